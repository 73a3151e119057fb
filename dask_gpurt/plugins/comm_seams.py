"""Private names of distributed's connections that this package touches.

A message that is received goes from the socket into fresh memory on the event loop. Stock does not
let go of the loop as long as there is something in the socket, and with a quick peer there always
is: a value of 60 MB, or several smaller ones in one message, held it for 140 ms, most of them page
faults. Here the loop comes round after every piece, at the cost of a round for each.

| what | why |
|---|---|
| `distributed.comm.tcp.read_bytes_rw` | receives a buffer over TCP or TLS |

It belongs to the process, not to a worker of it: it is replaced when the first of its workers asks,
and put back when the last has let go (`PiecewiseReads`). Reads that are under way go on as they
began.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from itertools import pairwise
from typing import Any

import distributed.comm.tcp as tcp

#: Bytes that are received between two rounds of the loop: up to 4 ms where memory is fresh.
PIECE_NBYTES = 1 << 20
#: Less than this is not worth a round.
SMALL_NBYTES = 256 << 10


async def read_in_pieces(stream: Any, n: int) -> memoryview:
    """Receive a buffer of `n` bytes into memory of its own, which may be written to."""
    buffer = tcp.host_array(n)
    for first, end in pairwise([*range(0, n, PIECE_NBYTES), n]):
        await stream.read_into(buffer[first:end])
        # What is at hand is read without a pause, and the next buffer of the message may be too.
        if end - first >= SMALL_NBYTES:
            await asyncio.sleep(0)
    return buffer


class _Replaced:
    """How many workers of the process want it so."""

    def __init__(self) -> None:
        # Of one thread's as often as it likes: a worker may be found to be gone in the midst of it.
        self._lock = threading.RLock()
        self._users = 0
        self._stock = tcp.read_bytes_rw

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            tcp.read_bytes_rw = read_in_pieces

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                tcp.read_bytes_rw = self._stock


_replaced = _Replaced()


class PiecewiseReads:
    """One worker's wish that its loop comes round while large messages arrive.

    Until `end` is called, once or more often, or the worker is gone without a word.
    """

    def __init__(self) -> None:
        _replaced.acquire()
        self.end = weakref.finalize(self, _replaced.release)

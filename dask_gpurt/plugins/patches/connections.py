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

The tasks of a graph arrive in one message, and a worker handles all of it before the loop comes
round: 30 to 110 ms where there are some hundreds. They are handled a few at a time
(`ShortTurns`), as if the scheduler had sent them one after the other.

| what | why |
|---|---|
| `Worker.batched_stream.comm`, `Comm.read` | what the scheduler sends passes through it |
| `Server.handle_stream` | lets the loop come round after each message that it read |

A message that could not be written is never let go of by itself: the stream keeps the error, the
error the frame that was writing, that frame the connection, and as long as there is the connection
its finalizer keeps the stream. `let_go_of_message` takes that apart.

| what | why |
|---|---|
| `distributed.comm.tcp.TCP._finalizer` | keeps the stream, which keeps what went wrong with it |
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import distributed.comm.tcp as tcp

if TYPE_CHECKING:
    from distributed import Worker

#: Bytes that are received between two rounds of the loop: up to 4 ms where memory is fresh.
PIECE_NBYTES = 1 << 20
#: Less than this is not worth a round.
SMALL_NBYTES = 256 << 10
#: What is handled of a message of the scheduler between two rounds of the loop: tasks take about
#: 0.2 ms each.
N_IN_TURN = 16


async def read_in_pieces(stream: Any, n: int) -> memoryview:
    """Receive a buffer of `n` bytes into memory of its own, which may be written to."""
    buffer = tcp.host_array(n)
    for first, end in pairwise([*range(0, n, PIECE_NBYTES), n]):
        await stream.read_into(buffer[first:end])
        # What is at hand is read without a pause, and the next buffer of the message may be too.
        if end - first >= SMALL_NBYTES:
            await asyncio.sleep(0)
    return buffer


def let_go_of_message(error: BaseException) -> None:
    """Have an error of sending a message not keep the message; it says what it said before."""
    found = [error]
    for one in found:
        for other in (one.__cause__, one.__context__, getattr(one, "real_error", None)):
            if other is not None and other not in found:
                other.__traceback__ = None
                found.append(other)


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


class ShortTurns:
    """One worker's wish that its loop comes round while a long message is handled, until `end`.

    Only between tasks that are to be computed. Whatever else the scheduler says at once belongs
    together: after a worker was lost, results are let go of that ready tasks need, which are let go
    of further on. Were there a round in between, such a task could begin.
    """

    def __init__(self, worker: Worker) -> None:
        self._comm: Any = worker.batched_stream.comm
        self._left: deque[Any] = deque()
        self._has_ended = False
        if self._comm is not None:
            self._stock_read = self._comm.read
            before = getattr(self._stock_read, "__self__", None)
            if isinstance(before, ShortTurns):
                # It ended in the midst of a message: what is left of that is handed out here.
                self._stock_read, self._left = before._stock_read, before._left
            self._comm.read = self._read

    async def _read(self, *args: Any, **kwargs: Any) -> Any:
        left, n = self._left, N_IN_TURN
        if not left:
            found = await self._stock_read(*args, **kwargs)
            if self._has_ended or not isinstance(found, (list, tuple)):
                return found
            n = max(n, _n_until_tasks_alone(found))
            if len(found) <= n:
                return found
            left.extend(found)
        turn = [left.popleft() for _ in range(min(n, len(left)))]
        self._let_go_if_done()
        return turn

    def end(self) -> None:
        """Have the loop wait for all of a message again, from the next one on."""
        self._has_ended = True
        if self._comm is not None:
            self._let_go_if_done()

    def _let_go_if_done(self) -> None:
        if self._has_ended and not self._left and vars(self._comm).get("read") == self._read:
            del self._comm.read


def _n_until_tasks_alone(messages: Sequence[Any]) -> int:
    """How many of these there are before only tasks that are to be computed follow."""
    for n in range(len(messages), 0, -1):
        message = messages[n - 1]
        if not isinstance(message, dict) or message.get("op") != "compute-task":
            return n
    return 0

"""Shorter turns on the event loop while a worker receives large messages and many tasks.

| what | why | taken back by |
|---|---|---|
| `distributed.comm.tcp.read_bytes_rw` | receives a buffer over TCP or TLS in pieces |
its last holder |
| `Worker.batched_stream.comm`, `Comm.read` | splits a message of the scheduler into parts |
`ShortTurns.uninstall` |
| `Server.handle_stream` | lets the loop run after each part | |
| `Worker.rpc.remove`, `Scheduler.rpc.remove` | closes connections of ours to a lost worker, too;
broadcasts go on without it | `LostPeers.uninstall` |
| `distributed.core._expects_comm` | `forget_handlers` empties this cache of all handlers | |
| `distributed.comm.tcp.TCP._finalizer` | keeps the stream, which keeps the error of a failed send |
|

*Large buffers.* A received message goes from the socket into fresh memory on the event loop. Stock
Dask reads as long as the socket has data, and a fast peer always provides some. A value of 60 MB,
or several smaller ones in one message, blocked the loop for 140 ms, mostly in page faults.
`piecewise_reads` yields to the loop after every piece, at the cost of one loop iteration each.
Reads in progress finish as they began.

*Many tasks.* The tasks of a graph arrive in one message, and a worker handles all of it in one
turn: 30 to 110 ms for some hundreds. `ShortTurns` hands out a few tasks at a time, as if the
scheduler had sent them one after the other.

*Failed sends.* A message that could not be written stays in memory, because of a cycle. The stream
references the error, and the error references the frame of the writer. The frame references the
connection, and the connection's finalizer references the stream. `drop_message` breaks the cycle.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import distributed.comm.tcp as tcp
from distributed.core import _expects_comm

from dask_gpurt.process_patch import ProcessPatch

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.core import ConnectionPool

#: Bytes received between two turns of the loop: up to 4 ms if the memory is fresh.
PIECE_NBYTES = 1 << 20
#: Smaller reads do not yield.
SMALL_NBYTES = 256 << 10
#: Tasks handled between two turns of the loop, at about 0.2 ms each.
TASKS_PER_TURN = 16


async def read_in_pieces(stream: Any, n: int) -> memoryview:
    """Receive a buffer of `n` bytes into writable memory of its own."""
    buffer = tcp.host_array(n)
    for first, end in pairwise([*range(0, n, PIECE_NBYTES), n]):
        await stream.read_into(buffer[first:end])
        # A read of available data does not yield to the loop, and the next one may not either.
        if end - first >= SMALL_NBYTES:
            await asyncio.sleep(0)
    return buffer


def drop_message(error: BaseException) -> None:
    """Free the message that an error of sending references; the error's text stays."""
    found = [error]
    for one in found:
        for other in (one.__cause__, one.__context__, getattr(one, "real_error", None)):
            if other is not None and other not in found:
                other.__traceback__ = None
                found.append(other)


def _read_in_pieces() -> Callable[[], None]:
    restore = functools.partial(setattr, tcp, "read_bytes_rw", tcp.read_bytes_rw)
    tcp.read_bytes_rw = read_in_pieces
    return restore


#: Held by each worker that yields to the loop while large messages arrive.
piecewise_reads = ProcessPatch(_read_in_pieces)


class ShortTurns:
    """The patch that yields to a worker's loop while it handles many tasks, until `uninstall`.

    It yields only between tasks to be computed. All other parts of a message belong together. After
    a worker was lost, for example, one part releases results that ready tasks need, and a later
    part releases these tasks. A turn of the loop in between could start such a task.
    """

    def __init__(self, worker: Worker) -> None:
        self._comm: Any = worker.batched_stream.comm
        self._left: deque[Any] = deque()
        self._has_ended = False
        if self._comm is not None:
            self._stock_read = self._comm.read
            before = getattr(self._stock_read, "__self__", None)
            if isinstance(before, ShortTurns):
                # The former patch was uninstalled inside a message: hand out its remaining parts.
                self._stock_read, self._left = before._stock_read, before._left
            self._comm.read = self._read

    async def _read(self, *args: Any, **kwargs: Any) -> Any:
        left, n = self._left, TASKS_PER_TURN
        if not left:
            found = await self._stock_read(*args, **kwargs)
            if self._has_ended or not isinstance(found, (list, tuple)):
                return found
            n = max(n, _n_until_tasks_alone(found))
            if len(found) <= n:
                return found
            left.extend(found)
        turn = [left.popleft() for _ in range(min(n, len(left)))]
        self._restore_if_done()
        return turn

    def uninstall(self) -> None:
        """Restore stock's read, once the current message is handled."""
        self._has_ended = True
        if self._comm is not None:
            self._restore_if_done()

    def _restore_if_done(self) -> None:
        if self._has_ended and not self._left and vars(self._comm).get("read") == self._read:
            del self._comm.read


def forget_handlers() -> None:
    """Let Dask forget the handlers that it called. Each refers to objects of a runtime that ended.

    Dask looks at a handler again when it calls it next.
    """
    _expects_comm.cache_clear()


class LostPeers:
    """The patch that tells a worker or the scheduler when a worker is lost, until `uninstall`.

    A call to a worker whose host is gone would wait until the system gives up its connection. A
    process may have several of these patches, which end in any order.

    Parameters
    ----------
    pool
        Dask's own connections, `rpc` of the worker or of the scheduler.
    on_loss
        Called with the address of the lost peer.
    """

    def __init__(self, pool: ConnectionPool, on_loss: Callable[[str], None]) -> None:
        self._pool: Any = pool
        self._on_loss = on_loss
        patched = vars(self._pool).get("remove")
        if not isinstance(patched, _Remove):
            patched = _Remove(self._pool.remove)
            self._pool.remove = patched  # type: ignore[method-assign]
        self._patched = patched
        patched.told.append(on_loss)

    def uninstall(self) -> None:
        """Restore stock's method after the last of these patches."""
        told = self._patched.told
        if self._on_loss in told:
            told.remove(self._on_loss)
        if not told and vars(self._pool).get("remove") is self._patched:
            del self._pool.remove


class _Remove:
    """Stock's `ConnectionPool.remove`, which tells of the removed address."""

    def __init__(self, stock: Callable[..., None]) -> None:
        self._stock = stock
        self.told: list[Callable[[str], None]] = []

    def __call__(self, addr: str, **kwargs: Any) -> None:
        self._stock(addr, **kwargs)
        for on_loss in tuple(self.told):
            on_loss(addr)


def _n_until_tasks_alone(messages: Sequence[Any]) -> int:
    """Return the number of messages before the trailing run of tasks to be computed."""
    for n in range(len(messages), 0, -1):
        message = messages[n - 1]
        if not isinstance(message, dict) or message.get("op") != "compute-task":
            return n
    return 0

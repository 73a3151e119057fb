"""Work at a worker's end that must finish despite cancellation.

When an event loop ends, it cancels all its tasks. This may interrupt a worker's close half-way.
Work that must still finish runs through these functions: they ignore cancellation and wait up to a
deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable

#: Longest wait for one piece of work, such as removing files from a disk that hangs.
DEADLINE_S = 10.0


async def to_its_end(work: Callable[[], Awaitable[None]]) -> bool:
    """Await some work, and drop any cancellation of the caller. Cancel it after `DEADLINE_S`.

    Parameters
    ----------
    work
        A coroutine function. If its own task is cancelled, it is called again and must resume where
        it stopped.

    Returns
    -------
    bool
        Whether the work ended in time.

    Raises
    ------
    Exception
        The error of the work.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + DEADLINE_S
    doing = asyncio.ensure_future(work())
    while not await _is_done(doing, until):
        if not doing.done():
            doing.cancel()
            return False
        doing = asyncio.ensure_future(work())
    doing.result()
    return True


async def _is_done(doing: asyncio.Future[None], until: float) -> bool:
    """Return whether a future ended. False if it was cancelled or the deadline passed."""
    loop = asyncio.get_running_loop()
    while not doing.done() and (left_s := until - loop.time()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({doing}, timeout=left_s)
    return doing.done() and not doing.cancelled()


async def in_a_thread(function: Callable[[], None]) -> bool:
    """Call a blocking function in a thread, and drop any cancellation of the caller.

    Wait for `DEADLINE_S` at most. The thread is a daemon, so a hanging disk does not keep the
    process alive.

    Returns
    -------
    bool
        Whether the function ended in time. If not, it continues.

    Raises
    ------
    Exception
        The error of the function.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + DEADLINE_S
    ended: asyncio.Future[None] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def call() -> None:
        error: BaseException | None = None
        try:
            function()
        except BaseException as raised:
            error = raised
        # If the event loop is closed by now, nothing waits for the result.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end, error)

    try:
        threading.Thread(target=call, name="gpurt closing", daemon=True).start()
    except RuntimeError:
        # An interpreter at its end starts no threads.
        call()
    if not await _is_done(ended, until):
        return False
    ended.result()
    return True

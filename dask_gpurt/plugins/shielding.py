"""Work that a worker has to bring to its end, whoever is cancelled meanwhile.

The end of an event loop cancels every task on it. A worker that is just closing then is cancelled
as well, half way. What has to be done all the same goes through here: it is waited for up to a
deadline, and a cancellation does not stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable

#: Longest wait for one piece of work, such as the removal of files from a disk that hangs.
DEADLINE_S = 10.0


async def to_its_end(work: Callable[[], Awaitable[None]], deadline_s: float | None = None) -> bool:
    """Await some work. A cancellation does not reach it, and is dropped.

    Parameters
    ----------
    work
        Is called again if its own task is cancelled, so it goes on where it stopped.
    deadline_s
        The work is cancelled after so long; None is `DEADLINE_S`.

    Returns
    -------
    bool
        Whether it ended in time.

    Raises
    ------
    Exception
        The error of the work.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + (DEADLINE_S if deadline_s is None else deadline_s)
    doing = asyncio.ensure_future(work())
    while not await _is_done(doing, until):
        if not doing.done():
            doing.cancel()
            return False
        doing = asyncio.ensure_future(work())
    doing.result()
    return True


async def _is_done(doing: asyncio.Future[None], until: float) -> bool:
    """Whether it came to its end; False if it was cancelled, or takes longer."""
    loop = asyncio.get_running_loop()
    while not doing.done() and (left_s := until - loop.time()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({doing}, timeout=left_s)
    return doing.done() and not doing.cancelled()


async def in_a_thread(function: Callable[[], None], deadline_s: float | None = None) -> bool:
    """Call a function that blocks, beside the loop. A cancellation is dropped.

    The thread is a daemon: one that hangs in a disk does not keep the process. The deadline is as
    in `to_its_end`.

    Returns
    -------
    bool
        Whether it ended in time. The function goes on if not.

    Raises
    ------
    Exception
        The error of the function.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + (DEADLINE_S if deadline_s is None else deadline_s)
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
        # The loop may be closed by now, and then nobody waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end, error)

    try:
        threading.Thread(target=call, name="gpurt closing", daemon=True).start()
    except RuntimeError:
        # An interpreter that ends starts no threads.
        call()
    if not await _is_done(ended, until):
        return False
    ended.result()
    return True

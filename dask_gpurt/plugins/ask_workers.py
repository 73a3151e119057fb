"""Broadcast a call to many workers, with one deadline for all answers.

distributed's `broadcast` waits for the last answer, and a worker with a blocked event loop never
answers. It also logs an error for a worker that has just left. So each worker is called separately.
This module knows nothing of the calls' contents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from distributed import Scheduler


class Answers(NamedTuple):
    """Answers of workers to a broadcast.

    Attributes
    ----------
    received
        Answers by address, in the order of the calls. An exception if the call failed.
    silent
        Addresses of workers that did not answer in time.
    """

    received: dict[str, Any]
    silent: list[str]

    def reports(self) -> dict[str, Any]:
        """Return the answers that are reports, without errors."""
        return {one: said for one, said in self.received.items() if isinstance(said, dict)}


async def ask(
    scheduler: Scheduler, op: str, workers: Iterable[str], deadline_s: float, **arguments: Any
) -> Answers:
    """Call a handler of workers and return the answers that arrive before the deadline.

    The calls use the scheduler's pool of connections, as stock's broadcasts do. The pool closes the
    connection of a cancelled call, so a late answer is never taken for the answer to another call.
    """
    asked = {
        asyncio.ensure_future(getattr(scheduler.rpc(one), op)(**arguments)): one for one in workers
    }
    try:
        if asked:
            await _until_late(asked, deadline_s)
    finally:
        # Also if the caller was cancelled.
        late = {one: None for asking, one in asked.items() if asking.cancel()}
    received = {
        one: error if (error := asking.exception()) is not None else asking.result()
        for asking, one in asked.items()
        if one not in late
    }
    return Answers(received, list(late))


async def _until_late(asked: Collection[asyncio.Future[Any]], deadline_s: float) -> None:
    await asyncio.wait(asked, timeout=deadline_s)

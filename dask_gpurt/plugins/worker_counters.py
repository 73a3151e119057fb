"""How the scheduler learns what workers count, and keeps it when they are gone.

What a worker counted so far rides on its heartbeats, which distributed sends for its extensions. A
worker that closes, or lets go of the runtime, says it once more. One that is killed is missed by
what it did since its last heartbeat. `shuffle.tally` keeps it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle.tally import Tally

if TYPE_CHECKING:
    from distributed import Scheduler, Worker

    from dask_gpurt.plugins.worker import WorkerState

logger = logging.getLogger("dask_gpurt")

#: Of the extension, at the scheduler and at workers: a heartbeat goes to that of the same name.
EXTENSION = "gpurt-counting"
#: How long a worker that lets go may take to say its last word.
LAST_WORD_S = 2.0


class Counted:
    """The scheduler's extension. It stays: a heartbeat may come when the runtime is off.

    distributed closes a worker whose heartbeat is for an extension that is not there, or that
    raises.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    @staticmethod
    def at(scheduler: Scheduler) -> Tally:
        """A new tally for this scheduler, in place of one of an earlier activation."""
        tally = Tally()
        scheduler.extensions[EXTENSION] = Counted(tally)
        return tally

    def heartbeat(self, ws: Any, said: Any) -> None:
        """A worker's heartbeat came."""
        take(self.tally, ws.server_id, said)


def take(tally: Tally, worker: str, said: Any) -> None:
    """What a worker says; nothing where that makes no sense."""
    try:
        tally.take(worker, said)
    except ValueError as error:
        logger.debug("worker %s: %s", worker, error)


class Counting:
    """The worker's extension, while the runtime is on there."""

    def __init__(self, worker: Worker, state: WorkerState) -> None:
        self._worker, self._state = worker, state
        self._last: dict[str, Any] = {}
        worker.extensions[EXTENSION] = self

    def heartbeat(self) -> dict[str, Any]:
        """What distributed sends with the next heartbeat."""
        return self._state.news()

    def leave(self) -> None:
        """Send nothing more with heartbeats. Not to be called while the worker goes through its
        extensions, as it does when it closes.
        """
        self._worker.extensions.pop(EXTENSION, None)
        self._last = self._state.last_word()

    async def say_last(self) -> None:
        """Say it for the last time. Bounded, and never an error: the scheduler may be gone."""
        saying = asyncio.ensure_future(
            self._worker.scheduler.gpurt_counted(worker=self._worker.id, said=self._last)
        )
        # Read here, so that nobody is told of an error that nobody waits for.
        saying.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({saying}, timeout=LAST_WORD_S)
        finally:
            saying.cancel()

"""Has stock look for tasks to steal as soon as somebody is free to help a slow worker.

Stock looks once a second. As long as workers are as quick as one another little is lost by that;
but what waits behind the first task of a slow worker begins late, and then takes several times as
long as it does elsewhere. Who may take what is decided where every steal is
(`dask_gpurt.plugins.placement.placer`); here it is only asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import WorkerState

#: Seconds between two looks at all workers, which take milliseconds where there are a thousand.
INTERVAL_S = 0.1
#: Share of the scheduler's time that they may take.
MOST_OF_TIME = 0.1
#: Of a worker that is helped. Less of it is also seen where tasks of a group are uneven, and moving
#: those early had computations take longer.
LEAST_SLOWNESS = 2.0


class EarlyStealing:
    """One a scheduler.

    Parameters
    ----------
    slowness
        Of a worker: seconds it takes for what takes others one.
    balance
        Has stock look for tasks to steal.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        slowness: Callable[[WorkerState], float],
        balance: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._slowness = slowness
        self._balance = balance
        self._next: asyncio.Handle | None = None

    def ended(self, ws: WorkerState) -> None:
        """A worker ended a task: where it has nothing else to do, see who could use its help."""
        # It gets the next one of the queue, if there are any.
        if self._next is None and not ws.processing and not self._scheduler.queued:
            # Not in the middle of a transition.
            self._next = asyncio.get_running_loop().call_soon(self._look)

    def close(self) -> None:
        """Nobody is helped any more."""
        if self._next is not None:
            self._next.cancel()

    def _look(self) -> None:
        state, loop = self._scheduler, asyncio.get_running_loop()
        began_s = loop.time()
        waited_on = []
        if state.idle and not state.queued:
            waited_on = [ws for ws in state.workers.values() if len(ws.processing) > ws.nthreads]
        try:
            if any(self._slowness(ws) >= LEAST_SLOWNESS for ws in waited_on):
                self._balance()
        finally:
            # Who is slow shows by not being heard of, and by then all others may be done.
            then = self._look if waited_on else self._rest
            # A look goes through all that may be stolen, which may be much, and not to be had.
            pause_s = max(INTERVAL_S, (loop.time() - began_s) / MOST_OF_TIME)
            self._next = loop.call_later(pause_s, then)

    def _rest(self) -> None:
        self._next = None

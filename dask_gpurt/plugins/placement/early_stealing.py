"""Early work stealing: stock Dask balances as soon as a worker is free to help a slow one.

Stock Dask balances once a second. That loses little while workers are equally fast. But a task that
waits behind the first task of a slow worker begins late, and then takes several times as long as
elsewhere. This module only triggers the balancing. The placer decides as for any other steal which
worker may take a task (`dask_gpurt.plugins.placement.placer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import WorkerState

#: Seconds between two checks of all workers, which take milliseconds with a thousand workers.
INTERVAL_S = 0.1
#: Share of the scheduler's time that checks may take.
MOST_OF_TIME = 0.1
#: Least slowness of a worker that gets help. Uneven tasks within a group look less slow than this.
#: Moving those early made computations slower.
LEAST_SLOWNESS = 2.0


class EarlyStealing:
    """Early work stealing on one scheduler.

    Parameters
    ----------
    slowness
        Returns the slowness of a worker.
    balance
        Makes stock Dask look for tasks to steal.
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
        self._timer: asyncio.Handle | None = None

    def ended(self, ws: WorkerState) -> None:
        """Note that a worker ended a task; if it has no other, schedule a check."""
        # If tasks are queued, the worker gets the next one of those.
        if self._timer is None and not ws.processing and not self._scheduler.queued:
            # Do not balance in the middle of a transition.
            self._timer = asyncio.get_running_loop().call_soon(self._check)

    def close(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        state, loop = self._scheduler, asyncio.get_running_loop()
        began_s = loop.time()
        waited_on = []
        if state.idle and not state.queued:
            waited_on = [ws for ws in state.workers.values() if len(ws.processing) > ws.nthreads]
        try:
            if any(self._slowness(ws) >= LEAST_SLOWNESS for ws in waited_on):
                self._balance()
        finally:
            # A slow worker is recognised by its silence, and by then all other workers may be idle.
            then = self._check if waited_on else self._stop
            # A check goes through all tasks that may be stolen. There may be many, and none to
            # steal.
            pause_s = max(INTERVAL_S, (loop.time() - began_s) / MOST_OF_TIME)
            self._timer = loop.call_later(pause_s, then)

    def _stop(self) -> None:
        self._timer = None

"""The workers that are ready for the runtime, and the waits for those that have not reported.

Each worker reports once the bootstrap plugin has attached the runtime, or the problem that kept it
from that. Runs begin once all workers have reported, or `JOIN_TIMEOUT_S` have passed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dask_gpurt")

#: Longest wait for joining workers: at activation, and before a new shuffle run.
JOIN_TIMEOUT_S = 10.0


class Readiness:
    """The reports of all workers of a scheduler, by address.

    Attributes
    ----------
    ready
        Workers on which the runtime is attached.
    not_ready
        Problems of the other workers that have reported, or that were waited for in vain.
    is_open
        False once the runtime is off: nothing waits any more.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.ready: set[str] = set()
        self.not_ready: dict[str, str] = {}
        self.is_open = True
        #: Set and replaced whenever a worker reports or leaves.
        self._reported = asyncio.Event()

    def report(self, worker: str, problem: str | None) -> None:
        """Record that a worker is ready, or its problem."""
        self.ready.discard(worker)
        self.not_ready.pop(worker, None)
        if problem is None:
            self.ready.add(worker)
        else:
            self.not_ready[worker] = problem
            logger.error("%s", problem)
        self._wake()

    def remove(self, worker: str) -> None:
        """Forget a worker that left. Runs may have waited only for its report."""
        self.ready.discard(worker)
        self.not_ready.pop(worker, None)
        self._wake()

    def close(self) -> None:
        """End all waits: the runtime is off."""
        self.is_open = False
        self._wake()

    def _wake(self) -> None:
        self._reported.set()
        self._reported = asyncio.Event()

    def unreported(self) -> set[str]:
        """Return the workers that have not reported yet."""
        return set(self._scheduler.workers) - self.ready - set(self.not_ready)

    def obstacle(self) -> str | None:
        """Return why a run cannot use our data plane on all workers, or None if it can."""
        if self.not_ready:
            return next(iter(self.not_ready.values()))
        if silent := self.unreported():
            return f"no word from worker {min(silent)}"
        return None

    async def wait(self) -> None:
        """Wait until all workers have reported. After the timeout, silent ones are not ready."""
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                while self.is_open and self.unreported():
                    await self._reported.wait()
        except TimeoutError:
            for worker in sorted(self.unreported()):
                self.not_ready[worker] = f"no word from worker {worker} in {JOIN_TIMEOUT_S:g} s"
                logger.warning("%s", self.not_ready[worker])

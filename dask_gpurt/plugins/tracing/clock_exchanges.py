"""Exchanges of clocks between the scheduler and workers, while a trace is on (`tracing.clocks`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from dask_gpurt.plugins.tracing.worker_trace import WorkerTrace
from dask_gpurt.tracing.clocks import ClockExchange

if TYPE_CHECKING:
    from distributed import Scheduler

#: Exchanges with a worker at the start and at the end, and at each time in between.
N_AT_ENDS, N_BETWEEN = 32, 4
#: Time between two rounds.
ROUND_S = 5.0
#: Longest time for one round with one worker.
_DEADLINE_S = 5.0
#: Most exchanges in one round. With many workers, each of them gets fewer.
_MOST_IN_ROUND = 4_000
#: Workers that are asked at the same time. With more, their answers would wait for each other.
_N_AT_ONCE = 8


class Clocks:
    """Compares the clocks of workers with this process's. On the event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._room = asyncio.Semaphore(_N_AT_ONCE)
        self._repeating: asyncio.Task[None] | None = None
        #: Comparisons that nobody waits for.
        self._later: set[asyncio.Task[None]] = set()

    def begin(self, workers: Callable[[], Sequence[WorkerTrace]]) -> None:
        """Compare the clocks of workers regularly until `stop`."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(ROUND_S)
                await self.compare(workers(), N_BETWEEN)

        self._repeating = asyncio.create_task(repeat(), name="gpurt-trace-clocks")

    def stop(self) -> None:
        if self._repeating is not None:
            self._repeating.cancel()
        for one in self._later:
            one.cancel()

    def compare_later(self, worker: WorkerTrace) -> None:
        """Compare the clock of a worker in the background."""
        comparing = asyncio.create_task(
            self.compare([worker], N_AT_ENDS), name="gpurt-trace-joined"
        )
        self._later.add(comparing)
        comparing.add_done_callback(self._later.discard)

    async def compare(self, workers: Sequence[WorkerTrace], n: int) -> None:
        """Exchange clocks with workers, at most `n` times each; keep the quickest exchange."""
        n = max(min(n, _MOST_IN_ROUND // max(len(workers), 1)), 1)
        await asyncio.gather(*(self._compare(one, n) for one in workers))

    async def _compare(self, worker: WorkerTrace, n: int) -> None:
        quickest: ClockExchange | None = None
        try:
            # A silent worker takes no room: others would wait for it.
            async with asyncio.timeout(_DEADLINE_S):
                quickest = await self._exchange(worker.address)
            async with self._room, asyncio.timeout(_DEADLINE_S):
                for _ in range(n - 1):
                    one = await self._exchange(worker.address)
                    if one.half_s < quickest.half_s:
                        quickest = one
        except Exception:
            pass  # it leaves, or is busy; other rounds may succeed
        if quickest is not None:
            worker.exchanges.append(quickest)

    async def _exchange(self, address: str) -> ClockExchange:
        asked_s = perf_counter()
        t1, t2 = await self._scheduler.rpc(address).gpurt_trace_clock()
        answered_s = perf_counter()
        found = ClockExchange(asked_s, float(t1), float(t2), answered_s)
        if not all(map(math.isfinite, found)):
            raise ValueError("a clock without a time")
        return found

"""Collection of the page's data on the scheduler, only while someone looks.

A page, the JSON handler and a client that shows progress ask `Gatherer` whenever they want to show
something. Workers are asked by these calls alone. So a page that is closed costs nothing, and
several pages cost what one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from time import monotonic
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from dask_gpurt.plugins.ask_workers import ask
from dask_gpurt.plugins.dashboard.overview import GONE, overview
from dask_gpurt.plugins.patches import p2p
from dask_gpurt.shuffle.tally import Tally

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dask_gpurt")

#: Least interval between two questions to a worker.
INTERVAL_S = 1.0
#: Most workers asked in a second: with more workers, each is asked less often.
WORKERS_PER_S = 100
#: Most links that all workers together report, and least that each of them does.
MAX_LINKS = 3_200
MIN_LINKS = 16
#: Longest wait for the answers of workers.
DEADLINE_S = 2.0


class Gatherer:
    """The latest data of the page.

    Parameters
    ----------
    status
        Returns what the scheduler's plugin knows without asking workers.
    ready
        Addresses of the workers that can be asked.
    tally
        Takes in what workers say about runs, and adds it up.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        status: Callable[..., Awaitable[dict[str, Any]]],
        ready: Collection[str],
        tally: Tally,
    ) -> None:
        self._scheduler, self._status, self._ready = scheduler, status, ready
        self._tally = tally
        self._latest: dict[str, Any] | None = None
        self._at_s = 0.0
        self._has_failed = False
        self._gathering: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.is_closed = False

    def look(self) -> dict[str, Any] | None:
        """Return the latest data, None if there is none yet, and have it renewed if it is old.

        Any thread may call this: Bokeh 3.10 fills new documents off the event loop.
        """
        if self._is_old:
            self._loop.call_soon_threadsafe(self._renew)
        return self._latest

    def _renew(self) -> None:
        may_ask = not self.is_closed and self._scheduler.status == Status.running
        is_idle = self._gathering is None or self._gathering.done()
        if may_ask and is_idle and self._is_old:
            self._gathering = asyncio.create_task(self._gather(), name="gpurt-dashboard")

    async def fresh(self) -> dict[str, Any]:
        """Return data that is not old."""
        self._renew()
        if self._gathering is not None:
            await asyncio.wait({self._gathering})
        return self._latest or {}

    def close(self) -> None:
        self.is_closed = True
        if self._gathering is not None:
            self._gathering.cancel()

    @property
    def _is_old(self) -> bool:
        interval_s = max(INTERVAL_S, len(self._ready) / WORKERS_PER_S)
        return self._latest is None or monotonic() - self._at_s >= interval_s

    async def _gather(self) -> None:
        try:
            status = {
                **await self._status(reports=False),
                "tasks": count_tasks(self._scheduler),
                "progress": p2p.how_far(self._scheduler),
            }
            if self._latest is None:
                # A worker that has just died may keep the first answers for some seconds.
                self._latest = overview(status, self._workers(), {})
            most_links = max(MIN_LINKS, MAX_LINKS // max(len(self._ready), 1))
            answers = await ask(
                self._scheduler,
                "gpurt_glance",
                sorted(self._ready),
                DEADLINE_S,
                most_links=most_links,
            )
            glances = {
                worker: answer
                for worker, answer in answers.reports().items()
                if worker in self._scheduler.workers
            }
            for worker, one in glances.items():
                of_worker = self._scheduler.workers[worker].server_id
                with contextlib.suppress(ValueError):
                    self._tally.take_runs(of_worker, one["ended_runs"], one["open_runs"])
            status["shuffles"] = self._tally.shuffles()
            # With many workers, this takes longer than the event loop may stand still.
            self._latest = await asyncio.to_thread(overview, status, self._workers(), glances)
        except Exception:
            # The page keeps what it shows. Once is enough: the next attempts would fail alike.
            logger.log(
                logging.DEBUG if self._has_failed else logging.ERROR,
                "no data for the dashboard's page",
                exc_info=True,
            )
            self._has_failed = True
        self._at_s = monotonic()

    def _workers(self) -> list[dict[str, Any]]:
        # Dask takes 1 and "1" for two names. Rows of the page need different ones.
        n_named = Counter(str(ws.name) for ws in self._scheduler.workers.values()) + Counter([GONE])
        return [
            {
                "address": ws.address,
                "name": f"{ws.name} {ws.address}" if n_named[str(ws.name)] > 1 else str(ws.name),
                "process_nbytes": (memory := ws.memory).process,
                "managed_nbytes": memory.managed,
                "spilled_nbytes": memory.spilled,
                "limit_nbytes": ws.memory_limit,
            }
            for ws in self._scheduler.workers.values()
        ]


def count_tasks(dask_scheduler: Scheduler) -> tuple[int, int]:
    """Return the numbers of done tasks and of all tasks on a scheduler.

    A client may have it run on the scheduler; only a reference to this function is sent.
    """
    open_states = ("waiting", "processing", "queued", "no-worker")
    total = to_do = 0
    for prefix in dask_scheduler.task_prefixes.values():
        total += sum(prefix.states.values())
        to_do += sum(prefix.states.get(state, 0) for state in open_states)  # type: ignore[call-overload]
    return total - to_do, total

"""Transport of workers' counters to the scheduler, which keeps those of departed workers.

Counters travel with heartbeats, as distributed's extension data. A worker that closes or detaches
the runtime sends them once more. For a killed worker, the counts since its last heartbeat are lost.
`shuffle.tally` stores the counters.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from dask_gpurt.plugins.patches import worker_close
from dask_gpurt.plugins.patches.worker_memory import is_closing
from dask_gpurt.plugins.time_spent import cluster_spent, without_untold
from dask_gpurt.shuffle.tally import Tally

if TYPE_CHECKING:
    from distributed import Scheduler, Worker

    from dask_gpurt.plugins.placement.placer import Placement
    from dask_gpurt.plugins.worker.worker_runtime import WorkerRuntime

logger = logging.getLogger("dask_gpurt")

#: Name of the extension on the scheduler and on workers. distributed matches heartbeat data by it.
EXTENSION = "gpurt-counting"
#: Longest wait for the final counters of a detaching worker.
FINAL_TIMEOUT_S = 2.0
#: Time between looks whether the scheduler is still there.
_LOOK_S = 0.02


class CounterReceiver:
    """The scheduler's extension, which receives counters with heartbeats.

    It stays registered when the runtime is off. distributed closes a worker whose heartbeat has
    data for a missing extension, or for one that raises.
    """

    def __init__(self, tally: Tally, spent_before: dict[str, float]) -> None:
        self.tally = tally
        #: What workers had spent before this activation (`time_spent`).
        self.spent_before = spent_before

    @staticmethod
    def at(scheduler: Scheduler) -> Tally:
        """Register a new tally on a scheduler, replacing that of an earlier activation."""
        tally = Tally()
        scheduler.extensions[EXTENSION] = CounterReceiver(tally, cluster_spent(scheduler))
        return tally

    def heartbeat(self, ws: Any, said: Any) -> None:
        """Record the counters in a worker's heartbeat."""
        take(self.tally, ws.server_id, said)


def take(tally: Tally, worker: str, said: Any) -> None:
    """Record a worker's counters. Invalid data is ignored."""
    try:
        tally.take(worker, said)
    except ValueError as error:
        logger.debug("worker %s: %s", worker, error)


def spent_since(scheduler: Scheduler, reports: Mapping[str, Any]) -> dict[str, float]:
    """Return what all workers spent since the activation (`SPENT`), given reports by address."""
    receiver: CounterReceiver = scheduler.extensions[EXTENSION]
    untold = []
    for address, report in reports.items():
        known = scheduler.workers.get(address)
        # While this waited for other reports, a heartbeat may have told the same.
        if known is not None and not receiver.tally.has_heard(
            known.server_id, report.get("heartbeat", 0)
        ):
            untold.append(report)
    now = cluster_spent(scheduler, untold)
    return {name: value - receiver.spent_before[name] for name, value in now.items()}


def counted_reports(
    scheduler: Scheduler, tally: Tally, placement: Placement | None, reports: dict[str, Any]
) -> dict[str, Any]:
    """Record the counters and runs in workers' reports; return the reports without them.

    The load of a slow worker gets its `slowness`, which placement has learned. That of others does
    not: 1,000 workers have a megabyte together.
    """

    def load(address: str, said: Mapping[str, Any]) -> dict[str, Any]:
        slowness = placement.learned_slowness(address) if placement is not None else 1.0
        return without_untold(said) | ({"slowness": slowness} if slowness > 1 else {})

    for address, report in reports.items():
        if (known := scheduler.workers.get(address)) is not None:
            take(tally, known.server_id, report)
    runs = ("runs", "open_runs")
    return {
        address: {name: value for name, value in report.items() if name not in runs}
        | {"load": load(address, report["load"])}
        for address, report in reports.items()
    }


class CounterSender:
    """The worker's extension, while the runtime is on."""

    def __init__(self, worker: Worker, runtime: WorkerRuntime) -> None:
        self._worker, self._runtime = worker, runtime
        self._last: dict[str, Any] = {}
        #: Number of heartbeats so far.
        self.n_heartbeats = 0

    def enter(self) -> None:
        """Add data to heartbeats from now on."""
        self._worker.extensions[EXTENSION] = self

    def heartbeat(self) -> dict[str, Any]:
        """Return the data for the next heartbeat. distributed calls this."""
        self.n_heartbeats += 1
        return {**self._runtime.heartbeat_data(), "heartbeat": self.n_heartbeats}

    def leave(self) -> None:
        """Stop adding data to heartbeats.

        Must not be called while the worker iterates over its extensions, as it does at its close.
        """
        self._worker.extensions.pop(EXTENSION, None)
        self._last = self._runtime.final_counters()

    async def send_final(self) -> None:
        """Send the final counters.

        Bounded in time. Never raises: the scheduler may be gone.
        """
        if not self._last:
            return  # it never counted
        worker = self._worker
        if is_closing(worker):
            worker_close.stop_heartbeats(worker)
        saying = asyncio.ensure_future(
            worker.scheduler.gpurt_counted(worker=worker.id, said=self._last)
        )
        # Read the error, so that asyncio does not log it.
        saying.add_done_callback(lambda task: task.cancelled() or task.exception())
        until_s = monotonic() + FINAL_TIMEOUT_S
        try:
            # Dask has no event for the end of this connection.
            while not worker_close.has_lost_scheduler(worker) and monotonic() < until_s:
                if (await asyncio.wait({saying}, timeout=_LOOK_S))[0]:
                    return
        finally:
            saying.cancel()

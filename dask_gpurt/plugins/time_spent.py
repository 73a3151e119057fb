"""Seconds and bytes of workers by what they were spent on, from Dask's fine performance metrics.

Dask measures them on every worker, with the runtime or without, and sends them with heartbeats.
So the sums cost nothing more, and they include workers that left. The kernel counts the seconds of
the scheduler's event loop. `tracing.live_rules` judges all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dask.system import CPU_COUNT

from dask_gpurt.metrics import SPENT
from dask_gpurt.system_calls import resident_nbytes

if TYPE_CHECKING:
    from distributed import Client, Scheduler, Worker

#: Names in `SPENT` for activities of tasks.
_OF_TASKS = {
    "p2p-comms-limiter": "held_back_s",
    "disk-read": "disk_s",
    "memory-room": "room_s",
}


def spent(*digests: Mapping[Any, float]) -> dict[str, float]:
    """Return the sums of fine performance metrics, of a worker or of the scheduler."""
    sums = dict.fromkeys(SPENT, 0.0)
    for metrics in digests:
        # A copy, because the worker adds metrics while this runs in another thread.
        for key, value in [*metrics.items()]:
            if isinstance(key, tuple) and len(key) > 2:
                where = str(key[-3] if key[0] == "p2p" else key[0])
                for name in _names(where, str(key[-2]), str(key[-1])):
                    sums[name] += value
    return sums


def _names(where: str, activity: str, unit: str) -> Iterable[str]:
    """Return the names in `SPENT` that a metric counts for."""
    if unit == "bytes":
        if activity == "disk-write":
            return ("written_nbytes",)
        return ("moved_nbytes",) if (where, activity) == ("background-comms", "process") else ()
    if unit != "seconds":
        return ()
    if where == "gather-dep":
        return ("fetch_s",)
    if where != "execute":
        return ()
    if activity in _OF_TASKS:
        return ("task_s", _OF_TASKS[activity])
    if activity.endswith("-noncpu"):
        return ("task_s", "noncpu_s")
    return ("task_s", "cpu_s") if activity.endswith("-cpu") else ("task_s",)


def worker_load(dask_worker: Worker) -> dict[str, Any]:
    """Return the size of a worker, and what it did since it started.

    Returns
    -------
    dict
        `load`, with the seconds of tasks (`task_s`), `threads`, the processors that the host lets
        this process use (`cores`), and the `untold` part of `SPENT`, in its order, which the next
        heartbeat will tell the scheduler.
    """
    untold = spent(dask_worker.digests_total_since_heartbeat).values()
    return {
        "load": {
            "threads": dask_worker.state.nthreads,
            "cores": CPU_COUNT,
            "task_s": spent(dask_worker.digests_total)["task_s"],
            # An integer 0 takes a byte, a float nine; 1,000 workers report.
            "untold": [seconds or 0 for seconds in untold],
        }
    }


def cluster_spent(dask_scheduler: Scheduler, reports: Iterable[Any] = ()) -> dict[str, float]:
    """Return the sums over all workers since the scheduler started. Runs on its event loop.

    Parameters
    ----------
    reports
        Reports of workers, with what they have not told the scheduler yet.
    """
    sums = spent(dask_scheduler.cumulative_worker_metrics)
    sums["scheduler_s"] = time.thread_time()
    for report in reports:
        if report and "load" in report:
            for name, more in zip(SPENT, report["load"]["untold"], strict=True):
                sums[name] += more
    return sums


def without_untold(load: Mapping[str, Any]) -> dict[str, Any]:
    """Return the load of a worker without what `cluster_spent` has taken from it."""
    return {name: value for name, value in load.items() if name != "untold"}


def _peak_nbytes() -> int:
    return resident_nbytes()["peak"]


async def peak_memory(client: Client) -> dict[str, int]:
    """Return the most bytes that each worker's process ever took, by address.

    They are not in the load of a worker: every byte there counts a thousand times in a status.
    """
    found: dict[str, int] = await client.run(  # type: ignore[no-untyped-call]
        _peak_nbytes, on_error="ignore"
    )
    return found


async def stock_figures(client: Client) -> dict[str, Any]:
    """Return the entries `spent` and `workers` of a status, of a cluster without the runtime."""
    loads = await client.run(worker_load, on_error="ignore")  # type: ignore[no-untyped-call]
    spent = await client.run_on_scheduler(  # type: ignore[no-untyped-call]
        cluster_spent, reports=[*loads.values()]
    )
    workers = {
        address: {"load": without_untold(report["load"])} for address, report in loads.items()
    }
    return {"spent": spent, "workers": workers}

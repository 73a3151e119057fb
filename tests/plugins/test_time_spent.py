"""Dask's fine performance metrics add up to what workers spent."""

from __future__ import annotations

from typing import Any

import dask.array as da
import pytest
from distributed import Client
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt.metrics import SPENT
from dask_gpurt.plugins.time_spent import cluster_spent, spent, stock_figures
from dask_gpurt.plugins.worker_counters import spent_since


def test_metrics_of_workers_and_schedulers_add_up() -> None:
    of_scheduler = {
        "latency": 9.0,
        ("execute", "sum", "thread-cpu", "seconds"): 1.0,
        ("execute", "sum", "thread-noncpu", "seconds"): 2.0,
        ("execute", "sum", "executor", "seconds"): 4.0,
        ("execute", "sum", "disk-read", "seconds"): 8.0,
        ("execute", "sum", "disk-read", "bytes"): 10**9,
        ("execute", "sum", "memory-room", "seconds"): 16.0,
        ("execute", "shuffle-transfer", "p2p-comms-limiter", "seconds"): 32.0,
        ("execute", "p2pshuffle", "p2p-disk-read", "seconds"): 64.0,
        ("execute", "p2pshuffle", "p2p-get-output-cpu", "seconds"): 128.0,
        ("gather-dep", "network", "seconds"): 0.5,
        ("p2p", "background-comms", "process", "bytes"): 700,
        ("p2p", "background-disk", "process", "bytes"): 11,
        ("p2p", "background-disk", "disk-write", "bytes"): 11,
        ("p2p", "foreground", "get-output-cpu", "seconds"): 128.0,
        ("memory-monitor", "disk-write", "bytes"): 22,
    }
    found = spent(of_scheduler)
    assert found == {
        "task_s": 255.0,
        "cpu_s": 129.0,
        "noncpu_s": 2.0,
        "held_back_s": 32.0,
        "disk_s": 8.0,
        "room_s": 16.0,
        "scheduler_s": 0.0,  # only the scheduler knows
        "fetch_s": 0.5,
        "moved_nbytes": 700,
        "written_nbytes": 33,
    }
    assert found.keys() == SPENT.keys()
    # On a worker, keys have the span, too.
    on_worker = {
        (key[0], "a-span", *key[1:]) if key[0] in ("execute", "p2p") else key: value
        for key, value in of_scheduler.items()
    }
    assert spent(on_worker) == found
    assert spent(of_scheduler, on_worker)["task_s"] == 510.0


async def tell(dask_worker: Any) -> None:
    """Send a heartbeat, and no other one later."""
    dask_worker.periodic_callbacks["heartbeat"].stop()
    await dask_worker.heartbeat()


def task_s(dask_worker: Any) -> float:
    return spent(dask_worker.digests_total)["task_s"]


@pytest.mark.cluster
def test_nothing_that_a_worker_did_is_missing(client: Client) -> None:
    """What a heartbeat has not told yet counts, and what was before the activation does not."""

    def tasks_s() -> float:
        return sum(client.run(task_s).values())

    def compute() -> None:
        with client.as_current():
            da.random.default_rng(0).random(10**6, chunks=10**5).sum().compute()

    client.run(tell)
    compute()
    before_s = tasks_s()
    assert before_s > 0
    assert client.run_on_scheduler(cluster_spent)["task_s"] == 0
    figures = client.sync(stock_figures, client)
    assert figures["spent"]["task_s"] == pytest.approx(before_s)
    assert figures["workers"].keys() == client.scheduler_info()["workers"].keys()
    client.run(tell)
    assert client.run_on_scheduler(cluster_spent)["task_s"] == pytest.approx(before_s)
    dask_gpurt.enable(client)
    compute()
    now = dask_gpurt.status(client)
    assert now["spent"]["task_s"] == pytest.approx(tasks_s() - before_s)
    loads = [report["load"] for report in now["workers"].values()]
    assert sum(load["task_s"] for load in loads) == pytest.approx(tasks_s())
    assert {load["threads"] for load in loads} == {1}


@gen_cluster(client=True, nthreads=[("", 1)], config={"gpurt.enabled": True})
async def test_a_heartbeat_after_a_report_counts_once(c: Any, s: Any, a: Any) -> None:
    """The scheduler may wait for other workers' reports meanwhile."""
    a.periodic_callbacks["heartbeat"].stop()
    await c.compute(da.random.default_rng(0).random(10**6, chunks=10**5).sum())
    reports = {a.address: await s.rpc(a.address).gpurt_report(most=10)}
    worked_s = spent_since(s, reports)["task_s"]
    assert worked_s > 0
    await a.heartbeat()
    assert spent_since(s, reports)["task_s"] == pytest.approx(worked_s)

"""Shards of shuffles count as managed memory, and spilled ones as spilled, wherever it is shown."""

from __future__ import annotations

import asyncio
import inspect
import sys
from weakref import WeakKeyDictionary

import distributed.scheduler
import pytest
from distributed import Scheduler
from distributed.http.worker.prometheus.core import WorkerMetricCollector
from distributed.scheduler import WorkerState
from distributed.utils_test import gen_cluster
from prometheus_client.parser import text_string_to_metric_families
from tornado.httpclient import AsyncHTTPClient

import dask_gpurt
from dask_gpurt.config import read
from dask_gpurt.plugins.patches.shown import memory_metrics
from dask_gpurt.plugins.patches.shown.memory_metrics import CountedShards
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.process_patch import ProcessPatch
from tests.integration.held_exchanges import all_moved, held, shuffled

MIB = 1 << 20
STOCK = WorkerMetricCollector.collect
NO_SPILL = {"distributed.worker.memory.spill": False}
ON_PROMETHEUS = {"distributed.worker.http.routes": ["distributed.http.worker.prometheus"]}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Hide workers of other tests, which may have the runtime in this process."""
    monkeypatch.setattr(WorkerMetricCollector, "collect", STOCK)
    monkeypatch.setattr(memory_metrics, "_patch", ProcessPatch(memory_metrics._replace))
    monkeypatch.setattr(memory_metrics, "_shards_of", WeakKeyDictionary())


@gen_cluster(client=True, nthreads=[("", 1)], config=NO_SPILL)
async def test_shards_are_managed_memory(c, s, a):
    kept = c.submit(bytes, 3 * MIB)
    await kept
    await a.heartbeat()
    ws = s.workers[a.address]
    stock = ws.memory
    await dask_gpurt.enable(c)
    budget = runtime_of(a).budget(read().shuffle)
    budget.change(5 * MIB)
    budget.change_on_disk(7 * MIB)
    await a.heartbeat()
    assert ws.memory.managed == stock.managed + 5 * MIB
    assert ws.memory.spilled == stock.spilled + 7 * MIB
    assert ws.memory.process == ws.metrics["memory"]
    # The lowest figure of a while: shards were never a part of it.
    assert ws.memory.unmanaged_old <= ws.memory.process - ws.memory.managed
    budget.change(-5 * MIB)
    budget.change_on_disk(-7 * MIB)
    before = a.get_metrics
    await dask_gpurt.disable(c)
    assert a.get_metrics != before
    assert "get_metrics" not in vars(a)
    await a.heartbeat()
    assert (ws.memory.managed, ws.memory.spilled) == (stock.managed, stock.spilled)


def test_only_two_places_read_the_spilled_memory():
    read = 'metrics["spilled_bytes"]["memory"]'
    assert inspect.getsource(distributed.scheduler).count(read) == 2
    assert read in inspect.getsource(WorkerState.memory.fget)
    assert read in inspect.getsource(Scheduler.heartbeat_worker)


async def gauge(worker):
    """Return the memory on a worker's page for Prometheus, by type."""
    url = f"http://localhost:{worker.http_server.port}/metrics"
    text = (await AsyncHTTPClient().fetch(url)).body.decode()
    (family,) = [
        one
        for one in text_string_to_metric_families(text)
        if one.name == "dask_worker_memory_bytes"
    ]
    return {one.labels["type"]: one.value for one in family.samples}


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config={**NO_SPILL, **ON_PROMETHEUS})
async def test_prometheus_and_scheduler_agree(c, s, a, b):
    kept = c.submit(bytes, 3 * MIB, workers=[a.address])
    await kept
    stock_collect = WorkerMetricCollector.collect
    stock = await gauge(a)
    await dask_gpurt.enable(c)
    budget = runtime_of(a).budget(read().shuffle)
    budget.change(5 * MIB)
    budget.change_on_disk(7 * MIB)
    seen = await gauge(a)
    await a.heartbeat()
    memory = s.workers[a.address].memory
    assert seen["managed"] == memory.managed == stock["managed"] + 5 * MIB
    assert seen["spilled"] == memory.spilled == stock["spilled"] + 7 * MIB
    other = await gauge(b)
    assert (other["managed"], other["spilled"]) == (0, 0)
    budget.change(-5 * MIB)
    budget.change_on_disk(-7 * MIB)
    await dask_gpurt.disable(c)
    assert WorkerMetricCollector.collect is stock_collect
    after = await gauge(a)
    assert (after["managed"], after["spilled"]) == (stock["managed"], stock["spilled"])


@gen_cluster(
    client=True,
    nthreads=[("", 2)] * 2,
    timeout=120,
    config={**NO_SPILL, **ON_PROMETHEUS, "gpurt.shuffle.memory": "16 KiB"},
)
async def test_prometheus_counts_shards_of_a_shuffle(c, s, a, b):
    await dask_gpurt.enable(c)
    ws, state = s.workers[a.address], runtime_of(a)

    def nbytes():
        return state.shards_nbytes(), state.shards_on_disk_nbytes(), a.state.nbytes, ws.nbytes

    async with held(c, s, shuffled(4), all_moved), asyncio.timeout(30):
        before = None
        while before != nbytes() or not before[1]:
            before = nbytes()
            seen = await gauge(a)
            await a.heartbeat()
            memory = ws.memory
        shards, on_disk, tasks, _ = before
        assert seen["managed"] == memory.managed == tasks + shards
        assert seen["spilled"] == memory.spilled == on_disk > 0


@gen_cluster(nthreads=[("", 1)] * 2)
async def test_the_gauge_is_stocks_after_the_last_worker(s, a, b):
    stock_collect = WorkerMetricCollector.collect
    both = [CountedShards(worker, lambda: 1 << 60, lambda: 0) for worker in (a, b)]
    both[0].uninstall()
    for worker, is_counted in ((a, False), (b, True)):
        samples = memory_samples(worker)
        # No more than the process has is ever managed.
        assert (samples["unmanaged"] == 0) == is_counted
        assert samples["managed"] >= 0
    both[1].uninstall()
    both[1].uninstall()
    assert WorkerMetricCollector.collect is stock_collect


def memory_samples(worker):
    """Return the gauge's samples by type, as the collector makes them."""
    families = {one.name: one for one in WorkerMetricCollector(worker).collect()}
    found = families["dask_worker_memory_bytes"].samples
    return {one.labels["type"]: one.value for one in found}


@gen_cluster(nthreads=[("", 1)])
async def test_the_gauge_of_stock_has_three_types(s, a):
    samples = memory_samples(a)
    assert [*samples] == ["managed", "unmanaged", "spilled"]
    # Once stock counts shards by itself, this package must not.
    computed = "managed_memory = min(process_memory, ws.nbytes - spilled_memory)"
    assert computed in inspect.getsource(WorkerMetricCollector.collect)


@gen_cluster(nthreads=[("", 1)])
async def test_shards_count_without_prometheus(s, a):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "distributed.http.worker.prometheus.core", None)
        counted = CountedShards(a, lambda: 3, lambda: 4)
    spilled = (await a.get_metrics())["spilled_bytes"]
    assert spilled == {"memory": -3, "disk": 4}
    counted.uninstall()

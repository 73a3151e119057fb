"""The scheduler counts shards of shuffles as managed memory, and spilled ones as spilled."""

from __future__ import annotations

import inspect

import distributed.scheduler
from distributed import Scheduler
from distributed.scheduler import WorkerState
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt.plugins.worker import runtime_of

MIB = 1 << 20


@gen_cluster(client=True, nthreads=[("", 1)], config={"distributed.worker.memory.spill": False})
async def test_shards_are_managed_memory(c, s, a):
    kept = c.submit(bytes, 3 * MIB)
    await kept
    await a.heartbeat()
    ws = s.workers[a.address]
    stock = ws.memory
    await dask_gpurt.enable(c)
    budget = runtime_of(a).budget(dask_gpurt_settings())
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


def dask_gpurt_settings():
    from dask_gpurt.config import read

    return read().shuffle


def test_only_two_places_read_the_spilled_memory():
    read = 'metrics["spilled_bytes"]["memory"]'
    assert inspect.getsource(distributed.scheduler).count(read) == 2
    assert read in inspect.getsource(WorkerState.memory.fget)
    assert read in inspect.getsource(Scheduler.heartbeat_worker)

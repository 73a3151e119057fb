"""Contract tests: distributed tells which workers and schedulers a process has."""

from __future__ import annotations

from distributed import get_worker
from distributed.utils_test import gen_cluster

from dask_gpurt.plugins.patches import client


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_servers_of_a_process_are_found(c, s, a, b):
    assert {w.address for w in client.workers_here()} >= {a.address, b.address}
    identity = await c.scheduler.identity(n_workers=-1)
    assert identity["id"] in client.scheduler_ids_here()
    assert {client.address_at_scheduler(w) for w in (a, b)} == identity["workers"].keys()
    assert client.address_of_scheduler(a) == identity["address"] == s.address
    await b.close()
    assert b.scheduler is not None  # a closed worker differs from one that never started


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_task_knows_its_worker(c, s, a):
    def address():
        return get_worker().address

    async def address_in_coroutine():
        return get_worker().address

    assert await c.submit(address) == await c.submit(address_in_coroutine) == a.address

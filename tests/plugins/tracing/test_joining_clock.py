"""The clock of a worker that joins during a trace is compared once the worker has started."""

from __future__ import annotations

from unittest import mock

from distributed import Worker
from distributed.utils_test import async_poll_for, gen_cluster, inc

import dask_gpurt
from dask_gpurt.plugins.tracing import clock_exchanges
from dask_gpurt.plugins.tracing.ledger_hook import TRACE
from tests.limits import HANG_S


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config={"gpurt.enabled": True})
async def test_a_joining_worker_does_not_wait_for_its_clock(c, s, worker, tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "1.json"
    # The scheduler gave up after this time, and the worker began so much later.
    with mock.patch.object(clock_exchanges, "_DEADLINE_S", HANG_S):
        async with dask_gpurt.trace(c, file), Worker(s.address, nthreads=1) as joined:
            assert await c.submit(inc, 1, workers=[joined.address]) == 2
            (found,) = (one for one in s.extensions[TRACE]._workers if one.joined_s is not None)
            await async_poll_for(lambda: found.exchanges, timeout=HANG_S)
    assert found.address == joined.address

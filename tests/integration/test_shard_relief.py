"""A worker with Dask's own store spills shards when its process is short of memory."""

from __future__ import annotations

import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Event
from distributed.utils_test import async_poll_for, gen_cluster

from dask_gpurt.plugins.bootstrap import NAME

MIB = 1 << 20
N_PARTS, ROWS = 4, 250_000
DASKS_STORE = {"gpurt.enabled": True, "gpurt.memory.enabled": False}


def frame(number):
    rng = np.random.default_rng(number)
    return pd.DataFrame({"key": rng.integers(0, 1_000, ROWS), "x": rng.random(ROWS)})


def shuffled():
    def part(number):
        if number == N_PARTS - 1:
            Event("more").wait()
        return frame(number)

    return dd.from_map(part, range(N_PARTS), meta=frame(0).head(0)).shuffle("key").x.sum()


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 2)],
    config=DASKS_STORE,
    worker_kwargs={"memory_limit": 64 * MIB},
)
async def test_a_paused_worker_resumes_after_its_shards_are_on_disk(c, s, a):
    runtime = a.extensions[NAME]
    a.monitor.get_process_memory = lambda: 0
    result = c.compute(shuffled())
    await async_poll_for(lambda: runtime.shards_nbytes() > 8 * MIB, timeout=60)
    assert not runtime.shards_on_disk_nbytes()
    # Other memory of the process; shards come on top of it.
    a.monitor.get_process_memory = lambda: 50 * MIB + runtime.shards_nbytes()
    await async_poll_for(lambda: a.status.name == "paused", timeout=60)
    await async_poll_for(lambda: runtime.shards_on_disk_nbytes() > 0, timeout=60)
    a.monitor.get_process_memory = lambda: 40 * MIB + runtime.shards_nbytes()
    await Event("more").set()
    assert np.isclose(await result, sum(frame(n).x.sum() for n in range(N_PARTS)))

"""Sizes that a type's own `sizeof` gives, and that are no whole numbers of bytes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from dask.sizeof import sizeof
from distributed.utils_test import gen_cluster

from tests.limits import HANG_S


class Grid:
    """A value whose registered size is the one that it names."""

    def __init__(self, size: object) -> None:
        self.size = size


@sizeof.register(Grid)
def _(grid):
    return grid.size


@pytest.mark.parametrize(
    "size", [np.int64(200), np.int64(1 << 20), -1000, float("nan"), 1e3], ids=repr
)
def test_odd_sizes_are_taken_as_stock_dask_takes_them(size):
    @gen_cluster(
        client=True,
        nthreads=[("127.0.0.1", 1)] * 2,
        # Both workers are in this process: with less, they may pause for what other tests left.
        worker_kwargs={"memory_limit": "16 GiB"},
        config={"gpurt.enabled": True},
    )
    async def scenario(client, scheduler, here, there):
        assert hasattr(here.data, "residency"), "the runtime has no store here"
        # Dask's own checks, which only its tests switch on, refuse some of these sizes.
        scheduler.validate = here.state.validate = there.state.validate = False
        made = client.submit(Grid, size, key="made", workers=[here.address])
        (placed,) = await client.scatter([Grid(size)], workers=[here.address])
        async with asyncio.timeout(HANG_S):
            for grid in (made, placed):
                fetched = client.submit(
                    lambda grid: repr(grid.size), grid, workers=[there.address], pure=False
                )
                assert await fetched == repr(size)
        for worker in (here, there):
            assert {"made", placed.key} <= set(worker.data)
            assert all(one.nbytes >= 0 for one in worker.data.residency.values.values())

    scenario()

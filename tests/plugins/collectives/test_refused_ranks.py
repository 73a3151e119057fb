"""A gang ends if the scheduler refuses the tasks of its ranks, and the next one may run."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import wait
from distributed.client import FutureCancelledError

from dask_gpurt.collectives import Communicator
from dask_gpurt.errors import GangError
from dask_gpurt.plugins.collectives.groups.gangs import rank_key
from dask_gpurt.plugins.collectives.groups.rank import run_rank
from tests.plugins.collectives.gang import assert_nothing_stays, on_cluster

TWO = [("127.0.0.1", 1)] * 2


def added(comm, _, *state):
    return float(comm.allreduce(np.ones(3)).sum())


async def assert_the_next_one_runs(c, s, *workers):
    """Its timeout is long: a test that must wait for it fails by its own."""
    assert await c.gather(await Communicator(c, timeout="1h").run(added)) == [6.0, 6.0]
    await assert_nothing_stays(c, s, *workers)


async def cancelled(c):
    future = c.submit(int, 1)
    await wait(future)
    await future.cancel()
    return future


@on_cluster(TWO)
async def test_an_input_was_cancelled(c, s, a, b):
    comm = Communicator(c, timeout="1h")
    with pytest.raises(FutureCancelledError):
        await c.gather(await comm.run(added, None, await cancelled(c)))
    await assert_the_next_one_runs(c, s, a, b)


@on_cluster(TWO)
async def test_a_block_ends_though_no_rank_began(c, s, a, b):
    async with Communicator(c, timeout="1h") as comm:
        await comm.run(added, None, await cancelled(c))
    await assert_the_next_one_runs(c, s, a, b)


@on_cluster([("127.0.0.1", 1)] * 3)
async def test_a_scattered_input_was_lost(c, s, *workers):
    lost = await c.scatter(1, workers=[workers[2].address])
    await workers[2].close()
    with pytest.raises(FutureCancelledError):
        await c.gather(await Communicator(c, timeout="1h").run(added, None, lost))
    await assert_the_next_one_runs(c, s, *workers[:2])


class CannotBeLoaded:
    def __reduce__(self):
        return int, ("no number",)


@on_cluster(TWO)
async def test_the_scheduler_cannot_load_an_input(c, s, a, b):
    futures = await Communicator(c, timeout="1h").run(added, None, CannotBeLoaded())
    with pytest.raises(RuntimeError, match="deserialization of the task graph"):
        await c.gather(futures)
    del futures
    await assert_the_next_one_runs(c, s, a, b)


@on_cluster(TWO)
async def test_ranks_that_began_are_told_why(c, s, a, b):
    workers = [a.address, b.address]
    answer = await c.scheduler.gpurt_gang_begin(
        name="pair", client=c.id, workers=workers, timeout_s=3600.0
    )
    assert answer["why_not"] is None
    inputs = [1, await cancelled(c)]
    futures = [
        c.submit(run_rank, "pair", n, added, [], [one], key=rank_key("pair", n), workers=[address])
        for n, (one, address) in enumerate(zip(inputs, workers, strict=True))
    ]
    error = await futures[0].exception()
    assert type(error) is GangError
    assert str(error).startswith(f"rank 1 at {b.address} cannot begin: one of its inputs")
    assert futures[1].status == "cancelled"
    del futures
    await assert_the_next_one_runs(c, s, a, b)

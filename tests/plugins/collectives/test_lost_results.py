"""What needs the result of a rank gets an error if the rank's worker is gone."""

from __future__ import annotations

import asyncio

from distributed import Event

from dask_gpurt.collectives import Communicator
from dask_gpurt.errors import CollectiveError, RankLostError
from tests.plugins.collectives.gang import on_cluster

THREE = [("127.0.0.1", 1), ("127.0.0.2", 1), ("127.0.0.3", 1)]


def one_stays(comm, _):
    comm.barrier()
    if comm.rank == 0:
        Event("go").wait()


@on_cluster(THREE)
async def test_a_task_that_needs_a_lost_rank_fails(c, s, *workers):
    """The program keeps no future of the ranks."""
    comm = Communicator(c, [one.address for one in workers[:2]])
    futures = await comm.run(one_stays)
    total = c.submit(len, futures, workers=[workers[2].address])
    await futures[1]
    key = futures[0].key
    del futures
    while total.key not in s.tasks or s.tasks[key].who_wants:
        await asyncio.sleep(0)
    workers[0].batched_stream.comm.abort()
    error = await total.exception()
    await Event("go", client=c).set()
    assert (type(error), error.rank) == (RankLostError, 0)


@on_cluster(THREE)
async def test_a_result_that_is_lost_while_others_run_fails(c, s, *workers):
    async with Communicator(c, [one.address for one in workers[:2]]) as comm:
        futures = await comm.run(one_stays)
        await futures[1]
        await s.remove_worker(workers[1].address, stimulus_id="test")
        while futures[1].status == "finished":
            await asyncio.sleep(0)
        error = await futures[1].exception()
        await Event("go", client=c).set()
        assert await futures[0] is None
    assert (type(error), error.rank) == (RankLostError, 1)


@on_cluster(THREE)
async def test_a_result_that_is_lost_after_the_end_fails(c, s, *workers):
    async with Communicator(c, [one.address for one in workers[:2]]) as comm:
        await Event("go", client=c).set()
        futures = await comm.run(one_stays)
        await c.gather(futures)
    await s.remove_worker(workers[1].address, stimulus_id="test")
    while futures[1].status == "finished":
        await asyncio.sleep(0)
    error = await futures[1].exception()
    assert isinstance(error, CollectiveError) and "has ended" in str(error)

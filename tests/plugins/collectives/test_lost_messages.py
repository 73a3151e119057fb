"""Messages of a group that come early, come twice, or are not heard at all."""

from __future__ import annotations

import asyncio

import numpy as np
from distributed import Event

from dask_gpurt.collectives import Communicator
from dask_gpurt.plugins.collectives.groups.group_member import GroupMember
from tests.plugins.collectives.gang import assert_nothing_stays, forced, on_cluster

TWO = [("127.0.0.1", 1), ("127.0.0.2", 1)]
FOUR = [(f"127.0.0.{number}", 1) for number in (1, 2, 3, 4)]


def two_trees_and_a_barrier(comm, _):
    if comm.rank == 3:
        Event("begin").wait()
    weights = comm.broadcast(np.ones(10) if comm.rank == 0 else None)
    biases = comm.broadcast(np.ones(3) if comm.rank == 0 else None)
    comm.barrier()
    return float(weights.sum() + biases.sum())


@on_cluster(FOUR)
async def test_a_peer_behind_a_relay_may_be_further(c, s, *workers):
    """Rank 0 waits for rank 2, which waits for rank 3. So rank 0 may be twice as far ahead."""
    take, came = GroupMember.take, asyncio.Event()

    async def noting(member, sender, header, payload):
        if (member.rank, header.rank, header.epoch) == (3, 0, 2):
            asyncio.get_running_loop().call_soon(came.set)
        return await take(member, sender, header, payload)

    with forced("broadcast", "tree"), forced("all_reduce", "one-shot"):
        GroupMember.take = noting
        try:
            async with Communicator(c) as comm:
                futures = await comm.run(two_trees_and_a_barrier)
                await came.wait()
                await Event("begin", client=c).set()
                assert await c.gather(futures) == [13.0] * 4
        finally:
            GroupMember.take = take
    del futures
    await assert_nothing_stays(c, s, *workers)

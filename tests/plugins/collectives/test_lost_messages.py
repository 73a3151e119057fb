"""Messages of a group that come early, come twice, or are not heard at all."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from distributed import Event, wait

from dask_gpurt.collectives import Communicator
from dask_gpurt.errors import DamagedError
from dask_gpurt.plugins.collectives.groups.group_member import GroupMember
from dask_gpurt.plugins.collectives.groups.group_messages import GroupFailure
from dask_gpurt.plugins.collectives.groups.operation_run import INLINE_NBYTES, OperationRun
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from tests.plugins.collectives.gang import assert_nothing_stays, forced, on_cluster

TWO = [("127.0.0.1", 1), ("127.0.0.2", 1)]
FOUR = [(f"127.0.0.{number}", 1) for number in (1, 2, 3, 4)]
#: Elements of a message that is lent, not copied.
LARGE = INLINE_NBYTES


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


def two_broadcasts(comm, _):
    return [
        sorted(set(comm.broadcast(np.full(LARGE, value) if comm.rank == 0 else None).tolist()))
        for value in (1.0, 2.0)
    ]


@pytest.mark.parametrize("first_is_damaged", [False, True])
def test_a_second_copy_waits_for_the_first(first_is_damaged, monkeypatch):
    """The answer to the second copy lets the sender use its memory again."""
    take, take_slices, fetched = GroupMember.take, OperationRun.take, OperationRun._fetched
    came, is_held, answered = [], [], []
    came_twice = asyncio.Event()

    async def twice(member, *message):
        if message[1].epoch:
            return await take(member, *message)
        copies = [take(member, *message) for _ in range(2)]
        one, two = await asyncio.gather(*copies, return_exceptions=True)
        assert two == {"status": "OK"}
        assert isinstance(one, DamagedError) if first_is_damaged else one == two
        return two

    async def noting(run, *message):
        came.append(run)
        if len(came) == 2:
            came_twice.set()
        await take_slices(run, *message)
        answered.append(run)

    async def held(run, *message):
        if not is_held:
            is_held.append(run)
            await came_twice.wait()
            for _ in range(10):  # The second copy has its turns of the loop.
                await asyncio.sleep(0)
            assert not answered
            if first_is_damaged:
                raise DamagedError("not in this test")
        return await fetched(run, *message)

    monkeypatch.setattr(GroupMember, "take", twice)
    monkeypatch.setattr(OperationRun, "take", noting)
    monkeypatch.setattr(OperationRun, "_fetched", held)

    @on_cluster(TWO)
    async def test(c, s, *workers):
        async with Communicator(c) as comm:
            assert await c.gather(await comm.run(two_broadcasts)) == [[[1.0], [2.0]]] * 2
        await assert_nothing_stays(c, s, *workers)

    test()
    assert is_held


def broadcasts(comm, _, number):
    if comm.rank == 1:
        Event("go").wait()
    for _ in range(number):
        comm.broadcast(np.ones(10) if comm.rank == 0 else None)


@pytest.mark.parametrize("number", [1, 2])
def test_small_messages_are_late_after_the_timeout(number):
    """With two operations, the second one ends when the first one's messages are answered."""

    @on_cluster(TWO)
    async def test(c, s, *workers):
        async with Communicator(c, timeout="300ms") as comm:
            futures = await comm.run(broadcasts, None, number)
            text = str(await futures[0].exception())
            assert "rank 0 made no progress for 0.3 s: peers have not taken its messages" in text
            await Event("go", client=c).set()
            assert str(await futures[1].exception()) == text
        del futures
        await assert_nothing_stays(c, s, *workers)

    test()


@on_cluster(TWO)
async def test_a_rank_leaves_while_its_messages_are_answered(c, s, *workers):
    """Those of the second operation get their answers while it waits for those of the first."""
    member = GroupMember(workers[0], runtime_of(workers[0]), "a group", 0)
    member.timeout_s, member._epoch = 60.0, 1
    release = [asyncio.Event(), asyncio.Event()]
    for epoch, event in enumerate(release):
        member.deliver = lambda *_, event=event: event.wait()
        member.send_behind(epoch, 1, None)
    leaving = asyncio.ensure_future(member.leave(None))
    await asyncio.sleep(0)  # It waits now.
    for event in reversed(release):
        event.set()
    await leaving
    assert not member._behind


@on_cluster(TWO)
async def test_messages_after_a_failure_are_not_awaited_for_ever(c, s, *workers):
    """Their peer lives and answers nothing, and the failure has ended earlier messages alone."""
    member = GroupMember(workers[0], runtime_of(workers[0]), "a group", 0)
    member.timeout_s, never = 0.01, asyncio.Event()
    member.end_with(GroupFailure("failed", "an earlier failure"))
    member.deliver = lambda *_: never.wait()
    member.send_behind(0, 1, None)
    await asyncio.wait_for(member._heard(0), 30)
    assert not member._behind


class UnprintableError(Exception):
    def __repr__(self):
        raise AttributeError("a mistake of the program")


def one_barrier(comm, _, fails):
    comm.barrier()
    if fails and comm.rank == 1:
        raise UnprintableError


@pytest.mark.parametrize("fails", [False, True])
def test_a_gang_ends_if_no_rank_is_heard_leaving(fails, monkeypatch):
    """The end of its task is enough."""

    async def lost(*_, **__):
        raise OSError("not in this test")

    @on_cluster(TWO)
    async def test(c, s, *workers):
        monkeypatch.setitem(s.handlers, "gpurt_gang_leave", lost)
        async with Communicator(c) as comm:
            futures = await comm.run(one_barrier, None, fails)
            await wait(futures)
        del futures
        await assert_nothing_stays(c, s, *workers)

    test()


def waits(comm, _):
    Event("go").wait()


@on_cluster(TWO)
async def test_a_cancelled_rank_that_is_not_heard_leaving_ends(c, s, *workers):
    """The scheduler hears nothing of the end of a task that was cancelled."""

    async def lost(*_, **__):
        raise OSError("not in this test")

    s.handlers["gpurt_gang_leave"] = lost
    async with Communicator(c) as comm:
        futures = await comm.run(waits)
        while not all(worker.state.executing_count for worker in workers):
            await asyncio.sleep(0)
        await c.cancel(futures)
        await Event("go", client=c).set()
    del futures
    await assert_nothing_stays(c, s, *workers)


def raises_between_barriers(comm, _):
    one_barrier(comm, _, True)
    comm.barrier()


@on_cluster(TWO)
async def test_an_unprintable_error_ends_its_group(c, s, *workers):
    async with Communicator(c) as comm:
        futures = await comm.run(raises_between_barriers)
        await wait(futures)
        text = f"rank 1 at {comm.workers[1]} failed: UnprintableError"
        assert text in str(await futures[0].exception())
    del futures
    await assert_nothing_stays(c, s, *workers)

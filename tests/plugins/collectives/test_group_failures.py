"""The first failure of a rank ends the group: all others get one error that names it."""

from __future__ import annotations

import asyncio
import re
import threading

import numpy as np
import pytest
from distributed import Client, Event, Worker, wait

import dask_gpurt
from dask_gpurt.collectives import Communicator
from dask_gpurt.collectives.plans import steps_of
from dask_gpurt.errors import CollectiveError, ProtocolError, RankLostError
from dask_gpurt.plugins.collectives.groups.group_member import GroupMember
from dask_gpurt.plugins.collectives.groups.operation_run import INLINE_NBYTES, OperationRun
from tests.plugins.collectives.gang import EACH, assert_nothing_stays, forced, on_cluster

THREE = [("127.0.0.1", 1), ("127.0.0.2", 1), ("127.0.0.3", 1)]
TWO_BY_TWO = [("127.0.0.1", 1)] * 2 + [("127.0.0.2", 1)] * 2
#: Elements of a message that is copied, and of one that is lent.
SMALL, LARGE = 10, INLINE_NBYTES


async def errors_of(futures):
    await wait(futures)
    return [await future.exception() for future in futures]


def raising(comm, _):
    comm.barrier()
    if comm.rank == 1:
        raise ValueError("it is 7")
    comm.allreduce(np.ones(SMALL))


@on_cluster(THREE)
async def test_an_exception_of_a_step_is_named_on_all_ranks(c, s, *workers):
    async with Communicator(c) as comm:
        errors = await errors_of(await comm.run(raising))
    assert repr(errors[1]) == "ValueError('it is 7')"
    text = f"rank 1 at {comm.workers[1]} failed: ValueError('it is 7')"
    assert [str(errors[0]), str(errors[2])] == [text, text]
    assert type(errors[0]) is type(errors[2]) is CollectiveError
    await assert_nothing_stays(c, s, *workers)


def unequal(comm, _, call, odd_rank, odd, even):
    array = odd if comm.rank == odd_rank else even
    return getattr(comm, call)(array)


@on_cluster(THREE)
async def test_unequal_arrays_are_named_on_all_ranks(c, s, *workers):
    async with Communicator(c) as comm:
        for algorithm in ("one-shot", "two-shot", "ring", "tree"):
            for n in (SMALL, LARGE):
                odd, even = np.ones(n, "f4"), np.ones(n + 2)
                with forced("all_reduce", algorithm):
                    futures = await comm.run(unequal, None, "allreduce", 2, odd, even)
                    errors = await errors_of(futures)
                texts = {str(error) for error in errors}
                assert len(texts) == 1, (algorithm, n)
                assert {type(error) for error in errors} == {CollectiveError}
                (text,) = texts
                assert f"rank 2 has ({n},) float32" in text
                assert f"has ({n + 2},) float64" in text
    del futures
    await assert_nothing_stays(c, s, *workers)


@on_cluster(THREE)
async def test_a_sender_names_unequal_arrays_as_their_receiver_does(c, s, *workers):
    """Whichever of the two reaches the scheduler first decides on the error of all ranks."""
    tell, take = GroupMember._tell, OperationRun.take

    async def after_rank_2(member, failure):
        while member.rank != 2 and member.failure is None:
            await member._change.wait()
        await tell(member, failure)

    async def but_rank_2(run, header, payload):
        if run._member.rank == 2:
            await run._member.until(lambda: False)
        await take(run, header, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupMember, "_tell", after_rank_2)
        patch.setattr(OperationRun, "take", but_rank_2)
        async with Communicator(c) as comm:
            odd, even = np.ones(SMALL, "f4"), np.ones(SMALL + 2)
            with forced("all_reduce", "one-shot"):
                futures = await comm.run(unequal, None, "allreduce", 2, odd, even)
                errors = await errors_of(futures)
    (text,) = {str(error) for error in errors}
    assert f"rank 2 has ({SMALL},) float32" in text
    del futures
    await assert_nothing_stays(c, s, *workers)


@on_cluster(THREE)
async def test_unequal_rows_are_named_too(c, s, *workers):
    arrays = np.ones((4, 2)), np.ones((4, 3))
    async with Communicator(c) as comm:
        for call in ("reduce_scatter", "all_gather"):
            errors = await errors_of(await comm.run(unequal, None, call, 0, *arrays))
            for error in errors:
                assert "has (4, 2) float64" in str(error) and "has (4, 3) float64" in str(error)


def other_call(comm, _):
    return comm.barrier() if comm.rank else comm.allreduce(np.zeros(1, "u1"), "max")


def broadcast_or_not(comm, _):
    return comm.barrier() if comm.rank else comm.broadcast(np.zeros(1), root=1)


@on_cluster(THREE)
async def test_unequal_calls_are_named(c, s, *workers):
    async with Communicator(c) as comm:
        for step, call in ((other_call, "allreduce(max)"), (broadcast_or_not, "broadcast(root=1)")):
            for error in await errors_of(await comm.run(step)):
                assert type(error) is CollectiveError
                assert re.fullmatch(r"rank \d calls barrier\(\), rank 0 calls (.*)", str(error))
                assert str(error).endswith(call)


@on_cluster(THREE)
async def test_types_that_cannot_be_added_are_refused_at_once(c, s, *workers):
    odd = [np.array([None]), np.zeros(1, "S0"), np.ma.masked_array([1]), np.zeros(1, "i4,f8")]
    async with Communicator(c) as comm:
        for array in odd:
            futures = await comm.run(unequal, None, "allreduce", 1, array, np.zeros(1))
            errors = await errors_of(futures)
            assert type(errors[1]) is TypeError
            for error in (errors[0], errors[2]):
                assert type(error) is CollectiveError and "rank 1" in str(error)
                assert "TypeError" in str(error)


def wrong_arguments(comm, _):
    for call, error in (
        (lambda: comm.allreduce(np.ones(1), "mean"), ValueError),
        (lambda: comm.broadcast(np.ones(1), root=3), ValueError),
        (lambda: comm.reduce_scatter(1.0), ValueError),
        (lambda: comm.allreduce("text"), TypeError),
    ):
        with pytest.raises(error):
            call()
    return comm.allreduce(1)


@on_cluster(THREE)
async def test_a_refused_call_leaves_the_group_as_it_is(c, s, *workers):
    async with Communicator(c) as comm:
        assert await c.gather(await comm.run(wrong_arguments)) == [3, 3, 3]


class NoticedLock:
    """A lock that tells when a thread has it."""

    def __init__(self):
        self._lock = threading.Lock()
        self.taken = threading.Event()

    def acquire(self, blocking):
        has_lock = self._lock.acquire(blocking)
        if has_lock:
            self.taken.set()
        return has_lock

    def release(self):
        self._lock.release()


def two_threads(comm, _, name):
    if comm.rank:
        Event(name).wait()
        return comm.allreduce(1)
    first = []
    comm._is_busy = lock = NoticedLock()
    thread = threading.Thread(target=lambda: first.append(comm.allreduce(1)))
    thread.start()
    lock.taken.wait()
    with pytest.raises(CollectiveError, match="two threads of rank 0"):
        comm.allreduce(1)
    Event(name).set()
    thread.join()
    return first[0]


@on_cluster(THREE)
async def test_two_operations_at_once_are_refused(c, s, *workers):
    async with Communicator(c) as comm:
        assert await c.gather(await comm.run(two_threads, None, "busy")) == [3, 3, 3]


def ends_early(comm, _):
    return None if comm.rank == 1 else comm.allreduce(1)


@on_cluster(THREE)
async def test_a_rank_that_ends_early_is_no_deadlock(c, s, *workers):
    async with Communicator(c) as comm:
        errors = await errors_of(await comm.run(ends_early))
    assert errors[1] is None and "has ended its step" in str(errors[0])
    assert str(errors[0]) == str(errors[2])


def silent(comm, _, name):
    return Event(name).wait() if comm.rank == 1 else comm.allreduce(1)


@on_cluster(THREE)
async def test_a_silent_rank_is_named_after_the_timeout(c, s, *workers):
    async with Communicator(c, timeout="300ms") as comm:
        futures = await comm.run(silent, None, "never")
        await wait([futures[0], futures[2]])
        await Event("never", client=c).set()
        errors = await errors_of(futures)
    assert "made no progress for 0.3 s: no message of rank 1" in str(errors[0])
    assert str(errors[0]) == str(errors[2])


# ---------------------------------------------------------------------- ranks that are lost


def one_operation(comm, _, collective, n):
    array, found = np.ones(n), None
    if collective == "all_reduce":
        found = comm.allreduce(array)
    elif collective == "reduce_scatter":
        comm.reduce_scatter(array.reshape(-1, 1))
    elif collective == "all_gather":
        comm.all_gather(array)
    else:
        comm.broadcast(array if comm.rank == 0 else None)
    # A rank that has its part needs no other one, and may end well while that one dies.
    comm.barrier()
    return found


@pytest.mark.share(4)
@pytest.mark.parametrize(("collective", "algorithm"), EACH)
def test_a_lost_rank_in_each_step_is_named_by_all_others(collective, algorithm):
    """It dies before the step: its connections break, and it answers no peer any more.

    Large and small messages take turns.
    """
    hosts = TWO_BY_TWO if algorithm == "two-level" else THREE

    @on_cluster(hosts)
    async def test(c, s, *workers):
        there = {worker.address: worker for worker in workers}
        name = collective.replace("_", "-")
        groups = [address.rpartition(":")[0] for address in sorted(there)]
        n_steps = len(steps_of(name, algorithm, 0, groups, 1))
        carry_out, take = OperationRun._carry_out, GroupMember.take
        for dead_step in range(n_steps):
            victim = dead_step % len(hosts)
            dead = set()

            async def dying(run, number, step, victim=victim, dead_step=dead_step, dead=dead):
                member = run._member
                if (member.rank, run.epoch, number) == (victim, 0, dead_step):
                    dead.add(member)
                    member._worker.batched_stream.comm.abort()
                    await run._until(lambda: False, str)
                await carry_out(run, number, step)

            async def taking(member, *message, dead=dead):
                if member in dead:
                    await member.until(lambda: False)
                return await take(member, *message)

            n = (SMALL, LARGE)[dead_step % 2]
            with forced(collective, algorithm), pytest.MonkeyPatch.context() as patch:
                patch.setattr(OperationRun, "_carry_out", dying)
                patch.setattr(GroupMember, "take", taking)
                async with Communicator(c) as comm:
                    futures = await comm.run(one_operation, None, collective, n)
                    errors = await errors_of(futures)
            lost = comm.workers[victim]
            named = {(type(error), error.rank, error.address) for error in errors}
            assert named == {(RankLostError, victim, lost)}
            smaller = await comm.rebuild()
            async with smaller:
                sums = await c.gather(await smaller.run(one_operation, None, "all_reduce", 1))
            assert sums == [[len(hosts) - 1]] * (len(hosts) - 1)
            await there.pop(lost).finished()
            del futures, errors
            await assert_nothing_stays(c, s, *there.values())
            # The next step needs as many hosts.
            host = lost.rpartition(":")[0].removeprefix("tcp://")
            new = await Worker(s.address, nthreads=1, host=host)
            there[new.address] = new
        for worker in there.values():
            await worker.close()

    test()


def waits_for_rank_0(comm, _):
    return Event("go").wait() if comm.rank == 0 else comm.allreduce(1)


@pytest.mark.parametrize("has_blocks", [False, True])
def test_gather_raises_the_loss_of_a_rank(has_blocks):
    """So a program can call `rebuild`. The task of the lost rank may wait for a lost block."""

    @on_cluster(THREE)
    async def test(c, s, *workers):
        made = [c.submit(str, rank, workers=[one.address]) for rank, one in enumerate(workers)]
        async with Communicator(c) as comm:
            futures = await comm.run(waits_for_rank_0, made if has_blocks else None)
            while not all(worker.state.executing_count for worker in workers):
                await asyncio.sleep(0)
            await s.remove_worker(comm.workers[0], stimulus_id="test", close=False)
            with pytest.raises(RankLostError, match="rank 0 is lost"):
                await c.gather(futures)
            for error in await errors_of(futures):
                assert (type(error), error.address) == (RankLostError, comm.workers[0])
            await Event("go", client=c).set()
        assert (await comm.rebuild()).workers == comm.workers[1:]

    test()


@on_cluster(THREE)
async def test_a_cancelled_run_ends_its_group(c, s, *workers):
    async with Communicator(c) as comm:
        futures = await comm.run(waits_for_rank_0)
        while not all(worker.state.executing_count for worker in workers):
            await asyncio.sleep(0)
        await c.cancel([futures[2]])
        assert "the task of rank 2 was cancelled" in str(await futures[1].exception())
        await Event("go", client=c).set()
        await wait(futures[0])
    del futures
    await assert_nothing_stays(c, s, *workers)


@on_cluster(THREE)
async def test_an_error_in_the_block_ends_its_runs(c, s, *workers):
    with pytest.raises(ZeroDivisionError):
        async with Communicator(c) as comm:
            futures = await comm.run(waits_for_rank_0)
            while not all(worker.state.executing_count for worker in workers):
                await asyncio.sleep(0)
            await Event("go", client=c).set()
            raise ZeroDivisionError
    assert "the client has cancelled the run" in str(await futures[1].exception())


@on_cluster(THREE)
async def test_an_interrupt_at_the_end_of_the_block_ends_its_runs(c, s, *workers):
    """Otherwise, the next run would wait for this one."""
    made = []

    async def block():
        async with Communicator(c) as comm:
            made.extend(await comm.run(waits_for_rank_0))

    running = asyncio.create_task(block())
    while not all(worker.state.executing_count for worker in workers):
        await asyncio.sleep(0)
    running.cancel()
    assert "the client has cancelled the run" in str(await made[1].exception())
    await Event("go", client=c).set()
    with pytest.raises(asyncio.CancelledError):
        await running
    made.clear()
    await assert_nothing_stays(c, s, *workers)


@on_cluster(THREE)
async def test_a_client_that_leaves_ends_its_groups(c, s, *workers):
    """One of its gangs runs, and one waits for the same workers."""
    async with Client(s.address, asynchronous=True) as other:
        comm = Communicator(other)
        futures = await comm.run(waits_for_rank_0)
        second = asyncio.ensure_future(Communicator(other).run(waits_for_rank_0))
        while len(s.plugins["gpurt"].collectives.gangs._gangs) < 2:
            await asyncio.sleep(0)
        second.cancel()
        assert len(futures) == 3
    await Event("go", client=c).set()
    await assert_nothing_stays(c, s, *workers)


@on_cluster(THREE)
async def test_switching_off_ends_groups(c, s, *workers):
    async with Communicator(c) as comm:
        futures = await comm.run(waits_for_rank_0)
        while not all(worker.state.executing_count for worker in workers):
            await asyncio.sleep(0)
        await dask_gpurt.disable(c)
        assert "switched off" in str(await futures[1].exception())
        await Event("go", client=c).set()
        # It has called nothing yet, and ends after its group.
        assert "switched off" in str(await futures[0].exception())
    assert not s.extensions["multi_locks"].requests
    assert "gpurt_gang_begin" not in s.handlers


def sends_last(comm, _):
    comm.broadcast(np.ones(4) if comm.rank == 0 else None)
    return comm.rank


@on_cluster(THREE)
async def test_a_rank_fails_if_a_peer_lacks_its_last_message(c, s, *workers):
    """The sender goes on without an answer, so it hears of that only as it ends."""
    take = GroupMember.take

    async def refusing(member, *message):
        if member.rank == 1:
            raise ProtocolError("not in this test")
        return await take(member, *message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupMember, "take", refusing)
        async with Communicator(c) as comm:
            errors = await errors_of(await comm.run(sends_last))
    assert "rank 1 refused a message: not in this test" in str(errors[0])
    assert str(errors[0]) == str(errors[1])

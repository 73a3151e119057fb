"""All ranks of a gang run at the same time, or none does; each gets the blocks on its worker."""

from __future__ import annotations

import asyncio

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Event, MultiLock, Worker, get_client, secede, wait
from distributed.core import Status

import dask_gpurt
from dask_gpurt.collectives import Communicator
from dask_gpurt.errors import ActivationError, GangError, ProtocolError
from tests.plugins.collectives.gang import assert_nothing_stays, on_cluster

TWO = [("127.0.0.1", 1)] * 2
THREADS = [("127.0.0.1", 2)] * 2


def ranks(comm, blocks, *state):
    return comm.rank, comm.size, comm.workers, state


@on_cluster([("127.0.0.1", 1)] * 2)
async def test_one_for_all_workers_is_rebuilt_for_new_ones(c, s, *workers):
    """None of the earlier ones is left, as after a restart."""

    def size(comm, _):
        return comm.size

    comm = Communicator(c)
    assert await c.gather(await comm.run(size)) == [2, 2]
    some = Communicator(c, comm.workers)
    await s.remove_worker(workers[0].address, stimulus_id="test", close=False)
    comm = await comm.rebuild()
    assert comm.workers == [workers[1].address]
    async with Worker(s.address, nthreads=1) as new:
        await s.remove_worker(workers[1].address, stimulus_id="test", close=False)
        assert await c.gather(await (await comm.rebuild()).run(size)) == [1]
        with pytest.raises(GangError, match="there is no worker"):
            await (await some.rebuild()).run(size)
        assert new.address in s.workers


@on_cluster([("127.0.0.1", 1)])
async def test_an_asynchronous_client_needs_an_async_block(c, s, a):
    with pytest.raises(TypeError, match="async with"):
        with Communicator(c):
            pytest.fail("nothing would wait for its runs")


def notes_its_end(comm, _):
    comm.barrier()
    Event(f"rank {comm.rank} has ended").set()


@on_cluster()
async def test_a_block_waits_for_runs_whose_futures_are_dropped(c, s, *workers):
    """Dask cancels a task without a future."""
    async with Communicator(c) as comm:
        await comm.run(notes_its_end)
    ends = [Event(f"rank {rank} has ended", client=c) for rank in range(len(workers))]
    assert all([await one.is_set() for one in ends])
    await assert_nothing_stays(c, s, *workers)


@on_cluster()
async def test_each_worker_is_one_rank_once(c, s, *workers):
    async with Communicator(c) as comm:
        futures = await comm.run(ranks, None, 5, await c.scatter("state"))
        found = await c.gather(futures)
    addresses = sorted(worker.address for worker in workers)
    assert comm.workers == addresses
    assert found == [(rank, 5, addresses, (5, "state")) for rank in range(5)]
    holders = await c.who_has(futures)
    assert [holders[future.key] for future in futures] == [(one,) for one in addresses]
    del futures
    await assert_nothing_stays(c, s, *workers)


@on_cluster()
async def test_workers_by_name_are_still_there_in_a_rebuilt_one(c, s, *workers):
    gone = "tcp://127.0.0.9:1"
    comm = Communicator(c, [workers[3].name, gone, workers[0].address])
    with pytest.raises(GangError, match="there is no worker"):
        await comm.run(ranks)
    async with await comm.rebuild() as smaller:
        found = await c.gather(await smaller.run(ranks))
    chosen = [workers[3].address, workers[0].address]
    assert found == [(rank, 2, chosen, ()) for rank in range(2)]


@on_cluster(TWO)
async def test_one_worker_may_be_a_text(c, s, a, b):
    async with Communicator(c, b.address) as comm:
        assert await c.gather(await comm.run(ranks)) == [(0, 1, [b.address], ())]


@on_cluster()
async def test_some_workers_by_address_or_name(c, s, *workers):
    chosen = [workers[3].address, workers[0].name]
    async with Communicator(c, chosen) as comm:
        found = await c.gather(await comm.run(ranks))
    assert found[1][:3] == (1, 2, [workers[3].address, workers[0].address])


def blocks_of(comm, blocks):
    return blocks


@on_cluster(TWO)
async def test_blocks_stay_where_they_are(c, s, a, b):
    x = c.persist(da.random.random((60, 4), chunks=(10, 4)))
    await wait(x)
    moved = [worker.state.transfer_incoming_count_total for worker in (a, b)]
    async with Communicator(c) as comm:
        found = await c.gather(await comm.run(lambda comm, blocks: sum(map(len, blocks)), x))
    assert sum(found) == 60 and min(found) > 0
    assert moved == [worker.state.transfer_incoming_count_total for worker in (a, b)]


@on_cluster(TWO)
async def test_blocks_of_one_position_stay_together(c, s, a, b):
    frame = pd.DataFrame({"x": np.arange(20.0)})
    x = da.arange(20, chunks=5, dtype=float)
    y = dd.from_pandas(frame, npartitions=4, sort=False)
    async with Communicator(c) as comm:
        found = await c.gather(await comm.run(blocks_of, (x, y)))
    pairs = [pair for of_rank in found for pair in of_rank]
    assert len(pairs) == 4 and all(found)
    for values, rows in pairs:
        assert rows["x"].tolist() == values.tolist()


@on_cluster(TWO)
async def test_futures_are_blocks(c, s, a, b):
    futures = [c.submit(int, number, workers=[b.address], pure=False) for number in range(3)]
    async with Communicator(c, [a.address, b.address]) as comm:
        assert await c.gather(await comm.run(blocks_of, futures)) == [[], [0, 1, 2]]
        with pytest.raises(TypeError, match="list of futures"):
            await comm.run(blocks_of, [1, 2])
        with pytest.raises(ValueError, match="3 and 4 blocks"):
            await comm.run(blocks_of, (futures, da.ones(4, chunks=1)))
        with pytest.raises(ZeroDivisionError):
            await comm.run(blocks_of, [c.submit(lambda: 1 // 0)])


def added(comm, _, number):
    return int(comm.allreduce(np.array([number]))[0])


@on_cluster()
async def test_a_hundred_runs_of_two_communicators_end(c, s, *workers):
    """They overlap in part, and begin in both orders."""
    first, second = workers[:4], workers[2:]
    async with (
        Communicator(c, [one.address for one in first]) as one,
        Communicator(c, [two.address for two in reversed(second)]) as two,
    ):
        runs = [comm.run(added, None, n) for n in range(50) for comm in (one, two)]
        futures = await asyncio.gather(*runs)
        found = await c.gather(futures)
    wanted = [[n * size] * size for n in range(50) for size in (4, 3)]
    assert found == wanted
    del futures
    await assert_nothing_stays(c, s, *workers)


@on_cluster(TWO)
async def test_a_gang_waits_for_a_lock_of_distributed(c, s, a, b):
    """Programs such as xgboost's take this lock on the addresses of their workers."""
    async with Communicator(c) as comm:
        async with MultiLock([b.address], client=c):
            running = asyncio.ensure_future(comm.run(ranks))
            while not s.extensions["multi_locks"].requests.keys() - {None} or not comm._names:
                await asyncio.sleep(0)
            while len(s.extensions["multi_locks"].locks[b.address]) < 2:
                await asyncio.sleep(0)
            assert not running.done()
        await c.gather(await running)


def waiting(comm, _, name):
    Event(name).wait()
    return comm.rank


@on_cluster(TWO)
async def test_a_busy_worker_is_waited_for_and_then_refused(c, s, a, b):
    """The rank that has a thread gets an error, and runs nothing."""
    event = Event("go on", client=c)
    busy = c.submit(lambda: Event("go on").wait(), workers=[b.address])
    while not b.state.executing_count:
        await asyncio.sleep(0)
    async with Communicator(c, timeout="200ms") as comm:
        futures = await comm.run(ranks)
        await wait(futures, return_when="FIRST_COMPLETED")
        await event.set()
        await busy
        await wait(futures)
    for future in futures:
        error = await future.exception()
        assert isinstance(error, GangError)
        assert f"at {b.address} had no free thread within 0.2 s" in str(error)
    del futures, future
    await assert_nothing_stays(c, s, a, b)


@on_cluster(TWO)
async def test_workers_that_cannot_run_are_named(c, s, a, b):
    async with Communicator(c) as comm:
        s.workers[b.address].nthreads = 0
        with pytest.raises(GangError, match=f"the worker at {b.address} has 0 threads"):
            await comm.run(ranks)
        s.workers[b.address].nthreads = 1
        s.plugins["gpurt"].readiness.ready.discard(a.address)
        s.plugins["gpurt"].readiness.not_ready[a.address] = "another version"
        with pytest.raises(GangError, match="dask_gpurt does not run on"):
            await comm.run(ranks)
    for workers, text in ((["nowhere"], "no worker 'nowhere'"), ([], "no worker")):
        with pytest.raises(GangError, match=text):
            await Communicator(c, workers).run(ranks)
    with pytest.raises(GangError, match="one rank of a gang only"):
        await Communicator(c, [b.address, b.name]).run(ranks)
    await assert_nothing_stays(c, s, a, b)


@on_cluster(TWO)
async def test_a_paused_worker_is_refused(c, s, a, b):
    s.handle_worker_status_change(Status.paused, a.address, stimulus_id="test")
    with pytest.raises(GangError, match=f"{a.address} is paused"):
        await Communicator(c).run(ranks)


def run_in_task(leaves):
    if leaves:
        secede()
    client = get_client()
    with Communicator(client) as comm:
        return client.gather(comm.run(added, None, 1))


@on_cluster(TWO)
async def test_a_task_that_keeps_the_only_thread_is_refused(c, s, a, b):
    with pytest.raises(GangError, match="tasks that wait for a group keep 1 of them"):
        await c.submit(run_in_task, False, pure=False)
    assert await c.submit(run_in_task, True, pure=False) == [2, 2]
    await assert_nothing_stays(c, s, a, b)


@on_cluster(THREADS)
async def test_a_task_may_keep_one_of_two_threads(c, s, a, b):
    assert await c.submit(run_in_task, False, pure=False) == [2, 2]


def run_in_rank(comm, _):
    if comm.rank == 0:
        secede()
        Communicator(get_client()).run(ranks)


@on_cluster(THREADS)
async def test_a_rank_cannot_start_a_gang(c, s, a, b):
    async with Communicator(c) as comm:
        futures = await comm.run(run_in_rank)
        with pytest.raises(GangError, match="it could wait for itself"):
            await futures[0]


@on_cluster(TWO)
async def test_a_cluster_without_the_runtime_is_named(c, s, a, b):
    await dask_gpurt.disable(c)
    with pytest.raises(ActivationError, match="disabled by a client"):
        await Communicator(c).run(ranks)


@on_cluster(TWO, **{"gpurt.collectives.enabled": False})
async def test_the_setting_is_named(c, s, a, b):
    with pytest.raises(ActivationError, match=r"gpurt.collectives.enabled is false"):
        await Communicator(c).run(ranks)


@pytest.mark.parametrize("timeout", [0, "0s"])
def test_a_timeout_is_positive(timeout):
    with pytest.raises(ValueError, match="positive"):
        Communicator(None, timeout=timeout)


@on_cluster(TWO[:1])
async def test_malformed_requests_to_the_scheduler(c, s, a):
    known = {"name": "x", "client": c.id, "workers": None, "timeout_s": 1.0}
    begins = [
        {"name": 5},
        {"workers": "text"},
        {"timeout_s": -1},
        {"timeout_s": "1"},
        {"client": None},
        {"caller": []},
    ]
    requests = [
        *(("begin", {**known, **changed}) for changed in begins),
        ("join", {"name": [], "rank": 0, "worker": ""}),
        ("failed", {"name": "x", "rank": 0, "failure": {"kind": "lost"}}),
        ("failed", {"name": "x", "rank": 0, "failure": "text"}),
        ("wait", {"names": 7, "cancel": True}),
    ]
    for handler, message in requests:
        with pytest.raises(ProtocolError):
            await s.handlers[f"gpurt_gang_{handler}"](**message)
    await assert_nothing_stays(c, s, a)


@on_cluster(TWO[:1])
async def test_distributed_has_the_locks_that_gangs_take(c, s, a):
    """A contract with distributed: handlers by name, and what the extension keeps."""
    acquire, release = (s.handlers[f"multi_lock_{name}"] for name in ("acquire", "release"))
    assert await acquire(locks=["x", "y"], id="one", num_locks=2)
    assert s.extensions["multi_locks"].requests == {"one": {"x", "y"}}
    assert not await acquire(locks=["y"], id="two", num_locks=1, timeout=0.01)
    release(id="one")
    assert not s.extensions["multi_locks"].requests

"""Messages of ranks are not trusted: late, foreign, malformed and damaged ones are refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from distributed import Client, Event, LocalCluster

import dask_gpurt
from dask_gpurt.collectives import Communicator
from dask_gpurt.errors import ProtocolError, TransportError
from dask_gpurt.plugins.collectives.groups.group_member import AHEAD, LATE, OVER
from dask_gpurt.plugins.collectives.groups.group_messages import OperationCall, SliceHeader
from dask_gpurt.plugins.collectives.groups.operation_run import INLINE_NBYTES, OperationRun
from dask_gpurt.plugins.shuffle.peer_links import Links
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from tests.plugins.collectives.gang import forced, on_cluster
from tests.plugins.collectives.test_operations import all_operations

TWO = [("127.0.0.1", 1), ("127.0.0.2", 1)]
SUBJECT = OperationCall("allreduce(sum)", (4,), "<f8", "one-shot", 1)
HEADER = SliceHeader(1, 0, 1, 0, 1, 32, 0, SUBJECT.encoded())


def in_the_middle(comm, _):
    """Rank 1 waits before its second operation, so rank 0 is in it."""
    first = comm.allreduce(np.zeros(4))
    if comm.rank == 1:
        Event("go").wait()
    return first.tolist(), comm.allreduce(np.ones(4)).tolist()


def to_rank_0(test):
    """Call `test` with a function that sends rank 0 a changed message, in an operation of it."""

    @on_cluster(TWO)
    async def run(c, s, *workers):
        async with Communicator(c) as comm:
            futures = await comm.run(in_the_middle)
            (name,) = comm._names
            there = {worker.address: worker for worker in workers}
            worker, sender = (there[address] for address in comm.workers)
            while not is_in_operation(worker, name, 1):
                await asyncio.sleep(0)
            known = {"name": name, "sender": sender.address, "message": 1}
            message = {"header": HEADER.encoded(), "payload": [bytes(32)], **known}
            await test(lambda one: worker.handlers["gpurt_collective"](**{**message, **one}))
            await Event("go", client=c).set()
            assert await c.gather(futures) == [([0.0] * 4, [2.0] * 4)] * 2

    run()


def is_in_operation(worker, name, epoch):
    member = runtime_of(worker).groups._members.get(name)
    run = member and member._current
    return run is not None and (run.epoch, run.step) == (epoch, 0)


def header(**changed):
    return {"header": replace(HEADER, **changed).encoded()}


MALFORMED = [
    {"name": 5},
    {"name": "x" * 2000},
    {"sender": 5},
    {"message": -1},
    {"message": 1 << 64},
    {"sender": "tcp://127.0.0.9:1"},
    {"header": b"short"},
    {"header": "text"},
    {"header": bytes(10_000)},
    {"payload": [bytes(31)]},
    {"payload": []},
    header(rank=0),
    header(rank=2),
    header(epoch=2 + AHEAD),
    header(first=1),
    header(count=2),
    header(nbytes=8),
    header(subject=b"no json"),
    header(subject=b"[" * 2000),
    header(subject=json.dumps(["allreduce(sum)", [4], "O", "ring", 1]).encode()),
    header(subject=json.dumps(["allreduce(sum)", [-4], "<f8", "ring", 1]).encode()),
    header(subject=json.dumps(["allreduce(sum)", ["4"], "<f8", "ring", 1]).encode()),
    header(subject=json.dumps(["allreduce(sum)", [4], "<f8", "ring", 0]).encode()),
]


def test_malformed_and_foreign_messages_change_nothing():
    async def refused(send):
        for changed in MALFORMED:
            with pytest.raises(ProtocolError):
                await send(changed)

    to_rank_0(refused)


def test_late_messages_change_nothing():
    async def answered(send):
        late = await send(header(epoch=0))
        assert late["status"] == LATE
        assert "rank 0 has done operation 0" in late["failure"]["text"]
        over = await send({"name": "another group"})
        assert over["status"] == OVER
        assert "has ended its step, or never began" in over["failure"]["text"]

    to_rank_0(answered)


async def refuse(self, *_):
    raise TransportError("not in this test")


def check_all_operations(**more):
    """Run all operations between ranks; return the transports that they took."""
    found = set()

    @on_cluster(TWO, **more)
    async def run(c, s, *workers):
        async with Communicator(c) as comm:
            one, two = await c.gather(await comm.run(all_operations, None, [100, 150_000], "i8"))
        paths = [path["path"] for path in runtime_of(workers[0]).links.report().values()]
        found.update(paths)
        for name in ("all_reduce", "all_gather", "broadcast"):
            for mine, yours in zip(one, two, strict=True):
                np.testing.assert_array_equal(mine[name], yours[name])

    run()
    return found


def test_values_cross_connections_whole(monkeypatch):
    monkeypatch.setattr(Links, "_link_shared", refuse)
    monkeypatch.setattr(Links, "_link_ucx", refuse)
    assert check_all_operations() == {"comm"}


def test_the_transport_of_shuffles_holds_for_groups():
    assert check_all_operations(**{"gpurt.shuffle.transport": "comm"}) == {"comm"}


def test_damaged_slices_are_sent_again(monkeypatch):
    monkeypatch.setattr(Links, "_link_shared", refuse)
    monkeypatch.setattr(Links, "_link_ucx", refuse)
    fetch, fetched = Links.fetch, []

    async def damaging(links, *arguments):
        """Flip a bit of a small message and of large ones."""
        found = await fetch(links, *arguments)
        fetched.append(found[0].copy())
        if len(fetched) in (2, 4, 7):
            fetched[-1][len(fetched[-1]) // 2] ^= 4
            return fetched[-1:]
        return found

    monkeypatch.setattr(Links, "fetch", damaging)
    check_all_operations()
    assert {len(one) > INLINE_NBYTES for one in fetched} == {True, False}
    assert len({fetched[number - 1].nbytes for number in (2, 4, 7)}) > 1


def all_reduced(comm, _):
    return comm.allreduce(np.full(100_000, 1 + 10 * comm.rank))


@pytest.mark.parametrize("refused", [["_link_ucx"], ["_link_shared", "_link_ucx"]])
def test_a_late_message_has_the_values_before_the_sum(monkeypatch, refused):
    """The first message to a peer waits for the link. The peer's may come and be added before."""
    for link in refused:
        monkeypatch.setattr(Links, link, refuse)
    compose = OperationRun._compose

    async def late(run, *arguments):
        if run._member.rank == 0:
            await run._member.until(lambda: run.step > 0)
        return await compose(run, *arguments)

    monkeypatch.setattr(OperationRun, "_compose", late)

    @on_cluster(TWO)
    async def run(c, s, *workers):
        async with Communicator(c) as comm:
            with forced("all_reduce", "one-shot"):
                for found in await c.gather(await comm.run(all_reduced)):
                    assert set(found.tolist()) == {12}

    run()


def mutating(comm, _):
    """The caller's array changes as soon as an operation is over."""
    found = []
    for number in range(5):
        array = np.full(100_000, number + comm.rank)
        total = comm.allreduce(array)
        array[:] = -1
        found.append(total)
    return all((total == 2 * number + 1).all() for number, total in enumerate(found))


def test_ranks_of_one_process_may_change_their_arrays(monkeypatch):
    """Dask's connections inside a process hand over the sender's own memory."""
    monkeypatch.setattr(Links, "_link_shared", refuse)
    monkeypatch.setattr(Links, "_link_ucx", refuse)
    cluster = LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0"
    )
    with cluster, Client(cluster) as client:
        dask_gpurt.enable(client)
        with Communicator(client) as comm:
            assert client.gather(comm.run(mutating)) == [True, True]

"""Replicated values arrive everywhere, by few links, and also when a worker fails."""

from __future__ import annotations

import itertools
import struct
import threading

import numpy as np
import pandas as pd
import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.errors import ProtocolError
from dask_gpurt.memory.store import TieredStore
from dask_gpurt.plugins.collectives.broadcasts import broadcast_run, worker_broadcasts
from dask_gpurt.plugins.collectives.broadcasts.broadcast_run import BroadcastRun
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.shuffle.routing import host_of

#: Three addresses of this machine stand for three hosts.
HOSTS = [("127.0.0.1", 1)] * 3 + [("127.0.0.2", 1)] * 2 + [("127.0.0.3", 1)]
CONFIG = {
    "gpurt.enabled": True,
    "distributed.scheduler.active-memory-manager.start": False,
}
N = 400_000


def on_cluster(nthreads=HOSTS, **settings):
    return gen_cluster(client=True, nthreads=nthreads, config={**CONFIG, **settings})


def report(s):
    return s.plugins["gpurt"].collectives.broadcaster.report()


def values():
    rng = np.random.default_rng(1)
    return {
        "array": rng.random(N),
        "frame": pd.DataFrame({"x": rng.random(N), "s": pd.array(["a", "bb"] * (N // 2))}),
        "several arrays": {"a": rng.random(N), "b": [rng.integers(0, 9, N), "text"]},
    }


@pytest.mark.parametrize("name", ["array", "frame", "several arrays"])
@pytest.mark.parametrize("how", ["scatter", "replicate"])
def test_every_worker_gets_the_value(name, how):
    @on_cluster()
    async def test(c, s, *workers):
        value = values()[name]
        if how == "scatter":
            (future,) = await c.scatter([value], broadcast=True)
        else:
            future = c.submit(lambda: values()[name], workers=[workers[4].address])
            await future
            await c.replicate(future)
        assert len(s.tasks[future.key].who_has) == len(workers)
        for worker in workers:
            assert str(worker.data[future.key]) == str(value)
        found = report(s)
        n_copies = len(workers) - (how == "replicate")
        assert (found["values"], found["copies"]) == (1, n_copies)

    test()


@on_cluster()
async def test_values_are_broadcast_however_many_there_were(c, s, *workers):
    s.plugins["gpurt"].collectives.broadcaster.versions._next = itertools.count(10**9)
    future = c.submit(lambda: values()["array"], workers=[workers[0].address])
    await future
    await c.replicate(future)
    assert report(s)["copies"] == len(workers) - 1


@on_cluster()
async def test_a_spilled_value_is_read_off_the_event_loop(c, s, *workers):
    holder = workers[4]
    future = c.submit(lambda: values()["array"], workers=[holder.address])
    await future
    store, read_in = holder.data, []
    assert isinstance(store, TieredStore)
    stock = store._carrier.read_through

    def read_through(key):
        read_in.append(threading.current_thread())
        return stock(key)

    store.make_room(0, 1 << 40)
    assert future.key not in store._objects
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._carrier, "read_through", read_through)
        await c.replicate(future)
    assert read_in and threading.main_thread() not in read_in
    assert report(s)["copies"] == len(workers) - 1


@pytest.mark.parametrize("size", [1, N])
@pytest.mark.parametrize("by", ["name", "text", "part of the address", "address"])
def test_scatter_takes_workers_as_stock_dask_does(by, size):
    @on_cluster()
    async def test(c, s, *workers):
        named = {
            "name": [worker.name for worker in workers],
            # A name like this is a part of all addresses.
            "text": ["1", "2", "127", "4", "5", "6"],
            "part of the address": [worker.address.partition("//")[2] for worker in workers],
            "address": [worker.address for worker in workers],
        }[by]
        if by == "text":
            s.aliases.update(zip(named, [worker.address for worker in workers], strict=True))
        future = await c.scatter(np.ones(size), workers=named[:4], broadcast=True)
        holders = {ws.address for ws in s.tasks[future.key].who_has}
        assert holders == {worker.address for worker in workers[:4]}
        assert report(s)["values"] == (size == N)

    test()


@on_cluster()
async def test_few_connections_are_enough(c, s, *workers):
    """Workers of one process share its open files, so each may have few connections."""
    future = c.submit(np.ones, N, workers=[workers[0].address])
    await future
    for worker in workers:
        (await runtime_of(worker).links.connections.pool()).limit = 2
    await c.replicate(future)
    assert report(s)["copies"] == len(workers) - 1


@on_cluster()
async def test_slices_pass_each_card_once(c, s, *workers):
    await c.scatter(np.ones(N), broadcast=True)
    links = {
        (host_of(worker.address), host_of(peer))
        for worker in workers
        for peer in runtime_of(worker).links.report()
        if host_of(worker.address) != host_of(peer)
    }
    assert len(links) == 2
    assert len({receiver for _, receiver in links}) == 2


@on_cluster(**{"gpurt.shuffle.transport": "comm"})
async def test_the_transport_of_shuffles_holds_for_broadcasts(c, s, *workers):
    future = c.submit(np.ones, N, workers=[workers[0].address])
    await future
    await c.replicate(future)
    links = [one for worker in workers for one in runtime_of(worker).links.report().values()]
    assert report(s)["values"] == 1 and {one["path"] for one in links} == {"comm"}


@on_cluster()
async def test_small_values_are_left_to_stock_dask(c, s, *workers):
    future = await c.scatter(1, broadcast=True)
    assert len(s.tasks[future.key].who_has) == len(workers)
    assert report(s)["values"] == 0


@on_cluster(**{"gpurt.collectives.enabled": False})
async def test_the_setting_leaves_all_to_stock_dask(c, s, *workers):
    future = await c.scatter(np.ones(N), broadcast=True)
    assert len(s.tasks[future.key].who_has) == len(workers)
    assert s.plugins["gpurt"].collectives is None


@on_cluster()
async def test_a_copy_for_some_workers_goes_to_these(c, s, *workers):
    future = await c.scatter(np.ones(N), workers=[workers[0].address])
    chosen = [worker.address for worker in workers[:4]]
    await c.replicate(future, workers=chosen)
    assert {ws.address for ws in s.tasks[future.key].who_has} == set(chosen)
    assert report(s)["copies"] == 3


@pytest.mark.parametrize("victim", [1, 3, 5])
def test_the_others_get_the_value_if_a_worker_fails(victim):
    """The first slice finds its receiver broken."""

    @on_cluster()
    async def test(c, s, *workers):
        future = await c.scatter(np.arange(N), workers=[workers[0].address])
        failing = workers[victim].address
        take = BroadcastRun.take

        async def broken(run, header, payload):
            if run._workers[run._rank] == failing:
                raise OSError("it is broken")
            return await take(run, header, payload)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BroadcastRun, "take", broken)
            await c.replicate(future)
        # Stock Dask's copy reached the failing one, too.
        assert len(s.tasks[future.key].who_has) == len(workers)
        for worker in workers:
            assert (worker.data[future.key] == np.arange(N)).all()

    test()


@on_cluster()
async def test_damaged_slices_are_sent_again(c, s, *workers):
    put, n_damaged = broadcast_run._put, 0

    def damaging(found, parts, checksum):
        nonlocal n_damaged
        if not n_damaged:
            n_damaged += 1
            return put(found, parts, checksum ^ 1)
        return put(found, parts, checksum)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast_run, "_put", damaging)
        future = await c.scatter(np.arange(N), broadcast=True)
    assert n_damaged == 1
    assert report(s)["copies"] == len(workers)
    for worker in workers:
        assert (worker.data[future.key] == np.arange(N)).all()


@on_cluster()
async def test_changed_slices_in_shared_memory_are_noticed(c, s, *workers):
    """A sender that has given up reuses its memory, which a slow worker may only read then."""
    copied_out, changed = BroadcastRun._copied_out, []

    def changing(run, number):
        lent, checksum = copied_out(run, number)
        lent[0] ^= 1
        changed.append(number)
        return lent, checksum

    value = c.submit(lambda: np.arange(N), workers=[workers[0].address])
    await value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BroadcastRun, "_copied_out", changing)
        await c.replicate(value)
    assert changed
    for worker in workers:
        assert (worker.data[value.key] == np.arange(N)).all()


@on_cluster()
async def test_nothing_stays_behind(c, s, *workers):
    future = await c.scatter(np.ones(N), broadcast=True)
    key = future.key
    future.release()
    while any(key in worker.data for worker in workers):
        await c.run(lambda: None)
    for worker in workers:
        assert not runtime_of(worker).links.outgoing.used_nbytes


NOWHERE = "tcp://127.0.0.9:1"


def joining(worker, **changed):
    message = {
        "name": "one",
        "key": "value",
        "workers": [NOWHERE, worker.address],
        "header": {},
        "lengths": [10],
        "n_slices": 1,
    }
    return worker.handlers["gpurt_broadcast_join"](**{**message, **changed})


@on_cluster(HOSTS[:1])
async def test_a_worker_forgets_a_broadcast_whose_sender_is_gone(c, s, a):
    with pytest.MonkeyPatch.context() as patch:
        for module in (broadcast_run, worker_broadcasts):
            patch.setattr(module, "PATIENCE_S", 0.05)
        assert await joining(a) == {"why_not": None}
        end = a.handlers["gpurt_broadcast_end"]
        assert "has not arrived" in (await end(name="one"))["why_not"]
        assert await joining(a, name="another") == {"why_not": None}
        # Nobody asks how this one ended.
        while (await end(name="another"))["why_not"] != "it has left the broadcast":
            await c.run(lambda: None)
    assert "value" not in a.data


@pytest.mark.parametrize(
    "changed",
    [
        {"name": 5},
        {"key": None},
        {"workers": [NOWHERE]},
        {"workers": 5},
        {"header": 5},
        {"lengths": [-1]},
        {"lengths": "text"},
        {"lengths": [1, 1], "header": {"split-num-sub-frames": [1]}},
        {"n_slices": 0},
        {"n_slices": 11},
    ],
)
def test_malformed_messages_are_refused(changed):
    @on_cluster(HOSTS[:1])
    async def test(c, s, a):
        with pytest.raises(ProtocolError):
            await joining(a, **changed)

    test()


@on_cluster(HOSTS[:1])
async def test_slices_that_are_none_are_refused(c, s, a):
    assert await joining(a) == {"why_not": None}
    take = a.handlers["gpurt_broadcast_slice"]
    for header in (b"short", struct.pack("<QQQ", 1, 10, 0), struct.pack("<QQQ", 0, 9, 0)):
        with pytest.raises(ProtocolError):
            await take(name="one", sender="x", message=1, header=header, payload=[bytes(10)])
    for unknown in ({"sender": 5, "message": 1}, {"sender": "x"}, {"sender": "x", "message": 0}):
        with pytest.raises(ProtocolError):
            await take(name="one", header=struct.pack("<QQQ", 0, 10, 0), payload=[], **unknown)
    with pytest.raises(OSError, match="over here"):
        await take(name="unknown", sender="x", message=1, header=b"", payload=[])
    await a.handlers["gpurt_broadcast_leave"](name="one")


@on_cluster(HOSTS[:1])
async def test_a_value_larger_than_the_memory_is_refused(c, s, a):
    answer = await joining(a, lengths=[1 << 49])
    assert "more than the worker's memory" in answer["why_not"]

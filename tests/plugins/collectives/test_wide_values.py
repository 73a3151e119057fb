"""Large values that several workers need arrive in one broadcast, or as with stock Dask."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from distributed import Event, wait
from distributed.core import Status
from distributed.utils_test import async_poll_for, gen_cluster

import dask_gpurt
from dask_gpurt.plugins.collectives.broadcasts import awaited_values, wide_values
from dask_gpurt.plugins.collectives.broadcasts.broadcast_run import BroadcastRun
from dask_gpurt.plugins.patches.values.replicate import take_replica

#: Three addresses of this machine stand for three hosts.
HOSTS = [("127.0.0.1", 1)] * 2 + [("127.0.0.2", 1)] * 2 + [("127.0.0.3", 1)] * 2
CONFIG = {"gpurt.enabled": True}
LARGE_NBYTES = 16 << 20


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Let workers wait for the scheduler's answer: all of them share its thread here."""
    monkeypatch.setattr(awaited_values, "_LEAST_PATIENCE_S", 60.0)


def on_cluster(**settings):
    return gen_cluster(client=True, nthreads=HOSTS, config={**CONFIG, **settings})


def report(s):
    return s.plugins["gpurt"].collectives.broadcaster.report()


def awaited(workers):
    attached = [worker.plugins["gpurt"]._attachment for worker in workers]
    return [one._broadcasts.awaited for one in attached]


def made(nbytes):
    return np.arange(nbytes // 8)


def total(value, number, _start):
    return int(value.sum()) + number


def sent_nbytes(workers):
    return sum(worker.transfer_outgoing_bytes_total for worker in workers)


async def used_by(c, s, value, workers):
    """Use a value on each of these workers, and check the results.

    All uses become ready at once, as those of one graph do.
    """
    start = c.submit(lambda: Event("start").wait(), workers=[workers[1].address])
    uses = [
        c.submit(total, value, number, start, workers=[worker.address])
        for number, worker in enumerate(workers)
    ]
    while value.key not in s.tasks or len(s.tasks[value.key].dependents) < len(workers):
        await asyncio.sleep(0)
    await wait(value)
    await Event("start").set()
    n = s.tasks[value.key].nbytes // 8
    expected = n * (n - 1) // 2
    assert await c.gather(uses) == [expected + number for number in range(len(workers))]


@on_cluster()
async def test_a_result_that_all_need_is_broadcast(c, s, *workers):
    value = c.submit(made, LARGE_NBYTES, workers=[workers[0].address])
    await used_by(c, s, value, workers)
    found = report(s)
    assert (found["values"], found["copies"]) == (1, len(workers) - 1)
    explained = (await dask_gpurt.explain(c, value))["broadcast"]
    assert explained == found["recent"][0]
    assert (explained["hosts"], explained["copies"]) == (3, len(workers) - 1)
    # Four other workers fetch from one, as stock Dask does it.
    assert explained["stock_s"] > 2 * explained["seconds"]
    # Nobody fetched it as well.
    assert sent_nbytes(workers) < LARGE_NBYTES


@on_cluster()
async def test_a_value_of_the_client_is_broadcast(c, s, *workers):
    value = await c.scatter(made(LARGE_NBYTES), workers=[workers[2].address])
    await used_by(c, s, value, workers)
    assert report(s)["copies"] == len(workers) - 1


@pytest.mark.parametrize(
    ("nbytes", "n_workers"), [(LARGE_NBYTES // 2, 6), (LARGE_NBYTES, wide_values.LEAST_WORKERS)]
)
def test_small_values_and_few_workers_are_left_to_stock(nbytes, n_workers):
    @on_cluster()
    async def test(c, s, *workers):
        # One of them has the value already.
        value = c.submit(made, nbytes, workers=[workers[0].address])
        await used_by(c, s, value, workers[:n_workers])
        assert report(s)["values"] == 0

    test()


@on_cluster(**{"gpurt.collectives.enabled": False})
async def test_the_setting_leaves_large_values_to_stock(c, s, *workers):
    # Nobody else would answer a worker.
    asked = []
    s.handlers["gpurt_wanted"] = lambda key, worker: asked.append(key)
    value = c.submit(made, LARGE_NBYTES, workers=[workers[0].address])
    await used_by(c, s, value, workers)
    assert sent_nbytes(workers) > (len(workers) - 1) * LARGE_NBYTES
    assert not asked


@on_cluster()
async def test_workers_may_ask_until_the_runtime_has_left_them(c, s, *workers):
    value = c.submit(made, LARGE_NBYTES, workers=[workers[0].address])
    wide = s.plugins["gpurt"].collectives.broadcaster._wide
    wide.uninstall()
    await used_by(c, s, value, workers)
    assert report(s)["values"] == 0
    await dask_gpurt.disable(c)
    assert "gpurt_wanted" not in s.handlers


@on_cluster()
async def test_workers_fetch_if_the_scheduler_is_slow(c, s, *workers):
    """They ask it once, and again after it has answered."""
    stock, may_answer, asked = s.handlers["gpurt_wanted"], asyncio.Event(), []

    async def slow(key, worker):
        asked.append(worker)
        await may_answer.wait()
        return await stock(key=key, worker=worker)

    s.handlers["gpurt_wanted"] = slow
    awaited_values._LEAST_PATIENCE_S = 0.01
    for _ in range(3):
        value = c.submit(made, LARGE_NBYTES, workers=[workers[0].address], pure=False)
        await used_by(c, s, value, workers)
        assert sorted(asked) == sorted(worker.address for worker in workers[1:])
    may_answer.set()
    awaited_values._LEAST_PATIENCE_S = 60.0
    assert report(s)["values"] == 0
    await async_poll_for(lambda: not any(one._unanswered for one in awaited(workers)), timeout=60)
    value = c.submit(made, LARGE_NBYTES, workers=[workers[0].address], pure=False)
    await used_by(c, s, value, workers)
    assert report(s)["values"] == 1


@on_cluster()
async def test_workers_fetch_what_a_broadcast_fails_to_bring(c, s, *workers):
    async def broken(run, header, payload):
        raise OSError("it is broken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BroadcastRun, "take", broken)
        value = c.submit(made, LARGE_NBYTES, workers=[workers[0].address])
        await used_by(c, s, value, workers)
    assert report(s)["copies"] == 0


@on_cluster()
async def test_a_value_may_be_released_before_its_broadcast_ends(c, s, *workers):
    """Dask takes it badly if a value is there, and forgotten, before its fetch has ended."""
    stock, may_answer = s.handlers["gpurt_brought"], asyncio.Event()

    async def slow(key):
        await may_answer.wait()
        return await stock(key=key)

    s.handlers["gpurt_brought"] = slow
    value = c.submit(made, LARGE_NBYTES, workers=[workers[0].address])
    await used_by(c, s, value, workers)
    value.release()
    await async_poll_for(
        lambda: not any(value.key in worker.state.tasks for worker in workers), timeout=60
    )
    may_answer.set()
    await async_poll_for(
        lambda: not any(worker.state.in_flight_workers for worker in workers), timeout=60
    )
    assert {worker.status for worker in workers} == {Status.running}
    assert report(s)["copies"] == len(workers) - 1


@on_cluster()
async def test_a_value_that_is_being_fetched_is_left_to_the_fetch(c, s, *workers):
    """The worker did not wait for the broadcast, which brings the value during the fetch."""
    source, target = workers[:2]
    value = await c.scatter(made(LARGE_NBYTES), workers=[source.address])
    stock, is_asked, may_answer = source.handlers["get_data"], asyncio.Event(), asyncio.Event()

    async def held(comm, **kwargs):
        is_asked.set()
        await may_answer.wait()
        return await stock(comm, **kwargs)

    source.handlers["get_data"] = held
    use = c.submit(len, value, workers=[target.address])
    await is_asked.wait()
    version = s.plugins["gpurt"].collectives.broadcaster.versions.of(s.tasks[value.key])
    assert await take_replica(target, value.key, made(LARGE_NBYTES), version) is None
    may_answer.set()
    assert await use == LARGE_NBYTES // 8
    assert target.status == Status.running


@on_cluster()
async def test_copies_removed_before_its_end_do_not_come_back(c, s, *workers):
    """One worker answers late. All have used their copies, and Dask has removed these."""
    s.extensions["amm"].stop()
    source, *others = workers
    stock, may_answer = others[-1].handlers["gpurt_broadcast_end"], asyncio.Event()

    async def late(name):
        await may_answer.wait()
        return await stock(name=name)

    others[-1].handlers["gpurt_broadcast_end"] = late
    value = c.submit(made, LARGE_NBYTES, workers=[source.address])
    await used_by(c, s, value, workers)
    ts = s.tasks[value.key]
    await async_poll_for(lambda: len(ts.who_has) == len(workers), timeout=60)
    for one in others:
        s.request_remove_replicas(one.address, [value.key], stimulus_id="test")
    await async_poll_for(lambda: not any(value.key in one.data for one in others), timeout=60)
    may_answer.set()
    await async_poll_for(lambda: report(s)["copies"] == len(others), timeout=60)
    assert {ws.address for ws in ts.who_has} == {source.address}


@on_cluster()
async def test_nothing_is_kept_of_a_broadcast(c, s, *workers):
    value = c.submit(made, LARGE_NBYTES, workers=[workers[0].address])
    await used_by(c, s, value, workers)
    assert not s.plugins["gpurt"].collectives.broadcaster._wide._under_way
    assert not any(one._fetches for one in awaited(workers))

"""Workers that die, say nothing or cannot read a value, and keys that are used anew."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from distributed import Event, wait
from distributed.utils_test import async_poll_for

from dask_gpurt.plugins.collectives.broadcasts import (
    awaited_values,
    broadcast_run,
    worker_broadcasts,
)
from dask_gpurt.plugins.collectives.broadcasts.broadcast_run import BroadcastRun
from dask_gpurt.plugins.patches.values.replicate import take_replica
from tests.limits import HANG_S
from tests.plugins.collectives import test_wide_values as wide
from tests.plugins.collectives.test_broadcasts import N, on_cluster

FOUR = [("127.0.0.1", 1)] * 4


class BroadcastPace:
    """Holds back the slices of some workers, and notes when another one has its copy.

    Parameters
    ----------
    quick, slow
        The worker whose copy is noted, and the addresses of those that have to wait.
    """

    def __init__(self, patch, quick, slow):
        self.is_there, self.may_go = asyncio.Event(), asyncio.Event()
        take = BroadcastRun.take

        async def noted(worker, key, value, version):
            found = await take_replica(worker, key, value, version)
            if worker is quick:
                self.is_there.set()
            return found

        async def held(run, header, payload):
            if run._workers[run._rank] in slow:
                await self.may_go.wait()
            return await take(run, header, payload)

        patch.setattr(worker_broadcasts, "take_replica", noted)
        patch.setattr(BroadcastRun, "take", held)


@on_cluster(FOUR)
async def test_no_copy_is_left_if_its_sender_dies(c, s, *workers):
    """A copy that the scheduler does not know would stay, also when the key is used anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast_run, "PATIENCE_S", 1.0)
        pace = BroadcastPace(patch, workers[1], {workers[2].address, workers[3].address})
        old = c.submit(np.full, N, 1.0, key="weights", workers=[workers[0].address])
        await wait(old)
        copying = asyncio.ensure_future(c.replicate(old))
        await pace.is_there.wait()
        workers[0].batched_stream.comm.abort()
        await workers[0].finished()
        pace.may_go.set()
        await async_poll_for(
            lambda: workers[0].address not in s.workers and not any(map(runs_of, workers[1:])),
            timeout=60,
        )
        holders = {worker.address for worker in workers[1:] if "weights" in worker.data}
        known = {ws.address for ws in s.tasks["weights"].who_has or ()}
        assert holders == known
    old.release()
    await async_poll_for(lambda: is_gone("weights", s, workers[1:]), timeout=60)
    # Stock Dask goes on with the copies, on a scheduler that knows no such key any more.
    await asyncio.wait({copying})


def is_gone(key, scheduler, workers):
    return key not in scheduler.tasks and not any(key in worker.data for worker in workers)


def runs_of(worker):
    return worker.plugins["gpurt"]._attachment._broadcasts._runs


@on_cluster(FOUR)
async def test_a_key_may_be_used_anew_during_its_broadcast(c, s, *workers):
    """The old value does not replace the new one, and the new one stays."""
    with pytest.MonkeyPatch.context() as patch:
        pace = BroadcastPace(patch, workers[1], {workers[3].address})
        old = (await c.scatter({"table": np.full(N, 1.0)}, workers=[workers[0].address]))["table"]
        copying = asyncio.ensure_future(c.replicate(old))
        await pace.is_there.wait()
        old.release()
        await async_poll_for(lambda: is_gone("table", s, workers[:3]), timeout=60)
        values = {"table": np.full(N, 2.0)}
        new = (await c.scatter(values, workers=[workers[1].address]))["table"]
        pace.may_go.set()
        await copying
    assert (await c.gather(new))[0] == 2
    for worker in workers:
        assert "table" not in worker.data or worker.data["table"][0] == 2
    assert "table" in workers[1].data


@pytest.fixture
def patience(monkeypatch):
    """Let workers wait for the scheduler's answer: all of them share its thread here."""
    monkeypatch.setattr(awaited_values, "_LEAST_PATIENCE_S", 60.0)


def test_others_do_not_wait_for_a_silent_worker(patience, monkeypatch):
    """Such as one with a task that holds the GIL."""
    monkeypatch.setattr(broadcast_run, "JOIN_PATIENCE_S", 0.2)

    @wide.on_cluster()
    async def test(c, s, *workers):
        silent, may_answer = workers[5], asyncio.Event()
        for name in ("gpurt_broadcast_join", "get_data"):
            silent.handlers[name] = held_back(silent.handlers[name], may_answer)
        _, uses = await all_use_one(c, s, workers)
        await wait(uses[:5])
        assert all(use.status == "finished" for use in uses[:5])
        may_answer.set()
        await wait(uses)

    test()


def held_back(stock, may_answer):
    async def held(*args, **kwargs):
        await may_answer.wait()
        return await stock(*args, **kwargs)

    return held


async def all_use_one(c, s, workers, **more):
    """Let all workers need one large value at the same time. Return it and its uses."""
    value = c.submit(wide.made, wide.LARGE_NBYTES, workers=[workers[0].address])
    start = c.submit(lambda: Event("start").wait(), workers=[workers[1].address])
    uses = [
        c.submit(wide.total, value, number, start, workers=[worker.address])
        for number, worker in enumerate(workers)
    ]
    while value.key not in s.tasks or len(s.tasks[value.key].dependents) < len(workers):
        await asyncio.sleep(0)
    await wait(value)
    await Event("start").set()
    return value, uses


def test_the_value_is_fetched_if_a_broadcast_takes_too_long(patience, monkeypatch):
    monkeypatch.setattr(awaited_values, "longest_s", lambda nbytes: 0.2)

    @wide.on_cluster()
    async def test(c, s, *workers):
        may_answer = asyncio.Event()
        name = "gpurt_broadcast_slice"
        workers[5].handlers[name] = held_back(workers[5].handlers[name], may_answer)
        s.handlers["gpurt_brought"] = held_back(s.handlers["gpurt_brought"], may_answer)
        _, uses = await all_use_one(c, s, workers)
        await wait(uses)
        assert all(use.status == "finished" for use in uses)
        may_answer.set()

    test()


class Immovable:
    """As a lock or a generator: it cannot come to another worker."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise TypeError("it stays where it is")


def kind(odd, value, _start):
    return type(odd).__name__


@wide.on_cluster()
async def test_a_value_stays_if_the_rest_cannot_be_read(c, s, *workers):
    """A worker fetches it beside one that cannot be unpickled. Others there need the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(awaited_values, "_LEAST_PATIENCE_S", 60.0)
        source, last = workers[0], workers[5]
        value = c.submit(wide.made, wide.LARGE_NBYTES, workers=[source.address])
        odd = c.submit(Immovable, workers=[source.address])
        start = c.submit(lambda: Event("start").wait(), workers=[workers[1].address])
        free = {"workers": [last.address], "allow_other_workers": True}
        other = c.submit(kind, odd, value, start, **free)
        uses = [
            c.submit(wide.total, value, number, start, workers=[worker.address])
            for number, worker in enumerate(workers[:5])
        ]
        while not {odd.key, value.key} <= s.tasks.keys() or len(s.tasks[value.key].dependents) < 6:
            await asyncio.sleep(0)
        await wait([value, odd])
        stock, late = last.gather_dep, []

        async def gather_dep(worker, to_gather, total_nbytes, *, stimulus_id):
            if {value.key, odd.key} <= set(to_gather) and not late:
                late.append(c.submit(wide.total, value, 5, start, key="late", **free))
                while "late" not in last.state.tasks:
                    await asyncio.sleep(0)
            return await stock(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)

        last.gather_dep = gather_dep
        await Event("start").set()
        while not late:
            await asyncio.sleep(0)
        await wait([*uses, *late])
        assert late[0].status == "finished"
        assert await other == "Immovable"


@pytest.mark.parametrize(
    ("number", "is_full"), [(0, False), (3, False), (0, True)], ids=["first", "last", "full"]
)
def test_a_worker_that_leaves_holds_nobody_up(number, is_full):
    """Dask would try to connect to it for as long as it may, and the others would wait.

    The first worker sends to the others. It may leave when it has the value, and has sent nothing.
    """

    @on_cluster(FOUR, **{"distributed.comm.timeouts.connect": f"{HANG_S}s"})
    async def test(c, s, *workers):
        victim = sorted(workers, key=lambda one: one.address)[number]
        run, feed, take = BroadcastRun.run, BroadcastRun._feed, BroadcastRun.take
        leaving = []

        def is_victim(self):
            return self._workers[self._rank] == victim.address

        async def losing(self):
            if self._rank == 0 and not is_full:
                await victim.close()
            await run(self)

        async def sending_nothing(self, peer):
            await (asyncio.Event().wait() if is_victim(self) and is_full else feed(self, peer))

        async def taking(self, header, payload):
            nbytes = await take(self, header, payload)
            if is_victim(self) and is_full and all(one.is_set() for one in self._here):
                leaving.append(asyncio.create_task(victim.close()))
            return nbytes

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BroadcastRun, "run", losing)
            patch.setattr(BroadcastRun, "_feed", sending_nothing)
            patch.setattr(BroadcastRun, "take", taking)
            future = await c.scatter(np.arange(N), broadcast=True)
        await asyncio.gather(*leaving)
        holders = {ws.address for ws in s.tasks[future.key].who_has}
        assert holders == {one.address for one in workers if one is not victim}
        assert s.plugins["gpurt"].collectives.broadcaster.report()["copies"] == 3
        assert "remove" not in vars(s.rpc)

    test()

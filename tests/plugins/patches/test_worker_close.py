"""Contract tests of a worker's close, and tests of workers that are cancelled while they close."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import pytest
from distributed import Status, Worker
from distributed.core import Server
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.utils_test import async_poll_for, gen_cluster

import dask_gpurt
from dask_gpurt.plugins import shielding, worker_counters

TIMEOUT_S = 120


class Lingers(WorkerPlugin):
    """A user's plugin: the worker waits for its teardown."""

    name = "lingers"

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def teardown(self, worker: Any) -> None:
        self.begun.set()
        await self.go_on.wait()


def linger(worker: Worker) -> Lingers:
    plugin = Lingers()
    worker.plugins["lingers"] = plugin
    return plugin


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_replaced_names_exist(c, s, a):
    assert list(inspect.signature(Worker.close).parameters) == [
        "self",
        "timeout",
        "executor_wait",
        "nanny",
        "reason",
    ]
    assert a.handlers["terminate"] == a.close and a.stream_handlers["close"] == a.close
    assert not a._event_finished.is_set() and inspect.iscoroutinefunction(Server.close)
    before = a.close
    await dask_gpurt.enable(c)
    assert a.close != before
    assert a.handlers["terminate"] == a.close and a.stream_handlers["close"] == a.close
    await dask_gpurt.disable(c)
    assert a.close == before
    assert a.handlers["terminate"] == before and a.stream_handlers["close"] == before


@pytest.mark.parametrize("told_by", ["a caller", "the scheduler", "a peer"])
def test_a_close_that_is_cancelled_half_way_completes(told_by: str) -> None:
    @gen_cluster(client=True, nthreads=[("", 1)] * 2)
    async def test(c, s, a, b):
        await dask_gpurt.enable(c)
        how = {
            "a caller": a.close,
            "the scheduler": a.stream_handlers["close"],
            "a peer": a.handlers["terminate"],
        }
        lingers = linger(a)
        task = asyncio.create_task(how[told_by]())
        await lingers.begun.wait()
        others = [asyncio.create_task(a.close()) for _ in range(2)]
        task.cancel()
        await asyncio.wait_for(a.finished(), TIMEOUT_S)
        assert a.status == Status.closed
        for other in others:
            assert await asyncio.wait_for(other, TIMEOUT_S) is None
        with pytest.raises(asyncio.CancelledError):
            await task
        lingers.go_on.set()
        assert await c.submit(sum, (1, 2)) == 3

    test()


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_a_task_that_waits_for_a_close_may_be_cancelled(c, s, a, b):
    """The task that closes the worker continues."""
    await dask_gpurt.enable(c)
    lingers = linger(a)
    task = asyncio.create_task(a.close())
    await lingers.begun.wait()
    other = asyncio.create_task(a.close())
    await asyncio.sleep(0)
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other
    assert a.status == Status.closing and not a._event_finished.is_set()
    lingers.go_on.set()
    assert await asyncio.wait_for(task, TIMEOUT_S) == "OK"


def _attachment(worker: Worker) -> Any:
    return worker.plugins["gpurt"]._attachment


def _hold_writes(attachment: Any) -> tuple[asyncio.Event, threading.Event]:
    """Keep the writer of values busy, as a slow disk does."""
    loop = asyncio.get_running_loop()
    begun, go_on = asyncio.Event(), threading.Event()

    def hold() -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(TIMEOUT_S)

    attachment._memory._writes.submit(hold)
    return begun, go_on


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_plugin_teardown_does_not_wait_on_a_closing_worker(c, s, a):
    """Otherwise a cancellation at that moment would stop Dask's close half way."""
    await dask_gpurt.enable(c)
    attachment = _attachment(a)
    begun, go_on = _hold_writes(attachment)
    await begun.wait()
    a.status = Status.closing
    detaching = attachment.detach()
    with pytest.raises(StopIteration):
        detaching.send(None)
    closing_state = asyncio.create_task(attachment.runtime.close())
    await asyncio.sleep(0)
    closing_state.cancel()
    await asyncio.sleep(0)
    assert not closing_state.done()
    go_on.set()
    await asyncio.wait_for(closing_state, TIMEOUT_S)
    a.status = Status.running


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_hanging_disk_does_not_block_a_closing_worker(c, s, a):
    await dask_gpurt.enable(c)
    begun, go_on = _hold_writes(_attachment(a))
    await begun.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shielding, "DEADLINE_S", 0.05)
        assert await asyncio.wait_for(a.close(), TIMEOUT_S) == "OK"
    go_on.set()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_disabling_the_runtime_may_be_cancelled(c, s, a):
    """The worker gets its own store back nevertheless, once."""
    stock = a.data
    await dask_gpurt.enable(c)
    attachment = _attachment(a)
    kept = await c.scatter({"x": b"x" * 100_000})
    attachment._memory.store.make_room(0, 1 << 40)
    await async_poll_for(lambda: attachment._memory.store.spilled(), timeout=TIMEOUT_S)
    begun, go_on = _hold_writes(attachment)
    await begun.wait()
    first, second = (asyncio.create_task(attachment.detach()) for _ in range(2))
    await async_poll_for(lambda: attachment._memory._writes.n_waiting, timeout=TIMEOUT_S)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not second.done()
    go_on.set()
    await asyncio.wait_for(second, TIMEOUT_S)
    assert a.data is stock and "x" in stock
    await attachment.detach()
    assert (await kept["x"]) == b"x" * 100_000


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_a_worker_closes_while_the_runtime_is_disabled(c, s, a, b):
    """A closing worker does not need the values that are left to hand over."""
    await dask_gpurt.enable(c)
    attachment = _attachment(a)
    kept = await c.scatter({f"x{i}": b"x" * 1000 for i in range(50)}, workers=[a.address])
    attachment._memory.store.make_room(0, 1 << 40)
    await async_poll_for(lambda: len(attachment._memory.store.spilled()) == 50, timeout=TIMEOUT_S)
    begun, go_on = _hold_writes(attachment)
    await begun.wait()
    disabling = asyncio.create_task(dask_gpurt.disable(c))
    await async_poll_for(lambda: attachment._memory._writes.n_waiting, timeout=TIMEOUT_S)
    closing_worker = asyncio.create_task(a.close())
    await async_poll_for(lambda: a.status == Status.closing, timeout=TIMEOUT_S)
    go_on.set()
    assert await asyncio.wait_for(closing_worker, TIMEOUT_S) == "OK"
    await asyncio.wait_for(disabling, TIMEOUT_S)
    assert not (await dask_gpurt.status(c))["active"]
    del kept


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_scheduler_does_not_wait_when_a_worker_leaves(c, s, a):
    """It would log a cancelled wait whenever it closes before its workers."""
    await dask_gpurt.enable(c)
    assert s.plugins["gpurt"].remove_worker(s, a.address) is None


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_worker_that_lost_its_scheduler_closes_at_once(c, s, a):
    """Nobody would hear its last counters."""
    await dask_gpurt.enable(c)

    async def hear_nothing(**_: Any) -> None:
        await asyncio.Event().wait()

    s.handlers["gpurt_counted"] = hear_nothing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_counters, "FINAL_TIMEOUT_S", 1e6)
        a.batched_stream.comm.abort()
        await asyncio.wait_for(a.finished(), TIMEOUT_S / 4)
    assert a.status == Status.closed

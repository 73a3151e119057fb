"""Contract tests of messages of ours from workers to the scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker, WorkerPlugin
from distributed.comm.core import CommClosedError
from distributed.utils_test import async_poll_for, gen_cluster

from dask_gpurt.plugins.patches.worker_messages import WorkerMessages, remove_worker_plugin

TIMEOUT_S = 60
MESSAGE = {"op": "gpurt-test", "key": "x"}


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_messages_are_handed_on_until_close(c: Client, s: Scheduler, a: Worker) -> None:
    heard: list[dict[str, Any]] = []
    messages = WorkerMessages(s, "gpurt-test", lambda **fields: heard.append(fields))
    a.batched_send(dict(MESSAGE))
    await async_poll_for(lambda: heard, TIMEOUT_S)
    messages.close()
    a.batched_send(dict(MESSAGE))
    # The result comes after that message, over the same connection.
    assert await c.submit(len, "abc") == 3
    assert heard == [{"key": "x", "worker": a.address}]
    assert a.address in s.workers


@gen_cluster(nthreads=[("", 1)])
async def test_stock_drops_a_worker_after_an_unknown_message(s: Scheduler, a: Worker) -> None:
    a.batched_send(dict(MESSAGE))
    await async_poll_for(lambda: a.address not in s.workers, TIMEOUT_S)
    assert "gpurt-test" not in s.stream_handlers


class Ends(WorkerPlugin):  # type: ignore[misc]
    """A plugin whose end waits for an event, if its worker has one."""

    async def teardown(self, worker: Worker) -> None:
        if (event := vars(worker).get("may_end")) is not None:
            await event.wait()
        vars(worker)["has_ended"] = True


@pytest.mark.parametrize("ours", [True, False])
@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_a_plugin_ends_on_all_workers_though_one_dies(
    c: Client, s: Scheduler, a: Worker, b: Worker, ours: bool
) -> None:
    """Stock's way raises, and does not wait for the other one."""
    await c.register_plugin(Ends(), name="ends")
    may_end = vars(b)["may_end"] = asyncio.Event()

    died = asyncio.Event()

    async def dies(comm: Any, **message: Any) -> None:
        comm.abort()
        died.set()

    a.handlers["plugin-remove"] = dies
    removing = remove_worker_plugin(s, "ends") if ours else s.unregister_worker_plugin(None, "ends")
    task = asyncio.ensure_future(removing)
    if ours:
        await died.wait()
        may_end.set()
        await task
        assert vars(b)["has_ended"]
    else:
        with pytest.raises(CommClosedError):
            await task
        assert "has_ended" not in vars(b)
        may_end.set()
    assert "ends" not in s.worker_plugins

"""Contract tests of messages of ours from workers to the scheduler."""

from __future__ import annotations

from typing import Any

from distributed import Client, Scheduler, Worker
from distributed.utils_test import async_poll_for, gen_cluster

from dask_gpurt.plugins.patches.worker_messages import WorkerMessages

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

"""The checks for leftovers find all kinds of leftovers that a test creates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.transport.ucx.engine import UcxEngine
from tests.conftest import stock_client
from tests.failure.gates import DEADLINE_S
from tests.failure.leftovers import left_on, links_to_nobody, ucx_report
from tests.transport.ucx_peer import invite_anybody


@pytest.fixture
def client() -> Iterator[Client]:
    pytest.importorskip("ucxx", reason="the ucx extra is not installed")
    with stock_client(1) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    """Poll for a state of UCX's thread, which sends no notification."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0)


def on_worker(client: Client, scenario: Callable[[Any], Any]) -> None:
    """Run a coroutine function with the worker, on its loop."""
    (worker,) = client.cluster.workers.values()
    client.cluster.sync(scenario, worker)


def test_leftover_check_sees_ucx_messages_in_flight(client: Client) -> None:
    async def scenario(worker: Any) -> None:
        engine = await runtime_of(worker).links.ucx.engine()
        await engine.connect(engine.descriptor, DEADLINE_S)
        await until(lambda: engine.report()["held_nbytes"] == 0)
        large = np.zeros(1 << 20, dtype=np.uint8)
        # One message is never received, and the other is never sent.
        under_way = [
            asyncio.create_task(what(engine.token, number, [large], DEADLINE_S))
            for number, what in enumerate((engine.send, engine.receive))
        ]
        # The message may arrive before the thread gets the request to receive.
        seen = {"sends": 1, "receives": 1, "unclaimed_parcels": 2, "closing_links": 0}
        await until(lambda: engine.report()["under_way"] == seen)
        held_nbytes = engine.report()["held_nbytes"]
        assert held_nbytes > large.nbytes
        assert [one for one in await left_on(worker) if one.endswith("of UCX")] == [
            "1 sends of UCX",
            "1 receives of UCX",
            "2 unclaimed_parcels of UCX",
            f"{held_nbytes} held_nbytes of UCX",
        ]
        for task in under_way:
            task.cancel()
        await asyncio.wait(under_way)
        # The thread cancels each by a separate call.
        await until(lambda: not any(ucx_report(worker)["under_way"].values()))
        await until(lambda: not ucx_report(worker)["held_nbytes"])
        assert await left_on(worker) == []

    on_worker(client, scenario)


def test_leftover_check_sees_ucx_links_to_closed_engines(client: Client) -> None:
    others: list[UcxEngine] = []

    async def link(worker: Any) -> None:
        others.append(await invite_anybody(await UcxEngine.start("127.0.0.1")))
        engine = await runtime_of(worker).links.ucx.engine()
        await engine.connect(others[0].descriptor, DEADLINE_S)

    async def end(worker: Any) -> None:
        await others[0].close(DEADLINE_S)
        await until(lambda: not ucx_report(worker)["peers"])

    on_worker(client, link)
    assert list(links_to_nobody(client).values()) == [
        [f"UCX link to {others[0].token}, which is gone"]
    ]
    on_worker(client, end)
    assert links_to_nobody(client) == {}

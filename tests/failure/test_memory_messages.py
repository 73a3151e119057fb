"""Values that peers ask for when there is no room for them, or when their worker is about to go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Worker, wait
from distributed.worker import get_data_from_worker

from tests.failure.gates import DEADLINE_S
from tests.failure.memory_stage import make_block, open_small


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with open_small(tmp_path) as client:
        yield client


def workers_of(client: Client) -> tuple[Worker, Worker]:
    holder, asking = client.cluster.workers.values()
    return holder, asking


def on_loop(client: Client, coroutine: Any) -> Any:
    """A future of what a coroutine comes to on the event loop of a client and its workers."""
    return asyncio.run_coroutine_threadsafe(coroutine, client.loop.asyncio_loop)


def ask(client: Client, key: str) -> Any:
    """What the first worker answers the second, as a future."""
    holder, asking = workers_of(client)
    asked = get_data_from_worker(asking.rpc, [key], holder.address, who=asking.address)
    return on_loop(client, asked)


class Lingers:
    """Holds a worker up while it closes, when its plugins are gone and its server is not."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.may_go = asyncio.Event()

    async def close(self) -> None:
        self.is_reached.set()
        await self.may_go.wait()


def test_a_worker_that_closes_still_sends_what_it_has_in_memory(client: Client) -> None:
    holder, _ = workers_of(client)
    block = client.submit(make_block, 7, workers=[holder.address])
    wait(block, timeout=DEADLINE_S)
    # Connected: a worker that closes takes no new connections.
    assert ask(client, block.key).result(DEADLINE_S)["status"] == "OK"
    holder.extensions["lingers"] = lingers = Lingers()
    closing = on_loop(client, holder.close(nanny=False))
    try:
        assert lingers.is_reached.wait(DEADLINE_S)
        answer = ask(client, block.key).result(DEADLINE_S)
        assert (answer["data"][block.key] == make_block(7)).all()
    finally:
        client.loop.asyncio_loop.call_soon_threadsafe(lingers.may_go.set)
        closing.result(DEADLINE_S)

"""Peers get the values they request while memory is short or the worker is closing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Worker, wait
from distributed.worker import get_data_from_worker

import dask_gpurt
from dask_gpurt.memory.files.disk_tier import DiskTier
from dask_gpurt.plugins.memory import manager
from dask_gpurt.plugins.patches import gather_dep
from tests.failure.gates import DEADLINE_S, until
from tests.failure.memory_stage import (
    N_BLOCKS,
    expected_sums,
    make_block,
    make_blocks,
    open_small,
    sum_of,
    sums_of,
)


@pytest.fixture
def client(small_client: Client) -> Client:
    return small_client


def workers_of(client: Client) -> tuple[Worker, Worker]:
    holder, asking = client.cluster.workers.values()
    return holder, asking


def on_loop(client: Client, coroutine: Any) -> Any:
    """Run a coroutine on the event loop of a client and its workers; return a future."""
    return asyncio.run_coroutine_threadsafe(coroutine, client.loop.asyncio_loop)


def ask(client: Client, key: str) -> Any:
    """Request a value of the first worker for the second; return a future of the answer."""
    holder, asking = workers_of(client)
    asked = get_data_from_worker(asking.rpc, [key], holder.address, who=asking.address)
    return on_loop(client, asked)


def first_spilled(worker: Any, blocks: list[Any]) -> Any:
    """Return the first block that a worker has written to disk, once there is one."""
    until(lambda: any(worker.data.is_spilled(one.key) for one in blocks), "all stay in memory")
    return next(block for block in blocks if worker.data.is_spilled(block.key))


def blocks_of(client: Client) -> tuple[list[Any], list[Any]]:
    """Return futures of all blocks on the first worker, and of those it has spilled."""
    holder, _ = workers_of(client)
    blocks = make_blocks(client, workers=[holder.address])
    wait(blocks, timeout=DEADLINE_S)
    return blocks, [block for block in blocks if holder.data.is_spilled(block.key)]


class Lingers:
    """An extension that delays a closing worker whose plugins are gone, but whose server runs."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.may_go = asyncio.Event()

    async def close(self) -> None:
        self.is_reached.set()
        await self.may_go.wait()


def test_closing_worker_sends_values_in_memory(client: Client) -> None:
    holder, _ = workers_of(client)
    _, (cold, *_) = blocks_of(client)
    block = client.submit(make_block, 7, workers=[holder.address])
    wait(block, timeout=DEADLINE_S)
    # This opens the connection, because a closing worker accepts no new one.
    assert ask(client, block.key).result(DEADLINE_S)["status"] == "OK"
    holder.extensions["lingers"] = lingers = Lingers()
    closing = on_loop(client, holder.close(nanny=False))
    try:
        assert lingers.is_reached.wait(DEADLINE_S)
        answer = ask(client, block.key).result(DEADLINE_S)
        assert (answer["data"][block.key] == make_block(7)).all()
        # Values that were only on disk are gone with the files.
        assert ask(client, cold.key).result(DEADLINE_S) == {"status": "OK", "data": {}}
    finally:
        client.loop.asyncio_loop.call_soon_threadsafe(lingers.may_go.set)
        closing.result(DEADLINE_S)


class ShortOfRoom:
    """Hooks that make the first `times` reads of a disk tier fail for lack of memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        self.threads: list[str] = []
        read = DiskTier.get

        def get(tier: DiskTier, place: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            self.left -= 1
            if self.left >= 0:
                raise MemoryError("no room now")
            return read(tier, place)

        monkeypatch.setattr(DiskTier, "get", get)


def test_peer_retries_a_value_that_cannot_be_read_now(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, asking = workers_of(client)
    blocks, (cold, *_) = blocks_of(client)
    short = ShortOfRoom(monkeypatch, times=2)
    summed = client.submit(sum_of, cold, workers=[asking.address])
    assert summed.result(DEADLINE_S) == sum_of(make_block(blocks.index(cold)))
    # No read was tried on the event loop.
    assert len(short.threads) == 3
    assert all(name.startswith("gpurt read") for name in short.threads)


def test_client_retries_a_value_that_cannot_be_read_now(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, _ = workers_of(client)
    blocks = make_blocks(client)
    wait(blocks, timeout=DEADLINE_S)
    cold = first_spilled(holder, blocks)
    short = ShortOfRoom(monkeypatch, times=2)
    assert sum_of(cold.result(DEADLINE_S)) == sum_of(make_block(blocks.index(cold)))
    assert all(name.startswith("gpurt read") for name in short.threads)


def test_busy_worker_reads_no_value_for_a_request(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, _ = workers_of(client)
    _, (cold, *_) = blocks_of(client)
    short = ShortOfRoom(monkeypatch, times=0)
    monkeypatch.setattr(holder, "transfer_outgoing_count", 1_000)
    assert ask(client, cold.key).result(DEADLINE_S) == {"status": "busy"}
    assert not short.threads
    monkeypatch.setattr(holder, "transfer_outgoing_count", 0)
    assert ask(client, cold.key).result(DEADLINE_S)["status"] == "OK"
    assert len(short.threads) == 1


def test_requests_being_read_count_as_outgoing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, _ = workers_of(client)
    _, cold = blocks_of(client)
    may_read = threading.Event()
    read = DiskTier.get

    def held(tier: DiskTier, place: Any) -> Any:
        assert may_read.wait(DEADLINE_S)
        return read(tier, place)

    monkeypatch.setattr(DiskTier, "get", held)
    # Dask doubles this limit for a peer on the same host.
    monkeypatch.setattr(holder, "transfer_outgoing_count_limit", 1)
    asked = [ask(client, block.key) for block in cold[:3]]
    try:
        done, _ = concurrent.futures.wait(asked, DEADLINE_S, "FIRST_COMPLETED")
        assert [one.result() for one in done] == [{"status": "busy"}]
    finally:
        may_read.set()
    assert sorted(one.result(DEADLINE_S)["status"] for one in asked) == ["OK", "OK", "busy"]


@pytest.mark.parametrize("where", ["here", "at a peer"])
def test_task_whose_input_never_fits_fails_with_the_reason(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(manager, "WARN_S", 0.0)
    monkeypatch.setattr(manager, "PATIENCE_S", 0.01)
    monkeypatch.setattr(gather_dep, "PATIENCE_S", 0.01)
    monitored = {
        "distributed.worker.memory.spill": 0.99,
        "distributed.worker.memory.monitor-interval": "5ms",
    }
    with open_small(tmp_path, **monitored) as client:
        holder, asking = workers_of(client)
        holder.monitor.get_process_memory = asking.monitor.get_process_memory = lambda: 0
        blocks = make_blocks(client, workers=[holder.address])
        wait(blocks, timeout=DEADLINE_S)
        cold = first_spilled(holder, blocks)
        with monkeypatch.context() as patch:
            ShortOfRoom(patch, times=10**9)
            user = holder if where == "here" else asking
            summed = client.submit(sum_of, cold, workers=[user.address])
            told = "no room now" if where == "here" else f"{holder.address} has no memory to read"
            with pytest.raises(MemoryError, match=told):
                summed.result(DEADLINE_S)
        again = client.submit(sum_of, cold, workers=[user.address], pure=False)
        assert again.result(DEADLINE_S) == sum_of(make_block(blocks.index(cold)))
    said = [one.getMessage() for one in caplog.records if one.name == manager.logger.name]
    said = [one for one in said if one.startswith("no memory to read")]
    assert len(said) == 1
    assert said[0].endswith("tasks that need them wait: no room now")


def test_reads_in_flight_during_disable_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading, closed = threading.Event(), threading.Event()
    read, close = DiskTier.get, DiskTier.close

    def held(tier: DiskTier, place: Any) -> Any:
        if threading.current_thread().name.startswith("gpurt read"):
            reading.set()
            assert closed.wait(DEADLINE_S)
        return read(tier, place)

    def close_and_tell(tier: DiskTier) -> None:
        close(tier)
        closed.set()

    with open_small(tmp_path, n_workers=1, threads=4) as client:
        (worker,) = client.cluster.workers.values()
        # Scattered values cannot be computed again.
        blocks = client.scatter([make_block(number) for number in range(N_BLOCKS)])
        until(lambda: len(worker.data.disk) > 10, "values stay in memory")
        cold = [number for number, block in enumerate(blocks) if worker.data.is_spilled(block.key)]
        monkeypatch.setattr(DiskTier, "get", held)
        monkeypatch.setattr(DiskTier, "close", close_and_tell)
        # There are more sums than threads that read.
        sums = [client.submit(sum_of, blocks[number]) for number in cold[:4]]
        fetched = on_loop(client, client.gather([blocks[cold[4]]], asynchronous=True))
        assert reading.wait(DEADLINE_S)
        dask_gpurt.disable(client)
        assert set(worker.data) >= {block.key for block in blocks}
        assert client.gather(sums) == [sum_of(make_block(number)) for number in cold[:4]]
        (found,) = fetched.result(DEADLINE_S)
        assert sum_of(found) == sum_of(make_block(cold[4]))
        assert sums_of(client, blocks) == expected_sums()
    assert not caplog.messages

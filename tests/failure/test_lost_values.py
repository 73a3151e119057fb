"""Unreadable values that cannot be computed again are lost at once; other values stay."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, Queue, Variable, Worker, wait
from distributed.client import FutureCancelledError
from distributed.worker_state_machine import FreeKeysEvent

import dask_gpurt
from tests.failure.gates import DEADLINE_S, Gate, pass_gate, until
from tests.failure.memory_stage import (
    assert_no_values_left,
    make_block,
    open_small,
    sum_of,
)

LOST = "lost value"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One cluster for all tests, because a lost value must not disturb it."""
    with open_small(tmp_path_factory.mktemp("lost")) as client:
        yield client


@pytest.fixture
def client(cluster: Client) -> Iterator[Client]:
    yield cluster
    gc.collect()
    assert_no_values_left(cluster)


@pytest.fixture
def holder(client: Client) -> Worker:
    return next(iter(client.cluster.workers.values()))


@pytest.fixture
def peer(client: Client) -> Worker:
    _, found = client.cluster.workers.values()
    return found


def gone(path: str) -> None:
    os.unlink(path)


def damaged(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        file.write(b"damaged")


def spoil(worker: Worker, keys: Iterable[Any], how: Callable[[str], None] = gone) -> None:
    """Damage the files of these values on a worker."""
    store = worker.data
    for key in keys:
        value = store.residency.values[key]
        (level,) = value.copies
        how(store._carrier._places[value.serial, level].path)


def cold_of(client: Client, worker: Worker, n_blocks: int = 16) -> list[Any]:
    """Return futures of values that were scattered to a worker and are only on its disk."""
    blocks = client.scatter(
        [make_block(number) for number in range(n_blocks)], workers=[worker.address], hash=False
    )
    store = worker.data
    until(lambda: len(store.disk) > n_blocks // 4, "values stay in memory")
    until(lambda: not store.residency.is_writing, "values are still written")
    return [block for block in blocks if store.is_spilled(block.key)]


def keys_of(futures: Iterable[Any]) -> list[Any]:
    return [future.key for future in futures]


def said_of(future: Any) -> str:
    """Return the error text of a future, which is set at once."""
    return said_by(lambda: future.result(DEADLINE_S))


def said_by(ask: Callable[[], Any]) -> str:
    """Return the error text of a client call."""
    with pytest.raises(FutureCancelledError) as error:
        ask()
    # The client keeps the error, whose frames would keep futures alive.
    return str(error.value.with_traceback(None))


def assert_all_else_goes_on(client: Client) -> None:
    addresses = [worker.address for worker in client.cluster.workers.values()]
    assert set(client.scheduler_info()["workers"]) == set(addresses)
    for address in addresses:
        block = client.submit(make_block, 3, workers=[address], pure=False)
        summed = client.submit(sum_of, block, workers=[address], pure=False)
        assert summed.result(DEADLINE_S) == sum_of(make_block(3))


def add(total: int, block: np.ndarray) -> int:
    return total + sum_of(block)


@pytest.mark.parametrize("how", [gone, damaged])
@pytest.mark.parametrize("where", ["on its worker", "on a peer"])
def test_lost_scattered_value_fails_the_tasks_that_need_it(
    client: Client, holder: Worker, peer: Worker, how: Any, where: str
) -> None:
    blocks = cold_of(client, holder)[:4]
    spoil(holder, keys_of(blocks), how)
    address = (holder if where == "on its worker" else peer).address
    summed = [client.submit(sum_of, block, workers=[address], pure=False) for block in blocks]
    added = [client.submit(add, one, blocks[0], workers=[address]) for one in summed]
    for needed, future in zip(blocks, summed, strict=True):
        said = said_of(future)
        assert LOST in said
        assert f"the last copy of {needed.key!r}" in said
        assert holder.address in said
        assert needed.status == "cancelled"
    # Dask itself reports the loss to tasks that were added later.
    assert all("lost" in said_of(future) for future in added)
    assert "lost dependencies" in said_of(client.submit(sum_of, blocks[0], pure=False))
    assert_all_else_goes_on(client)
    del blocks, summed, added, future, needed
    assert_no_values_left(client)


def test_lost_scattered_value_fails_the_gather(client: Client, holder: Worker) -> None:
    cold = cold_of(client, holder)
    spoil(holder, keys_of(cold))
    assert f"{cold[0].key!r}, and nothing can compute it again" in said_of(cold[0])
    assert LOST in said_by(lambda: client.gather(cold[:3]))
    # Another damaged value is not lost until somebody asks for it.
    assert cold[-1].status == "finished"
    assert_all_else_goes_on(client)


@pytest.fixture
def kept_replicas(client: Client) -> Iterator[None]:
    """Stop Dask's active memory manager, which might drop the good replica."""
    client.amm.stop()
    yield
    client.amm.start()


@pytest.mark.usefixtures("kept_replicas")
def test_replica_replaces_a_lost_scattered_value(
    client: Client, holder: Worker, peer: Worker
) -> None:
    (block, *_) = cold_of(client, holder)
    client.replicate([block], 2)
    spoil(holder, [block.key])
    for worker in (holder, peer):
        summed = client.submit(sum_of, block, workers=[worker.address], pure=False)
        assert summed.result(DEADLINE_S)
    assert sum_of(block.result(DEADLINE_S)) == summed.result()
    assert_all_else_goes_on(client)


@pytest.mark.usefixtures("kept_replicas")
def test_queued_tasks_take_the_replica_of_a_lost_value(
    client: Client, holder: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are ready to run when the worker finds out that it has lost the value."""
    # Read ahead, the loss would be noticed before the tasks are ready.
    monkeypatch.setattr(holder.data, "_upcoming", tuple)
    (block, *_) = cold_of(client, holder)
    client.replicate([block], 2)
    spoil(holder, [block.key])
    with Gate() as gate:
        first = client.submit(pass_gate, gate.path, workers=[holder.address], priority=10)
        gate.wait_for()
        uses = [
            client.submit(sum_of, block, workers=[holder.address], pure=False) for _ in range(3)
        ]
        until(lambda: len(holder.state.ready) == len(uses), "tasks are queued")
        with pytest.raises(KeyError):
            holder.data[block.key]
        until(lambda: block.key not in holder.data, "the loss is noticed")
        gate.open()
        assert [use.result(DEADLINE_S) for use in uses] == [sum_of(block.result(DEADLINE_S))] * 3
        del first
    assert_all_else_goes_on(client)


@pytest.mark.filterwarnings("ignore:.*but key is unknown")
def test_lost_value_of_a_departed_client_is_reported(client: Client, holder: Worker) -> None:
    with Client(client.cluster, set_as_default=False) as other:
        in_variable, in_queue, published, *_ = cold_of(other, holder)
        Variable("v", other).set(in_variable)
        Queue("q", other).put(in_queue)
        Queue("q", other).put(in_queue)
        other.publish_dataset(published=published)
        spoil(holder, keys_of([in_variable, in_queue, published]))
        del in_variable, in_queue, published, _
    # The first request finds the loss. At the second, no worker has the value any more.
    for _ in range(2):
        for take in (
            lambda: Variable("v", client).get(),
            lambda: Queue("q", client).get(),
            lambda: client.get_dataset("published"),
        ):
            assert LOST in said_of(take())
    key = client.get_dataset("published").key
    # Tasks end after all answers about the old value. An answer that came later would cancel
    # the new value of that name.
    assert_all_else_goes_on(client)
    anew = client.scatter({key: make_block(1)}, workers=[holder.address])
    assert sum_of(client.get_dataset("published").result(DEADLINE_S)) == sum_of(make_block(1))
    del anew
    assert_all_else_goes_on(client)
    client.unpublish_dataset("published")
    Variable("v", client).delete()


def test_lost_value_that_a_plugin_stored_is_a_key_error(client: Client, holder: Worker) -> None:
    def put(dask_worker: Any) -> None:
        dask_worker.data["of a plugin"] = make_block(7)

    def look(dask_worker: Any) -> int:
        return sum_of(dask_worker.data["of a plugin"])

    def is_there(dask_worker: Any) -> bool:
        return "of a plugin" in dask_worker.data

    client.run(put, workers=[holder.address])
    cold = cold_of(client, holder)
    until(lambda: holder.data.is_spilled("of a plugin"), "it stays in memory")
    spoil(holder, ["of a plugin", *keys_of(cold)])
    with pytest.raises(KeyError, match="of a plugin"):
        client.run(look, workers=[holder.address])
    assert not client.run(is_there, workers=[holder.address])[holder.address]
    assert LOST in said_of(cold[0])
    assert_all_else_goes_on(client)


class Keeper:
    """An actor."""

    def __init__(self, block: np.ndarray) -> None:
        self.block = block

    def sum(self) -> int:
        return sum_of(self.block)

    def keep(self, block: np.ndarray) -> np.ndarray:
        return block


def test_actor_outlives_the_lost_value_it_was_made_of(client: Client, holder: Worker) -> None:
    made_of = client.scatter(make_block(99), workers=[holder.address])
    keeper = client.submit(Keeper, made_of, actor=True, workers=[holder.address]).result(DEADLINE_S)
    cold = cold_of(client, holder)
    until(lambda: holder.data.is_spilled(made_of.key), "it stays in memory")
    spoil(holder, [made_of.key, *keys_of(cold)])
    assert LOST in said_of(client.submit(sum_of, made_of, workers=[holder.address]))
    assert LOST in said_of(cold[0])
    assert keeper.sum().result(DEADLINE_S) == sum_of(make_block(99))
    assert sum_of(keeper.keep(make_block(5)).result(DEADLINE_S)) == sum_of(make_block(5))
    assert_all_else_goes_on(client)


def fails_once_told(path: str) -> np.ndarray:
    if os.path.exists(path):
        raise RuntimeError("not twice")
    return make_block(1)


def twice(block: np.ndarray) -> np.ndarray:
    return 2 * block


def test_lost_value_with_a_failed_input_is_reported(
    client: Client, holder: Worker, tmp_path: Path
) -> None:
    """If it were computed again, it would wait for its input forever."""
    flag = tmp_path / "flag"
    options = {"workers": [holder.address], "pure": False}
    made = client.submit(fails_once_told, str(flag), **options)
    doubled = client.submit(twice, made, **options)
    wait([made, doubled], timeout=DEADLINE_S)
    flag.touch()

    async def lose(key: str, dask_worker: Any) -> None:
        dask_worker.handle_stimulus(FreeKeysEvent(keys=[key], stimulus_id="test"))

    client.run(lose, made.key, workers=[holder.address])
    until(lambda: made.status == "error", "it was not computed again")
    client.run(lose, doubled.key, workers=[holder.address])
    until(lambda: doubled.status == "cancelled", "it is not said to be lost")
    assert f"its input {made.key!r} has failed since" in said_of(doubled)
    assert_all_else_goes_on(client)


def test_scattered_values_lost_during_disable_are_reported(tmp_path: Path) -> None:
    with open_small(tmp_path, n_workers=1) as client:
        scheduler = client.cluster.scheduler
        (holder,) = client.cluster.workers.values()
        (block, *_) = cold_of(client, holder)
        summed = client.submit(sum_of, block, workers=["tcp://127.0.0.1:1"], pure=False)
        spoil(holder, [block.key])
        dask_gpurt.disable(client)
        assert LOST in said_of(block)
        assert LOST in said_of(summed)
        handlers = [scheduler.stream_handlers[n] for n in ("release-worker-data", "report-key")]
        assert handlers == [scheduler.release_worker_data, scheduler.report_on_key]
        assert_all_else_goes_on(client)

"""Managed memory loses no value, and has no wrong one, when disks, files or clients fail."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, wait

import dask_gpurt
from dask_gpurt.errors import DamagedValueError
from dask_gpurt.memory.files import owner
from dask_gpurt.memory.files.directory import sweep
from tests.failure.gates import DEADLINE_S, Gate, pass_gate, until
from tests.failure.memory_stage import (
    MIB,
    N_BLOCKS,
    assert_no_values_left,
    disk_of,
    expected_sums,
    have_calls_pass,
    hold_a_call,
    make_block,
    make_blocks,
    open_small,
    orphans,
    stores,
    sum_of,
    sums_of,
)


@pytest.fixture
def client(small_client: Client) -> Client:
    return small_client


def is_cold_somewhere(client: Client) -> bool:
    return any(store.has_spilled for store in stores(client))


def cold_ones(client: Client, futures: list[Any]) -> list[Any]:
    return [f for f in futures if any(store.is_spilled(f.key) for store in stores(client))]


# ---------------------------------------------------------------------- disks


def _full_after(n_writes: int) -> Any:
    """Return a `pwrite` that fails as on a full disk after `n_writes` calls, until `is_free`."""
    numbers = itertools.count()

    def pwrite(real: Any, *args: Any) -> Any:
        if next(numbers) >= n_writes and not pwrite.is_free:  # type: ignore[attr-defined]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    pwrite.is_free = False  # type: ignore[attr-defined]
    return pwrite


@pytest.mark.parametrize("n_writes", [0, 1, 2, 5])
def test_full_disk_keeps_values_in_memory(client: Client, n_writes: int) -> None:
    disks = [_full_after(n_writes) for _ in stores(client)]
    for worker, pwrite in zip(client.cluster.workers.values(), disks, strict=True):
        have_calls_pass(worker, pwrite=pwrite)
    blocks = make_blocks(client)
    assert sums_of(client, blocks) == expected_sums()
    # Every value is in memory or complete on disk.
    for store in stores(client):
        assert len(store.memory) + len(store.disk) >= len(store)
    del blocks
    assert_no_values_left(client)


def test_disk_with_room_again_is_used_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store tries again by itself; no task has to release a value."""
    monkeypatch.setattr("dask_gpurt.memory.decisions.backoff.FIRST_S", 0.0)
    disks = [_full_after(0) for _ in stores(client)]
    for worker, pwrite in zip(client.cluster.workers.values(), disks, strict=True):
        have_calls_pass(worker, pwrite=pwrite)
    blocks = make_blocks(client)
    wait(blocks, timeout=DEADLINE_S)
    assert not is_cold_somewhere(client)
    for pwrite in disks:
        pwrite.is_free = True
    for store in stores(client):
        memory = store.residency.levels[0]
        until(lambda m=memory: m.used_nbytes <= m.capacity_nbytes, "a free disk is not used")
    assert sums_of(client, blocks) == expected_sums()


def test_disk_limit_is_kept(tmp_path: Path) -> None:
    with open_small(tmp_path, **{"gpurt.memory.disk-limit": "7 MiB"}) as client:
        blocks = make_blocks(client)
        assert sums_of(client, blocks) == expected_sums()
        for worker in client.cluster.workers.values():
            assert 0 < disk_of(worker).used_nbytes <= 7 * MIB


def test_value_larger_than_the_disk_limit_stays_in_memory(tmp_path: Path) -> None:
    """It stays in memory, and other values are spilled."""
    limit = {"gpurt.memory.disk-limit": "8 MiB"}
    with open_small(tmp_path, n_workers=1, **limit) as client:
        (store,) = stores(client)
        memory = store.residency.levels[0]
        large = client.submit(make_block, 99, 14 * MIB, key="large")
        wait(large, timeout=DEADLINE_S)
        blocks = [client.submit(make_block, n, MIB) for n in range(11)]
        wait(blocks, timeout=DEADLINE_S)
        until(lambda: memory.used_nbytes <= memory.capacity_nbytes, "small values stay as well")
        assert not store.is_spilled("large")
        expected = [sum_of(make_block(n, MIB)) for n in range(11)]
        assert client.gather(client.map(sum_of, blocks, pure=False)) == expected


def test_directory_that_cannot_be_made_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    directory = str(tmp_path / "file" / "values")
    with open_small(tmp_path, **{"gpurt.memory.directory": directory}) as client:
        blocks = make_blocks(client)
        assert sums_of(client, blocks) == expected_sums()
        assert is_cold_somewhere(client)
    told = [record for record in caplog.records if f"is {directory}, " in record.message]
    assert len(told) == 2, "one line for each worker"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "values"
    directory.mkdir(0o500)
    with open_small(tmp_path, **{"gpurt.memory.directory": str(directory)}) as client:
        blocks = make_blocks(client)
        assert sums_of(client, blocks) == expected_sums()
        assert is_cold_somewhere(client)


def _values_directories(client: Client) -> list[str]:
    paths = [disk_of(worker)._directory._path for worker in client.cluster.workers.values()]
    return [path for path in paths if path is not None]


def test_removed_directory_is_replaced(client: Client) -> None:
    blocks = make_blocks(client)
    wait(blocks, timeout=DEADLINE_S)
    removed = _values_directories(client)
    assert len(removed) == 2
    for path in removed:
        shutil.rmtree(path)
    assert sums_of(client, blocks) == expected_sums()
    more = client.map(make_block, range(N_BLOCKS, 2 * N_BLOCKS))
    assert sums_of(client, more) == expected_sums(2 * N_BLOCKS)[N_BLOCKS:]
    # The workers continue in directories with new names.
    assert not set(_values_directories(client)) & set(removed)
    del blocks, more
    assert_no_values_left(client)


class OneWay:
    """A value that can be pickled but not unpickled."""

    def __init__(self, number: int) -> None:
        _n_made[number] += 1
        self.block = make_block(number)

    def __sizeof__(self) -> int:
        return self.block.nbytes

    def __reduce__(self) -> Any:
        return _come_back, (self.block.tobytes(),)


def _come_back(data: bytes) -> None:
    raise ValueError("this does not come back")


#: How often each value was made; the workers are in this process.
_n_made: Counter[int] = Counter()


def test_tasks_fail_on_values_that_cannot_be_unpickled(client: Client) -> None:
    """The tasks fail as with Dask's own store, because a new computation would not help.

    Tasks use the values only on the worker that has them. Dask cannot send them to a peer anyway.
    """
    _n_made.clear()
    (there, _) = client.scheduler_info()["workers"]
    values = client.map(OneWay, range(N_BLOCKS), workers=[there], pure=False)
    wait(values, timeout=DEADLINE_S)
    cold = cold_ones(client, values)
    assert len(cold) > 1
    result = client.submit(len, cold, workers=[there])
    with pytest.raises(ValueError, match="this does not come back"):
        result.result(DEADLINE_S)
    assert set(_n_made.values()) == {1}
    values = cold = result = None
    assert sums_of(client, make_blocks(client)) == expected_sums()


@pytest.mark.share(3)
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_values_damaged_on_disk_are_computed_again(client: Client, every: int) -> None:
    damaged: Counter[str] = Counter()

    def damage(worker: Any) -> None:
        tier, numbers = disk_of(worker), itertools.count(1)
        get = tier.get

        def damaging(place: Any) -> Any:
            if not next(numbers) % every:
                damaged[worker.address] += 1
                raise DamagedValueError("not the value it was")
            return get(place)

        tier.get = damaging

    for worker in client.cluster.workers.values():
        damage(worker)
    blocks = make_blocks(client)
    wait(blocks, timeout=DEADLINE_S)
    for _ in range(2):
        assert sums_of(client, blocks) == expected_sums()
    assert damaged
    # Messages have the same error.
    for number, block in enumerate(blocks[:8]):
        np.testing.assert_array_equal(block.result(DEADLINE_S), make_block(number))
    del blocks, block
    assert_no_values_left(client)


# ---------------------------------------------------------------------- clients


def _hold_room(path: str, nbytes: int) -> np.ndarray:
    pass_gate(path)
    return np.zeros(nbytes // 8)


def test_tasks_may_be_cancelled_while_waiting_for_room(tmp_path: Path) -> None:
    with open_small(tmp_path, n_workers=1, threads=2) as client, Gate() as gate:
        (store,) = stores(client)
        # The size of these tasks' results is known from an earlier task with this name.
        client.submit(np.zeros, 14 * MIB // 8, key="large-0").result(DEADLINE_S)
        running = client.submit(_hold_room, gate.path, 14 * MIB, key="large-1", priority=1)
        gate.wait_for()
        waiting = client.map(
            np.zeros, [14 * MIB // 8] * 3, key=[f"large-{n}" for n in (2, 3, 4)], pure=False
        )
        until(lambda: store.admission.n_waiting, "nobody waits for room")
        client.cancel(waiting)
        del waiting
        gate.open()
        assert running.result(DEADLINE_S).nbytes == 14 * MIB
        # There is room for other tasks.
        assert client.submit(sum_of, client.submit(make_block, 1)).result(DEADLINE_S)
        del running
        assert_no_values_left(client)


def test_idle_time_does_not_count_towards_patience(tmp_path: Path) -> None:
    """A wait for room must not be given up because nothing ran before it."""
    with open_small(tmp_path, n_workers=1) as client, Gate() as gate:
        (worker,) = client.cluster.workers.values()
        memory = worker.plugins["gpurt"]._attachment._memory
        memory._progress_at = before = memory._loop.time() - 3600.0
        running = client.submit(pass_gate, gate.path)
        gate.wait_for()
        assert memory._progress_at > before + 3000.0
        gate.open()
        running.result(DEADLINE_S)


@pytest.mark.cluster
def test_cluster_restart_leaves_no_values(tmp_path: Path) -> None:
    with open_small(tmp_path, processes=True) as client:
        blocks = make_blocks(client)
        wait(blocks, timeout=DEADLINE_S)
        client.restart()
        assert not orphans(tmp_path)
        blocks = make_blocks(client)
        assert sums_of(client, blocks) == expected_sums()
    assert not list(tmp_path.rglob("dask-gpurt-values-*"))


def test_scattered_values_move_when_their_worker_is_retired(tmp_path: Path) -> None:
    """They cannot be computed again and exceed the memory of the other workers."""
    with open_small(tmp_path, n_workers=3) as client:
        blocks = client.scatter([make_block(n) for n in range(N_BLOCKS)], hash=False)
        until(lambda: is_cold_somewhere(client), "nothing was spilled")
        victim = max(client.cluster.workers.values(), key=lambda worker: len(worker.data.disk))
        held = set(victim.data)
        assert held & set(victim.data.disk)
        client.retire_workers([victim.address])
        left = {key for store in stores(client) for key in store}
        assert held <= left
        for number, block in enumerate(client.gather(blocks)):
            np.testing.assert_array_equal(block, make_block(number))


def test_broadcast_value_is_read_on_every_worker(client: Client) -> None:
    (block,) = client.scatter([make_block(7, 12 * MIB)], broadcast=True)
    blocks = make_blocks(client)
    assert sums_of(client, blocks) == expected_sums()
    for worker in list(client.cluster.workers.values()):
        got = client.submit(sum_of, block, workers=[worker.address], pure=False)
        assert got.result(DEADLINE_S) == sum_of(make_block(7, 12 * MIB))


class Keeper:
    """An actor with state."""

    def __init__(self, block: np.ndarray) -> None:
        self.kept = [block]

    def keep(self, block: np.ndarray) -> int:
        self.kept.append(block)
        return len(self.kept)

    def sums(self) -> list[int]:
        return [sum_of(block) for block in self.kept]


def test_actor_survives_among_spilled_values(client: Client) -> None:
    blocks = make_blocks(client)
    keeper = client.submit(Keeper, blocks[0], actor=True).result(DEADLINE_S)
    wait(blocks, timeout=DEADLINE_S)
    for block in cold_ones(client, blocks)[:3]:
        keeper.keep(block.result(DEADLINE_S)).result(DEADLINE_S)
    assert len(keeper.sums().result(DEADLINE_S)) == 4
    assert sums_of(client, blocks) == expected_sums()


def test_spilled_value_is_read_on_its_worker(client: Client) -> None:
    blocks = make_blocks(client)
    wait(blocks, timeout=DEADLINE_S)
    block = cold_ones(client, blocks)[0]
    (address,) = client.who_has([block])[block.key]

    def look(key: Any, dask_worker: Any) -> int:
        return sum_of(dask_worker.data[key])

    (got,) = client.run(look, block.key, workers=[address]).values()
    assert got == sum_of(make_block(blocks.index(block)))


def test_two_clients_share_spilled_values(client: Client) -> None:
    with Client(client.cluster, set_as_default=False) as other:
        blocks, same = make_blocks(client), make_blocks(other)
        assert sums_of(client, blocks) == expected_sums()
        del blocks
        assert sums_of(other, same) == expected_sums()
        del same
    assert_no_values_left(client)


# ---------------------------------------------------------------------- the end of a worker


def test_closing_worker_reads_nothing_back(client: Client) -> None:
    blocks = make_blocks(client)
    wait(blocks, timeout=DEADLINE_S)
    reads = []

    def preadv(real: Any, *args: Any) -> Any:
        reads.append(args)
        return real(*args)

    workers = list(client.cluster.workers.values())
    for worker in workers:
        have_calls_pass(worker, preadv=preadv)
        assert worker.data.disk
    client.cluster.close()
    assert not reads


def test_worker_closes_during_a_write(tmp_path: Path) -> None:
    with open_small(tmp_path, n_workers=1) as client, Gate() as gate:
        (worker,) = client.cluster.workers.values()
        ours = worker.data
        hold_a_call(worker, "open", gate.path)
        blocks = make_blocks(client)
        gate.wait_for()
        closing = asyncio.run_coroutine_threadsafe(worker.close(), client.loop.asyncio_loop)
        until(lambda: ours._is_closed, "the worker does not close")
        gate.open()
        closing.result(DEADLINE_S)
        assert not list(tmp_path.rglob("dask-gpurt-values-*"))
        del blocks


def test_task_waiting_for_room_starts_on_disable(tmp_path: Path) -> None:
    with open_small(tmp_path, n_workers=1, threads=2) as client, Gate() as gate:
        (store,) = stores(client)
        client.submit(np.zeros, 14 * MIB // 8, key="large-0").result(DEADLINE_S)
        running = client.submit(_hold_room, gate.path, 14 * MIB, key="large-1", priority=1)
        gate.wait_for()
        waiting = client.submit(np.zeros, 14 * MIB // 8, key="large-2")
        until(lambda: store.admission.n_waiting, "nobody waits for room")
        dask_gpurt.disable(client)
        assert waiting.result(DEADLINE_S).nbytes == 14 * MIB
        gate.open()
        assert running.result(DEADLINE_S).nbytes == 14 * MIB


def test_damaged_values_are_found_when_the_runtime_is_disabled(
    client: Client, tmp_path: Path
) -> None:
    blocks = make_blocks(client)
    wait(blocks, timeout=DEADLINE_S)
    for path in _values_directories(client):
        shutil.rmtree(path)
    dask_gpurt.disable(client)
    assert sums_of(client, blocks) == expected_sums()
    assert all(type(store).__name__ == "SpillBuffer" for store in stores(client))


@pytest.mark.parametrize("locks", [True, False])
def test_file_locks_follow_the_setting_of_dask(tmp_path: Path, locks: bool) -> None:
    """Users switch Dask's locks off on file systems whose locks do not work."""
    config = {"distributed.worker.use-file-locking": locks, "gpurt.memory.directory": str(tmp_path)}
    with open_small(tmp_path, n_workers=1, **config) as client:
        found = client.run(lambda dask_worker: disk_of(dask_worker).probe()["directory"])
        (directory,) = found.values()
        record = owner.unpacked(Path(f"{directory}.lock").read_bytes())
        assert record is not None
        assert (record.pid, record.is_locked) == (os.getpid(), locks)
        assert bool(orphans(tmp_path)) != locks, "its lock can be taken, so nobody holds it"
        assert sweep(str(tmp_path), locks) == sweep(str(tmp_path), not locks) == 0
    assert not list(tmp_path.rglob("dask-gpurt-values-*"))

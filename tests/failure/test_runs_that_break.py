"""Shuffles with killed workers or full disks end with the right result or one clear error.

Other tests have outputs that are wanted twice. Each failure is caused once, inside a task, at a
point that the test chose. So nothing here depends on timing.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import threading
from collections import Counter

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
from dask import delayed
from distributed import Client, LocalCluster, as_completed, futures_of, wait

import dask_gpurt
from dask_gpurt.plugins.patches.p2p import P2POutOfDiskError, barrier_key
from dask_gpurt.plugins.shuffle import exchange_run
from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun
from dask_gpurt.plugins.shuffle.run_control import RunControl
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.shuffle import spill_file
from tests.conftest import stock_client
from tests.failure import gates
from tests.failure.leftovers import files_in
from tests.integration.comparing import collection, runs

N_PARTITIONS = 12
ROWS = 5_000


def frame(number):
    rng = np.random.default_rng(number)
    return pd.DataFrame(
        {
            "key": rng.integers(0, 1000, ROWS),
            "origin": number * ROWS + np.arange(ROWS),
            "text": pd.array(rng.choice(["a", "bb"], ROWS), dtype="str"),
        }
    )


def inputs():
    return collection([frame(number) for number in range(N_PARTITIONS)])


def assert_all_rows_are_there(parts):
    joined = pd.concat(parts).sort_values("origin", ignore_index=True)
    source = pd.concat([frame(number) for number in range(N_PARTITIONS)], ignore_index=True)
    pd.testing.assert_frame_equal(joined, source)
    keys = [set(part["key"]) for part in parts]
    assert sum(map(len, keys)) == len(set().union(*keys))


def once(flag):
    """Return True for the first caller in any process."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die_once(part, flag):
    """Kill the worker, once."""
    if len(part) and once(flag):
        os.kill(os.getpid(), signal.SIGKILL)
    return part


def die_at_the_second_transfer(dask_worker):
    """Kill the worker when it takes part in a run; the worker that replaces it has no part."""

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    gates.before(dask_worker, "transfer", gates.from_call(2, die))


def doom_one(client):
    client.run(die_at_the_second_transfer, workers=[min(client.scheduler_info()["workers"])])


@pytest.fixture
def processes():
    options = {"n_workers": 3, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(silence_logs=50, **options) as local:
        with Client(local, set_as_default=False) as client:
            dask_gpurt.enable(client)
            yield client


def compute(client, lazy, **options):
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return client.gather(client.compute(lazy.to_delayed(), **options))


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("when", ["transfer", "unpack"])
def test_killed_worker_restarts_the_shuffle(processes, tmp_path, when):
    """The worker dies in the middle of the run; its nanny restarts it, and the shuffle restarts."""
    flag = str(tmp_path / "died")
    lazy = inputs().shuffle("key", npartitions=5)
    if when == "transfer":
        doom_one(processes)
    else:
        lazy = lazy.map_partitions(die_once, flag=flag, meta=lazy._meta)
    assert_all_rows_are_there(compute(processes, lazy))
    assert os.path.exists(flag) == (when == "unpack")
    # It starts over once more if a run begins before the scheduler knows of the death.
    assert runs(processes)["gpurt"] >= 2
    assert runs(processes)["stock"] == 0


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("when", ["transfer", "unpack"])
def test_killed_worker_restarts_the_rechunk(processes, tmp_path, when):
    flag = str(tmp_path / "died")
    source = np.arange(240_000.0).reshape(600, 400)
    lazy = da.from_array(source, chunks=(60, 400))
    with dask.config.set({"array.chunk-size": "1B"}):
        lazy = lazy.rechunk((600, 40), method="p2p")
    if when == "transfer":
        doom_one(processes)
    else:
        lazy = lazy.map_blocks(die_once, flag, meta=source[:0])
    with processes.as_current():
        got = lazy.compute()
    np.testing.assert_array_equal(got, source)
    assert os.path.exists(flag) == (when == "unpack")
    # It starts over once more if a run begins before the scheduler knows of the death.
    assert runs(processes)["gpurt"] >= 2
    assert runs(processes)["stock"] == 0


def test_released_output_is_computed_again(client, tmp_path, monkeypatch):
    """The output is released while the run continues, as if it was lost with its worker."""
    read = ExchangeRun.get_output_partition

    def read_again_once(run, partition_id, key, **kwargs):
        frame = read(run, partition_id, key, **kwargs)
        if once(tmp_path / "again"):
            run._store.release(run._plan.slot_of[partition_id])
            read(run, partition_id, key, **kwargs)
            pytest.fail("a partition that was let go was read")
        return frame

    monkeypatch.setattr(ExchangeRun, "get_output_partition", read_again_once)
    dask_gpurt.enable(client)
    assert_all_rows_are_there(compute(client, inputs().shuffle("key", npartitions=6)))
    assert runs(client) == {"gpurt": 2, "stock": 0}


def rechunked(path=None):
    """Return an array rechunked from rows to columns, and the array; rows may wait at a gate."""
    source = np.arange(64.0).reshape(8, 8)

    def row(number):
        if path is not None:
            gates.pass_gate(path)
        return source[number : number + 1]

    rows = [da.from_delayed(delayed(row)(n), (1, 8), dtype=float) for n in range(8)]
    return da.concatenate(rows).rechunk((8, 1), method="p2p"), source


def test_two_computations_share_one_rechunk_run(client):
    """Their tasks read the same chunks, which stay until both computations end."""
    dask_gpurt.enable(client)
    with gates.Gate() as gate, client.as_current():
        columns, source = rechunked(gate.path)
        one, other = client.compute(columns + 1), client.compute((columns * 2).sum())
        gate.wait_for()
        gate.open()
        np.testing.assert_array_equal(one.result(gates.DEADLINE_S), source + 1)
        assert other.result(gates.DEADLINE_S) == 2 * source.sum()
    assert runs(client) == {"gpurt": 1, "stock": 0}


#: Calls of each computation that has a turn.
_calls: Counter[int] = Counter()
_counting = threading.Lock()


def held_at_call(nth, data, path, turn=0):
    """Return the task's data; the n-th task of a turn in this process waits at a gate."""
    with _counting:
        _calls[turn] += 1
        is_held = _calls[turn] == nth
    if is_held:
        gates.pass_gate(path)
    return data


@pytest.fixture
def beside():
    """A client of workers with a second thread, for other tasks while one waits."""
    _calls.clear()
    with stock_client(2, n_threads=2) as client:
        yield client


def half_read(client, function):
    """Run two computations over one rechunk, of which the second starts late.

    The first applies `function` to each chunk. The second starts while the first reads its last
    chunk, when the other chunks are already released. So the shuffle has to run again, once.
    Returns the futures of the first, which are done, and the source array.
    """
    dask_gpurt.enable(client)
    with gates.Gate() as gate, client.as_current():
        columns, source = rechunked()
        one = futures_of(columns.map_blocks(function, gate.path, meta=source[:0]).persist())
        gate.wait_for()
        wait_for_some(one, len(one) - 1)
        other = client.compute(columns + 2)
        scheduler_is_at_run(client, 2)
        gate.open()
        np.testing.assert_array_equal(other.result(gates.DEADLINE_S), source + 2)
        wait(one, timeout=gates.DEADLINE_S)
    assert runs(client) == {"gpurt": 2, "stock": 0}
    return one, source


def test_second_computation_repeats_a_half_read_rechunk(beside):
    """Released chunks are computed once more, for both computations."""

    def held(block, path):
        return held_at_call(8, block, path)

    one, source = half_read(beside, held)
    np.testing.assert_array_equal(np.concatenate(beside.gather(one), axis=1), source)


def test_a_run_after_a_late_computation_keeps_what_was_read(beside):
    """A third computation reads the same shuffle late, and finds all of it."""

    def held(block, path, turn):
        return held_at_call(8, block, path, turn)

    dask_gpurt.enable(beside)
    with gates.Gate() as first, gates.Gate() as second, beside.as_current():
        columns, source = rechunked()
        one = columns.map_blocks(held, first.path, 0, meta=source[:0]).persist()
        first.wait_for()
        wait_for_some(futures_of(one), 7)
        other = columns.map_blocks(held, second.path, 1, meta=source[:0]).persist()
        scheduler_is_at_run(beside, 2)
        first.open()
        second.wait_for()
        wait_for_some(futures_of(other), 7)
        third = beside.compute(columns + 3)
        np.testing.assert_array_equal(third.result(gates.DEADLINE_S), source + 3)
        second.open()
        np.testing.assert_array_equal(other.compute(), source)
        np.testing.assert_array_equal(one.compute(), source)
    assert runs(beside) == {"gpurt": 2, "stock": 0}


def test_failed_task_does_not_block_a_rechunk_restart(beside):
    def fails(block, path):
        if held_at_call(8, block, path)[0, 0] == 0.0:
            raise ZeroDivisionError
        return block

    one, _ = half_read(beside, fails)
    assert sorted(future.status for future in one) == ["error", *["finished"] * 7]


def test_second_computation_repeats_a_half_read_join(beside):
    """Both sides of the join are shuffled again, together, and only once."""
    dask_gpurt.enable(beside)
    frames = [pd.DataFrame({"key": range(n, 96, 8), "x": 1.0}) for n in range(8)]
    with (
        gates.Gate() as gate,
        beside.as_current(),
        dask.config.set({"dataframe.shuffle.method": "p2p"}),
    ):
        joined = collection(frames).merge(collection(frames), on="key", npartitions=6)
        parts = joined.optimize().to_delayed()
        one = [delayed(held_at_call, pure=False)(6, part, gate.path) for part in parts]
        one = beside.compute(one)
        gate.wait_for()
        wait_for_some(one, len(one) - 1)
        other = beside.compute([delayed(len, pure=False)(part) for part in parts])
        scheduler_is_at_run(beside, 4)
        gate.open()
        assert sum(beside.gather(other)) == sum(map(len, beside.gather(one))) == 96
    assert runs(beside) == {"gpurt": 4, "stock": 0}


def wait_for_some(futures, n_done):
    done = as_completed(futures, timeout=gates.DEADLINE_S)
    for _ in range(n_done):
        next(done)


def scheduler_is_at_run(client, n_runs):
    async def begun(dask_scheduler):
        while sum(dask_scheduler.plugins["gpurt"].data_plane_choice.runs.values()) < n_runs:
            await asyncio.sleep(0)

    client.run_on_scheduler(begun)


def fail_once(part, flag):
    if len(part) and once(flag):
        raise RuntimeError("flaky")
    return part


@pytest.mark.timeout(300)
def test_restricted_output_moves_to_its_owner(client, monkeypatch):
    """The output is restricted to another worker just before it runs; there it asks, and moves."""
    dask_gpurt.enable(client)
    scheduler = client.cluster.scheduler
    stock_barrier = ExchangeRun.barrier
    attempts = []

    async def barrier(run, run_ids):
        outputs = scheduler.tasks[barrier_key(run.id)].dependents
        for output in outputs:
            (owner,) = output.worker_restrictions
            scheduler.set_restrictions({output.key: set(scheduler.workers) - {owner}})
        return await stock_barrier(run, run_ids)

    move_task = RunControl.move_task

    async def moving(control, key, owner):
        attempts.append(key)
        await move_task(control, key, owner)

    monkeypatch.setattr(ExchangeRun, "barrier", barrier)
    monkeypatch.setattr(RunControl, "move_task", moving)
    assert_all_rows_are_there(compute(client, inputs().shuffle("key", npartitions=5)))
    assert len(attempts) == len(set(attempts)) == 5


def test_retried_output_reads_its_shards_again(client, tmp_path):
    """A task that fails after reading its partition can read it again, without a new run."""
    dask_gpurt.enable(client)
    lazy = inputs().shuffle("key", npartitions=4)
    lazy = lazy.map_partitions(fail_once, str(tmp_path / "failed"), meta=lazy._meta)
    assert_all_rows_are_there(compute(client, lazy, retries=1))
    assert runs(client) == {"gpurt": 1, "stock": 0}


def directories(client):
    def find(dask_worker):
        return files_in(dask_worker.local_directory)

    return [name for names in client.run(find).values() for name in names]


def test_spilled_shards_leave_nothing_behind(client):
    with dask.config.set({"gpurt.shuffle.memory": "64 KiB"}):
        dask_gpurt.enable(client)
        assert_all_rows_are_there(compute(client, inputs().shuffle("key", npartitions=4)))
    totals = dask_gpurt.status(client)["totals"]
    assert totals["spilled_nbytes"] > 100_000
    assert totals["unspilled_nbytes"] >= totals["spilled_nbytes"]
    client.sync(_runs_are_closed, client)
    assert directories(client) == []


async def _runs_are_closed(client):
    """Ask until workers have closed the run, which happens some time after its last output."""

    def n_runs(dask_worker):
        return len(dask_worker.plugins["shuffle"].shuffle_runs._runs)

    while any((await client.run(n_runs)).values()):
        pass


def test_closing_run_still_reports_its_shards(client, monkeypatch):
    """For a moment, the shards are freed while the run is still open."""
    let_go, arrived, proceed = ExchangeRun._free, threading.Semaphore(0), threading.Event()

    def held(run):
        let_go(run)
        arrived.release()
        assert proceed.wait(gates.DEADLINE_S)

    monkeypatch.setattr(ExchangeRun, "_free", held)
    dask_gpurt.enable(client)
    hot = collection([pd.DataFrame({"key": [7] * 900 + list(range(100))})] * 4)
    outputs = compute(client, hot.shuffle("key", npartitions=6))
    assert sum(map(len, outputs)) == 4000
    for _ in client.scheduler_info()["workers"]:
        assert arrived.acquire(timeout=gates.DEADLINE_S)
    (told,) = dask_gpurt.status(client)["shuffles"]
    proceed.set()
    assert told["rows"] == 4000
    assert told["skew"] > 1.5
    assert told["fullest"][0][1] >= 3600


class FullDisk(spill_file.SpillFile):
    def append(self, buffer):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_keeps_shards_in_memory(client, monkeypatch, caplog):
    monkeypatch.setattr(exchange_run, "SpillFile", FullDisk)
    with dask.config.set({"gpurt.shuffle.memory": "64 KiB"}):
        dask_gpurt.enable(client)
        assert_all_rows_are_there(compute(client, inputs().shuffle("key", npartitions=4)))
    told = [r.getMessage() for r in caplog.records if "cannot spill" in r.getMessage()]
    assert 1 <= len(told) <= 2  # one for each worker; both are in this process
    assert "temporary-directory" in told[0]
    assert dask_gpurt.status(client)["totals"]["spilled_nbytes"] == 0


def test_full_disk_and_too_little_memory_end_a_shuffle(client, monkeypatch, caplog):
    """Workers that can neither spill nor keep shards would be paused for ever, or be killed."""
    add, n_added = ExchangeRun._add, itertools.count(1)

    def add_and_run_short(run, parts):
        add(run, parts)
        if next(n_added) == N_PARTITIONS // 2:
            # As the memory monitor does when the process is above its limit.
            runtime_of(run._worker).release_memory(1 << 40)

    monkeypatch.setattr(ExchangeRun, "_add", add_and_run_short)
    monkeypatch.setattr(exchange_run, "SpillFile", FullDisk)
    with dask.config.set({"gpurt.shuffle.memory": "64 KiB"}):
        dask_gpurt.enable(client)
        with pytest.raises(P2POutOfDiskError):
            compute(client, inputs().shuffle("key", npartitions=4))
        client.sync(_runs_are_closed, client)
        told = [r.getMessage() for r in caplog.records if "memory is short" in r.getMessage()]
        assert len(told) == 1
        assert "No space left on device" in told[0]
        # The next shuffle has its memory again.
        monkeypatch.undo()
        assert_all_rows_are_there(compute(client, inputs().shuffle("key", npartitions=4)))


def test_memory_is_returned_after_the_last_run(client):
    """No memory is kept after the last run, once it is clear that no other run follows."""
    dask_gpurt.enable(client)
    assert_all_rows_are_there(compute(client, inputs().shuffle("key", npartitions=4)))
    client.sync(_runs_are_closed, client)

    def cool_down(dask_worker):
        runtime = runtime_of(dask_worker)
        runtime.cool_down()
        pool = runtime.pool
        return pool.idle_nbytes, pool.used_nbytes, runtime._budget.used_nbytes

    assert set(client.run(cool_down).values()) == {(0, 0, 0)}

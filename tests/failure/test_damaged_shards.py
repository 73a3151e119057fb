"""A shuffle restarts if its spilled shards were damaged on disk.

The files, their damage and the system's errors are real. A shuffle starts over at most once for
each worker, because the next run of a worker that met damage keeps its shards in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
from distributed import Client

import dask_gpurt
from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun
from tests.integration.comparing import collection, runs

N_PARTITIONS = 8
ROWS = 4_000


def frame(number: int) -> pd.DataFrame:
    rng = np.random.default_rng(number)
    return pd.DataFrame(
        {
            "key": rng.integers(0, 1000, ROWS),
            "origin": number * ROWS + np.arange(ROWS),
            "text": pd.array(rng.choice(["a", "bb", "ccc"], ROWS), dtype="str"),
        }
    )


def flip_bits(fd: int) -> None:
    """Flip one bit in each kilobyte, so that every read sees one."""
    nbytes = os.fstat(fd).st_size
    for position in range(100, nbytes, 1024):
        (byte,) = os.pread(fd, 1, position)
        os.pwrite(fd, bytes([byte ^ 4]), position)


def lose_writes(fd: int) -> None:
    """Replace the content of a file by zeros, as after lost writes."""
    nbytes = os.fstat(fd).st_size
    os.ftruncate(fd, 0)
    os.ftruncate(fd, nbytes)


def cut_short(fd: int) -> None:
    os.ftruncate(fd, os.fstat(fd).st_size // 2)


def answer_eio(fd: int) -> None:
    """Make reads fail with EIO, as on a broken disk; unmapped process memory does that."""
    memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(memory, fd, inheritable=False)
    os.close(memory)


def answer_ebadf(fd: int) -> None:
    """Make a descriptor unreadable, as after a network file system has gone."""
    other = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(other, fd, inheritable=False)
    os.close(other)


DAMAGES = [flip_bits, lose_writes, cut_short, answer_eio, answer_ebadf]


@pytest.fixture
def harm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[int]]:
    """Return a function that damages each file before a run first reads it; it returns run ids."""

    def harm(damage: Callable[[int], None], n_runs: int) -> set[int]:
        read = ExchangeRun.get_output_partition
        seen: dict[ExchangeRun, None] = {}
        run_ids: set[int] = set()

        def harmed(run: ExchangeRun, *args: Any, **kwargs: Any) -> Any:
            run_ids.add(run.run_id)
            if run not in seen and len(run_ids) <= n_runs:
                seen[run] = None
                for file in run._store._files:
                    damage(file._fd)
            return read(run, *args, **kwargs)

        monkeypatch.setattr(ExchangeRun, "get_output_partition", harmed)
        return run_ids

    return harm


def shuffled(client: Client) -> None:
    parts = [frame(number) for number in range(N_PARTITIONS)]
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        lazy = collection(parts).shuffle("key", npartitions=5)
        outputs = client.gather(client.compute(lazy.to_delayed()))
    joined = pd.concat(outputs).sort_values("origin", ignore_index=True)
    pd.testing.assert_frame_equal(joined, pd.concat(parts, ignore_index=True))


def rechunked(client: Client) -> None:
    source = np.random.default_rng(0).random((400, 300))
    with client.as_current(), dask.config.set({"array.chunk-size": "1B"}):
        lazy = da.from_array(source, chunks=(40, 300)).rechunk((400, 60), method="p2p")
        np.testing.assert_array_equal(lazy.compute(), source)


def merged(client: Client) -> None:
    """Merge two tables and check the result; both shuffles restart together."""
    parts = [frame(number) for number in range(4)]
    other = pd.DataFrame({"key": np.arange(1000), "more": np.arange(1000) * 3})
    others = [other[number::4] for number in range(4)]
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        lazy = collection(parts).merge(collection(others), on="key", broadcast=False)
        outputs = client.gather(client.compute(lazy.to_delayed()))
    joined = pd.concat(outputs).sort_values("origin", ignore_index=True)
    pd.testing.assert_frame_equal(joined, pd.concat(parts).merge(other, on="key"))


@pytest.fixture
def spilling(client: Client) -> Client:
    with dask.config.set({"gpurt.shuffle.memory": "4 KiB"}):
        dask_gpurt.enable(client)
    return client


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard_restarts_the_shuffle(
    spilling: Client, harm: Any, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run_ids = harm(damage, 1)
    shuffled(spilling)
    assert 2 <= len(run_ids) <= 3
    assert runs(spilling)["stock"] == 0
    told = [record.getMessage() for record in caplog.records if "Check that disk" in record.message]
    # Each of the two workers logs at most once, and both are in this process.
    assert 1 <= len(told) <= 2
    assert "temporary-directory" in told[0]


def test_damaged_shard_restarts_the_rechunk(spilling: Client, harm: Any) -> None:
    run_ids = harm(flip_bits, 1)
    rechunked(spilling)
    assert 2 <= len(run_ids) <= 3


def test_damaged_shard_restarts_the_merge(spilling: Client, harm: Any) -> None:
    run_ids = harm(flip_bits, 2)
    merged(spilling)
    # The run of the other side may end before a task reads from it.
    assert 3 <= len(run_ids) <= 6


@pytest.mark.parametrize("damage", [flip_bits, answer_eio])
def test_workers_stop_using_a_disk_that_stays_broken(
    spilling: Client, harm: Any, damage: Any
) -> None:
    """Each worker notices the damage once for each shuffle, and then does not use its disk."""
    run_ids = harm(damage, 1000)
    for _ in range(2):
        run_ids.clear()
        shuffled(spilling)
        assert 2 <= len(run_ids) <= 1 + len(spilling.scheduler_info()["workers"])

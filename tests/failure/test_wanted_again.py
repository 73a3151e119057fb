"""Two computations over one shuffle each get all of their rows from a single run.

The second one starts while the first reads the shuffle. Shards are freed once their output is
made, so the shuffle runs again for the second. The inputs differ in each run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import dask
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster

import dask_gpurt
from dask_gpurt.command.judge import verdict
from dask_gpurt.tracing import live_verdict
from tests.failure import gates
from tests.failure.gates import DEADLINE_S, Gate, pass_gate, until

N_PARTITIONS = 4
HELD = N_PARTITIONS - 1
ALL_ROWS = N_PARTITIONS * 100
META = pd.DataFrame({"key": [0], "time": [0]}).iloc[:0]

#: How often each input partition was made; the workers are in this process.
_times: Counter[int] = Counter()


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    options: dict[str, Any] = {"protocol": "tcp://", "memory_limit": 0, "dashboard_address": ":0"}
    with LocalCluster(n_workers=2, threads_per_worker=4, processes=False, **options) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as client:
        dask_gpurt.enable(client)
        yield client


@pytest.fixture
def gate(client: Client) -> Iterator[Gate]:
    """A gate at which one output of each shuffle waits before it is concatenated."""
    with Gate() as gate:
        client.run(_hold_an_output, gate.path)
        yield gate


def _hold_an_output(path: str, dask_worker: Any) -> None:
    def make(proceed: Callable[..., Any]) -> Callable[..., Any]:
        def held(shuffle_id: str, run_id: int, partition_id: int, *args: Any, **kw: Any) -> Any:
            if partition_id == HELD:
                pass_gate(path)
            return proceed(shuffle_id, run_id, partition_id, *args, **kw)

        return held

    gates.replace(dask_worker, "unpack", make)


def make(number: int) -> pd.DataFrame:
    """Make an input partition; its rows contain how often it was made."""
    _times[number] += 1
    return pd.DataFrame({"key": np.arange(100), "time": _times[number]})


@pytest.fixture
def shuffled(client: Client) -> list[Any]:
    _times.clear()
    return shuffle(client, [dask.delayed(make, pure=False)(n) for n in range(N_PARTITIONS)])


def shuffle(client: Client, inputs: list[Any]) -> list[Any]:
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        import dask.dataframe as dd

        lazy = dd.from_delayed(inputs, meta=META, verify_meta=False)
        return list(lazy.shuffle("key", npartitions=N_PARTITIONS).to_delayed())


def see(frame: pd.DataFrame) -> pd.DataFrame:
    return frame


def times_of(frames: list[pd.DataFrame]) -> tuple[int, list[int]]:
    """Return the number of rows, and the distinct values of `time`."""
    whole = pd.concat(frames)
    return len(whole), sorted(set(whole["time"]))


def seen(outputs: list[Any], name: str) -> list[Any]:
    return [
        dask.delayed(see)(output, dask_key_name=(name, number))
        for number, output in enumerate(outputs)
    ]


def wait_for_all_but_the_held(cluster: LocalCluster, name: str) -> None:
    """Wait until all other outputs are read and released."""

    async def is_so() -> bool:
        # A task that reads an output may hand it to the next shuffle, and is named after both.
        tasks = [
            task
            for key, task in cluster.scheduler.tasks.items()
            if isinstance(key, tuple) and key[0].split("-")[0] == name and key[1] < HELD
        ]
        # The inputs of the tasks have to be released, too.
        return len(tasks) == HELD and all(
            task.state in ("memory", "released")
            and all(output.state == "released" for output in task.dependencies)
            for task in tasks
        )

    until(lambda: cluster.sync(is_so), "the first computation does not read the other outputs")


def wait_for_runs(client: Client, n_runs: int) -> None:
    until(
        lambda: dask_gpurt.status(client)["runs"] == {"gpurt": n_runs, "stock": 0},
        f"there are no {n_runs} runs",
    )


def assert_both_have_rows_of_the_second_run(
    cluster: LocalCluster,
    client: Client,
    shuffled: list[Any],
    gate: Gate,
    first: list[Any],
    n_shuffles: int,
) -> None:
    """Check two computations; `first` is the input of the first, behind `n_shuffles` shuffles."""
    total = client.compute(dask.delayed(times_of)(first))
    gate.wait_for()
    wait_for_runs(client, n_shuffles)
    wait_for_all_but_the_held(cluster, "first")
    second = client.compute(dask.delayed(times_of)(seen(shuffled, "second")))
    wait_for_runs(client, 2 * n_shuffles)
    gate.open()
    assert total.result(DEADLINE_S) == second.result(DEADLINE_S) == (ALL_ROWS, [2])
    wait_for_runs(client, 2 * n_shuffles)


def test_released_reads_are_repeated_with_the_second_run(
    cluster: LocalCluster, client: Client, shuffled: list[Any], gate: Gate
) -> None:
    first = seen(shuffled, "first")
    assert_both_have_rows_of_the_second_run(cluster, client, shuffled, gate, first, 1)


def test_the_verdict_names_the_attempt_that_did_not_count(
    cluster: LocalCluster,
    client: Client,
    shuffled: list[Any],
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_verdict, "LEAST_S", 1e-9)
    monkeypatch.setattr(live_verdict, "LEAST_SHARE", 0.0)
    first = seen(shuffled, "first")
    assert_both_have_rows_of_the_second_run(cluster, client, shuffled, gate, first, 1)
    found = verdict.of_status(dask_gpurt.status(client))["bottlenecks"]
    (one,) = (one for one in found if one["rule"] == "restarts")
    assert one["evidence"].startswith("1 attempt at shuffles did not count: shuffle ")


def test_shuffle_that_consumed_the_first_run_restarts(
    cluster: LocalCluster, client: Client, shuffled: list[Any], gate: Gate
) -> None:
    first = shuffle(client, seen(shuffled, "first"))
    assert_both_have_rows_of_the_second_run(cluster, client, shuffled, gate, first, 2)


def test_results_of_one_collection_come_from_one_run(
    cluster: LocalCluster, client: Client, shuffled: list[Any], gate: Gate
) -> None:
    """Partitions that were made already are made again with the others of their collection."""
    parts = client.compute(seen(shuffled, "first"))
    gate.wait_for()
    wait_for_all_but_the_held(cluster, "first")
    second = client.compute(dask.delayed(times_of)(seen(shuffled, "second")))
    wait_for_runs(client, 2)
    gate.open()
    assert second.result(DEADLINE_S) == (ALL_ROWS, [2])
    assert times_of(client.gather(parts)) == (ALL_ROWS, [2])


def test_finished_results_of_the_first_run_stay(
    cluster: LocalCluster, client: Client, shuffled: list[Any], gate: Gate
) -> None:
    """Results that depend only on the first run are not computed again."""
    reads = seen(shuffled, "first")
    some = client.compute(dask.delayed(times_of)(reads[:HELD]))
    # This task keeps the run, which would end otherwise.
    last = client.compute(reads[HELD])
    gate.wait_for()
    assert some.result(DEADLINE_S)[1] == [1]
    second = client.compute(dask.delayed(times_of)(seen(shuffled, "second")))
    wait_for_runs(client, 2)
    assert some.done() and some.result(DEADLINE_S)[1] == [1]
    gate.open()
    assert second.result(DEADLINE_S) == (ALL_ROWS, [2])
    assert set(last.result(DEADLINE_S)["time"]) == {2}
    assert some.result(DEADLINE_S)[1] == [1]

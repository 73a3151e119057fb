"""The verdict names causes that are planted in programs on real clusters, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.system import CPU_COUNT
from distributed import Client

import dask_gpurt
from benchmarks import hosts
from dask_gpurt.command.judge import verdict
from dask_gpurt.tracing import live_rules, live_verdict
from tests.conftest import stock_client
from tests.integration.memory_cluster import MIB, cluster, until
from tests.thoroughness import only_if_all

pytestmark = pytest.mark.cluster

ROWS = 50_000


@pytest.fixture
def any_savings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the rules name causes whatever they cost: these programs are short."""
    monkeypatch.setattr(live_verdict, "LEAST_S", 1e-9)
    monkeypatch.setattr(live_verdict, "LEAST_SHARE", 0.0)


@pytest.fixture
def enabled() -> Iterator[Client]:
    with stock_client(2) as client:
        dask_gpurt.enable(client)
        yield client


class Labelled(pd.DataFrame):
    @property
    def _constructor(self) -> type[Labelled]:
        return Labelled


def part(number: int, hot: float = 0.0, rows: int = ROWS) -> pd.DataFrame:
    """Return rows of which a share has one key."""
    rng = np.random.default_rng(number)
    keys = np.where(rng.random(rows) < hot, 7, rng.integers(0, 10**9, rows))
    return pd.DataFrame({"key": keys, "x": rng.random(rows)})


def shuffled(client: Client, n_partitions: int = 8, kind: Any = pd.DataFrame, **how: Any) -> None:
    def make(number: int) -> pd.DataFrame:
        frame: pd.DataFrame = kind(part(number, **how))
        return frame

    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        lazy = dd.from_map(make, range(n_partitions), meta=kind(part(0, rows=1)))
        lazy.shuffle("key").map_partitions(len, meta=(None, int)).compute()


def judged(client: Client) -> dict[str, Any]:
    return verdict.of_status(dask_gpurt.status(client))


def rules(client: Client) -> list[str]:
    return [one["rule"] for one in judged(client)["bottlenecks"]]


def bottleneck(client: Client, rule: str) -> Any:
    """Return the bottleneck of a rule. On a busy machine, others may stand out beside it."""
    (one,) = (one for one in judged(client)["bottlenecks"] if one["rule"] == rule)
    return one


def test_a_healthy_shuffle_has_nothing_that_stands_out(enabled: Client) -> None:
    shuffled(enabled)
    found = judged(enabled)
    assert found["bottlenecks"] == []
    (text,) = found["text"]
    assert text.startswith("nothing stands out: 2 threads worked ")
    assert "no shuffled bytes left their host" in text


def test_a_shuffle_that_is_computed_twice_has_not_restarted(
    enabled: Client, any_savings: None
) -> None:
    def n_tasks(dask_scheduler: Any) -> int:
        return len(dask_scheduler.tasks)

    for _ in range(2):
        shuffled(enabled)
        # Until the tasks are forgotten, a second computation may take the results of the first.
        until(lambda: not enabled.run_on_scheduler(n_tasks))
    runs = dask_gpurt.status(enabled)["shuffles"]
    assert runs[0]["id"] == runs[1]["id"] and runs[0]["run"] < runs[1]["run"]
    assert "restarts" not in rules(enabled)


def test_hot_keys_are_skew(enabled: Client, any_savings: None) -> None:
    # One partition has nine tenths of the rows, and cannot be divided between two workers.
    shuffled(enabled, hot=0.9, n_partitions=6)
    one = bottleneck(enabled, "skew")
    assert "output partitions above the mean of 50,000 rows: " in one["evidence"]


def test_a_small_limit_is_spilling(any_savings: None) -> None:
    with dask.config.set({"gpurt.shuffle.memory": 2 * MIB}), stock_client(2) as client:
        dask_gpurt.enable(client)
        shuffled(client)
        (one,) = judged(client)["bottlenecks"]
        written = dask_gpurt.status(client)["totals"]["spilled_nbytes"]
    assert (one["rule"], one["setting"]) == ("spill", "gpurt.shuffle.memory: 0.5")
    assert written > MIB


def test_values_that_do_not_fit_are_waited_for(any_savings: None) -> None:
    with cluster(64 * MIB, n_workers=1, n_threads=2) as client:
        held = client.map(np.ones, [MIB] * 12, pure=False)
        for future in held:
            assert client.submit(np.sum, future).result() == MIB
        spent = dask_gpurt.status(client)["spent"]
        assert spent["disk_s"] > 0
        assert spent["room_s"] > 0
        assert {"spill", "memory-wait"} <= {*rules(client)}


def test_tiny_partitions_are_small_messages(enabled: Client, any_savings: None) -> None:
    shuffled(enabled, n_partitions=60, rows=50)
    assert rules(enabled)[0] == "small-messages"


def test_a_type_that_falls_back_is_a_stock_shuffle(enabled: Client) -> None:
    shuffled(enabled, kind=Labelled)
    one = bottleneck(enabled, "stock-shuffle")
    assert "1 of 1 shuffle ran on stock Dask, mostly: shuffle of " in one["evidence"]


def test_a_program_without_a_shuffle_has_none(enabled: Client) -> None:
    assert judged(enabled)["text"] == ["nothing stands out: no task has run"]
    assert enabled.submit(sum, range(10**6)).result() == 499_999_500_000
    assert rules(enabled) == ["no-shuffle"]


def test_a_worker_that_takes_longer_than_others_is_slow(enabled: Client, any_savings: None) -> None:
    slow, other = sorted(enabled.scheduler_info()["workers"])
    for worker, n_times in ((other, 1), (slow, 12)):
        jobs = [enabled.submit(busy_times, n_times, n, workers=[worker]) for n in range(6)]
        enabled.gather(jobs)
    one = bottleneck(enabled, "slow-worker")
    assert one["evidence"].startswith(f"{slow} takes ")


@pytest.mark.skipif(CPU_COUNT < 2, reason="one processor cannot be too many for a thread")
def test_one_thread_leaves_processors_free(
    any_savings: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long a thread waits between tasks, beside other programs, is a matter of the machine.
    monkeypatch.setattr(live_rules, "BUSY_SHARE", 0.1)
    with stock_client(1) as client:
        dask_gpurt.enable(client)
        with dask_gpurt.progress(client):
            client.gather([client.submit(busy, n) for n in range(8)])
    said = capsys.readouterr().err
    assert "processors (up to " in said
    assert f"on hosts with {CPU_COUNT} processors" in said


def test_the_scheduler_limits_tiny_tasks(
    any_savings: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # How many processors the scheduler gets beside its workers is a matter of the machine.
    monkeypatch.setattr(live_rules, "SCHEDULING_SHARE", 1e-3)
    with stock_client(2) as client:
        dask_gpurt.enable(client)
        with dask_gpurt.progress(client):
            client.gather(client.map(int, range(1_000)))
    said = capsys.readouterr().err
    assert "scheduler-bound (up to " in said
    assert "the scheduler's event loop was busy " in said


def busy(number: int) -> float:
    # Long enough for the start of the block to be a small part of it.
    return busy_times(20, number)


def busy_times(n_times: int, number: int) -> float:
    return float(sum(np.random.default_rng(number).random(10**6).sum() for _ in range(n_times)))


needs_networks = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="network namespaces need root, ip and tc",
)


@needs_networks
@only_if_all
def test_a_shaped_link_between_hosts_is_slow() -> None:
    if os.path.exists(f"/sys/class/net/{hosts.BRIDGE}"):
        pytest.skip("another run has the network")
    rate = 12.5e6
    with hosts.hosts(2) as names:
        hosts.shape(names, "100mbit")
        # Several messages, because the bandwidth is that of some readings.
        settings = {"gpurt.shuffle.compression": "none", "gpurt.shuffle.message-size": "1 MiB"}
        with dask.config.set(settings), hosts.cluster(names) as client:
            dask_gpurt.enable(client)
            shuffled(client, rows=400_000)
            (one,) = judged(client)["bottlenecks"]
            (run,) = dask_gpurt.status(client)["shuffles"]
    assert one["rule"] == "slow-link"
    _, nbytes, seconds, bandwidth = run["longest_sender"]
    # On a busy machine, the link waits for processors: only the upper bounds are certain.
    assert 0 < nbytes / seconds <= 1.05 * rate
    assert 0 < bandwidth <= 1.25 * rate
    # The part of the time that the link was busy for.
    assert 0 < one["saves_s"] <= run["lasted_s"]

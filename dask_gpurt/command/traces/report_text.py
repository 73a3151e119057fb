"""The report of a trace as text for a terminal: the verdict first, then the tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dask_gpurt.command.layout import table, wrapped
from dask_gpurt.tracing.amounts import name_text, seconds_text
from dask_gpurt.tracing.bottleneck import Bottleneck
from dask_gpurt.tracing.report.table_columns import (
    GAPS,
    HAPPENINGS,
    KERNELS,
    WAITING,
    WORKERS,
    TableColumn,
    host_columns,
    path_columns,
    task_columns,
    transfer_columns,
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
    for title, columns, rows in _tables(report):
        lines += ["", *wrapped(title, width)]
        shown = [
            [name_text(column.text(row), _MOST_CHARACTERS) for column in columns]
            for row in rows[:MOST_ROWS]
        ]
        head = [column.heading for column in columns]
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


def _tables(report: TraceReport) -> Iterator[tuple[str, Sequence[TableColumn], Sequence[Any]]]:
    """Yield title, columns and rows of each table."""
    title = "critical path: the chain of causes that ends with the last result"
    yield title, path_columns(report.wall_s), report.path.parts
    # A terminal has no picture of kinds, so they come first.
    link, kind, *rest = transfer_columns()
    title = "transfers, busiest first" + _see(report, "transfers")
    yield title, [kind, link, *rest], report.transfers
    if report.hosts:
        name, *rest = host_columns()
        yield "links of hosts, busiest first", [name._replace(heading="link"), *rest], report.hosts
    yield "workers, busiest first" + _see(report, "workers"), WORKERS, report.workers
    yield "tasks by prefix" + _see(report, "tasks"), task_columns(), report.tasks
    title = "tasks that waited most for data, added up over tasks" + _see(report, "waits")
    yield title, WAITING, report.waiting
    idle = f"{seconds_text(report.gaps.total_s)} over all threads" + _see(report, "idle threads")
    yield f"idle threads: gaps from 0.1 s between tasks, {idle}", GAPS, report.gaps.rows
    if report.happenings:
        title = "what happened, the rarest first" + _see(report, "happenings")
        yield title, HAPPENINGS, report.happenings
    if report.kernels:
        yield "kernels of GPUs, busiest first", KERNELS, report.kernels


def _see(report: TraceReport, section: str) -> str:
    """Return the rules of the verdict that a table shows."""
    rules = report.rules_about(section)
    return f" (see {', '.join(rules)})" if rules else ""

"""The columns of a report's tables. The terminal and the page show the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dask_gpurt.tracing.amounts import nbytes_text, rate_text, seconds_text, share_text


class TableColumn(NamedTuple):
    """A column: heading, text of a cell, the share that a bar shows, and the class of a colour.

    Bars and colours are for the page.
    """

    heading: str
    text: Callable[..., str]
    is_number: bool = True
    share: Callable[..., float] | None = None
    colour: Callable[..., str] | None = None


def path_columns(wall_s: float) -> list[TableColumn]:
    """Return the columns for parts of the critical path of a trace of this length."""
    return [
        TableColumn("part", lambda part: part.text, is_number=False),
        TableColumn("time", lambda part: seconds_text(part.seconds)),
        TableColumn("of all", lambda part: share_text(part.seconds / wall_s)),
    ]


def transfer_columns(longest_s: float = 1.0) -> list[TableColumn]:
    """Return the columns for kinds and links; a full bar stands for `longest_s`."""
    return [
        TableColumn("link", lambda row: row.link, is_number=False),
        TableColumn("kind", lambda row: row.kind, is_number=False),
        TableColumn("way", lambda row: row.way or "-", is_number=False),
        TableColumn("bytes", lambda row: nbytes_text(row.nbytes)),
        TableColumn("number", lambda row: f"{row.n_transfers:,}"),
        TableColumn("mean size", lambda row: nbytes_text(row.mean_nbytes)),
        _busy(longest_s),
        TableColumn("rate", lambda row: rate_text(row.rate)),
        TableColumn("of link", lambda row: share_text(row.share)),
    ]


def host_columns(longest_s: float = 1.0) -> list[TableColumn]:
    """Return the columns for links of hosts; a full bar stands for `longest_s`."""
    return [
        TableColumn("link of a host", lambda row: row.name, is_number=False),
        TableColumn("bytes", lambda row: nbytes_text(row.nbytes)),
        _busy(longest_s),
        TableColumn("rate", lambda row: rate_text(row.rate)),
        TableColumn("other hosts", lambda row: f"{len(row.peers):,}"),
    ]


def _busy(longest_s: float) -> TableColumn:
    return TableColumn(
        "busy", lambda row: seconds_text(row.busy_s), share=lambda row: row.busy_s / longest_s
    )


def task_columns(most_s: float = 1.0) -> list[TableColumn]:
    """Return the columns for prefixes of tasks; a full bar stands for `most_s`."""
    return [
        TableColumn("prefix", lambda row: row.prefix, is_number=False),
        TableColumn("tasks", lambda row: f"{row.n_tasks:,}"),
        TableColumn(
            "time", lambda row: seconds_text(row.task_s), share=lambda row: row.task_s / most_s
        ),
        TableColumn("held back", lambda row: seconds_text(row.held_back_s)),
        TableColumn("median", lambda row: seconds_text(row.median_s)),
        TableColumn("longest", lambda row: seconds_text(row.longest_s)),
        TableColumn("output", lambda row: nbytes_text(row.nbytes)),
    ]


def _overlap(share: float | None) -> str:
    return "-" if share is None else share_text(max(share, 0.0))


WORKERS = [
    TableColumn("worker", lambda row: row.name, is_number=False),
    TableColumn("host", lambda row: row.host, is_number=False),
    TableColumn("threads", lambda row: str(row.n_threads)),
    TableColumn("tasks", lambda row: f"{row.n_tasks:,}"),
    TableColumn("busy", lambda row: share_text(row.busy_share), share=lambda row: row.busy_share),
    TableColumn("skew", lambda row: f"{row.skew:.2f}"),
    TableColumn("slowness", lambda row: f"{row.slowness:.2f}"),
    TableColumn("overlapped", lambda row: _overlap(row.overlap)),
    TableColumn("sent", lambda row: nbytes_text(row.sent_nbytes)),
    TableColumn("received", lambda row: nbytes_text(row.received_nbytes)),
]
WAITING = [
    TableColumn("prefix", lambda row: row.prefix, is_number=False),
    TableColumn("waited", lambda row: seconds_text(row.data_wait_s)),
    TableColumn("of a task", lambda row: seconds_text(row.data_wait_s / row.n_tasks)),
    TableColumn("then for a thread or memory", lambda row: seconds_text(row.start_wait_s)),
]
GAPS = [
    TableColumn("worker", lambda row: row.worker, is_number=False),
    TableColumn("waited for", lambda row: row.waited_for, is_number=False),
    TableColumn("gaps", lambda row: f"{row.n_gaps:,}"),
    TableColumn("time", lambda row: seconds_text(row.seconds)),
    TableColumn("longest", lambda row: seconds_text(row.longest_s)),
]
HAPPENINGS = [
    TableColumn("event", lambda row: row.name, is_number=False),
    TableColumn("times", lambda row: f"{row.n_times:,}"),
    TableColumn("first at", lambda row: seconds_text(row.first_s)),
    TableColumn("last at", lambda row: seconds_text(row.last_s)),
    TableColumn("the first", lambda row: row.detail or "-", is_number=False),
]
KERNELS = [
    TableColumn("kernel", lambda row: row.name, is_number=False),
    TableColumn("device", lambda row: row.device, is_number=False),
    TableColumn("launches", lambda row: f"{row.n_launches:,}"),
    TableColumn("time", lambda row: seconds_text(row.busy_s)),
]

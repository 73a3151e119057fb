"""Gaps in which a thread ran no task, and who was waited for.

The next task of the thread says why: the chain of causes that ends with its start.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dask_gpurt.tracing.report.critical_path import chain
from dask_gpurt.tracing.report.event_columns import Columns
from dask_gpurt.tracing.report.task_stories import (
    CLIENT,
    COMPUTING,
    SAME_S,
    Backwards,
    TaskStories,
)

#: Shorter gaps are not looked at.
SHORTEST_S = 0.1
#: Gaps that are explained, the longest first. Others are only added up.
MAX_EXPLAINED = 300
#: Tasks of a chain that are followed.
_MAX_STEPS = 20
NOTHING_LEFT = "nothing: no task was left for it"
SHORT_OF_TIME = "not looked at"


class GapRow(NamedTuple):
    """The gaps of a worker with one cause, added up over its threads."""

    worker: str
    waited_for: str
    n_gaps: int
    seconds: float
    longest_s: float


@dataclass(frozen=True)
class IdleGaps:
    """All gaps.

    Attributes
    ----------
    rows
        By worker and cause, most seconds first.
    total_s
        Seconds of all gaps, added up over threads.
    """

    rows: list[GapRow]
    total_s: float

    def by_cause(self) -> list[tuple[str, float]]:
        """Return the seconds by cause over all workers, most first."""
        found: defaultdict[str, float] = defaultdict(float)
        for row in self.rows:
            found[row.waited_for] += row.seconds
        return sorted(found.items(), key=lambda item: -item[1])


def idle_gaps(columns: Columns, stories: TaskStories) -> IdleGaps:
    """Find the gaps of all threads of workers, and explain them."""
    start_s, end_s, process, after = _gaps(columns)
    order = np.argsort(start_s - end_s, kind="stable")
    found: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for rank, i in enumerate(order.tolist()):
        length_s = float(end_s[i] - start_s[i])
        if after[i] < 0:
            cause = NOTHING_LEFT
        elif rank >= MAX_EXPLAINED:
            cause = SHORT_OF_TIME
        else:
            cause = _cause(columns, stories, int(after[i]), float(start_s[i]), float(end_s[i]))
        found[int(process[i]), cause].append(length_s)
    names = columns.places.names
    rows = [
        GapRow(names[worker], cause, len(lengths), sum(lengths), max(lengths))
        for (worker, cause), lengths in found.items()
    ]
    rows.sort(key=lambda row: -row.seconds)
    return IdleGaps(rows, sum(row.seconds for row in rows))


def _gaps(columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return start, end, process, and the task after each gap; -1 at the end of the trace."""
    tasks = columns.tasks
    threads = _threads(columns)
    order = np.lexsort((tasks.start_s, threads, tasks.process))
    process, thread = tasks.process[order], threads[order]
    joined_s, left_s = np.transpose(
        [columns.life_s(i) for i in range(columns.places.n_processes)] or [(0.0, 0.0)]
    )
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (process[1:] != process[:-1]) | (thread[1:] != thread[:-1])
    before_s = np.roll(tasks.free_s[order], 1)
    before_s[is_first] = joined_s[process[is_first]]
    start_s, end_s = before_s, tasks.start_s[order]
    is_last = np.roll(is_first, -1)
    starts = [start_s, tasks.free_s[order][is_last]]
    ends = [end_s, left_s[process[is_last]]]
    owners = [process, process[is_last]]
    after = [order, np.full(int(is_last.sum()), -1)]
    unused = _unused_threads(columns, process[is_first])
    starts.append(joined_s[unused])
    ends.append(left_s[unused])
    owners.append(unused)
    after.append(np.full(len(unused), -1))
    columns_of_gaps = [np.concatenate(parts) for parts in (starts, ends, owners, after)]
    is_long = columns_of_gaps[1] - columns_of_gaps[0] >= SHORTEST_S
    picked = [column[is_long] for column in columns_of_gaps]
    return picked[0], picked[1], picked[2], picked[3]


def _threads(columns: Columns) -> np.ndarray:
    """Return the thread of each task.

    A task that leaves its thread keeps it, and the worker starts another one in its place. Tasks of
    such a worker get places instead: each the free one that was used last.
    """
    tasks = columns.tasks
    threads = tasks.thread.copy()
    for worker in np.unique(tasks.process[tasks.free_s < tasks.end_s]).tolist():
        rows = np.flatnonzero(tasks.process == worker)
        free: list[tuple[float, int]] = [(0.0, one) for one in range(columns.n_threads(worker))]
        for row in rows[np.argsort(tasks.start_s[rows], kind="stable")].tolist():
            # The one that became free last: others may be idle for longer.
            at = max(
                (one for one in free if one[0] <= tasks.start_s[row] + SAME_S),
                default=min(free, default=(0.0, 0)),
            )
            if at in free:
                free.remove(at)
            free.append((float(tasks.free_s[row]), at[1]))
            threads[row] = at[1]
    return threads


def _unused_threads(columns: Columns, used: np.ndarray) -> np.ndarray:
    """Return the process of each thread that ran no task."""
    n_used = np.bincount(used, minlength=columns.places.n_processes)
    unused = [
        np.full(max(columns.n_threads(i) - int(n_used[i]), 0), i, dtype=np.int32)
        for i in columns.places.workers
    ]
    return np.concatenate([np.zeros(0, dtype=np.int32), *unused])


def _cause(columns: Columns, stories: TaskStories, task: int, from_s: float, to_s: float) -> str:
    """Return who was waited for in most of a gap before a task."""
    tasks, names = columns.tasks, columns.places.names
    back, seen = Backwards(to_s), set[int]()
    for step, _ in enumerate(chain(columns, stories, task, back, seen)):
        if back.now_s <= from_s or step == _MAX_STEPS:
            break
    else:
        back.task = -1
        back.to(from_s, CLIENT)
    seconds: defaultdict[str, float] = defaultdict(float)
    for one in back.segments:
        who = f"{one.kind} {one.where}".strip()
        if one.kind == COMPUTING:
            who = f"{tasks.prefixes[tasks.prefix[one.task]]} on {names[tasks.process[one.task]]}"
        seconds[who] += max(one.end_s - max(one.start_s, from_s), 0.0)
    return max(seconds, key=lambda who: seconds[who], default=CLIENT)

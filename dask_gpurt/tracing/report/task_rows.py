"""Tasks by prefix: how many, how long, and how long they waited for data."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dask_gpurt.tracing.report.event_columns import Columns


class TaskRow(NamedTuple):
    """All tasks of a prefix.

    Attributes
    ----------
    task_s
        Seconds of all of them, added up over threads.
    held_back_s
        The part of these in which they waited for peers.
    longest_s, median_s
        Of a single task, without such waits.
    data_wait_s
        Seconds from the scheduler's decision where a task runs until its inputs were there, added
        up over tasks.
    start_wait_s
        Seconds from then until it ran, added up over tasks.
    """

    prefix: str
    n_tasks: int
    task_s: float
    held_back_s: float
    median_s: float
    longest_s: float
    data_wait_s: float
    start_wait_s: float
    nbytes: float

    @property
    def mean_s(self) -> float:
        return self.task_s / self.n_tasks


def task_rows(columns: Columns) -> list[TaskRow]:
    """Return a row for each prefix, the one with the most seconds first."""
    tasks = columns.tasks
    n = len(tasks.prefixes)
    spent_s = columns.working_s
    needs_data = np.fromiter((bool(needs) for needs in tasks.needs), bool, len(tasks))
    data_s = np.where(needs_data, (tasks.here_s - tasks.assigned_s).clip(min=0), 0.0)
    start_s = (tasks.start_s - tasks.here_s).clip(min=0)
    totals = [
        np.bincount(tasks.prefix, column, minlength=n)
        for column in (
            np.ones(len(tasks)),
            tasks.free_s - tasks.start_s,
            spent_s,
            data_s,
            start_s,
            tasks.nbytes,
        )
    ]
    order = np.lexsort((spent_s, tasks.prefix))
    ends = np.cumsum(totals[0]).astype(int)
    rows = []
    for i, prefix in enumerate(tasks.prefixes):
        mine = spent_s[order[ends[i] - int(totals[0][i]) : ends[i]]]
        count, task_s, working_s, wait_s, held_s, nbytes = (float(total[i]) for total in totals)
        rows.append(
            TaskRow(
                prefix,
                int(count),
                task_s,
                max(task_s - working_s, 0.0),
                float(np.median(mine)),
                float(mine[-1]),
                wait_s,
                held_s,
                nbytes,
            )
        )
    return sorted(rows, key=lambda row: -row.task_s)

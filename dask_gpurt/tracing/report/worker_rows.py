"""Workers: how busy their threads were, how far from the mean, and how much work overlapped."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from dask_gpurt.devices.ledger import COMPUTE, WAITING, overlap_of_parts
from dask_gpurt.tracing.lane_names import PHASE
from dask_gpurt.tracing.report.busy_time import Column, busy_by_group
from dask_gpurt.tracing.report.event_columns import Columns

#: A median of fewer tasks says little.
_ENOUGH_TASKS = 3
#: With more processes, one more or less hardly changes the median.
_FEW_PROCESSES = 50
#: Name of the lane of tasks in `WorkerRow.lanes_s`.
TASKS = COMPUTE


class WorkerRow(NamedTuple):
    """One worker.

    Attributes
    ----------
    task_s
        Seconds of its tasks without their waits for peers, added up over threads.
    had_s
        Seconds that its threads had while it was there.
    busy_share
        `task_s` as a share of `had_s`.
    skew
        Its busy share over the mean of all workers. 1 is even.
    slowness
        Its time for tasks over the time that others take for the same ones. 1 is even.
    lanes_s
        Busy seconds of each lane; of tasks as `TASKS`.
    overlap
        Share of the time that overlap could save and did save, as in the ledger; None if only one
        lane did anything.
    """

    process: int
    name: str
    host: str
    n_threads: int
    n_tasks: int
    task_s: float
    had_s: float
    busy_share: float
    skew: float
    slowness: float
    sent_nbytes: float
    received_nbytes: float
    lanes_s: dict[str, float]
    overlap: float | None


def worker_rows(columns: Columns) -> list[WorkerRow]:
    """Return a row for each worker, the busiest first."""
    tasks, hops, places = columns.tasks, columns.hops, columns.places
    n = places.n_processes
    task_s = np.bincount(tasks.process, columns.working_s, minlength=n)
    n_tasks = np.bincount(tasks.process, minlength=n)
    sent = np.bincount(hops.sender, hops.nbytes, minlength=n)
    received = np.bincount(hops.receiver, hops.nbytes, minlength=n)
    lanes, slowness = _lanes(columns), _slowness(columns)
    threads = {i: columns.n_threads(i) for i in places.workers}
    had_s = {i: columns.threads_s(i) for i in places.workers}
    shares = {i: float(task_s[i]) / s if s else 0.0 for i, s in had_s.items()}
    mean = sum(shares.values()) / len(shares) if shares else 0.0
    rows = []
    for i in places.workers:
        lanes_s, measured_s = lanes.get(i, ({}, 0.0))
        rows.append(
            WorkerRow(
                i,
                places.names[i],
                places.hosts[i],
                threads[i],
                int(n_tasks[i]),
                float(task_s[i]),
                had_s[i],
                shares[i],
                shares[i] / mean if mean else 1.0,
                float(slowness[i]),
                float(sent[i]),
                float(received[i]),
                lanes_s,
                overlap_of_parts(lanes_s, measured_s).efficiency,
            )
        )
    return sorted(rows, key=lambda row: -row.busy_share)


def _lanes(columns: Columns) -> dict[int, tuple[dict[str, float], float]]:
    """Return for each process the busy seconds of its lanes, and the period of their work."""
    work, tasks = columns.work, columns.tasks
    names = list(dict.fromkeys([*work.lanes, TASKS]))
    # Phases are parts of tasks. The ledger of a worker may have its tasks too: one of both counts.
    is_task_of_ledger = work.is_lane(COMPUTE) & ~work.is_path(WAITING)
    picked = np.flatnonzero(~work.is_lane(PHASE) & ~is_task_of_ledger)
    process = np.concatenate([work.process[picked], tasks.process])
    compute = np.full(len(tasks), names.index(TASKS))
    lane = np.concatenate([work.lane[picked], compute])
    start_s = np.concatenate([work.start_s[picked], tasks.start_s])
    end_s = np.concatenate([work.end_s[picked], tasks.free_s])
    is_wait = work.is_path(WAITING)[picked]
    weight = np.concatenate([np.where(is_wait, -1, 1), np.ones(len(tasks), dtype=int)])
    if not len(process):
        return {}
    group = process.astype(np.int64) * len(names) + lane
    busy_s = busy_by_group(group, start_s, end_s, columns.places.n_processes * len(names), weight)
    first_s = np.full(columns.places.n_processes, np.inf)
    last_s = np.full(columns.places.n_processes, -np.inf)
    np.minimum.at(first_s, process, start_s)
    np.maximum.at(last_s, process, end_s)
    found = {}
    for i in np.unique(process).tolist():
        mine = busy_s[i * len(names) : (i + 1) * len(names)]
        parts = {name: float(s) for name, s in zip(names, mine, strict=True) if s > 0}
        found[i] = parts, float(last_s[i] - first_s[i])
    return found


def _slowness(columns: Columns) -> Column:
    """Return for each process its time for tasks over that of others for the same prefixes.

    It compares medians: a single long task, as of a hot key, does not make a worker slow.
    """
    tasks, n = columns.tasks, columns.places.n_processes
    n_prefixes = len(tasks.prefixes)
    if not n_prefixes:
        return np.ones(n)
    pair = tasks.prefix.astype(np.int64) * n + tasks.process
    order = np.lexsort((columns.working_s, pair))
    pairs, first, counted = np.unique(pair[order], return_index=True, return_counts=True)
    median_s = columns.working_s[order][first + counted // 2]
    is_enough = counted >= _ENOUGH_TASKS
    pairs, counted, median_s = pairs[is_enough], counted[is_enough], median_s[is_enough]
    own_s, expected_s = np.zeros(n), np.zeros(n)
    prefixes, processes = np.divmod(pairs, n)
    bounds = np.searchsorted(prefixes, np.arange(n_prefixes + 1))
    for begin, end in itertools.pairwise(bounds.tolist()):
        if end - begin < 2:
            continue  # only one process ran it, which says nothing
        mine = median_s[begin:end]
        usual_s = np.full(end - begin, np.median(mine))
        if end - begin <= _FEW_PROCESSES:
            usual_s = np.array([np.median(np.delete(mine, i)) for i in range(end - begin)])
        np.add.at(own_s, processes[begin:end], counted[begin:end] * mine)
        np.add.at(expected_s, processes[begin:end], counted[begin:end] * usual_s)
    return np.where(expected_s > 0, own_s / np.maximum(expected_s, 1e-12), 1.0)

"""The rule about processors: what workers used of them, against what their tasks ran.

Workers record the processors that they use. Tasks that run and use none wait for something that the
trace does not see: the interpreter's lock, files, or processors that others have.
"""

from __future__ import annotations

import numpy as np

from dask_gpurt.tracing.amounts import count_text, seconds_text
from dask_gpurt.tracing.bottleneck import Bottleneck
from dask_gpurt.tracing.lane_names import CPU
from dask_gpurt.tracing.report.busy_time import Column, amount_over_time, crowded
from dask_gpurt.tracing.report.rules.findings import Findings
from dask_gpurt.tracing.report.task_stories import COMPUTING, WORKER

#: Threads that run at the same time, and the processors that they use then, if they take turns.
_TOGETHER, _ONE_AT_A_TIME = 1.5, (0.75, 1.3)
#: Tasks work less than this share of their time if they use so few processors.
_WAITING_SHARE = 0.5


def processors(found: Findings) -> Bottleneck | None:
    """Tasks ran, and did not get or did not use processors."""
    used_s, ran_s, busy_s, n_workers = _sums(found)
    if not busy_s:
        return None
    saves_s: float | None
    together, used = ran_s / busy_s, used_s / busy_s
    path_s = found.path.seconds(COMPUTING) + found.path.seconds(WORKER)
    waited_s = path_s * (1 - min(used_s / ran_s, 1.0)) if ran_s else 0.0
    if not found.is_worth(waited_s):
        return None
    low, high = _ONE_AT_A_TIME
    said = (
        f"{together:.1f} tasks ran at a time on each of {count_text(n_workers, 'busy worker')}, "
        f"and used {used:.1f} processors; the critical path spent {seconds_text(path_s)} with "
        "tasks and event loops"
    )
    if together >= _TOGETHER and low <= used <= min(high, together / _TOGETHER):
        advice = (
            "They take turns with Python's interpreter lock: start more workers with fewer threads "
            "each, and give object columns a dtype, such as strings."
        )
        saves_s = waited_s
    elif used_s < _WAITING_SHARE * ran_s:
        advice = (
            "They wait: for processors, if the hosts are full, so start fewer workers or leave "
            "out other programs; or for files and services, so start more threads."
        )
        # Nobody knows what they wait for, so nobody knows how much of it could be saved.
        saves_s = None
    else:
        return None
    return Bottleneck("processors", said, advice, "", saves_s)


def _sums(found: Findings) -> tuple[float, float, float, int]:
    """Return over sampled workers: seconds of processors, of tasks, with any task, and workers.

    Only the time with tasks counts.
    """
    columns = found.columns
    tasks, is_work = columns.tasks, columns.working_s > 0
    used_s = ran_s = busy_s = 0.0
    n_workers = 0
    for process, at_s, used in _samples(found):
        rows = np.flatnonzero((tasks.process == process) & is_work)
        start_s, end_s = tasks.start_s[rows], tasks.free_s[rows]
        union = crowded(start_s, end_s, 1)
        running_s = amount_over_time(start_s, end_s, columns.working_s[rows], at_s)
        with_any_s = amount_over_time(union.start_s, union.end_s, union.end_s - union.start_s, at_s)
        lasted_s = np.diff(at_s)
        # If tasks ran in a part of a sample only, the same part of its processor time is theirs.
        share = np.divide(with_any_s, lasted_s, out=np.zeros_like(lasted_s), where=lasted_s > 0)
        used_s += float((used * with_any_s)[share > _WAITING_SHARE].sum())
        ran_s += float(running_s[share > _WAITING_SHARE].sum())
        busy_s += float(with_any_s[share > _WAITING_SHARE].sum())
        n_workers += bool((share > _WAITING_SHARE).any())
    return used_s, ran_s, busy_s, n_workers


def _samples(found: Findings) -> list[tuple[int, Column, Column]]:
    """Return for each worker the times of its samples, and processors in use between them."""
    by_process: dict[int, list[tuple[float, float]]] = {}
    for one in found.columns.trace.samples:
        if one.name == CPU:
            by_process.setdefault(one.process, []).append((one.at_s, one.value))
    workers = set(found.columns.places.workers)
    columns = []
    for process, samples in by_process.items():
        if process in workers and len(samples) > 1:
            times, values = np.array(sorted(samples)).T
            columns.append((process, times, values[1:]))
    return columns

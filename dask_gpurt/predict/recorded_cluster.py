"""The cluster of a trace: its hosts, its workers, and the speed of its links."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from dask_gpurt.tracing.events import MEMORY_LIMITS
from dask_gpurt.tracing.report.busy_time import Column, Coverage, busy_by_group
from dask_gpurt.tracing.report.event_columns import Columns

#: Bytes per second between workers of a host, where the trace has no large message: what workers
#: reach over a loopback connection.
LOCAL_NBYTES_PER_S = 2e9
#: Bytes per second between hosts, where the trace has none: 10 Gb/s net of overhead.
NETWORK_NBYTES_PER_S = 1.2e9
#: Smaller messages say more about latency than about bandwidth.
LARGE_NBYTES = 1 << 20
#: A link carries at least its rate in its best moments. The very best ones are mere luck.
FAST_QUANTILE = 0.9
#: Longer times between two tasks have another cause than the worker's own work.
MAX_TURNAROUND_S = 0.05
#: A worker that has its libraries sees a task sooner than this.
MIN_STARTUP_S = 0.1
#: Bytes per second of a disk that nobody described or measured: a common volume of a cloud.
DISK_NBYTES_PER_S = 125e6
#: The tier in paths such as "memory > disk".
DISK = "disk"
#: Fewer bytes say little about a disk.
ENOUGH_NBYTES = 100_000_000
#: Seconds of a message between a worker and the scheduler: no model uses less or more.
MIN_CONTROL_S, MAX_CONTROL_S = 0.0002, 0.05


@dataclass(frozen=True)
class RecordedCluster:
    """The cluster on which a trace was made.

    Attributes
    ----------
    workers
        The threads of each worker, by host. The order is that of the trace.
    memory_nbytes
        Memory limit of a worker; 0 if unknown.
    local_nbytes_per_s, network_nbytes_per_s
        Bandwidth between workers of one host, and the best one between two hosts.
    control_s
        Seconds of a message from a worker to the scheduler, with the time that it waits there.
    turnaround_s
        Seconds that a thread needs from the end of a task to the start of the next one, if that is
        there already.
    startup_s
        Seconds that a new worker needs before its first task, to import libraries. 0 in the trace
        of workers that had run tasks before.
    disk_nbytes_per_s
        What a disk read and wrote for all workers of a host together.
    """

    workers: dict[str, tuple[int, ...]]
    memory_nbytes: int
    local_nbytes_per_s: float
    network_nbytes_per_s: float
    control_s: float
    turnaround_s: float
    startup_s: float = 0.0
    disk_nbytes_per_s: float = DISK_NBYTES_PER_S

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return sum(map(len, self.workers.values()))

    @property
    def nthreads(self) -> int:
        """Threads of a worker: the usual number."""
        counts = sorted(one for threads in self.workers.values() for one in threads)
        return counts[len(counts) // 2]


def recorded_cluster(columns: Columns) -> RecordedCluster:
    """Return the cluster of a trace."""
    places, tasks = columns.places, columns.tasks
    workers: dict[str, tuple[int, ...]] = {}
    for i in _most_at_once(columns):
        host = places.hosts[i]
        workers[host] = (*workers.get(host, ()), max(columns.n_threads(i), 1))
    limits = columns.trace.about.get(MEMORY_LIMITS)
    values = limits.values() if isinstance(limits, dict) else ()
    known = [one for one in values if type(one) is int and one > 0]
    between = [link.bandwidth for link in columns.trace.links if link.bandwidth > 0]
    waits_s = tasks.known_s - tasks.end_s
    control_s = float(np.median(waits_s)) if len(waits_s) else MIN_CONTROL_S
    return RecordedCluster(
        workers,
        min(known, default=0),
        _rate(columns, is_local=True) or LOCAL_NBYTES_PER_S,
        max(between, default=0.0) or _rate(columns, is_local=False) or NETWORK_NBYTES_PER_S,
        min(max(control_s, MIN_CONTROL_S), MAX_CONTROL_S),
        _turnaround_s(columns),
        _startup_s(columns),
        _disk_rate(columns) or DISK_NBYTES_PER_S,
    )


def _most_at_once(columns: Columns) -> list[int]:
    """Return the workers at the moment when most were there. Others replaced them, or came late."""
    lives = {i: columns.life_s(i) for i in columns.places.workers}
    # The number only grows when a worker joins.
    moments = dict.fromkeys(joined_s for joined_s, _ in lives.values())
    there = ([i for i, life_s in lives.items() if _is_there(life_s, at_s)] for at_s in moments)
    return max(there, key=len, default=[])


def _is_there(life_s: tuple[float, float], at_s: float) -> bool:
    joined_s, left_s = life_s
    return joined_s == at_s or joined_s < at_s < left_s


def _turnaround_s(columns: Columns) -> float:
    """Return the mean time of a thread between two tasks of which the second did not wait."""
    tasks = columns.tasks
    order = np.lexsort((tasks.start_s, tasks.thread, tasks.process))
    one, next_ = order[:-1], order[1:]
    follows = (tasks.process[one] == tasks.process[next_]) & (
        tasks.thread[one] == tasks.thread[next_]
    )
    follows &= tasks.here_s[next_] <= tasks.end_s[one]
    between_s = (tasks.start_s[next_] - tasks.end_s[one])[follows]
    if not len(between_s):
        return 0.0
    return float(between_s.clip(0.0, MAX_TURNAROUND_S).mean())


def _startup_s(columns: Columns) -> float:
    """Return how long a worker was idle although it had been sent a task: the median of workers.

    A worker imports libraries when the first task that needs them arrives, and sees it later.
    """
    tasks = columns.tasks
    unseen = tasks.here_s - tasks.assigned_s > MIN_STARTUP_S
    for i in np.flatnonzero(unseen).tolist():
        inputs = (tasks.index.get(one) for one in tasks.needs[i])
        # It may wait for inputs from others, or for values that the trace does not know.
        unseen[i] = all(
            one is not None and tasks.process[one] == tasks.process[i] for one in inputs
        )
    found = []
    for i in columns.places.workers:
        mine = tasks.process == i
        if not mine.any():
            continue
        waits = Coverage(tasks.assigned_s[mine & unseen], tasks.here_s[mine & unseen])
        runs = Coverage(tasks.start_s[mine], tasks.end_s[mine])
        ran_s = sum(map(runs.between, waits.start_s.tolist(), waits.end_s.tolist()))
        found.append(waits.total_s - ran_s)
    return statistics.median(found) if found else 0.0


def _disk_rate(columns: Columns) -> float:
    """Return the bytes per second of the disks while they were busy; 0 if few bytes were moved."""
    work = columns.work
    to_or_from = [DISK in path.split(" > ") for path in work.paths]
    is_disk = np.array(to_or_from, bool)[work.path] if len(work.path) else work.is_lane(DISK)
    nbytes = float(work.nbytes[is_disk].sum())
    if nbytes < ENOUGH_NBYTES:
        return 0.0
    hosts = np.array(columns.places.hosts)[work.process[is_disk]]
    names, host = np.unique(hosts, return_inverse=True)
    by_host_s = busy_by_group(host, work.start_s[is_disk], work.end_s[is_disk], len(names))
    busy_s = float(by_host_s.sum())
    return nbytes / busy_s if busy_s else 0.0


def _rate(columns: Columns, *, is_local: bool) -> float:
    """Return the bytes per second of a place in its best moments; 0 without large messages.

    A place is a worker for bytes within hosts, and a host for bytes between hosts. Messages to and
    from a place share its link. So their rates are added up.
    """
    hops = columns.hops
    lasted_s = hops.wire_end_s - hops.start_s
    chosen = (hops.nbytes >= LARGE_NBYTES) & (lasted_s > 0)
    chosen &= (hops.source == hops.target) if is_local else (hops.source != hops.target)
    ends = (hops.sender, hops.receiver) if is_local else (hops.source, hops.target)
    rate = hops.nbytes[chosen] / lasted_s[chosen]
    moments = [
        _rates_over_time(end[chosen], hops.start_s[chosen], hops.wire_end_s[chosen], rate)
        for end in ends
    ]
    rates, seconds = (np.concatenate(parts) for parts in zip(*moments, strict=True))
    if not len(rates):
        return 0.0
    order = np.argsort(rates)
    until_s = np.cumsum(seconds[order])
    return float(rates[order][np.searchsorted(until_s, FAST_QUANTILE * until_s[-1])])


def _rates_over_time(
    place: Column, start_s: Column, end_s: Column, rate: Column
) -> tuple[Column, Column]:
    """Return the summed rates of each place, moment by moment, and how long each moment lasted."""
    places = np.concatenate([place, place])
    times = np.concatenate([start_s, end_s])
    changes = np.concatenate([rate, -rate])
    order = np.lexsort((times, places))
    # The changes of a place add up to nothing, so one running total serves all places.
    rates = np.cumsum(changes[order])[:-1]
    seconds = np.diff(times[order])
    is_moment = (np.diff(places[order]) == 0) & (seconds > 0) & (rates > 1.0)
    return rates[is_moment], seconds[is_moment]

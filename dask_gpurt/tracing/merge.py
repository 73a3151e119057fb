"""Files of all workers and of the scheduler, brought together into one `Trace`.

Times of workers become times of the scheduler (`tracing.clocks`). Runs of tasks on workers find the
same runs on the scheduler, and each receive finds its send. No arrow points backwards: what still
arrives before it was sent moves by the least.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dask_gpurt.tracing import records
from dask_gpurt.tracing.clocks import ClockExchange, ClockFit, fit, shifts
from dask_gpurt.tracing.events import (
    SCHEDULER,
    WORKER,
    Instant,
    LaneWork,
    LinkFacts,
    Sample,
    TaskTimes,
    Trace,
    TraceProcess,
)
from dask_gpurt.tracing.lane_names import NOT_SENDS, RECEIVE

#: Lane of values that the store moves down.
_EVICTIONS = "write"


@dataclass
class RecordedProcess:
    """The records of one process, and the facts that the scheduler has about it.

    Attributes
    ----------
    data
        Its file.
    exchanges
        Exchanges of clocks with the scheduler.
    joined_s, left_s
        As in `TraceProcess`, on the scheduler's clock; None for the begin or the end of the trace.
    """

    address: str
    name: str
    host: str
    data: bytes | bytearray = b""
    n_threads: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    n_dropped: int = 0
    ended: str = ""
    exchanges: list[ClockExchange] = field(default_factory=list)
    joined_s: float | None = None
    left_s: float | None = None


class _Row(NamedTuple):
    """One record, with the fields of `records.FIELDS`."""

    kind: int
    n: int
    lane: int
    way: int
    thread: int
    path: int
    peer: int
    key: int
    run: int
    message: int
    nbytes: int
    start_s: float
    end_s: float
    encoded_nbytes: int


class _Events:
    """The decoded events of one process. Times become those of the trace with `move`."""

    def __init__(self, recorded: RecordedProcess, zero_s: float, *, is_scheduler: bool) -> None:
        is_known = is_scheduler or bool(recorded.exchanges)
        # Without a comparison of clocks, its times say nothing. Dask's own times of tasks remain.
        decoded = records.decode(recorded.data if is_known else b"")
        self.texts, self.names = decoded.texts, decoded.names
        self.recorded = recorded
        self.ended = recorded.ended or decoded.problem
        if not is_known and recorded.data:
            self.ended = self.ended or "no events: its clock could not be compared"
        exchanges = recorded.exchanges
        self.clock = ClockFit() if is_scheduler or not exchanges else fit(exchanges)
        self._by_kind: dict[int, npt.NDArray[Any]] = {}
        all_records = decoded.records
        for kind in np.unique(all_records["kind"]):
            rows = all_records[all_records["kind"] == kind].copy()
            rows["start_s"] = self.clock.to_scheduler(rows["start_s"]) - zero_s
            if kind != records.SAMPLE:
                rows["end_s"] = self.clock.to_scheduler(rows["end_s"]) - zero_s
            self._by_kind[int(kind)] = rows

    def rows(self, kind: int) -> list[_Row]:
        found = self._by_kind.get(kind)
        # Plain tuples are much faster to read than rows of an array.
        return [] if found is None else list(map(_Row._make, found.tolist()))

    def hashes(self) -> dict[int, int]:
        """Return the hash of each key by its number here."""
        return {row.key: row.nbytes for row in self.rows(records.KEY)}

    def move(self, by_s: float) -> None:
        for kind, rows in self._by_kind.items():
            rows["start_s"] += by_s
            if kind != records.SAMPLE:
                rows["end_s"] += by_s

    def sends(self) -> list[_Row]:
        """Return the messages that were delivered."""
        texts = self.texts
        every = self.rows(records.WORK)
        return [row for row in every if row.message and texts[row.path] not in NOT_SENDS]

    def receives(self) -> list[_Row]:
        """Return the messages that arrived here."""
        texts = self.texts
        every = self.rows(records.WORK)
        return [row for row in every if row.message and texts[row.path] == RECEIVE]


def merged(
    scheduler: RecordedProcess,
    workers: Sequence[RecordedProcess],
    began_s: float,
    ended_s: float,
    began_utc_s: float = 0.0,
    links: Sequence[LinkFacts] = (),
    about: dict[str, Any] | None = None,
) -> Trace:
    """Merge what all processes recorded.

    Parameters
    ----------
    scheduler, workers
        The scheduler is process 0 of the trace, the workers follow.
    began_s, ended_s
        Begin and end of the trace on the scheduler's clock. Work that began before, or ended after,
        is left out: its other half may not have been recorded. Tasks are cut off there.
    """
    wall_s = max(ended_s - began_s, 0.0)
    every = [_Events(scheduler, began_s, is_scheduler=True)]
    every += [_Events(one, began_s, is_scheduler=False) for one in workers]
    by_address = {one.recorded.address: number for number, one in enumerate(every)}
    tasks = _tasks(every, by_address)
    _bring_in_order(every, by_address, tasks)
    trace = Trace(
        processes=[
            _process(one, WORKER if number else SCHEDULER, began_s, wall_s)
            for number, one in enumerate(every)
        ],
        links=list(links),
        began_utc_s=began_utc_s,
        wall_s=wall_s,
        about=dict(about or {}),
    )
    numbers_of = _number_tasks(every, tasks, trace, wall_s)
    sends = _sends(every, by_address)
    for number, one in enumerate(every):
        trace.work += _work(number, one, by_address, sends, numbers_of[number], wall_s)
        trace.instants += _instants(number, one, wall_s)
        trace.samples += _samples(number, one, wall_s)
    trace.work.sort(key=lambda it: it.start_s)
    trace.tasks.sort(key=lambda it: it.start_s)
    trace.instants.sort(key=lambda it: it.at_s)
    trace.samples.sort(key=lambda it: it.at_s)
    return trace


def _process(one: _Events, kind: str, zero_s: float, wall_s: float) -> TraceProcess:
    recorded = one.recorded
    joined_s, left_s = recorded.joined_s, recorded.left_s
    return TraceProcess(
        recorded.address,
        recorded.name,
        recorded.host,
        kind,
        recorded.n_threads,
        recorded.counters,
        recorded.n_dropped,
        one.ended,
        one.clock.error_s,
        0.0 if joined_s is None else _within(joined_s - zero_s, wall_s),
        None if left_s is None else _within(left_s - zero_s, wall_s),
    )


# ---------------------------------------------------------------------- tasks


@dataclass
class _TaskRun:
    """One run of a task: as the scheduler saw it, and as the worker did."""

    number: int
    process: int
    key: str
    ready_s: float
    assigned_s: float
    known_s: float
    nbytes: int
    #: 0 if before the trace.
    submitted_s: float = 0.0
    hash: int = 0
    thread: int = 0
    away_s: float = 0.0
    needs: list[int] = field(default_factory=list)
    #: By Dask's clock, until the worker's own times are found.
    here_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    #: Row among the worker's records; None if there is none.
    row: _Row | None = None
    #: Whether the scheduler saw the run end. If not, it counts if the worker recorded it.
    is_seen: bool = True


def _tasks(every: list[_Events], by_address: dict[str, int]) -> list[_TaskRun]:
    """Return all runs that the scheduler saw, with the times of workers where they are known."""
    scheduler = every[0]
    texts = scheduler.texts
    runs: dict[int, _TaskRun] = {}
    for row in scheduler.rows(records.ASSIGNED):
        process = by_address.get(texts[row.peer])
        if process is not None:
            ready_s = row.start_s - row.message / 1e6
            shown = texts[row.path]
            submitted_s = ready_s - (row.run - 1) / 1e3 if row.run else 0.0
            times = ready_s, row.start_s, row.end_s
            made = _TaskRun(
                row.key, process, shown, *times, row.nbytes, submitted_s, is_seen=not row.n
            )
            runs[row.key] = made
    for row in scheduler.rows(records.TIMES):
        if (run := runs.get(row.key)) is not None:
            run.start_s, run.end_s = row.start_s, row.end_s
            run.here_s = row.start_s - row.message / 1e6
            thread = scheduler.names[row.thread]
            run.hash, run.thread = row.nbytes, int(thread) if thread.isdecimal() else 0
    for row in scheduler.rows(records.NEEDS):
        if (run := runs.get(row.key)) is not None:
            some = (row.path, row.peer, row.run, row.message)[: row.n]
            run.needs += [one for one in some if one in runs]
    _find_on_workers(every, list(runs.values()))
    return list(runs.values())


def _find_on_workers(every: list[_Events], runs: list[_TaskRun]) -> None:
    """Give each run the worker's record of it: the last to end before the scheduler knew."""
    waiting: dict[tuple[int, int], list[_TaskRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda it: it.known_s):
        waiting[run.process, run.hash].append(run)
    for process, one in enumerate(every[1:], 1):
        hashes = one.hashes()
        rows: dict[int, list[_Row]] = defaultdict(list)
        for row in one.rows(records.RUN):
            rows[hashes.get(row.key, 0)].append(row)
        for hash_, of_key in rows.items():
            ends = [row.end_s for row in of_key]
            for run in waiting.get((process, hash_), ()):
                # The clock may be wrong by its bound.
                at = bisect_right(ends, run.known_s + one.clock.error_s) - 1
                if at >= 0 and ends[at] >= run.assigned_s - one.clock.error_s:
                    run.row = of_key[at]


def _within(time_s: float, wall_s: float) -> float:
    return min(max(time_s, 0.0), wall_s)


def _number_tasks(
    every: list[_Events], runs: list[_TaskRun], trace: Trace, wall_s: float
) -> list[dict[int, list[tuple[float, int]]]]:
    """Add the tasks to a trace. Return when each run was assigned, and its number.

    By process and hash of the key, in order. Work for a key belongs to the last run before it.
    """
    of_hash: list[dict[int, list[tuple[float, int]]]] = [defaultdict(list) for _ in every]
    for run in runs:
        if run.row is not None:
            run.start_s, run.end_s = run.row.start_s, run.row.end_s
            run.here_s = run.start_s - run.row.message / 1e6
            run.away_s = run.row.nbytes / 1e6
            thread = every[run.process].names[run.row.thread]
            run.thread = int(thread) if thread.isdecimal() else run.thread
        # The scheduler's times hold: what the worker did lies between them.
        run.end_s = min(max(run.end_s, run.assigned_s), run.known_s)
        run.start_s = min(max(run.start_s, run.assigned_s), run.end_s)
        run.here_s = min(max(run.here_s, run.assigned_s), run.start_s)
    inside = {
        run.number
        for run in runs
        if run.known_s >= 0 and run.start_s <= wall_s and (run.is_seen or run.row is not None)
    }
    for run in runs:
        if run.number in inside:
            of_hash[run.process][run.hash].append((run.assigned_s, run.number))
            needs = tuple(one for one in run.needs if one in inside)
            start_s, end_s = _within(run.start_s, wall_s), _within(run.end_s, wall_s)
            free_s = min(max(run.end_s - run.away_s, start_s), end_s)
            # If a task began before the trace or ended after it, only the part inside counts.
            trace.tasks.append(
                TaskTimes(
                    run.number,
                    run.key,
                    run.process,
                    needs,
                    ready_s=_within(run.ready_s, wall_s),
                    assigned_s=_within(run.assigned_s, wall_s),
                    here_s=_within(run.here_s, wall_s),
                    start_s=start_s,
                    end_s=end_s,
                    known_s=_within(run.known_s, wall_s),
                    nbytes=run.nbytes,
                    thread=run.thread,
                    away_s=round(end_s - free_s, 6),
                    submitted_s=_within(run.submitted_s, wall_s),
                )
            )
    for of_process in of_hash:
        for found in of_process.values():
            found.sort()
    return of_hash


# ---------------------------------------------------------------------- messages


class _Sent(NamedTuple):
    """A send. Its receive has the same sender, receiver and number."""

    start_s: float
    end_s: float
    way: str


_Sends = dict[tuple[int, int, int], _Sent]


def _sends(every: list[_Events], by_address: dict[str, int]) -> _Sends:
    """Return sends by sender, receiver and number of the message."""
    found = {}
    for number, one in enumerate(every):
        for row in one.sends():
            receiver = by_address.get(one.texts[row.peer], -1)
            sent = _Sent(row.start_s, row.end_s, one.names[row.way])
            found[number, receiver, row.message] = sent
    return found


def _bring_in_order(
    every: list[_Events], by_address: dict[str, int], tasks: list[_TaskRun]
) -> None:
    """Move the clocks of workers a little, so that as few messages as possible point backwards."""
    sends = _sends(every, by_address)
    limits: dict[tuple[int, int], tuple[float, float]] = {}

    def narrow(a: int, b: int, low: float, high: float) -> None:
        before = limits.get((a, b), (-np.inf, np.inf))
        limits[a, b] = max(before[0], low), min(before[1], high)

    for number, one in enumerate(every):
        senders = [by_address.get(text, -1) for text in one.texts]
        for row in one.receives():
            sender = senders[row.peer]
            sent = sends.get((sender, number, row.message))
            if sent is not None:
                low, high = sent.start_s - row.start_s, sent.end_s - row.end_s
                narrow(sender, number, low, high)
    for run in tasks:
        if (seen := run.row) is None:
            continue
        # A task may run already when it is assigned to its worker again, after another worker left.
        if seen.start_s >= run.assigned_s - every[run.process].clock.error_s:
            narrow(0, run.process, run.assigned_s - seen.start_s, run.known_s - seen.end_s)
    moved = shifts(limits, [one.clock.error_s for one in every])
    for one, by_s in zip(every, moved, strict=True):
        if by_s:
            one.move(by_s)
    for run in tasks:
        if run.row is not None:
            by_s = moved[run.process]
            run.row = run.row._replace(start_s=run.row.start_s + by_s, end_s=run.row.end_s + by_s)


def _work(
    process: int,
    one: _Events,
    by_address: dict[str, int],
    sends: _Sends,
    tasks: dict[int, list[tuple[float, int]]],
    wall_s: float,
) -> list[LaneWork]:
    texts, names = one.texts, one.names
    threads = [int(name) if name.isdecimal() else 0 for name in names]
    hashes = one.hashes()
    made = []
    for row in one.rows(records.WORK):
        lane, path, peer = names[row.lane], texts[row.path], texts[row.peer]
        start_s, end_s, way = row.start_s, max(row.start_s, row.end_s), names[row.way]
        is_inside = start_s >= 0 and end_s <= wall_s
        if row.message and path == RECEIVE:
            sent = sends.get((by_address.get(peer, -1), process, row.message))
            if sent is not None:
                late_s = max(sent.start_s - start_s, 0.0)
                start_s, end_s, way = start_s + late_s, end_s + late_s, sent.way
                # Either both are in the trace, or none.
                is_inside = sent.start_s >= 0 and sent.end_s <= wall_s
        if is_inside:
            task = _task(tasks.get(hashes.get(row.key, -1), []), end_s)
            moved = lane, path, row.nbytes, start_s, end_s, peer, way, row.run, row.message
            made.append(LaneWork(process, *moved, task, threads[row.thread], row.encoded_nbytes))
    return made


def _task(runs: list[tuple[float, int]], end_s: float) -> int:
    """Return the number of the last run that was assigned before this time."""
    at = bisect_right(runs, (end_s, sys.maxsize)) - 1
    return runs[at][1] if at >= 0 else -1


def _instants(process: int, one: _Events, wall_s: float) -> list[Instant]:
    """Return what happened: as recorded, and values that the store moved down."""
    texts = one.texts
    found = [
        Instant(process, texts[row.path], row.start_s, texts[row.peer])
        for row in one.rows(records.INSTANT)
    ]
    found += [
        Instant(process, "eviction", row.start_s, texts[row.path])
        for row in one.rows(records.WORK)
        if one.names[row.lane] == _EVICTIONS and " > " in texts[row.path]
    ]
    return [it for it in found if 0 <= it.at_s <= wall_s]


def _samples(process: int, one: _Events, wall_s: float) -> list[Sample]:
    found = (
        Sample(process, one.texts[row.path], row.start_s, row.end_s)
        for row in one.rows(records.SAMPLE)
    )
    return [it for it in found if 0 <= it.at_s <= wall_s]

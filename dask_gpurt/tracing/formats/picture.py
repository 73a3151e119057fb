"""The picture of a trace: the row of each event, and the order of events in a file.

A process has a row for each thread that ran tasks, rows for each lane, a row for each sampled
quantity, and one for instants. Slices of one row follow each other or lie in each other, because
viewers cannot show others. Work that overlaps other work of its lane therefore gets a row of its
own. A wait lies in the slice of the work that waits, and a part of a shuffle in the slice of its
task.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import NamedTuple

from dask_gpurt.tracing.events import Instant, LaneWork, Sample, TaskTimes, Trace
from dask_gpurt.tracing.formats.arrows import ArrowFinder, Arrows
from dask_gpurt.tracing.lane_names import PHASE, RECEIVE

#: Kinds of rows.
THREAD, LANE, QUANTITY, INSTANTS = "thread", "lane", "quantity", "instants"
#: A part of a shuffle may seem to end that much later than its task, because different clocks timed
#: the two. The picture cuts it off.
_CUT_NS = 20_000_000
#: The path of idle time of a lane, as in the ledger.
WAITING = "waiting"


@dataclass(eq=False)
class PictureRow:
    """One row of a process.

    Attributes
    ----------
    number
        Counts the rows of the trace from 0.
    process
        Index in `Trace.processes`.
    kind
        `THREAD`, `LANE`, `QUANTITY` or `INSTANTS`.
    name
        For viewers. Several rows of one lane have one name.
    thread
        Identifier of the thread whose work is on the row; 0 if unknown.
    index
        Counts the rows of the thread or lane from 0.
    ends_ns
        Ends of the open slices, the outermost first.
    """

    number: int
    process: int
    kind: str
    name: str
    thread: int = 0
    index: int = 0
    ends_ns: list[int] = field(default_factory=list)


class SliceBegin(NamedTuple):
    """The begin of a slice, whose `SliceEnd` follows later.

    Attributes
    ----------
    end_ns
        Where the slice ends in the picture.
    cut_ns
        How much later the event ended.
    """

    row: PictureRow
    at_ns: int
    end_ns: int
    cut_ns: int
    event: LaneWork | TaskTimes
    arrows: Arrows


class SliceEnd(NamedTuple):
    """The end of the slice of a row that began last."""

    row: PictureRow
    at_ns: int


class PointEvent(NamedTuple):
    """An instant or a sample."""

    row: PictureRow
    at_ns: int
    event: Instant | Sample


class _RowGroup:
    """The rows of one thread or lane: as many as there are slices at one time."""

    def __init__(self) -> None:
        self.rows: list[PictureRow] = []
        #: Numbers, in `rows`, of rows without an open slice: a heap.
        self.free: list[int] = []

    def around(self, end_ns: int) -> PictureRow | None:
        """Return a row whose innermost open slice goes on until a time."""
        return next((row for row in self.rows if row.ends_ns and row.ends_ns[-1] >= end_ns), None)

    def around_about(self, end_ns: int) -> tuple[PictureRow | None, int]:
        """Return a row whose innermost open slice goes on until about a time, and the end there."""
        row = self.around(end_ns) or self.around(end_ns - _CUT_NS)
        return row, min(end_ns, row.ends_ns[-1]) if row else end_ns


class _Rows:
    """All rows of a trace, and the open slices on them."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str, str, int], _RowGroup] = {}
        self._n_rows = 0
        self._n_threads: dict[int, int] = {}
        self._open: list[tuple[int, int, PictureRow, _RowGroup]] = []
        self._n_slices = 0

    def ended(self, until_ns: float) -> Iterator[SliceEnd]:
        """Close the slices that end until a time, the inner ones first."""
        while self._open and self._open[0][0] <= until_ns:
            end_ns, _, row, group = heapq.heappop(self._open)
            row.ends_ns.pop()
            if not row.ends_ns:
                heapq.heappush(group.free, row.index)
            yield SliceEnd(row, end_ns)

    def begin(self, event: LaneWork | TaskTimes, end_ns: int) -> tuple[PictureRow, int]:
        """Open a slice on a row. Return the row, and the end of the slice there."""
        if isinstance(event, TaskTimes):
            kind, name = THREAD, ""
        else:
            kind, name = LANE, event.lane
            if event.lane == PHASE and event.thread:
                task_rows = self._group(event.process, THREAD, "", event.thread)
                row, shown_ns = task_rows.around_about(end_ns)
                if row is not None:
                    return self._open_on(row, task_rows, shown_ns), shown_ns
        group = self._group(event.process, kind, name, event.thread)
        row = None
        if isinstance(event, LaneWork) and event.path == WAITING:
            row = group.around(end_ns)
        if row is None and group.free:
            row = group.rows[heapq.heappop(group.free)]
        if row is None:
            row = self._add(group, event.process, kind, name, event.thread)
        return self._open_on(row, group, end_ns), end_ns

    def of_point(self, event: Instant | Sample) -> PictureRow:
        """Return the row of an instant or a sample."""
        kind, name = (INSTANTS, INSTANTS) if isinstance(event, Instant) else (QUANTITY, event.name)
        group = self._group(event.process, kind, name, 0)
        return group.rows[0] if group.rows else self._add(group, event.process, kind, name, 0)

    def _group(self, process: int, kind: str, name: str, thread: int) -> _RowGroup:
        key = process, kind, name, thread
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = _RowGroup()
        return found

    def _add(self, group: _RowGroup, process: int, kind: str, name: str, thread: int) -> PictureRow:
        if kind == THREAD:
            n_threads = self._n_threads[process] = self._n_threads.get(process, 0) + 1
            name = f"thread {n_threads}"
        row = PictureRow(self._n_rows, process, kind, name, thread, len(group.rows))
        self._n_rows += 1
        group.rows.append(row)
        return row

    def _open_on(self, row: PictureRow, group: _RowGroup, end_ns: int) -> PictureRow:
        self._n_slices += 1
        row.ends_ns.append(end_ns)
        # If several slices end at one time, the one that began last ends first.
        heapq.heappush(self._open, (end_ns, -self._n_slices, row, group))
        return row


def nanoseconds(time_s: float) -> int:
    """Return a time in whole nanoseconds. Files hold times in them."""
    return round(time_s * 1e9)


def seconds(time_ns: int) -> float:
    """Return the inverse of `nanoseconds`."""
    return time_ns / 1e9


def earliest_ns(trace: Trace) -> int:
    """Return the time of the first event; 0 without events."""
    times_s = itertools.chain(
        (work.start_s for work in trace.work),
        (task.start_s for task in trace.tasks),
        (instant.at_s for instant in trace.instants),
        (sample.at_s for sample in trace.samples),
    )
    return nanoseconds(min(times_s, default=0.0))


def drawn_samples(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the samples that a file can hold: those that are finite numbers."""
    return (one for one in samples if math.isfinite(one.value))


def draw(trace: Trace) -> Iterator[SliceBegin | SliceEnd | PointEvent]:
    """Draw a trace, in the order of time.

    If events start together, tasks come first and receives last: viewers draw arrows in the order
    of events. An event that ends before its start gets no length.
    """
    arrows = ArrowFinder(trace)
    rows = _Rows()
    work: list[LaneWork] = sorted(trace.work, key=work_order)
    for at_ns, _, _, event in heapq.merge(
        _timed(trace.tasks, "start_s", 0),
        _timed(work, "start_s", 1),
        _timed(trace.instants, "at_s", 2),
        _timed(drawn_samples(trace.samples), "at_s", 3),
    ):
        yield from rows.ended(at_ns)
        if isinstance(event, _POINTS):
            yield PointEvent(rows.of_point(event), at_ns, event)
            continue
        end_ns = max(nanoseconds(event.end_s), at_ns)
        found = arrows.of_task(event) if isinstance(event, TaskTimes) else arrows.of_work(event)
        row, shown_ns = rows.begin(event, end_ns)
        yield SliceBegin(row, at_ns, shown_ns, end_ns - shown_ns, event, found)
    yield from rows.ended(float("inf"))


#: A union in `isinstance` would be made anew for each event.
_POINTS = (Instant, Sample)
_Event = LaneWork | TaskTimes | Instant | Sample


def work_order(work: LaneWork) -> tuple[int, bool]:
    """Sort work by its start. If a send and its receive start together, the send is first."""
    return nanoseconds(work.start_s), work.path == RECEIVE


def _timed(
    events: Iterable[_Event], time: str, order: int
) -> Iterator[tuple[int, int, int, _Event]]:
    """Yield events with their times, and with numbers that decide between equal times."""
    time_of = attrgetter(time)
    timed = ((nanoseconds(time_of(event)), event) for event in events)
    for number, (at_ns, event) in enumerate(sorted(timed, key=itemgetter(0))):
        yield at_ns, order, number, event

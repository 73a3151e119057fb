"""Chrome's trace format: JSON that Perfetto and Chrome's own viewer open. Needs nothing.

An event has one line, so that a file is written and read in pieces. Complete events are slices.
The slices of a chain name it themselves; flow events are the other arrows.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, TextIO

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import Instant, Sample, TaskTimes, Trace
from dask_gpurt.tracing.formats import arguments
from dask_gpurt.tracing.formats.header import Header, decode, encode
from dask_gpurt.tracing.formats.picture import (
    INSTANTS,
    LANE,
    QUANTITY,
    THREAD,
    PictureRow,
    PointEvent,
    SliceBegin,
    draw,
    seconds,
)

#: The order of a process' rows in a viewer: by kind, then as they appear.
_ORDER = {INSTANTS: 0, THREAD: 1, LANE: 2, QUANTITY: 3}
_OF_A_KIND = 1_000_000
#: Times are in tenths of microseconds. More digits would make files a quarter larger.
_TICK_NS = 100
#: Lines that are parsed at once. One at a time takes longer.
_N_LINES = 4096


def write(trace: Trace, file: TextIO) -> None:
    """Write a trace as Chrome's JSON."""
    header, zero_ns = encode(trace)
    file.write(f'{{"displayTimeUnit":"ms","otherData":{{"dask_gpurt":{header}}},"traceEvents":[\n')
    lines = itertools.chain(_of_processes(trace), _of_events(trace, zero_ns))
    # A comma goes between events, and JSON has none after the last one.
    file.write(next(lines, ""))
    for line in lines:
        file.write(",\n")
        file.write(line)
    file.write("\n]}\n")


def _of_processes(trace: Trace) -> Iterator[str]:
    for number, process in enumerate(trace.processes):
        for name, about in (
            ("process_name", {"name": f"{process.name or process.address} on {process.host}"}),
            ("process_labels", {"labels": f"{process.kind} {process.address}"}),
            ("process_sort_index", {"sort_index": number}),
        ):
            yield _metadata(number + 1, 0, name, about)


def _metadata(pid: int, tid: int, name: str, about: dict[str, Any]) -> str:
    return f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{name}","args":{json.dumps(about)}}}'


def _of_events(trace: Trace, zero_ns: int) -> Iterator[str]:
    n_rows = 0
    # Viewers take a thread with the number of its process for the main one.
    first_tid = len(trace.processes) + 1
    for drawn in draw(trace):
        row = drawn.row
        if row.number == n_rows:
            n_rows += 1
            if row.kind != QUANTITY:
                yield from _of_row(row, tid=row.number + first_tid)
        where = f'"pid":{row.process + 1},"tid":{row.number + first_tid}'
        if isinstance(drawn, SliceBegin):
            yield from _of_slice(drawn, where, zero_ns)
        elif isinstance(drawn, PointEvent):
            yield _of_point(drawn, where, zero_ns)


def _of_row(row: PictureRow, tid: int) -> Iterator[str]:
    about = {"name": row.name, "thread": row.thread}
    yield _metadata(row.process + 1, tid, "thread_name", about)
    order = {"sort_index": _ORDER[row.kind] * _OF_A_KIND + row.number}
    yield _metadata(row.process + 1, tid, "thread_sort_index", order)


def _of_slice(drawn: SliceBegin, where: str, zero_ns: int) -> Iterator[str]:
    event = drawn.event
    start, end = (_ticks(time_ns + zero_ns) for time_ns in (drawn.at_ns, drawn.end_ns))
    at = _microseconds(start)
    if isinstance(event, TaskTimes):
        name, category = event.key, "task"
        start_ns, end_ns = (ticks * _TICK_NS - zero_ns for ticks in (start, end))
        found = arguments.of_task(event, start_ns, end_ns, arguments.MICROSECONDS)
    else:
        cut_ns = (_ticks(drawn.end_ns + drawn.cut_ns + zero_ns) - end) * _TICK_NS
        name, category, found = event.path, event.lane, arguments.of_work(event, cut_ns)
    flow = ""
    arrows = drawn.arrows
    if arrows.chain:
        flow = f',"bind_id":"{arrows.chain:#x}"'
        flow += ',"flow_in":true' * arrows.comes + ',"flow_out":true' * arrows.goes
    about = json.dumps(found, separators=(",", ":"))
    yield (
        f'{{"ph":"X",{where},"cat":{quoted(category)},"name":{quoted(name)}{flow},'
        f'"ts":{at},"dur":{_microseconds(end - start)},"args":{about}}}'
    )
    for phase, numbers in (("s", arrows.out), ("t", arrows.through), ("f", arrows.into)):
        # Without `bp`, an arrow would end at the next slice.
        binding = ',"bp":"e"' if phase == "f" else ""
        for number in numbers:
            yield (
                f'{{"ph":"{phase}",{where},"cat":"output","name":"output","id":{number},'
                f'"ts":{at}{binding}}}'
            )


def _of_point(drawn: PointEvent, where: str, zero_ns: int) -> str:
    event = drawn.event
    at = _microseconds(_ticks(drawn.at_ns + zero_ns))
    if isinstance(event, Instant):
        detail = json.dumps({"detail": event.detail})
        return f'{{"ph":"i",{where},"s":"t","name":{quoted(event.name)},"ts":{at},"args":{detail}}}'
    pid = drawn.row.process + 1
    value = json.dumps(event.value)
    return (
        f'{{"ph":"C","pid":{pid},"name":{quoted(event.name)},"ts":{at},"args":{{"value":{value}}}}}'
    )


def _ticks(time_ns: int) -> int:
    return round(time_ns / _TICK_NS)


def _microseconds(ticks: int) -> str:
    whole, tenths = divmod(ticks, 10)
    return f"{whole}.{tenths}" if tenths else str(whole)


def read(file: TextIO) -> Trace:
    """Read a trace that `write` wrote. Another content can raise any error of a parser."""
    first = file.readline()
    if not first.endswith("[\n"):
        raise TraceFileError("dask_gpurt did not write it")
    header = decode(json.loads(first + "]}").get("otherData", {}).get("dask_gpurt"))
    reader = _ChromeReader(header)
    while lines := list(itertools.islice(file, _N_LINES)):
        is_last = lines[-1] == "]}\n"
        if is_last:
            lines.pop()
        for event in json.loads(f"[{''.join(lines).rstrip().removesuffix(',')}]"):
            reader.add(event)
        if is_last:
            header.check()
            return header.trace
    raise TraceFileError("its end is missing")


class _ChromeReader:
    """Adds events of a file to the trace of its header."""

    def __init__(self, header: Header) -> None:
        self._trace, self._zero_ns = header.trace, header.zero_ns
        self._threads: dict[int, int] = {}
        #: One object for each string, however often the file has it.
        self._known: dict[str, str] = {}
        self._add: dict[str, Callable[[int, dict[str, Any]], None]] = {
            "X": self._add_slice,
            "i": self._add_instant,
            "C": self._add_sample,
        }

    def add(self, event: dict[str, Any]) -> None:
        if add := self._add.get(event["ph"]):
            process = event["pid"] - 1
            if not 0 <= process < len(self._trace.processes):
                raise TraceFileError(f"it has an event of process {process}, and no such process")
            add(process, event)
        elif event["name"] == "thread_name":
            self._threads[event["tid"]] = event["args"]["thread"]

    def _one(self, text: str) -> str:
        return self._known.setdefault(text, text)

    def _at_ns(self, event: dict[str, Any]) -> int:
        ticks: int = round(event["ts"] * 10)
        return ticks * _TICK_NS - self._zero_ns

    def _add_slice(self, process: int, event: dict[str, Any]) -> None:
        found = {
            name: self._one(value) if isinstance(value, str) else value
            for name, value in event["args"].items()
        }
        name, thread = self._one(event["name"]), self._threads[event["tid"]]
        start_ns = self._at_ns(event)
        end_ns = start_ns + round(event["dur"] * 10) * _TICK_NS
        if arguments.is_task(found):
            unit = arguments.MICROSECONDS
            task = arguments.task_of(process, name, thread, start_ns, end_ns, found, unit)
            self._trace.tasks.append(task)
        else:
            lane = self._one(event["cat"])
            work = arguments.work_of(process, lane, name, thread, start_ns, end_ns, found)
            self._trace.work.append(work)

    def _add_instant(self, process: int, event: dict[str, Any]) -> None:
        at_s = seconds(self._at_ns(event))
        detail = event["args"]["detail"]
        self._trace.instants.append(Instant(process, self._one(event["name"]), at_s, detail))

    def _add_sample(self, process: int, event: dict[str, Any]) -> None:
        at_s = seconds(self._at_ns(event))
        value = event["args"]["value"]
        self._trace.samples.append(Sample(process, self._one(event["name"]), at_s, value))

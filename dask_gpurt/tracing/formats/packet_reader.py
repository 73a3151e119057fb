"""Reads a trace from packets of Perfetto that `packet_writer` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import IO, Any

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import Instant, Sample, Trace
from dask_gpurt.tracing.formats import arguments
from dask_gpurt.tracing.formats.header import Header, decode
from dask_gpurt.tracing.formats.picture import INSTANTS, seconds
from dask_gpurt.tracing.formats.protobuf import ABOUT, FIRST_ROW, packets


def read(file: IO[bytes]) -> Trace:
    """Read a trace that `packet_writer` wrote. Another content can raise any error of a parser."""
    reader = _PacketReader()
    for packet in packets(file):
        reader.add(packet)
    return reader.end()


class _PacketReader:
    """Adds the events of packets to the trace of the header."""

    def __init__(self) -> None:
        self._header: Header | None = None
        self._at_ns = 0
        #: Kind, process and thread of each row, by the number of its track; names of rows.
        self._rows: dict[int, tuple[str, int, int]] = {}
        self._row_names: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._categories: dict[int, str] = {}
        self._fields: dict[int, str] = {}
        self._values: dict[int, str] = {}
        #: Begun slices of each row: the position in the list of their kind, what they need besides
        #: their end.
        self._begun: dict[int, list[Callable[[int], None]]] = {}

    def add(self, packet: Any) -> None:
        """Add what a packet has."""
        self._learn(packet.interned_data)
        if packet.HasField("track_descriptor"):
            self._add_row(packet.track_descriptor)
        if not packet.HasField("track_event"):
            return
        event = packet.track_event
        self._at_ns += packet.timestamp
        if event.track_uuid == ABOUT:
            self._header = decode(json.loads(event.debug_annotations[0].string_value))
        elif self._header is None:
            raise TraceFileError("dask_gpurt did not write it")
        elif event.type == event.TYPE_SLICE_BEGIN:
            self._begin(event, self._header)
        elif event.type == event.TYPE_SLICE_END:
            self._begun[event.track_uuid].pop()(self._at_ns - self._header.zero_ns)
        else:
            self._add_point(event, self._header)

    def end(self) -> Trace:
        """Return the trace."""
        if self._header is None:
            raise TraceFileError("dask_gpurt did not write it")
        self._header.check()
        if any(self._begun.values()):
            raise TraceFileError("its end is missing")
        return self._header.trace

    def _learn(self, interned: Any) -> None:
        for entry in interned.event_names:
            self._names[entry.iid] = entry.name
        for entry in interned.event_categories:
            self._categories[entry.iid] = entry.name
        for entry in interned.debug_annotation_names:
            self._fields[entry.iid] = entry.name
        for entry in interned.debug_annotation_string_values:
            self._values[entry.iid] = entry.str.decode()

    def _add_row(self, track: Any) -> None:
        if track.uuid < FIRST_ROW or self._header is None:
            return
        kind, process, thread = json.loads(track.description)
        if not 0 <= process < len(self._header.trace.processes):
            raise TraceFileError(f"it has an event of process {process}, and no such process")
        self._rows[track.uuid] = kind, process, thread
        self._row_names[track.uuid] = track.name
        self._begun[track.uuid] = []

    def _arguments(self, event: Any) -> dict[str, arguments.Value]:
        found = {}
        for one in event.debug_annotations:
            kind = one.WhichOneof("value")
            value = getattr(one, kind)
            if kind == "string_value_iid":
                value = self._values[value]
            found[self._fields[one.name_iid]] = value
        return found

    def _begin(self, event: Any, header: Header) -> None:
        _, process, thread = self._rows[event.track_uuid]
        name, start_ns = self._names[event.name_iid], self._at_ns - header.zero_ns
        found, unit = self._arguments(event), arguments.NANOSECONDS
        # The order of events is that of their starts, and the end is not known yet.
        if arguments.is_task(found):
            tasks = header.trace.tasks
            place = len(tasks)
            slice_ = process, name, thread, start_ns
            tasks.append(arguments.task_of(*slice_, start_ns, found, unit))

            def end(end_ns: int) -> None:
                tasks[place] = arguments.task_of(*slice_, end_ns, found, unit)

        else:
            lane = self._categories[event.category_iids[0]]
            works = header.trace.work
            place = len(works)
            part = process, lane, name, thread, start_ns
            works.append(arguments.work_of(*part, start_ns, found))

            def end(end_ns: int) -> None:
                works[place] = arguments.work_of(*part, end_ns, found)

        self._begun[event.track_uuid].append(end)

    def _add_point(self, event: Any, header: Header) -> None:
        kind, process, _ = self._rows[event.track_uuid]
        at_s = seconds(self._at_ns - header.zero_ns)
        if kind == INSTANTS:
            detail = str(self._arguments(event).get("detail", ""))
            name = self._names[event.name_iid]
            header.trace.instants.append(Instant(process, name, at_s, detail))
            return
        is_whole = event.HasField("counter_value")
        value = float(event.counter_value) if is_whole else event.double_counter_value
        header.trace.samples.append(Sample(process, self._row_names[event.track_uuid], at_s, value))

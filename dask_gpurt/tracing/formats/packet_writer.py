"""Writes a trace as packets of Perfetto."""

from __future__ import annotations

import json
import zlib
from typing import IO, Any

from dask_gpurt.tracing.events import Instant, TaskTimes, Trace
from dask_gpurt.tracing.formats import arguments
from dask_gpurt.tracing.formats.header import encode
from dask_gpurt.tracing.formats.picture import (
    INSTANTS,
    LANE,
    QUANTITY,
    THREAD,
    PictureRow,
    PointEvent,
    SliceBegin,
    SliceEnd,
    draw,
)
from dask_gpurt.tracing.formats.protobuf import ABOUT, FIRST_PROCESS, FIRST_ROW, protos

#: Packets that are compressed together.
_N_PACKETS = 8192
_SEQUENCE = 1
#: Numbers of clocks: of the system, of the time of day, and of our differences.
_BOOT, _REALTIME, _DIFFERENCES = 6, 1, 64
#: The order of a process' rows in a viewer: by kind, then as they appear.
_ORDER = {INSTANTS: 0, LANE: 1, QUANTITY: 2}
_OF_A_KIND = 1_000_000


class _Names:
    """Texts of one kind that are written once, and their numbers."""

    def __init__(self, entries: str) -> None:
        self._entries = entries
        self._numbers: dict[str, int] = {}

    def number(self, text: str, packet: Any) -> int:
        """Return the number of a text. A packet that uses it first also has the text."""
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._numbers) + 1
            entry = getattr(packet.interned_data, self._entries).add()
            entry.iid = number
            # A string value is held as bytes.
            if self._entries == "debug_annotation_string_values":
                entry.str = text.encode()
            else:
                entry.name = text
        return number


class _PacketWriter:
    """Writes drawn events as packets.

    Parameters
    ----------
    file
        Gets groups of packets.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._protos = protos()
        self._kinds = self._protos.TrackEvent
        self._file = file
        self._group = self._protos.Trace()
        self._at_ns = 0
        self._n_processes = 0
        self._names = _Names("event_names")
        self._categories = _Names("event_categories")
        self._fields = _Names("debug_annotation_names")
        self._values = _Names("debug_annotation_string_values")

    def write(self, trace: Trace) -> None:
        header, zero_ns = encode(trace)
        self._n_processes = len(trace.processes)
        self._begin(trace, zero_ns)
        self._describe(header)
        for number, process in enumerate(trace.processes):
            track = self._packet().track_descriptor
            track.uuid = FIRST_PROCESS + number
            track.process.pid = number + 1
            track.process.process_name = f"{process.name or process.address} on {process.host}"
            track.process.process_labels.append(f"{process.kind} {process.address}")
            track.child_ordering = track.EXPLICIT
        n_rows = 0
        for drawn in draw(trace):
            if drawn.row.number == n_rows:
                n_rows += 1
                self._add_row(drawn.row)
            if isinstance(drawn, SliceBegin):
                self._add_slice(drawn, zero_ns)
            elif isinstance(drawn, SliceEnd):
                self._event(drawn.row, drawn.at_ns + zero_ns, self._kinds.TYPE_SLICE_END)
            else:
                self._add_point(drawn, zero_ns)
        self._flush()

    def _flush(self) -> None:
        packed = zlib.compress(self._group.SerializeToString(), 6)
        group = self._protos.Trace()
        group.packet.add().compressed_packets = packed
        self._file.write(group.SerializeToString())
        self._group = self._protos.Trace()

    def _packet(self) -> Any:
        if len(self._group.packet) >= _N_PACKETS:
            self._flush()
        packet = self._group.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = packet.SEQ_NEEDS_INCREMENTAL_STATE
        return packet

    def _begin(self, trace: Trace, zero_ns: int) -> None:
        """Set the clocks."""
        packet = self._packet()
        packet.sequence_flags = packet.SEQ_INCREMENTAL_STATE_CLEARED
        packet.trace_packet_defaults.timestamp_clock_id = _DIFFERENCES
        snapshot = packet.clock_snapshot
        snapshot.primary_trace_clock = _BOOT
        for clock, at_ns in (
            (_BOOT, 0),
            (_REALTIME, max(0, round(trace.began_utc_s * 1e9) - zero_ns)),
            (_DIFFERENCES, 0),
        ):
            entry = snapshot.clocks.add()
            entry.clock_id, entry.timestamp = clock, at_ns
        entry.is_incremental = True

    def _describe(self, header: str) -> None:
        """Write the header, as an instant that viewers show."""
        track = self._packet().track_descriptor
        track.uuid, track.name = ABOUT, "about this trace"
        packet = self._packet()
        packet.timestamp = 0
        event = packet.track_event
        event.type, event.track_uuid = event.TYPE_INSTANT, ABOUT
        event.name = "about this trace"
        annotation = event.debug_annotations.add()
        annotation.name, annotation.string_value = "dask_gpurt", header

    def _add_row(self, row: PictureRow) -> None:
        packet = self._packet()
        track = packet.track_descriptor
        track.uuid = FIRST_ROW + row.number
        track.parent_uuid = FIRST_PROCESS + row.process
        if row.kind == THREAD:
            # Perfetto knows threads by these numbers, and the same may exist on several hosts. It
            # takes a thread with the number of its process for the main one.
            track.thread.pid = row.process + 1
            track.thread.tid = row.number + 1 + self._n_processes
            track.thread.thread_name = row.name
        else:
            track.name = row.name
            track.sibling_order_rank = _ORDER[row.kind] * _OF_A_KIND + row.number
        if row.kind == QUANTITY:
            track.counter.SetInParent()
            if "bytes" in row.name:
                track.counter.unit = track.counter.UNIT_SIZE_BYTES
        track.description = json.dumps([row.kind, row.process, row.thread])

    def _event(self, row: PictureRow, at_ns: int, kind: int) -> Any:
        packet = self._packet()
        packet.timestamp = at_ns - self._at_ns
        self._at_ns = at_ns
        event = packet.track_event
        event.type = kind
        event.track_uuid = FIRST_ROW + row.number
        return packet

    def _add_slice(self, drawn: SliceBegin, zero_ns: int) -> None:
        event = drawn.event
        packet = self._event(drawn.row, drawn.at_ns + zero_ns, self._kinds.TYPE_SLICE_BEGIN)
        if isinstance(event, TaskTimes):
            name, category = event.key, "task"
            unit = arguments.NANOSECONDS
            found = arguments.of_task(event, drawn.at_ns, drawn.end_ns, unit)
        else:
            name, category, found = event.path, event.lane, arguments.of_work(event, drawn.cut_ns)
        slice_ = packet.track_event
        slice_.name_iid = self._names.number(name, packet)
        slice_.category_iids.append(self._categories.number(category, packet))
        arrows = drawn.arrows
        if arrows.goes:
            slice_.flow_ids.append(arrows.chain)
        elif arrows.comes:
            slice_.terminating_flow_ids.append(arrows.chain)
        slice_.flow_ids.extend(arrows.out + arrows.through)
        slice_.terminating_flow_ids.extend(arrows.into)
        self._annotate(packet, found)

    def _annotate(self, packet: Any, found: dict[str, arguments.Value]) -> None:
        for name, value in found.items():
            annotation = packet.track_event.debug_annotations.add()
            annotation.name_iid = self._fields.number(name, packet)
            if isinstance(value, str):
                annotation.string_value_iid = self._values.number(value, packet)
            elif isinstance(value, float):
                annotation.double_value = value
            else:
                annotation.int_value = value

    def _add_point(self, drawn: PointEvent, zero_ns: int) -> None:
        event = drawn.event
        if isinstance(event, Instant):
            packet = self._event(drawn.row, drawn.at_ns + zero_ns, self._kinds.TYPE_INSTANT)
            packet.track_event.name_iid = self._names.number(event.name, packet)
            if event.detail:
                self._annotate(packet, {"detail": event.detail})
            return
        counter = self._event(
            drawn.row, drawn.at_ns + zero_ns, self._kinds.TYPE_COUNTER
        ).track_event
        # Whole numbers take less room.
        if float(event.value).is_integer() and abs(event.value) < 1 << 53:
            counter.counter_value = int(event.value)
        else:
            counter.double_counter_value = event.value


def write(trace: Trace, file: IO[bytes]) -> None:
    """Write a trace in Perfetto's format.

    Raises
    ------
    TraceFileError
        The package `perfetto` is missing.
    """
    _PacketWriter(file).write(trace)

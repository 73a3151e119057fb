"""Perfetto's files follow the rules of the format, read back with Perfetto's own classes."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given

from dask_gpurt.tracing.files import write
from tests.tracing.shuffle_trace import shuffle_trace
from tests.tracing.traces import traces

perfetto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

INTERNED = {
    "event_names": "names",
    "event_categories": "categories",
    "debug_annotation_names": "fields",
    "debug_annotation_string_values": "values",
}


def packets_of(trace, path):
    """Return the packets of a file, with those in groups in their places."""
    write(trace, path)
    packets = []
    for packet in perfetto.Trace.FromString(path.read_bytes()).packet:
        if packet.compressed_packets:
            group = perfetto.Trace.FromString(zlib.decompress(packet.compressed_packets))
            packets += group.packet
        else:
            packets.append(packet)
    return packets


class Viewer:
    """Follows packets as a viewer does, and checks that each refers to what is known."""

    def __init__(self):
        self.tracks = {}
        self.known = {kind: {} for kind in INTERNED.values()}
        self.stacks = {}
        self.flows = set()
        self.ended_flows = set()
        self.at_ns = 0
        self.n = dict.fromkeys(("slices", "instants", "counters"), 0)

    def see(self, packet):
        assert packet.trusted_packet_sequence_id
        assert packet.sequence_flags
        for name, kind in INTERNED.items():
            for entry in getattr(packet.interned_data, name):
                assert entry.iid and entry.iid not in self.known[kind]
                self.known[kind][entry.iid] = entry
        if packet.HasField("track_descriptor"):
            self.describe(packet.track_descriptor)
        if packet.HasField("track_event"):
            self.at_ns += packet.timestamp
            self.follow(packet.track_event)

    def describe(self, track):
        assert track.uuid and track.uuid not in self.tracks
        assert not track.parent_uuid or track.parent_uuid in self.tracks
        self.tracks[track.uuid] = track

    def follow(self, event):
        track = self.tracks[event.track_uuid]
        stack = self.stacks.setdefault(event.track_uuid, [])
        assert track.HasField("counter") == (event.type == event.TYPE_COUNTER)
        if event.type == event.TYPE_SLICE_BEGIN:
            assert event.name_iid in self.known["names"]
            assert set(event.category_iids) <= self.known["categories"].keys()
            stack.append(self.at_ns)
            self.n["slices"] += 1
        elif event.type == event.TYPE_SLICE_END:
            assert stack.pop() <= self.at_ns
        elif event.type == event.TYPE_INSTANT:
            self.n["instants"] += 1
        else:
            assert event.WhichOneof("counter_value_field")
            self.n["counters"] += 1
        for annotation in event.debug_annotations:
            assert annotation.name or annotation.name_iid in self.known["fields"]
            if annotation.HasField("string_value_iid"):
                assert annotation.string_value_iid in self.known["values"]
        for number in event.terminating_flow_ids:
            self.ended_flows.add(number)
        self.flows.update(event.flow_ids)


def viewed(packets):
    first, *others = packets
    assert first.sequence_flags & first.SEQ_INCREMENTAL_STATE_CLEARED
    clock = first.trace_packet_defaults.timestamp_clock_id
    clocks = {one.clock_id: one for one in first.clock_snapshot.clocks}
    # Clocks of one sequence have these numbers.
    assert 64 <= clock <= 127 and clocks[clock].is_incremental
    assert first.clock_snapshot.primary_trace_clock in clocks
    viewer = Viewer()
    for packet in others:
        assert not packet.HasField("clock_snapshot")
        viewer.see(packet)
    assert not any(viewer.stacks.values())
    return viewer


@given(trace=traces())
def test_any_trace_is_written_by_the_rules(tmp_path_factory, trace):
    viewer = viewed(packets_of(trace, tmp_path_factory.getbasetemp() / "rules.pftrace"))
    # One instant is the header's.
    assert sum(viewer.n.values()) == trace.n_events + 1


@pytest.fixture(scope="module")
def shuffle(tmp_path_factory):
    trace = shuffle_trace(400)
    packets = packets_of(trace, tmp_path_factory.mktemp("perfetto") / "shuffle.pftrace")
    return trace, viewed(packets)


def test_every_event_of_a_shuffle_is_shown(shuffle):
    trace, viewer = shuffle
    assert viewer.n == {
        "slices": len(trace.work) + len(trace.tasks),
        "instants": len(trace.instants) + 1,
        "counters": len(trace.samples),
    }


def test_flows_of_a_shuffle_have_a_begin_and_an_end(shuffle):
    trace, viewer = shuffle
    assert viewer.ended_flows == viewer.flows
    n_messages = sum(1 for one in trace.work if one.path == "send")
    assert sum(1 for number in viewer.flows if number >= 1 << 62) == n_messages > 100


def test_threads_and_processes_have_numbers_of_their_own(shuffle):
    trace, viewer = shuffle
    threads = [track.thread for track in viewer.tracks.values() if track.HasField("thread")]
    assert len({one.tid for one in threads}) == len(threads) == 8
    processes = [track.process for track in viewer.tracks.values() if track.HasField("process")]
    assert [one.process_name for one in processes] == [
        f"{one.name} on {one.host}" for one in trace.processes
    ]
    pids = {one.pid for one in processes}
    assert {one.pid for one in threads} == pids
    assert not {one.tid for one in threads} & pids


def test_a_lane_is_below_its_process(shuffle):
    _, viewer = shuffle
    lanes = [track for track in viewer.tracks.values() if track.name == "communication"]
    assert len(lanes) >= 4
    assert all(viewer.tracks[track.parent_uuid].HasField("process") for track in lanes)


def test_bytes_are_counted_in_bytes(shuffle):
    _, viewer = shuffle
    units = {
        track.name: track.counter.unit
        for track in viewer.tracks.values()
        if track.HasField("counter")
    }
    assert units["bytes of outputs"] == perfetto.CounterDescriptor.UNIT_SIZE_BYTES
    assert units["cpu"] == perfetto.CounterDescriptor.UNIT_UNSPECIFIED


def test_the_time_of_day_is_known(tmp_path):
    trace = shuffle_trace(2)
    trace.began_utc_s = 1_800_000_000.25
    first, *_ = packets_of(trace, tmp_path / "a.pftrace")
    clocks = {one.clock_id: one.timestamp for one in first.clock_snapshot.clocks}
    assert abs(clocks[1] - 1_800_000_000_250_000_000) < 1000

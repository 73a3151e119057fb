"""Chrome's files follow the documented rules of the format: phases, fields, nesting, flows."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given

from dask_gpurt.tracing.files import write
from tests.tracing.shuffle_trace import shuffle_trace
from tests.tracing.traces import traces

#: Documented phases and the fields that each must have.
PHASES = {
    "X": {"pid", "tid", "ts", "dur", "name", "cat"},
    "s": {"pid", "tid", "ts", "id", "name", "cat"},
    "t": {"pid", "tid", "ts", "id", "name", "cat"},
    "f": {"pid", "tid", "ts", "id", "name", "cat", "bp"},
    "i": {"pid", "tid", "ts", "name", "s"},
    "C": {"pid", "ts", "name", "args"},
    "M": {"pid", "name", "args"},
}
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def events_of(trace, path):
    write(trace, path)
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] in ("ms", "ns")
    return content["traceEvents"]


def check_fields(events):
    for event in events:
        assert PHASES[event["ph"]] <= event.keys()
        if event["ph"] == "M":
            name, kind = METADATA[event["name"]]
            assert isinstance(event["args"][name], kind)
        else:
            assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(math.isfinite(value) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")


def check_nesting(events):
    """Slices of a thread follow each other, or lie in each other."""
    ends: dict[tuple[int, int], list[int]] = {}
    slices = [event for event in events if event["ph"] == "X"]
    for event in slices:
        start = round(event["ts"] * 10)
        end = start + round(event["dur"] * 10)
        stack = ends.setdefault((event["pid"], event["tid"]), [])
        while stack and stack[-1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1]
        stack.append(end)
    assert slices == sorted(slices, key=lambda event: event["ts"])


def check_flows(events):
    """A flow begins, goes on and ends in slices, in the order of time."""
    slices = {(event["pid"], event["tid"], event["ts"]) for event in events if event["ph"] == "X"}
    open_flows = set()
    for event in events:
        if event["ph"] in "stf":
            assert (event["pid"], event["tid"], event["ts"]) in slices
        for name, begins, ends in (
            ((event["cat"], event["id"]), event["ph"] == "s", event["ph"] == "f")
            if event["ph"] in "stf"
            else (event.get("bind_id"), event.get("flow_out"), event.get("flow_in")),
        ):
            if ends or event["ph"] == "t":
                assert name in open_flows
            if begins:
                open_flows.add(name)
    return open_flows


@given(trace=traces(1000))
def test_any_trace_is_written_by_the_rules(tmp_path_factory, trace):
    events = events_of(trace, tmp_path_factory.getbasetemp() / "rules.json")
    check_fields(events)
    check_nesting(events)
    # Arrows of messages are as the trace has them: a receive may lack its send.
    check_flows([event for event in events if event["ph"] in "stfX" and is_output(event)])


def is_output(event):
    """Return whether an event is no message. The trace has what messages have."""
    return int(event.get("bind_id", "0"), 16) < 1 << 62


@pytest.fixture(scope="module")
def shuffle(tmp_path_factory):
    trace = shuffle_trace(100)
    return trace, events_of(trace, tmp_path_factory.mktemp("chrome") / "shuffle.json")


def test_a_shuffle_is_written_by_the_rules(shuffle):
    trace, events = shuffle
    check_fields(events)
    check_nesting(events)
    assert len(check_flows(events)) > len(trace.tasks) / 8
    n_messages = sum(1 for one in trace.work if one.path == "send")
    flows = [
        int(e["bind_id"], 16) for e in events if e.get("flow_in") and e["cat"] == "communication"
    ]
    assert len(set(flows)) == len(flows) == n_messages


def test_processes_and_rows_have_names(shuffle):
    trace, events = shuffle
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(named.values()) == [f"{one.name} on {one.host}" for one in trace.processes]
    rows = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert rows == {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xi"}
    assert len({tid for _, tid in rows}) == len(rows)
    assert not {tid for _, tid in rows} & {pid for pid, _ in rows}


def test_numbers_of_flows_are_exact_in_other_parsers(shuffle):
    """JavaScript has no whole numbers above 2 to the 53rd."""
    _, events = shuffle
    assert all(event["id"] < 1 << 53 for event in events if "id" in event)
    assert all(isinstance(event["bind_id"], str) for event in events if "bind_id" in event)

"""Machine reports survive serialization, and invalid ones are refused."""

from __future__ import annotations

import copy

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.errors import ProtocolError
from dask_gpurt.topology.machine import MAX_PARTS, MachineReport
from tests.topology.trees import NAMES, machine


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return MachineReport(machine("dgx-a100", tmp_path_factory.mktemp("sys")), "0")


@pytest.mark.parametrize("name", NAMES)
def test_machine_reports_survive_serialization(name, tmp_path):
    report = MachineReport(machine(name, tmp_path, addresses={"ens27": ["10.0.0.1"]}), None)
    plain = msgpack.unpackb(msgpack.packb(report.to_plain()), use_list=False)
    assert MachineReport.from_plain(plain) == report


def edited(report, path, value):
    plain = copy.deepcopy(msgpack.unpackb(msgpack.packb(report.to_plain())))
    *parents, last = path
    at = plain
    for one in parents:
        at = at[one]
    at[last] = value
    return plain


GPU = "machine", "gpus", 0
CARD = "machine", "cards", 0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("gpu",), 7),
        (("gpu",), "x" * 1000),
        (("machine",), []),
        (("machine", "name"), "a\nb"),
        (("machine", "extra"), 1),
        (("machine", "numa"), [{}]),
        (("machine", "numa"), "nodes"),
        (("machine", "numa", 0, "number"), -1),
        (("machine", "numa", 0, "number"), 1),
        ((*GPU, "place", "hops", -1, "address"), "0000:0f:00.0"),
        ((*CARD, "name"), "ibp12s0"),
        (("machine", "numa", 0, "memory_nbytes"), True),
        ((*GPU, "memory_nbytes"), 2**80),
        ((*GPU, "place", "hops"), []),
        ((*GPU, "place", "hops"), [{"address": "0000:00:00.0", "nbytes_per_s": 1.0}] * 40),
        ((*GPU, "place", "hops", 0, "address"), "../../etc"),
        ((*GPU, "place", "hops", 0, "nbytes_per_s"), float("nan")),
        ((*GPU, "place", "hops", 0, "nbytes_per_s"), "fast"),
        ((*GPU, "place", "numa"), 1.5),
        ((*GPU, "bonds", 0, "peer"), ""),
        ((*GPU, "bonds", 0, "nbytes_per_s"), -1.0),
        ((*CARD, "kind"), "carrier pigeon"),
        ((*CARD, "addresses"), ["a"] * (MAX_PARTS + 1)),
        ((*CARD, "nbytes_per_s"), False),
    ],
)
def test_invalid_machine_reports_are_refused(report, path, value):
    assert MachineReport.from_plain(report.to_plain()) == report
    with pytest.raises(ProtocolError):
        MachineReport.from_plain(edited(report, path, value))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(["machine", "gpu", "name", "boot", "numa", "gpus", "cards"])


@settings(max_examples=200)
@given(VALUES | st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES)))
def test_values_that_are_no_report_are_refused(plain):
    with pytest.raises(ProtocolError):
        MachineReport.from_plain(plain)


def places(plain, path=()):
    """Return the path of every value in a plain report."""
    items = plain.items() if isinstance(plain, dict) else enumerate(plain)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@settings(max_examples=200)
@given(st.data())
def test_report_with_one_changed_value_is_valid_or_refused(report, data):
    plain = msgpack.unpackb(msgpack.packb(report.to_plain()))
    path = data.draw(st.sampled_from(list(places(plain))))
    try:
        found = MachineReport.from_plain(edited(report, path, data.draw(VALUES)))
    except ProtocolError:
        return
    assert MachineReport.from_plain(found.to_plain()) == found

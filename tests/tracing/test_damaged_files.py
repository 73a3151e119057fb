"""Whatever happens to the content of a file, it is read or refused with its name, and no more."""

from __future__ import annotations

import contextlib
import re
import warnings
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import Trace
from dask_gpurt.tracing.files import read, write
from dask_gpurt.tracing.report.trace_report import report_of
from tests.tracing.shuffle_trace import shuffle_trace

perfetto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

#: What a program or a person could leave in a file.
PIECES = st.sampled_from(
    [
        b"",
        b"0",
        b"-",
        b"9" * 25,
        b"1e999",
        b"NaN",
        b"null",
        b'"',
        b"[]",
        b"{}",
        b",",
        b"\n",
        b"\xff",
    ]
) | st.binary(max_size=4)


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """The content of a file in each format. That of Perfetto is not compressed."""
    folder = tmp_path_factory.mktemp("whole")
    for ending in (".json", ".pftrace"):
        write(shuffle_trace(4), folder / f"a{ending}")
    outer = perfetto.Trace.FromString((folder / "a.pftrace").read_bytes())
    (group,) = outer.packet
    return (folder / "a.json").read_bytes(), zlib.decompress(group.compressed_packets)


def damaged(content: bytes, data: st.DataObject) -> bytes:
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content)))
        n_lost = data.draw(st.integers(0, 12))
        content = content[:place] + data.draw(PIECES) + content[place + n_lost :]
    return content


def look_at(path) -> None:
    try:
        found = read(path)
    except TraceFileError as error:
        assert str(path) in str(error)
    else:
        assert isinstance(found, Trace)


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_json_is_refused_or_read(contents, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(damaged(contents[0], data))
    look_at(path)


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_packets_are_refused_or_read(contents, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.pftrace"
    outer = perfetto.Trace()
    outer.packet.add().compressed_packets = zlib.compress(damaged(contents[1], data))
    path.write_bytes(outer.SerializeToString())
    look_at(path)


BAD_NUMBERS = [b"NaN", b"Infinity", b"-1", b"1e308", b"9" * 23, b'""', b'"x"', b"[]", b"true"]


@settings(max_examples=300)
@given(data=st.data())
def test_a_bad_number_is_refused_by_readers_or_users(contents, tmp_path_factory, data):
    """JSON has more values than an event, and a reader does not look at each."""
    content, folder = contents[0], tmp_path_factory.getbasetemp()
    events_from = content.index(b'"traceEvents"')
    numbers = [
        one.span() for one in re.finditer(rb"(?<=[:\[ ])-?\d+(\.\d+)?", content[events_from:])
    ]
    start, end = data.draw(st.sampled_from(numbers))
    bad = data.draw(st.sampled_from(BAD_NUMBERS))
    path = folder / "bad.json"
    path.write_bytes(content[: events_from + start] + bad + content[events_from + end :])
    with contextlib.suppress(TraceFileError), warnings.catch_warnings(action="ignore"):
        trace = read(path)
        assert isinstance(trace, Trace)
        for use in (
            lambda: report_of(trace),
            lambda: write(trace, folder / "again.json"),
            lambda: write(trace, folder / "again.pftrace"),
        ):
            with contextlib.suppress(TraceFileError):
                use()

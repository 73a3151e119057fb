"""The header of a shuffle message: what is sent arrives, and anything else is refused."""

from __future__ import annotations

import pathlib
import struct
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.errors import ProtocolError
from dask_gpurt.transport import wire

GOLDEN_PATH = pathlib.Path(__file__).parents[1] / "data" / "wire-v1.bin"

deterministic = settings(derandomize=True, deadline=None, max_examples=300)

_U32 = 2**32 - 1
_U64 = 2**64 - 1
_PREAMBLE_NBYTES = 12
_SHARD_NBYTES = 56


@st.composite
def shard_headers(draw):
    count = draw(st.integers(1, _U32))
    arrow = draw(st.integers(0, 2**40))
    pickle = draw(st.integers(0, 2**40))
    return wire.ShardHeader(
        layout_key=draw(st.sampled_from([b"", b"layout", b"another"]) | st.binary(max_size=20)),
        source=draw(st.integers(0, _U32)),
        attempt=draw(st.integers(0, _U64)),
        number=draw(st.integers(0, count - 1)),
        count=count,
        first_slot=draw(st.integers(0, _U32)),
        rows_per_slot=tuple(draw(st.lists(st.integers(0, _U32), max_size=6))),
        buffer_nbytes=arrow + pickle + draw(st.integers(0, 2**40)),
        arrow_nbytes=arrow,
        pickle_nbytes=pickle,
    )


messages = st.lists(shard_headers(), max_size=5)

#: What the golden file holds. Never change either: workers of one version talk to each other.
GOLDEN = [
    wire.ShardHeader(b"layout one", 0, 0x0123456789ABCDEF, 0, 2, 0, (3, 0, 5), 4096, 128, 64),
    wire.ShardHeader(b"layout two", 7, _U64, 0, 1, 258, (1,), 2**40, 0, 2**33),
    wire.ShardHeader(b"layout one", 0, 0x0123456789ABCDEF, 1, 2, 3, (_U32, 1), 1000, 600, 400),
    wire.ShardHeader(b"", _U32, 0, _U32 - 1, _U32, _U32, (), 0, 0, 0),
]


@deterministic
@given(messages)
def test_round_trip(shards):
    assert wire.decode(wire.encode(shards)) == shards


def test_the_golden_message_is_still_written():
    assert wire.encode(GOLDEN) == GOLDEN_PATH.read_bytes()


def test_the_golden_message_is_still_read():
    assert wire.decode(GOLDEN_PATH.read_bytes()) == GOLDEN


def test_the_golden_message_begins_as_documented():
    golden = GOLDEN_PATH.read_bytes()
    assert golden[:4] == b"GRT\x01"
    assert struct.unpack("<II", golden[4:12]) == (3, 4)
    assert golden[12:26] == struct.pack("<I", 10) + b"layout one"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_header_may_come_in_any_buffer(kind):
    assert wire.decode(kind(wire.encode(GOLDEN))) == GOLDEN


def test_a_message_without_shards():
    assert wire.decode(wire.encode([])) == []


def test_a_layout_that_several_shards_share_is_sent_once():
    layout = bytes(range(256)) * 40
    shards = [replace(GOLDEN[0], layout_key=layout, source=source) for source in range(10)]
    encoded = wire.encode(shards)
    assert encoded.count(layout) == 1
    assert wire.decode(encoded) == shards


def test_rows_of_a_shard():
    assert [shard.n_rows for shard in GOLDEN] == [8, 1, _U32 + 1, 0]


# ------------------------------------------------------------------ refusals


def test_every_truncation_is_refused():
    golden = wire.encode(GOLDEN)
    for length in range(len(golden)):
        with pytest.raises(ProtocolError):
            wire.decode(golden[:length])


@pytest.mark.parametrize("shards", [[], GOLDEN[:1], GOLDEN])
@pytest.mark.parametrize("junk", [b"\0", b"GRT\x01", bytes(1000)])
def test_trailing_bytes_are_refused(shards, junk):
    with pytest.raises(ProtocolError, match=f"{len(junk)} bytes too many"):
        wire.decode(wire.encode(shards) + junk)


def test_another_magic_is_refused():
    with pytest.raises(ProtocolError, match="not a shuffle message"):
        wire.decode(b"GRX" + wire.encode(GOLDEN)[3:])


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_refused_and_both_are_named(version):
    header = bytearray(wire.encode(GOLDEN))
    header[3] = version
    with pytest.raises(ProtocolError, match=rf"version {version}\b.*speaks {wire.VERSION}\b"):
        wire.decode(bytes(header))


def test_what_comes_after_another_version_is_not_looked_at():
    with pytest.raises(ProtocolError, match="version 2"):
        wire.decode(b"GRT\x02" + b"\xff" * 8)


def _shard(layout=0, number=0, count=1, n_slots=0, nbytes=0, arrow=0, pickle=0):
    return struct.pack(
        "<IIQIIIIQQQ", layout, 5, 6, number, count, 7, n_slots, nbytes, arrow, pickle
    )


def _message(*shards, n_layouts=1, n_shards=None, layout=b"", layout_nbytes=None):
    preamble = struct.pack("<3sBII", b"GRT", 1, n_layouts, n_shards or len(shards))
    length = len(layout) if layout_nbytes is None else layout_nbytes
    return preamble + struct.pack("<I", length) + layout + b"".join(shards)


def test_the_messages_below_are_refused_for_what_is_wrong_with_them():
    (header,) = wire.decode(_message(_shard(nbytes=9, arrow=4, pickle=5)))
    assert (header.buffer_nbytes, header.arrow_nbytes, header.pickle_nbytes) == (9, 4, 5)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (_message(_shard(layout=1)), "layout 1"),
        (_message(_shard(layout=_U32)), f"layout {_U32}"),
        (_message(_shard(number=1, count=1)), "contradicts"),
        (_message(_shard(number=0, count=0)), "contradicts"),
        (_message(_shard(nbytes=9, arrow=5, pickle=5)), "contradicts"),
        (_message(_shard(nbytes=_U64, arrow=_U64, pickle=1)), "contradicts"),
        (_message(_shard(n_slots=1)), "row counts"),
        (_message(_shard(n_slots=2) + bytes(4)), "row counts"),
        (_message(_shard(), layout_nbytes=_SHARD_NBYTES + 1), "layout longer"),
        (_message(_shard(), n_shards=2), "more than it holds"),
        (_message(_shard(), n_layouts=3, layout_nbytes=_SHARD_NBYTES), "more than it holds"),
    ],
)
def test_a_message_that_contradicts_itself_is_refused(message, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        wire.decode(message)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(_message(_shard(), n_shards=_U32), id="shards"),
        pytest.param(_message(_shard(), n_layouts=_U32), id="layouts"),
        pytest.param(_message(_shard(), n_layouts=_U32, n_shards=_U32), id="both"),
        pytest.param(_message(_shard(), layout_nbytes=_U32), id="layout-length"),
        pytest.param(_message(_shard(n_slots=_U32)), id="slots"),
    ],
)
def test_huge_counts_are_refused_before_anything_is_allocated(message):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            wire.decode(message)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 64 << 10


def test_huge_payload_lengths_are_only_announced():
    """The lengths of what is not in the header are values here: nothing is made that long."""
    tracemalloc.start()
    try:
        (header,) = wire.decode(_message(_shard(nbytes=_U64, arrow=_U64)))
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert header.buffer_nbytes == _U64
    assert peak_nbytes < 64 << 10


def _decodes_or_is_refused(header):
    """Anything but a `ProtocolError` goes through and fails the test."""
    try:
        shards = wire.decode(header)
    except ProtocolError:
        return
    assert sum(shard.n_rows for shard in shards) >= 0
    assert wire.decode(wire.encode(shards)) == shards


@deterministic
@given(st.binary(max_size=300))
def test_arbitrary_bytes(header):
    _decodes_or_is_refused(header)


@deterministic
@given(st.binary(max_size=300))
def test_arbitrary_bytes_behind_a_good_beginning(rest):
    _decodes_or_is_refused(b"GRT\x01" + rest)


@deterministic
@given(messages, st.data())
def test_mutations_of_good_headers(shards, data):
    header = bytearray(wire.encode(shards))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(header)))
        cut = data.draw(st.integers(0, 8))
        header[position : position + cut] = data.draw(st.binary(max_size=8))
    _decodes_or_is_refused(bytes(header))


@deterministic
@given(messages, st.integers(0), st.sampled_from([0, 1, 2**31, _U32 - 1, _U32]))
def test_mutations_of_single_numbers(shards, place, value):
    header = bytearray(wire.encode(shards))
    position = _PREAMBLE_NBYTES - 8 + place % (len(header) - 7)
    header[position : position + 4] = struct.pack("<I", value)
    _decodes_or_is_refused(bytes(header))

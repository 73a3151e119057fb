"""Tests of the message header: valid headers round-trip, and all others are refused."""

from __future__ import annotations

import contextlib
import pathlib
import struct
import zlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.errors import DamagedError, ProtocolError
from dask_gpurt.transport import wire
from tests.allocations import peak_nbytes

GOLDEN_PATH = pathlib.Path(__file__).parents[1] / "data" / "wire-v4.bin"


def sealed(header):
    """Return the header with a valid checksum, so that decoding gets past it."""
    return header[:4] + struct.pack("<I", zlib.crc32(header[8:])) + header[8:]


deterministic = settings(derandomize=True, max_examples=300)

_U32 = 2**32 - 1
_U64 = 2**64 - 1
_PREAMBLE_NBYTES = 8
_SHARD_NBYTES = 72


@st.composite
def shard_headers(draw):
    count = draw(st.integers(1, _U32))
    arrow = draw(st.integers(0, 2**40))
    pickle = draw(st.integers(0, 2**40))
    nbytes = arrow + pickle + draw(st.integers(0, 2**40))
    table = draw(st.binary(max_size=20))
    ends = sorted(draw(st.lists(st.integers(0, nbytes), max_size=3)))
    parts = [end - first for first, end in pairwise([0, *ends])] if table else [nbytes]
    return wire.ShardHeader(
        layout_key=draw(st.sampled_from([b"", b"layout", b"another"]) | st.binary(max_size=20)),
        source=draw(st.integers(0, _U32)),
        attempt=draw(st.integers(0, _U64)),
        number=draw(st.integers(0, count - 1)),
        count=count,
        first_slot=draw(st.integers(0, _U32)),
        packed_rows=wire.pack_rows(draw(st.lists(st.integers(0, _U32), max_size=6))),
        buffer_nbytes=nbytes,
        arrow_nbytes=arrow,
        pickle_nbytes=pickle,
        checksum=draw(st.integers(0, _U32)),
        parts=tuple(parts),
        table=table,
        packed_origins=draw(
            st.integers(0, 3).flatmap(lambda n: st.binary(min_size=12 * n, max_size=12 * n))
        ),
    )


messages = st.lists(shard_headers(), max_size=5)

_ATTEMPT = 0x0123456789ABCDEF
#: Content of the golden file. Never change either: workers of one version exchange them.
GOLDEN = [
    wire.ShardHeader(
        b"layout one",
        0,
        _ATTEMPT,
        0,
        2,
        0,
        wire.pack_rows((3, 0, 5)),
        4096,
        128,
        64,
        0,
        (4096,),
        b"",
    ),
    wire.ShardHeader(
        b"layout two", 7, _U64, 0, 1, 258, wire.pack_rows((1,)), 2**40, 0, 2**33, 9, (2**40,), b""
    ),
    wire.ShardHeader(
        b"layout one",
        0,
        _ATTEMPT,
        1,
        2,
        3,
        wire.pack_rows((_U32, 1)),
        1000,
        600,
        400,
        _U32,
        (7, 3),
        b"a table",
    ),
    wire.ShardHeader(b"", _U32, 0, _U32 - 1, _U32, _U32, b"", 0, 0, 0, 1, (0,), b""),
    wire.ShardHeader(
        b"layout two",
        4,
        _ATTEMPT,
        0,
        1,
        8,
        wire.pack_rows((3, 0, 2)),
        64,
        parts=(64,),
        packed_origins=wire.pack_origins([0, 0, 2], [4, 9, 9], [1, 2, 2]),
    ),
]


@deterministic
@given(messages)
def test_message_survives_encoding(shards):
    assert wire.decode(wire.encode(shards)) == shards


def test_golden_message_is_written_unchanged():
    assert wire.encode(GOLDEN) == GOLDEN_PATH.read_bytes()


def test_golden_message_is_read():
    assert wire.decode(GOLDEN_PATH.read_bytes()) == GOLDEN


def test_the_golden_message_begins_as_documented():
    golden = GOLDEN_PATH.read_bytes()
    assert golden[:4] == b"GRT\x04"
    assert struct.unpack("<III", golden[4:16]) == (zlib.crc32(golden[8:]), 3, 5)
    assert golden[16:30] == struct.pack("<I", 10) + b"layout one"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_header_may_be_any_buffer_type(kind):
    assert wire.decode(kind(wire.encode(GOLDEN))) == GOLDEN


def test_message_without_shards_is_valid():
    assert wire.decode(wire.encode([])) == []


def test_a_layout_that_several_shards_share_is_sent_once():
    layout = bytes(range(256)) * 40
    shards = [replace(GOLDEN[0], layout_key=layout, source=source) for source in range(10)]
    encoded = wire.encode(shards)
    assert encoded.count(layout) == 1
    assert wire.decode(encoded) == shards


def test_shard_header_counts_its_rows():
    assert [shard.n_rows for shard in GOLDEN] == [8, 1, _U32 + 1, 0, 5]


def test_origins_are_read_with_the_slots_of_the_plan():
    slot, source, n_rows = GOLDEN[-1].origins()
    assert (slot.tolist(), source.tolist(), n_rows.tolist()) == ([8, 8, 10], [4, 9, 9], [1, 2, 2])
    assert GOLDEN[0].origins() is None


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "origins",
    [
        pytest.param(([0, 0, 2], [4, 9, 9], [1, 1, 2]), id="too few rows"),
        pytest.param(([0, 0, 1], [4, 9, 9], [1, 2, 2]), id="other slot"),
        pytest.param(([0, 2, 0], [4, 9, 9], [1, 2, 2]), id="slots fall"),
        pytest.param(([0, 0, 3], [4, 9, 9], [1, 2, 2]), id="no such slot"),
        pytest.param(([0, 0, _U32], [4, 9, 9], [1, 2, 2]), id="far too large a slot"),
        pytest.param(([0], [4], [3]), id="rows without an origin"),
    ],
)
def test_origins_that_do_not_fit_the_rows_are_refused(origins):
    header = replace(GOLDEN[-1], packed_origins=wire.pack_origins(*origins))
    (read,) = wire.decode(wire.encode([header]))
    with pytest.raises(ProtocolError, match="origins of shard 0 of 1 do not fit"):
        read.origins()


def test_every_truncation_is_refused():
    golden = wire.encode(GOLDEN)
    for length in range(len(golden)):
        with pytest.raises(ProtocolError):
            wire.decode(golden[:length])


@pytest.mark.parametrize("shards", [[], GOLDEN[:1], GOLDEN])
@pytest.mark.parametrize("junk", [b"\0", b"GRT\x04", bytes(1000)])
def test_trailing_bytes_are_refused(shards, junk):
    with pytest.raises(ProtocolError, match=f"{len(junk)} bytes too many"):
        wire.decode(sealed(wire.encode(shards) + junk))


def test_every_damaged_byte_is_noticed():
    golden = wire.encode(GOLDEN)
    for place in range(4, len(golden)):
        header = bytearray(golden)
        header[place] ^= 1 << place % 8
        with pytest.raises(DamagedError, match="damaged"):
            wire.decode(bytes(header))


def test_other_magic_number_is_refused():
    with pytest.raises(ProtocolError, match="not a shuffle message"):
        wire.decode(b"GRX" + wire.encode(GOLDEN)[3:])


@pytest.mark.parametrize("version", [0, 1, 3, 5, 255])
def test_other_version_is_refused_and_both_are_named(version):
    header = bytearray(wire.encode(GOLDEN))
    header[3] = version
    with pytest.raises(ProtocolError, match=rf"version {version}\b.*speaks {wire.VERSION}\b"):
        wire.decode(bytes(header))


def test_the_content_of_another_version_is_not_decoded():
    with pytest.raises(ProtocolError, match="version 3"):
        wire.decode(b"GRT\x03" + b"\xff" * 8)


def _shard(
    layout=0,
    number=0,
    count=1,
    n_slots=0,
    n_origins=0,
    nbytes=0,
    arrow=0,
    pickle=0,
    parts=0,
    table=0,
):
    sizes = (n_slots, n_origins, nbytes, arrow, pickle)
    fields = (layout, 5, 6, number, count, 7, *sizes, 1, parts, table)
    return struct.pack("<IIQIIIIIQQQIII", *fields)


def _message(*shards, n_layouts=1, n_shards=None, layout=b"", layout_nbytes=None):
    preamble = struct.pack("<3sBIII", b"GRT", 4, 0, n_layouts, n_shards or len(shards))
    length = len(layout) if layout_nbytes is None else layout_nbytes
    return sealed(preamble + struct.pack("<I", length) + layout + b"".join(shards))


def _encoded(*parts):
    """Return a message with a shard of nine bytes that travels in parts of these lengths."""
    lengths = struct.pack(f"<{len(parts)}Q", *parts)
    return _message(_shard(nbytes=9, parts=len(parts), table=1) + lengths + b"t")


def test_the_messages_below_are_refused_for_their_own_defect():
    part = struct.pack("<Q", 9)
    (header,) = wire.decode(_message(_shard(nbytes=9, arrow=4, pickle=5, parts=1) + part))
    assert (header.buffer_nbytes, header.arrow_nbytes, header.pickle_nbytes) == (9, 4, 5)
    (header,) = wire.decode(_encoded(4, 5))
    assert header.parts == (4, 5)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (_message(_shard(layout=1)), "layout 1"),
        (_message(_shard(layout=_U32)), f"layout {_U32}"),
        (_message(_shard(number=1, count=1)), "out of range"),
        (_message(_shard(number=0, count=0)), "out of range"),
        (_message(_shard(nbytes=9, arrow=5, pickle=5)), "out of range"),
        (_message(_shard(nbytes=_U64, arrow=_U64, pickle=1)), "out of range"),
        (_message(_shard(n_slots=1)), "row counts"),
        (_message(_shard(n_slots=2) + bytes(4)), "row counts"),
        (_message(_shard(n_origins=1) + bytes(11)), "origins"),
        (_message(_shard(parts=1) + bytes(7)), "parts"),
        (_message(_shard(table=9) + bytes(8)), "table"),
        (_message(_shard(n_slots=1, parts=1, table=1) + bytes(12)), "table"),
        (_message(_shard(nbytes=9)), "do not add up"),
        (_message(_shard(nbytes=9, parts=1) + struct.pack("<Q", 8)), "do not add up"),
        (_encoded(0, 10), "do not add up"),
        (_encoded(5, 5), "do not add up"),
        (_encoded(_U64, 1), "do not add up"),
        (_message(_shard(), layout_nbytes=_SHARD_NBYTES + 1), "layout longer"),
        (_message(_shard(), n_shards=2), "more than it holds"),
        (_message(_shard(), n_layouts=3, layout_nbytes=_SHARD_NBYTES), "more than it holds"),
    ],
)
def test_inconsistent_message_is_refused(message, complaint):
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
        pytest.param(_message(_shard(n_origins=_U32)), id="origins"),
        pytest.param(_message(_shard(parts=_U32)), id="parts"),
        pytest.param(_message(_shard(table=_U32)), id="table"),
    ],
)
def test_huge_counts_are_refused_before_anything_is_allocated(message):
    def refuse():
        with pytest.raises(ProtocolError):
            wire.decode(message)

    assert peak_nbytes(refuse) < 64 << 10


def test_huge_payload_lengths_are_only_announced():
    """The header only states the lengths of the payload; the decoder allocates none of it."""
    message = _message(_shard(nbytes=_U64, arrow=_U64, table=1) + b"t")
    (header,) = wire.decode(message)
    assert header.buffer_nbytes == _U64
    assert peak_nbytes(wire.decode, message) < 64 << 10


def _decodes_or_is_refused(header):
    """Decode; let any error but a `ProtocolError` fail the test."""
    try:
        shards = wire.decode(header)
    except ProtocolError:
        return
    assert sum(shard.n_rows for shard in shards) >= 0
    assert all(shard.wire_nbytes <= shard.buffer_nbytes for shard in shards)
    assert wire.decode(wire.encode(shards)) == shards
    for shard in shards:
        with contextlib.suppress(ProtocolError):
            shard.origins()


@deterministic
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_decoded_or_refused(header):
    _decodes_or_is_refused(header)


@deterministic
@given(st.binary(max_size=300))
def test_bytes_behind_a_valid_preamble_are_decoded_or_refused(rest):
    _decodes_or_is_refused(sealed(b"GRT\x04" + bytes(4) + rest))


@deterministic
@given(messages, st.data())
def test_mutated_headers_are_refused_or_decoded(shards, data):
    header = bytearray(wire.encode(shards))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(header)))
        cut = data.draw(st.integers(0, 8))
        header[position : position + cut] = data.draw(st.binary(max_size=8))
    _decodes_or_is_refused(bytes(header))
    _decodes_or_is_refused(sealed(bytes(header)))


@deterministic
@given(messages, st.integers(0), st.sampled_from([0, 1, 2**31, _U32 - 1, _U32]))
def test_mutated_numbers_are_refused_or_decoded(shards, place, value):
    header = bytearray(wire.encode(shards))
    position = _PREAMBLE_NBYTES + place % (len(header) - _PREAMBLE_NBYTES - 3)
    header[position : position + 4] = struct.pack("<I", value)
    _decodes_or_is_refused(sealed(bytes(header)))


# ------------------------------------------------------------------ checksums


def content(nbytes):
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 1024, 1025, 5000, 1 << 20])
def test_checksums_notice_any_byte_that_changed(nbytes):
    buffer = content(nbytes)
    before = wire.checksum([buffer])
    assert before == wire.checksum([buffer.copy()]) != 0
    for place in {0, nbytes // 3, nbytes // 2, nbytes - 1} if nbytes else ():
        buffer[place] ^= 0x40
        assert wire.checksum([buffer]) != before
        buffer[place] ^= 0x40


@deterministic
@given(st.binary(min_size=1, max_size=3000), st.data())
def test_checksums_notice_words_that_changed(original, data):
    buffer = np.frombuffer(original, dtype=np.uint8).copy()
    first = data.draw(st.integers(0, len(buffer) - 1))
    new = data.draw(st.binary(min_size=1, max_size=8))[: len(buffer) - first]
    buffer[first : first + len(new)] = np.frombuffer(new, dtype=np.uint8)
    same = buffer.tobytes() == original
    assert (wire.checksum([buffer]) == wire.checksum([np.frombuffer(original, np.uint8)])) == same


def test_checksums_detect_missing_and_moved_bytes():
    buffer = content(8192)
    moved = np.roll(buffer, 8)
    shorter = buffer[:-1]
    zeros = buffer.copy()
    zeros[1024:2048] = 0
    sums = [wire.checksum([one]) for one in (buffer, moved, shorter, zeros)]
    assert len(set(sums)) == 4


def test_checksum_of_several_parts_covers_them_in_order():
    one, other = content(5000), content(700)
    changed = other.copy()
    changed[3] ^= 1
    sums = [wire.checksum(each) for each in ([one, other], [other, one], [one], [one, changed])]
    assert len(set(sums)) == 4
    assert wire.checksum([]) == wire.checksum([one[:0]]) == 1

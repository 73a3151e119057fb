"""Shards are encoded section by section and decode to the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dask_gpurt.codecs.codec import RAW, Section
from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.codecs.encoded_shards import (
    ENTRY_NBYTES,
    SectionEntry,
    decode_shard,
    encode_shard,
    joined,
    pack_table,
    unpack_table,
)
from dask_gpurt.errors import DamagedError, ProtocolError

deterministic = settings(derandomize=True, max_examples=200)


def shard(*columns):
    """Return the buffer and the sections of these columns, one after the other."""
    sections, offset = [], 0
    for number, column in enumerate(columns):
        sections.append(Section(f"c{number}", offset, column.nbytes, column.itemsize))
        offset += column.nbytes
    return np.concatenate([column.view(np.uint8) for column in columns]), sections


def noise(n):
    return np.random.default_rng(n).integers(-(2**63), 2**63 - 1, n)


COUNTING = np.arange(1000)


@st.composite
def shards(draw):
    columns = []
    for _ in range(draw(st.integers(0, 6))):
        n = draw(st.integers(0, 300))
        kind = draw(st.sampled_from(["counting", "noise", "constant", "text"]))
        column = {
            "counting": np.arange(n, dtype=draw(st.sampled_from(["i2", "i4", "i8"]))),
            "noise": noise(n),
            "constant": np.ones(n),
            "text": np.frombuffer(b"one and two " * (n // 12 + 1), np.uint8)[:n],
        }[kind]
        columns.append(column)
    choices = [draw(st.sampled_from([RAW, *HOST_CODECS])) for _ in columns]
    buffer, sections = shard(*columns, np.zeros(0))
    return buffer, sections, [*choices, RAW]


def decoded(encoded, nbytes, parts=None):
    out = np.full(nbytes, 0xA5, dtype=np.uint8)
    decode_shard(encoded.parts if parts is None else parts, encoded.table, out)
    return out


@deterministic
@given(shards())
def test_encoded_shards_decode_to_the_same_bytes(case):
    buffer, sections, choices = case
    encoded = encode_shard(buffer, sections, choices)
    np.testing.assert_array_equal(decoded(encoded, buffer.nbytes), buffer)
    # One buffer with all parts works too.
    whole = np.concatenate(encoded.parts).tobytes()
    np.testing.assert_array_equal(decoded(encoded, buffer.nbytes, [whole]), buffer)
    assert encoded.nbytes <= buffer.nbytes
    assert unpack_table(pack_table(encoded.table)) == encoded.table


def test_shard_that_gains_less_than_its_table_stays_raw():
    """The section saves its two entries and a byte, and the raw bytes around it need one more."""

    class Barely:
        def encode(self, section, itemsize):
            return [section[: len(section) - 2 * ENTRY_NBYTES - 1]]

    buffer, sections = shard(
        np.zeros(10, np.uint8), np.zeros(100, np.uint8), np.zeros(10, np.uint8)
    )
    encoded = encode_shard(buffer, sections, [RAW, 1, RAW], {1: Barely()})
    assert (encoded.table, encoded.nbytes) == ((), buffer.nbytes)


@pytest.mark.parametrize("codec", HOST_CODECS)
def test_incompressible_shards_do_not_grow(codec):
    buffer, sections = shard(*(noise(n) for n in (1, 10, 100, 1000)))
    encoded = encode_shard(buffer, sections, [codec] * 4)
    assert encoded.table == ()
    assert len(encoded.parts) == 1
    assert encoded.parts[0] is buffer
    assert encoded.nbytes == buffer.nbytes


def test_neighbouring_raw_sections_are_one_view():
    buffer, sections = shard(noise(600), noise(610), COUNTING, COUNTING, noise(620), noise(630))
    encoded = encode_shard(buffer, sections, [RAW, 5, 5, 5, 5, RAW])
    assert [entry.codec for entry in encoded.table] == [RAW, 5, 5, RAW]
    before, narrowed, after = encoded.parts
    assert np.shares_memory(before, buffer)
    assert np.shares_memory(after, buffer)
    assert (before.nbytes, after.nbytes) == (9680, 10_000)
    assert narrowed.nbytes < 150
    np.testing.assert_array_equal(decoded(encoded, buffer.nbytes), buffer)


def test_short_raw_ranges_share_a_buffer():
    buffer, sections = shard(COUNTING, noise(5), COUNTING, noise(6))
    encoded = encode_shard(buffer, sections, [5, RAW, 5, RAW])
    assert [entry.codec for entry in encoded.table] == [5, RAW, 5, RAW]
    assert len(encoded.parts) == 1
    np.testing.assert_array_equal(decoded(encoded, buffer.nbytes), buffer)


@pytest.mark.parametrize("change", ["gap", "short", "long"])
def test_sections_have_to_cover_the_buffer(change):
    buffer, sections = shard(COUNTING, COUNTING)
    if change == "gap":
        sections[1] = sections[1]._replace(offset=8008)
    if change == "short":
        sections.pop()
    if change == "long":
        sections[1] = sections[1]._replace(nbytes=8008)
    with pytest.raises(ValueError, match="section"):
        encode_shard(buffer, sections, [RAW] * len(sections))


def changed(table, number, **fields):
    table = list(table)
    old = table[number]
    values = {name: getattr(old, name) for name in SectionEntry.__dataclass_fields__} | fields
    table[number] = SectionEntry(**values)
    return tuple(table)


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (0, {"raw_nbytes": 2**63}),
        (0, {"raw_nbytes": 7999}),
        (0, {"wire_nbytes": 2**63}),
        (0, {"codec": 99}),
        (0, {"codec": 1}),
        (0, {"codec": 7}),
        (0, {"itemsize": 0}),
        (0, {"itemsize": 4}),
        (1, {"codec": 5}),
    ],
)
def test_table_of_another_length_is_refused(number, fields):
    buffer, sections = shard(COUNTING, noise(50))
    encoded = encode_shard(buffer, sections, [5, RAW])
    with pytest.raises(ProtocolError):
        decode_shard(encoded.parts, changed(encoded.table, number, **fields), buffer.copy())


def test_lengths_that_only_add_up_are_refused():
    buffer, sections = shard(COUNTING, noise(50))
    encoded = encode_shard(buffer, sections, [5, RAW])
    narrow, raw = encoded.table
    for table in (
        (
            SectionEntry(5, 8, narrow.raw_nbytes - 8, narrow.wire_nbytes),
            SectionEntry(RAW, 1, raw.raw_nbytes + 8, raw.wire_nbytes),
        ),
        (
            SectionEntry(5, 8, narrow.raw_nbytes, narrow.wire_nbytes + 8),
            SectionEntry(RAW, 1, raw.raw_nbytes, raw.wire_nbytes - 8),
        ),
        (raw, narrow),
    ):
        with pytest.raises(ProtocolError):
            decode_shard([np.concatenate(encoded.parts)], table, buffer.copy())
        with pytest.raises(ProtocolError):
            decode_shard(encoded.parts, table, buffer.copy())


def test_missing_or_extra_parts_are_refused():
    buffer, sections = shard(COUNTING, noise(600))
    encoded = encode_shard(buffer, sections, [5, RAW])
    for parts in ((), encoded.parts[:1], (*encoded.parts, b"more")):
        with pytest.raises(ProtocolError):
            decode_shard(parts, encoded.table, buffer.copy())
    with pytest.raises(ProtocolError):
        decode_shard((buffer[:-1],), (), buffer.copy())


@deterministic
@given(shards(), st.data())
def test_damaged_encoded_bytes_are_noticed(case, data):
    buffer, sections, choices = case
    encoded = encode_shard(buffer, sections, choices)
    coded = [n for n, e in enumerate(encoded.table) if e.codec != RAW]
    assume(coded)
    number = data.draw(st.sampled_from(coded))
    start = sum(e.wire_nbytes for e in encoded.table[:number])
    position = start + data.draw(st.integers(0, encoded.table[number].wire_nbytes - 1))
    whole = np.concatenate(encoded.parts)
    whole[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedError):
        decoded(encoded, buffer.nbytes, [whole])


@deterministic
@given(
    # An empty table is that of raw bytes.
    st.just(b"") | st.binary(max_size=60),
    st.binary(max_size=300),
    st.integers(-1, 1) | st.integers(0, 300),
)
def test_any_bytes_decode_to_a_shard_or_raise(packed, payload, more):
    out = np.empty(max(0, len(payload) + more), dtype=np.uint8)
    try:
        decode_shard([payload], unpack_table(packed), out)
    except ProtocolError:
        return
    assert out.tobytes() == payload


def test_truncated_table_is_refused():
    with pytest.raises(ProtocolError, match="short"):
        unpack_table(b"\0" * (ENTRY_NBYTES + 1))


def test_short_neighbouring_sections_are_joined():
    sections = joined([(f"c{n}", n * 800, 800, 8) for n in range(100)])
    assert [s.nbytes for s in sections] == [32 * 800] * 3 + [4 * 800]
    assert sections[0].name == "c0..c31"
    assert [s.offset for s in sections] == [0, 25_600, 51_200, 76_800]


def test_long_sections_and_other_item_sizes_stay_apart():
    apart = [
        ("a", 0, 20_000, 8),
        ("b", 20_000, 20_000, 8),
        ("c", 40_000, 80, 8),
        ("d", 40_080, 9, 1),
    ]
    assert joined(apart) == apart


def test_sections_behind_padding_are_not_joined():
    apart = [("a", 0, 80, 4), ("b", 80, 86, 4), ("c", 166, 80, 4), ("d", 246, 80, 4)]
    assert [s.name for s in joined(apart)] == ["a..b", "c..d"]


def test_shards_of_similar_length_are_joined_the_same_way():
    def names(rows):
        return [s.name for s in joined([(f"c{n}", n * rows * 8, rows * 8, 8) for n in range(50)])]

    assert names(140) == names(200) == names(255)


@given(st.lists(st.tuples(st.integers(0, 40_000), st.sampled_from([1, 2, 8])), max_size=20))
def test_joined_sections_cover_the_same_bytes(wanted):
    sections, offset = [], 0
    for number, (nbytes, itemsize) in enumerate(wanted):
        sections.append((str(number), offset, nbytes, itemsize))
        offset += nbytes
    end = 0
    for section in joined(sections):
        assert section.offset == end
        end += section.nbytes
    assert end == offset

"""Contents of device tables survive a round trip, and invalid contents are refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.frames.device.device_contents import (
    TYPES,
    VERSION,
    DeviceColumn,
    decode,
    encode,
    mask_nbytes,
)

#: 5 rows of an integer, a text with a missing value, a list of small integers, and a decimal.
N_ROWS = 5
MEMORY_NBYTES = 512
COLUMNS = (
    DeviceColumn("INT64", 5, offset=0, nbytes=40),
    DeviceColumn(
        "STRING",
        5,
        n_missing=1,
        offset=40,
        nbytes=17,
        mask=64,
        children=(DeviceColumn("INT32", 6, offset=128, nbytes=24),),
    ),
    DeviceColumn(
        "LIST",
        5,
        children=(
            DeviceColumn("INT32", 6, offset=192, nbytes=24),
            DeviceColumn("INT8", 9, n_missing=2, offset=256, nbytes=9, mask=320),
        ),
    ),
    DeviceColumn("DECIMAL128", 5, offset=384, nbytes=80, scale=-2),
)


def changed(number: int, **fields) -> tuple[DeviceColumn, ...]:
    """Return COLUMNS with one invalid column."""
    columns = list(COLUMNS)
    columns[number] = dataclasses.replace(columns[number], **fields)
    return tuple(columns)


def test_contents_round_trip():
    assert decode(encode(COLUMNS), N_ROWS, MEMORY_NBYTES) == COLUMNS


@pytest.mark.parametrize("n_rows", [0, 3])
def test_a_table_without_columns_allows_any_number_of_rows(n_rows):
    assert decode(encode(()), n_rows, 0) == ()


def test_empty_strings_and_lists_may_have_no_offsets():
    columns = (
        DeviceColumn("STRING", 0),
        DeviceColumn("LIST", 0, children=(DeviceColumn("INT32", 0), DeviceColumn("STRING", 0))),
    )
    assert decode(encode(columns), 0, 0) == columns


def test_members_of_a_structure_have_its_rows():
    member = DeviceColumn("INT32", 2, nbytes=8)
    assert decode(encode([DeviceColumn("STRUCT", 2, children=(member,))]), 2, 8)
    short = dataclasses.replace(member, n_rows=1)
    with pytest.raises(ValueError, match="rows"):
        decode(encode([DeviceColumn("STRUCT", 2, children=(short,))]), 2, 8)


@pytest.mark.parametrize("n_rows, nbytes", [(0, 0), (1, 4), (32, 4), (33, 8)])
def test_a_mask_is_read_in_words(n_rows, nbytes):
    assert mask_nbytes(n_rows) == nbytes


OFFSETS = DeviceColumn("INT32", 6, offset=128, nbytes=24)


@pytest.mark.parametrize(
    "columns",
    [
        changed(0, offset=480),
        changed(0, offset=4),
        changed(0, nbytes=39),
        changed(0, nbytes=1 << 40),
        changed(0, offset=(1 << 64) - 8),
        changed(0, n_rows=4),
        changed(0, n_missing=6),
        changed(0, n_missing=1),
        changed(0, mask=MEMORY_NBYTES),
        changed(0, mask=-8),
        changed(0, scale=2),
        changed(0, children=(OFFSETS,)),
        changed(1, children=()),
        changed(1, children=(dataclasses.replace(OFFSETS, n_rows=5),)),
        changed(1, children=(dataclasses.replace(OFFSETS, type="FLOAT32"),)),
        changed(1, children=(dataclasses.replace(OFFSETS, mask=0),)),
        changed(1, nbytes=500),
        changed(2, children=(OFFSETS,)),
        changed(2, nbytes=8),
    ],
    ids=str,
)
def test_inconsistent_layouts_are_refused(columns):
    with pytest.raises(ValueError):
        decode(encode(columns), N_ROWS, MEMORY_NBYTES)


def test_lists_in_lists_have_an_end():
    column = DeviceColumn("INT8", 0)
    for _ in range(40):
        column = DeviceColumn("LIST", 0, children=(DeviceColumn("INT32", 0), column))
    with pytest.raises(ValueError, match="too deep"):
        decode(encode([column]), 0, 0)


def test_another_version_says_so():
    contents = bytearray(encode(COLUMNS))
    contents[3] = VERSION + 1
    with pytest.raises(ValueError, match="install the same"):
        decode(bytes(contents), N_ROWS, MEMORY_NBYTES)


@pytest.mark.parametrize("end", range(0, 60))
def test_contents_cut_short_are_refused(end):
    with pytest.raises(ValueError):
        decode(encode(COLUMNS)[:end], N_ROWS, MEMORY_NBYTES)


def test_type_numbers_never_change():
    """The wire format uses the numbers."""
    assert TYPES[:4] == ("INT8", "INT16", "INT32", "INT64")
    assert TYPES[21:] == ("DECIMAL32", "DECIMAL64", "DECIMAL128", "STRING", "LIST", "STRUCT")


def within(columns, memory_nbytes):
    for column in columns:
        assert 0 <= column.offset <= column.offset + column.nbytes <= memory_nbytes
        if column.mask is not None:
            assert 0 <= column.mask <= column.mask + mask_nbytes(column.n_rows) <= memory_nbytes
        within(column.children, memory_nbytes)


def checked(contents: bytes, n_rows: int, memory_nbytes: int) -> None:
    """Check that contents are refused or stay within the memory."""
    try:
        columns = decode(contents, n_rows, memory_nbytes)
    except ValueError:
        return
    within(columns, memory_nbytes)
    assert all(column.n_rows == n_rows for column in columns)


many = settings(derandomize=True, max_examples=500)


@many
@given(st.binary(max_size=300), st.integers(0, 10), st.integers(0, 1000))
def test_any_bytes_are_refused_or_within_the_memory(contents, n_rows, memory_nbytes):
    checked(contents, n_rows, memory_nbytes)


@many
@given(st.data())
def test_damaged_contents_are_refused_or_within_the_memory(data):
    contents = np.frombuffer(encode(COLUMNS), np.uint8).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(contents) - 1))
        contents[position] = data.draw(st.sampled_from([0, 1, 7, 127, 128, 255]))
    checked(contents.tobytes(), N_ROWS, MEMORY_NBYTES)

"""Sections of a packed shard cover all of its bytes, each with bytes of one kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dask_gpurt.frames.adapter import Selection
from dask_gpurt.frames.pandas_ import PandasFrames


def packed(frame):
    adapter = PandasFrames(frame.iloc[:0], "slot", drop_column=True)
    opened = adapter.open(frame)
    (shard,) = opened.gather([Selection(np.arange(len(frame)), True)])
    return adapter, opened.layout_key, shard


def sections_of(frame):
    adapter, key, shard = packed(frame)
    return shard, adapter.sections(key, shard)


def test_columns_have_names_and_correct_places():
    frame = pd.DataFrame(
        {
            "slot": 0,
            "price": np.arange(5) / 7,
            3: np.arange(5),
            "flag": np.arange(5) > 2,
            "maybe": pd.array([1, 2, None, 4, 5], dtype="Int32"),
        },
        index=np.arange(5) + 10,
    )
    shard, sections = sections_of(frame)
    named = {name: (nbytes, itemsize) for name, _, nbytes, itemsize in sections}
    assert named == {
        "price": (40, 8),
        "3": (40, 8),
        "index level 0": (40, 8),
        "maybe": (20, 4),
        "padding 2": (4, 1),
        "flag": (5, 1),
        "maybe part 1": (5, 1),
        "padding 3": (6, 1),
    }
    (offset,) = (first for name, first, *_ in sections if name == "price")
    np.testing.assert_array_equal(shard.buffer[offset : offset + 40].view("f8"), frame["price"])


def test_columns_of_the_same_name_are_distinguished():
    frame = pd.DataFrame(np.zeros((4, 3), dtype=int), columns=["slot", "x", "x"])
    _, sections = sections_of(frame)
    assert [name for name, *_ in sections] == ["x (column 0)", "x (column 1)", "index level 0"]


def test_string_offsets_and_bytes_are_separate_sections():
    words = ["alpha", "be", "", "delta"] * 50
    columns = {"arrow": words, "more": words[::-1]}
    frame = pd.DataFrame({"slot": 0, **columns}).astype(dict.fromkeys(columns, "string[pyarrow]"))
    shard, sections = sections_of(frame)
    found = {
        name: (shard.buffer[offset : offset + nbytes], itemsize)
        for name, offset, nbytes, itemsize in sections
    }
    text, itemsize = found["arrow values"]
    assert itemsize == 1
    assert text.tobytes() == "".join(words).encode()
    offsets, itemsize = found["more offsets"]
    width = f"i{itemsize}"
    np.testing.assert_array_equal(np.diff(offsets.view(width)), [len(word) for word in words[::-1]])


@pytest.mark.parametrize(
    "kind",
    [
        pa.int16(),
        pa.bool_(),
        pa.decimal128(9, 2),
        pa.list_(pa.int64()),
        pa.struct([("a", pa.int8())]),
        pa.dictionary(pa.int8(), pa.string()),
        pa.large_string(),
        pa.null(),
    ],
    ids=str,
)
def test_sections_cover_any_arrow_type(kind):
    values = {
        "list<item: int64>": [[1, 2], None, []],
        "struct<a: int8>": [{"a": 1}, None, {"a": 3}],
        "null": [None] * 3,
    }.get(str(kind), [1, 0, 1])
    if "string" in str(kind):
        values = ["a", "b", None]
    column = pd.arrays.ArrowExtensionArray(pa.chunked_array([as_type(values, kind)]))
    shard, sections = sections_of(pd.DataFrame({"slot": [0, 0, 0], "x": column}))
    end = 0
    for _, offset, nbytes, _ in sections:
        assert offset == end
        end += nbytes
    assert end == shard.buffer.nbytes


def as_type(values, kind):
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    if pa.types.is_boolean(kind):
        values = [bool(value) for value in values]
    return pa.array(values, kind)


def test_a_damaged_arrow_section_is_a_value_error():
    adapter, key, shard = packed(
        pd.DataFrame({"slot": 0, "x": pd.array(["a", "b", "c"], "string[pyarrow]")})
    )
    broken = shard.buffer.copy()
    broken[-shard.arrow_nbytes :] = 255
    with pytest.raises(ValueError, match="Arrow"):
        adapter.sections(key, replace(shard, buffer=broken))

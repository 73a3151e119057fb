"""Arrow arrays and tables are restored equal from their flat form."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.frames.flat.values import flatten, restore
from tests.frames.flat.value_cases import (
    ARROW,
    assert_same,
    copies_of,
    deterministic,
    there_and_back,
)

# ------------------------------------------------------------------ Arrow


@pytest.mark.parametrize("name", ARROW)
@pytest.mark.parametrize("first", [0, 3, 8, 11])
@pytest.mark.parametrize("length", [0, 1, 9])
def test_arrow_value_is_restored_equal(name, first, length):
    array = ARROW[name].slice(first, length)
    chunks = pa.chunked_array([array, ARROW[name], array])
    schema = pa.schema(
        [pa.field("x", array.type, metadata={"k": "v"}), pa.field("n", pa.int64(), nullable=False)],
        metadata={"of": "the table"},
    )
    for value in (
        array,
        chunks,
        pa.chunked_array([], type=array.type),
        pa.record_batch([array, pa.array(range(length))], schema=schema),
        pa.table([chunks, pa.array(range(len(chunks)))], schema=schema),
    ):
        assert_same(there_and_back(value), value)


def test_tables_without_rows_or_columns_are_restored():
    table = pa.table({"a": [1, 2]}).replace_schema_metadata({"of": "the table"})
    (batch,) = table.to_batches()
    values = [table.slice(0, 0), pa.table({}), batch, table.select([]), batch.select([])]
    for value in [*values, values, {"in a dict": table.select([])}]:
        assert_same(there_and_back(value), value)


def test_an_arrow_slice_does_not_keep_its_parent():
    for name in ("integers", "bits", "text", "large text", "bytes of one length", "dictionary"):
        parent = pa.concat_arrays([ARROW[name]] * 10_000)
        flat = flatten(parent.slice(200_003, 17))
        assert flat.nbytes < 2_000
        assert_same(restore(flat.header, copies_of(flat)), parent.slice(200_003, 17))


@deterministic
@given(
    st.lists(st.one_of(st.none(), st.text(max_size=5)), max_size=40),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from(["string", "large_string", "dictionary", "binary"]),
)
def test_any_slice_of_text_is_restored_equal(words, first, length, kind):
    array = pa.array(words, pa.string())
    if kind == "dictionary":
        array = array.dictionary_encode()
    else:
        array = array.cast(kind)
    array = array.slice(min(first, len(array)), length)
    assert_same(there_and_back(array), array)

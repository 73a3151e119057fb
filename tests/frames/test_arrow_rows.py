"""Rows gathered from Arrow columns agree with Arrow's own `take`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.frames.arrow_rows import ArrowRows

BYTES = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]


def taken_as_arrow_does(column: pa.ChunkedArray, rows: np.ndarray) -> pa.Array:
    return pa.concat_arrays([*column.take(pa.array(rows)).chunks, pa.array([], column.type)])


def check(column: pa.ChunkedArray, rows: np.ndarray) -> None:
    taken = ArrowRows(column).take(rows)
    taken.validate(full=True)
    assert taken.type == column.type
    assert taken.equals(taken_as_arrow_does(column, rows))


@st.composite
def columns_of_bytes(draw: st.DrawFn) -> pa.ChunkedArray:
    """Columns with values of one length, of almost one length, or of any length, in chunks."""
    kind = draw(st.sampled_from(BYTES))
    width = draw(st.integers(0, 20))
    same = st.text("abc", min_size=width, max_size=width)
    odd = st.none() | st.text("abc", max_size=20)
    usual = draw(st.sampled_from([same, same, same | odd, odd]))
    values = draw(st.lists(usual, min_size=1, max_size=40))
    array = pa.array([None if v is None else v.encode() for v in values], pa.binary()).cast(kind)
    begin = draw(st.integers(0, len(array) - 1))
    array = array.slice(begin)
    cut = draw(st.integers(0, len(array)))
    return pa.chunked_array(draw(st.sampled_from([[array], [array[:cut], array[cut:]]])), type=kind)


@given(columns_of_bytes(), st.data())
def test_bytes_of_any_and_of_one_length(column: pa.ChunkedArray, data: st.DataObject) -> None:
    wanted = data.draw(st.sets(st.integers(0, len(column) - 1)))
    check(column, np.array(sorted(wanted), dtype=np.intp))


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None, 3, 4]),
        pa.array([[1, 2], [], None, [3]]),
        pa.array(["x", "y", "x", "y"]).dictionary_encode(),
        pa.array([b"12", b"34", b"56", b"78"], pa.binary(2)),
        pa.array([None] * 4, pa.string()),
        pa.nulls(4),
    ],
    ids=lambda array: str(array.type),
)
@pytest.mark.parametrize("cut", [0, 1, 4])
def test_other_types(array: pa.Array, cut: int) -> None:
    column = pa.chunked_array([array[:cut], array[cut:]])
    check(column, np.array([0, 2, 3]))
    check(column, np.array([], dtype=np.intp))


def test_mixed_lengths_with_a_whole_mean_are_not_fixed_width() -> None:
    check(pa.chunked_array([["ab", "", "abcd", "ab"]], pa.large_string()), np.array([1, 2]))


@pytest.mark.parametrize("values", [["a", "b", "c"], ["a", "bc", ""]])
def test_gathered_rows_do_not_keep_the_column_alive(values: list[str]) -> None:
    """Otherwise, a shard that stays here would keep its whole input partition in memory."""
    column = pa.chunked_array([values], pa.large_string())
    taken = ArrowRows(column).take(np.array([0, 1, 2]))

    def addresses(array: pa.Array) -> set[int]:
        return {buffer.address for buffer in array.buffers() if buffer is not None}

    assert not addresses(taken) & addresses(column.chunk(0))

"""The inner loops of a sending task agree with plain NumPy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.frames import gather
from dask_gpurt.frames.gather import Kernels, RowCounts, gather_columns, gather_into, group_rows


@given(st.lists(st.integers(-1, 6), max_size=300))
def test_group_rows_is_a_stable_sort(slots):
    codes = np.array(slots, dtype=np.intp)
    rows, offsets = group_rows(codes, 7)
    for slot in range(7):
        assert rows[offsets[slot] : offsets[slot + 1]].tolist() == [
            row for row, code in enumerate(slots) if code == slot
        ]


@pytest.mark.parametrize("n_slots", [7, 70_000])
def test_group_rows_without_pandas_kernel(monkeypatch, n_slots):
    codes = np.random.default_rng(0).integers(-1, n_slots, 5_000)
    fast = group_rows(codes, n_slots)
    monkeypatch.setattr(gather, "_kernels", lambda: Kernels({}, None))
    slow = group_rows(codes, n_slots)
    for one, other in zip(fast, slow, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "dtype", ["i1", "u2", "i4", "f2", "f4", "f8", "?", "c8", "c16", "M8[ns]", ">i8", ">f4"]
)
@pytest.mark.parametrize("kernels", [True, False])
def test_gather_writes_into_the_output(monkeypatch, dtype, kernels):
    if not kernels:
        monkeypatch.setattr(gather, "_kernels", lambda: Kernels({}, None))
    rng = np.random.default_rng(0)
    values = rng.integers(0, 100, (2, 50)).astype(dtype)
    values.flags.writeable = False
    rows = rng.integers(0, 50, 20)
    for source in (values[0], values[:, 3], values[0, ::2]):
        chosen = rows % len(source)
        out = np.zeros(20, dtype=dtype)
        gather_into(source, chosen, out)
        np.testing.assert_array_equal(out, source[chosen])


@pytest.mark.parametrize(("start", "step"), [(0, 1), (5, 1), (7, 3), (10, -2)])
def test_gather_reads_a_counting_column(start, step):
    rows = np.array([4, 0, 2])
    out = np.zeros(3, dtype=np.int64)
    gather_into(RowCounts(start, step), rows, out)
    assert out.tolist() == [start + step * row for row in (4, 0, 2)]


@given(
    slots=st.lists(st.integers(0, 3), max_size=60),
    ascending=st.booleans(),
    block_rows=st.integers(1, 70),
    least_piece_rows=st.integers(0, 20),
    read_ahead=st.booleans(),
)
def test_the_gather_does_not_depend_on_the_blocks(
    slots, ascending, block_rows, least_piece_rows, read_ahead
):
    n_rows = len(slots)
    rng = np.random.default_rng(n_rows)
    wide = rng.random((n_rows, 3))
    columns = [
        np.arange(n_rows),
        wide[:, 1],
        rng.integers(0, 2, n_rows).astype(bool),
        np.array(["NaT", "2026-01-01"] * n_rows, "M8[ns]")[::2],
        wide[:, 2].astype("c16"),
        np.arange(n_rows, dtype=">i4"),
        np.where(rng.random(n_rows) < 0.5, np.nan, 1.0),
        np.zeros(n_rows, "V3"),
        RowCounts(7, 3),
    ]
    rows, offsets = group_rows(np.array(slots, dtype=np.intp), 4)
    rows_of = [rows[a:b] for a, b in pairwise(offsets)]
    if not ascending:
        rows_of = [rows[::-1] for rows in rows_of]
    outs = [[np.empty(len(rows), column.dtype) for rows in rows_of] for column in columns]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "BLOCK_ROWS", block_rows)
        patch.setattr(gather, "LEAST_PIECE_ROWS", least_piece_rows)
        patch.setattr(gather, "_READ_AHEAD_ROWS", range(1, n_rows + 1 if read_ahead else 1))
        gather_columns(zip(columns, outs, strict=True), rows_of, n_rows, ascending=ascending)
    columns[-1] = 7 + 3 * np.arange(n_rows)
    for column, found in zip(columns, outs, strict=True):
        for rows, out in zip(rows_of, found, strict=True):
            np.testing.assert_array_equal(out, column[rows])


def test_long_columns_are_gathered_block_by_block(monkeypatch):
    """Otherwise, data that is read ahead would leave the cache before its use."""
    order = []

    def kernel(source, rows, out, fill):
        order.append((source.itemsize, rows.tolist()))
        out[:] = source[rows]

    monkeypatch.setattr(gather, "_kernels", lambda: Kernels({2: kernel, 8: kernel}, None))
    monkeypatch.setattr(gather, "BLOCK_ROWS", 4)
    monkeypatch.setattr(gather, "LEAST_PIECE_ROWS", 1)
    rows_of = [np.array([1, 2, 5, 9]), np.array([0, 4, 6, 8])]
    columns = [np.arange(10), np.arange(10, dtype=np.int16)]
    outs = [[np.empty_like(column[:4]) for _ in rows_of] for column in columns]
    gather_columns(zip(columns, outs, strict=True), rows_of, 10, ascending=True)
    assert order == [
        *((8, [1, 2]), (8, [0]), (2, [1, 2]), (2, [0])),
        *((8, [5]), (8, [4, 6]), (2, [5]), (2, [4, 6])),
        *((8, [9]), (8, [8]), (2, [9]), (2, [8])),
    ]
    order.clear()
    gather_columns(zip(columns, outs, strict=True), rows_of, 10)
    assert [len(rows) for _, rows in order] == [4, 4, 4, 4]

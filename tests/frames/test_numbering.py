"""Partition numbers agree with Dask's own."""

from __future__ import annotations

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.shuffle import partitioning_index
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dask_gpurt.frames import numbering
from dask_gpurt.frames.numbering import (
    agrees_with,
    columns_hashed,
    columns_to_hash,
    partition_numbers,
)

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]


def stock_numbers(frame, n_partitions):
    return partitioning_index(frame.astype(np.float64), n_partitions)


@given(
    columns=st.integers(0, 40).flatmap(
        lambda n_rows: st.lists(
            st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, n_rows)),
            min_size=1,
            max_size=4,
        )
    ),
    n_partitions=st.integers(1, 70_000),
    block_rows=st.sampled_from([1, 7, 1 << 15]),
)
def test_numbers_are_those_of_dask(columns, n_partitions, block_rows):
    expected = stock_numbers(pd.DataFrame(dict(enumerate(columns))), n_partitions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbering, "BLOCK_ROWS", block_rows)
        found = partition_numbers(columns, n_partitions)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("rows", [0, 1, numbering.BLOCK_ROWS, numbering.BLOCK_ROWS + 1, 100_000])
def test_rows_at_the_edges_of_blocks(rows):
    column = np.random.default_rng(1).integers(-(1 << 40), 1 << 40, rows)
    expected = stock_numbers(pd.DataFrame({"a": column}), 37)
    assert np.array_equal(partition_numbers([column], 37), expected)


def test_a_strided_column_is_numbered_and_not_changed():
    column = np.arange(20)[::2]
    expected = stock_numbers(pd.DataFrame({"a": column}), 5)
    assert np.array_equal(partition_numbers([column], 5), expected)
    assert column.tolist() == list(range(0, 20, 2))


FRAME = pd.DataFrame(
    {
        "n": [1, 2],
        "x": [0.5, np.nan],
        "yes": [True, False],
        "name": ["a", "b"],
        "day": pd.to_datetime(["2026-01-01", "2026-01-02"]),
        "whole": pd.array([1, None], dtype="Int64"),
        "mode": pd.Categorical([1, 2]),
        "z": [1j, 2j],
        3: [4, 5],
    }
)


@pytest.mark.parametrize("index", [["n"], "n", ["n", "x", "yes"], [3], ["x", 3]])
def test_plain_numbers_are_taken(index):
    columns = columns_to_hash(FRAME, index, FRAME.iloc[:0])
    labels = index if isinstance(index, list) else [index]
    assert all(
        np.shares_memory(c, FRAME[n].to_numpy()) for c, n in zip(columns, labels, strict=True)
    )


@pytest.mark.parametrize(
    "index",
    [
        ["name"],
        ["n", "name"],
        ["day"],
        ["whole"],
        ["mode"],
        ["z"],
        ["missing"],
        ["n", "n"],
        [],
        None,
        [("n",)],
        FRAME[["n"]],
    ],
)
def test_anything_else_is_left_to_dask(index):
    assert columns_to_hash(FRAME, index, FRAME.iloc[:0]) is None


def test_ambiguous_labels_are_left_to_dask():
    meta = FRAME.iloc[:0]
    assert columns_to_hash(FRAME.rename_axis("n"), ["n"], meta) is None
    twice = pd.concat([FRAME[["n"]], FRAME[["n"]]], axis=1)
    assert columns_to_hash(twice, ["n"], twice.iloc[:0]) is None


def test_a_label_of_several_columns_is_left_to_dask():
    names = pd.MultiIndex.from_tuples([("oil", "lo"), ("oil", "hi"), ("tea", "lo")])
    frame = pd.DataFrame([[1, 2, 3]], columns=names)
    assert columns_to_hash(frame, "oil", frame) is None
    assert columns_to_hash(frame, ["oil", "tea"], frame) is None


def test_a_partition_unlike_its_meta_is_left_to_dask():
    assert columns_to_hash(FRAME, ["n"], FRAME.astype({"n": object})) is None
    assert columns_to_hash(FRAME.astype({"n": object}), ["n"], FRAME) is None
    assert columns_to_hash(FRAME, ["n"], FRAME[["x"]]) is None


def test_other_kinds_of_frames_are_left_to_dask():
    class Special(pd.DataFrame):
        pass

    assert columns_to_hash(Special(FRAME), ["n"], FRAME) is None
    assert columns_to_hash(FRAME["n"], ["n"], FRAME) is None
    assert columns_to_hash(dd.from_pandas(FRAME[["n"]], npartitions=1), ["n"], FRAME) is None


def test_a_frame_hashed_whole_must_be_cast():
    keys = pd.DataFrame([[1.0, 2.0], [3.0, 4.0]], columns=["a", "a"])
    assert [column.tolist() for column in columns_hashed(keys)] == [[1.0, 3.0], [2.0, 4.0]]
    assert columns_hashed(FRAME[["n"]]) is None
    assert columns_hashed(FRAME[["x"]].astype("Float64")) is None
    assert columns_hashed(FRAME[[]]) is None
    assert columns_hashed(FRAME["x"]) is None


def test_agreement_is_found_out():
    assert agrees_with(partitioning_index)
    # A pandas that distinguishes zeros or NaNs in another way would number like this.
    assert not agrees_with(lambda frame, n: partitioning_index(frame.fillna(0.0), n))
    assert not agrees_with(lambda frame, n: partitioning_index(frame, n).astype(np.int64))


@pytest.mark.filterwarnings("error")
def test_floats_hash_as_in_dask():
    """Signalling NaNs (R's missing values), zeros of both signs, and the smallest numbers."""
    bits = [
        0x7FF00000000007A2,
        0xFFF0000000000001,
        0x7FF8000000000000,
        1 << 63,
        0,
        1,
        (1 << 63) + 1,
    ]
    column = np.array(bits, dtype=np.uint64).view(np.float64)
    expected = stock_numbers(pd.DataFrame({"a": column}), 1000)
    assert partition_numbers([column], 1000).tolist() == expected.tolist()

"""Rows of output partitions are counted in plain integers only."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dask_gpurt.frames.partition_sizes import partition_sizes


@pytest.mark.parametrize("dtype", ["i4", "u8", "Int64", "int32[pyarrow]"])
def test_rows_of_each_partition_are_counted(dtype):
    assert partition_sizes(pd.Series([2, 0, 2, 5], dtype=dtype)) == [1, 0, 2, 0, 0, 1]


def test_rows_without_a_partition_do_not_count():
    assert partition_sizes(pd.Series([-1, 1, -1])) == [0, 1]
    assert partition_sizes(pd.Series([-1])) == []


@pytest.mark.parametrize(
    "numbers",
    [
        pd.Series([1.0, 2.0]),
        pd.Series([1, None], dtype="Int64"),
        pd.Series(["1"]),
        pd.Series([1], dtype="category").astype("O"),
        pd.Series([np.datetime64("2026-01-01")]),
    ],
    ids=lambda one: str(one.dtype),
)
def test_other_values_are_not_counted(numbers):
    assert partition_sizes(numbers) is None

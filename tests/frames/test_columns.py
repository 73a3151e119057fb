"""A peer's column layout is accepted only if `decompose` could have produced it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dask_gpurt.frames.columns import Layout, decompose

COLUMNS = {
    "plain": np.arange(3),
    "complex": np.arange(3, dtype="c16"),
    "times": pd.date_range("2020", periods=3).array,
    "zone": pd.date_range("2020", periods=3, tz="Europe/Berlin").array,
    "period": pd.period_range("2020", periods=3, freq="D").array,
    "masked": pd.array([1, None, 3], dtype="Int16"),
    "categorical": pd.Categorical(["a", "b", "a"]),
    "interval": pd.interval_range(0, 3).array,
    "interval of times": pd.interval_range(pd.Timestamp("2020", tz="UTC"), periods=3).array,
    "string": pd.array(["a", "b", None], dtype="string[pyarrow]"),
    "objects": np.array([(), {}, None], dtype=object),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_layout_of_a_real_column_is_accepted(name):
    layout = decompose(COLUMNS[name]).layout
    assert Layout.from_plain(layout.to_plain()) == layout


@pytest.mark.parametrize(
    "plain",
    [
        ["unknown", ["<i8"], False, False, [], []],
        # NumPy evaluates text, and accepts lists of fields, objects and types without a size.
        ["plain", ["(2+)i4"], False, False, [], []],
        ["plain", ["i4,f8"], False, False, [], []],
        ["plain", ["|O8"], False, False, [], []],
        ["geometry", ["<i8"], True, False, [""], []],
        ["geometry", [], False, False, [""], []],
        ["geometry", [], True, False, [4326], []],
        ["plain", ["<U4"], False, False, [], []],
        ["plain", ["<i3"], False, False, [], []],
        ["plain", [b"<i8"], False, False, [], []],
        ["plain", [], False, False, [], []],
        ["plain", ["<i8", "<i8"], False, False, [], []],
        ["plain", ["<i8"], True, False, [], []],
        ["wall", ["<i8"], False, False, ["int64"], []],
        ["wall", ["<i4"], False, False, ["datetime64[ns, UTC]"], []],
        ["wall", ["<i8"], False, False, [], []],
        ["masked", ["<i8", "|b1"], False, False, ["Int32"], []],
        ["masked", ["<i4"], False, False, ["Int32"], []],
        ["categorical", ["<f8"], False, False, [False, True, b""], []],
        ["categorical", ["|i1"], False, False, [False, True], []],
        ["interval", ["<i8", "<i8"], False, False, ["right"], []],
        ["interval", [], False, False, ["middle"], []],
        ["arrow", [], True, False, ["string"], []],
        ["arrow", [], False, False, ["string", "NA"], []],
        ["objects", ["<i8"], False, True, [], []],
        ["objects", [], False, False, [], []],
    ],
)
def test_impossible_column_layout_is_refused(plain):
    with pytest.raises(ValueError, match=r"is carried like|plain memory"):
        Layout.from_plain(plain)


def test_intervals_between_masked_numbers_have_no_masked_ends():
    """A layout has to be one that a receiver accepts. pandas 2 makes plain ends of them."""
    ends = pd.array(range(3), dtype="Int64"), pd.array(range(1, 4), dtype="Int64")
    layout = decompose(pd.arrays.IntervalArray.from_arrays(*ends)).layout
    assert layout.kind == "objects" or {end.kind for end in layout.children} == {"plain"}

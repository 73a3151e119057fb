"""Columns of another type than the promised one are converted without a change of values."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from dask.dataframe.utils import UNKNOWN_CATEGORIES

from dask_gpurt.frames import reconciling
from dask_gpurt.frames.reconciling import casts_between, with_casts, with_missing_like_meta

BIG = 2**60 + 1
MOMENT = pd.Timestamp("2020-01-01 12:30")


def arrow(type_):
    return pd.ArrowDtype(type_)


def objects(*values):
    return pd.Series(values, dtype=object)


def reconciled(column, expected):
    frame, meta = pd.DataFrame({"x": column}), pd.DataFrame({"x": pd.Series(dtype=expected)})
    return with_casts(frame, casts_between(frame.dtypes, meta.dtypes))["x"]


PROMISED = [
    ("Int64", BIG),
    ("UInt64", 2**63 + 5),
    ("float32", 0.5),
    ("float64", 0.5),
    ("Float32", 0.5),
    ("boolean", True),
    ("str", "a"),
    ("string", "a"),
    ("category", "a"),
    ("period[M]", pd.Period("2020-01")),
    ("datetime64[s]", MOMENT),
    ("datetime64[ns, Europe/Berlin]", MOMENT),
    ("timedelta64[ms]", pd.Timedelta(1, "s")),
    ("int64[pyarrow]", BIG),
    ("bool[pyarrow]", True),
    (arrow(pa.date32()), datetime.date(2020, 1, 1)),
    (arrow(pa.decimal128(5, 2)), decimal.Decimal("1.25")),
]


@pytest.mark.parametrize(("dtype", "value"), PROMISED)
def test_a_piece_without_values_changes_no_type(dtype, value):
    some, none = pd.DataFrame({"x": pd.Series([value], dtype=dtype)}), objects(None, None)
    expected = some.iloc[:0].dtypes
    for frames in ([some, none.to_frame("x")], [none.to_frame("x"), some]):
        joined = pd.concat(with_missing_like_meta(frames, expected))["x"]
        assert joined.dtype == some["x"].dtype
        assert joined.dropna().tolist() == some["x"].tolist()
        assert joined.isna().sum() == 2
    assert none.dtype == object


@pytest.mark.parametrize(("dtype", "value"), PROMISED)
def test_a_column_without_values_gets_the_expected_type(dtype, value):
    found = reconciled(objects(None, None), pd.Series([value], dtype=dtype).dtype)
    assert found.dtype == pd.Series([value], dtype=dtype).dtype
    assert found.isna().all()


@pytest.mark.parametrize("dtype", ["int8", "uint64"])
def test_integers_with_missing_values_become_floats(dtype):
    frames = [pd.DataFrame({"x": np.ones(2, dtype)}), pd.DataFrame({"x": objects(None)})]
    joined = pd.concat(with_missing_like_meta(frames, frames[0].dtypes))
    assert joined["x"].dtype == np.float64
    assert reconciled(objects(None), dtype).dtype == np.float64


def test_plain_booleans_cannot_hold_missing_values():
    assert reconciled(objects(None), "bool").dtype == object


def test_meta_may_lack_the_categories():
    assert reconciling.UNKNOWN_CATEGORIES == UNKNOWN_CATEGORIES
    unknown = pd.CategoricalDtype([UNKNOWN_CATEGORIES])
    assert reconciled(objects(None), unknown).cat.categories.tolist() == []
    some = pd.DataFrame({"x": pd.Categorical(["b"], ["a", "b"])})
    frames = [pd.DataFrame({"x": objects(None)}), some]
    meta = pd.DataFrame({"x": pd.Series(dtype=unknown)})
    for frame in with_missing_like_meta(frames, meta.dtypes):
        assert frame["x"].cat.categories.tolist() == ["a", "b"]


#: `str` of pandas 3, which pandas 2 has by this name alone.
STR = pd.StringDtype("pyarrow", na_value=np.nan)
ZONED = MOMENT.tz_localize("Europe/Berlin")
BERLIN = arrow(pa.timestamp("us", "Europe/Berlin"))
CODED = arrow(pa.dictionary(pa.int8(), pa.string()))


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (objects(MOMENT, ZONED), "datetime64[us]"),
        (objects(MOMENT, ZONED), "datetime64[us, Europe/Berlin]"),
        (objects(MOMENT, datetime.date(2020, 1, 1)), arrow(pa.date32())),
        (objects(MOMENT, None), arrow(pa.date32())),
        (objects(2**70, 1), "int64"),
        (objects(BIG, 0.5), "float64"),
        (objects(True, 7), "boolean"),
        (pd.Series([ZONED], dtype=BERLIN), arrow(pa.timestamp("us"))),
        (pd.Series([MOMENT], dtype=arrow(pa.timestamp("us"))), arrow(pa.date32())),
        (pd.Series([0.123], dtype="double[pyarrow]"), arrow(pa.decimal128(10, 2))),
        (pd.Series([0.1], dtype="double[pyarrow]"), "float[pyarrow]"),
        (pd.Series([BIG], dtype="int64[pyarrow]"), "double[pyarrow]"),
        (pd.Series([7], dtype="int64[pyarrow]"), "bool[pyarrow]"),
        (pd.Series([1], dtype="int64[pyarrow]"), "bool[pyarrow]"),
        (pd.Series(["8"], dtype=arrow(pa.string())), "int64[pyarrow]"),
        (pd.Series([7], dtype="int64[pyarrow]"), arrow(pa.string())),
        (pd.Series([300], dtype="int64[pyarrow]"), "int8[pyarrow]"),
        (objects(["a", "b"], None), STR),
        (objects(1, 2), STR),
        (objects(b"a", None), "string"),
        (objects("a", 1), STR),
        (objects(decimal.Decimal("1.5"), None), "string[pyarrow]"),
    ],
)
def test_values_that_do_not_fit_keep_their_type(column, expected):
    found = reconciled(column, expected)
    assert found.dtype == column.dtype
    assert found.tolist() == column.tolist()


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (objects("a", None), arrow(pa.large_string())),
        (objects("a", None), STR),
        (pd.Series(["a", None], dtype=arrow(pa.string())), STR),
        (pd.Series(["a"], dtype=arrow(pa.large_string())), "string[pyarrow]"),
        (objects(datetime.date(2020, 1, 1), None), arrow(pa.date32())),
        (objects(1, 2), "int64[pyarrow]"),
        (pd.Series(["a"], dtype=arrow(pa.string())), arrow(pa.large_string())),
        (pd.Series([1, None], dtype="int64[pyarrow]"), "int8[pyarrow]"),
        (pd.Series([1, 2], dtype="int32[pyarrow]"), "double[pyarrow]"),
        (pd.Series([None], dtype=arrow(pa.null())), "int64[pyarrow]"),
        (pd.Series(["a"], dtype=CODED), arrow(pa.dictionary(pa.int32(), pa.string()))),
        (pd.Series([[1]], dtype=arrow(pa.list_(pa.int32()))), arrow(pa.list_(pa.int64()))),
        (pd.Series([ZONED], dtype=BERLIN), arrow(pa.timestamp("us", "UTC"))),
        (objects(1, 2), "int64"),
        (objects(MOMENT, None), "datetime64[us]"),
        (objects(True, False), "bool"),
        (pd.Series([1, 2], dtype="Int64"), "int64"),
        (objects(decimal.Decimal("1.5"), None), "float64"),
        (objects(decimal.Decimal("1.5"), decimal.Decimal("0.25")), "float32"),
        (pd.Series([decimal.Decimal("1.25")], dtype=arrow(pa.decimal128(5, 2))), "Float64"),
    ],
)
def test_values_that_fit_get_the_promised_type(column, expected):
    found = reconciled(column, expected)
    assert found.dtype == expected
    assert found.isna().tolist() == column.isna().tolist()
    pairs = zip(found.dropna(), column.dropna(), strict=True)
    # Lists are restored as arrays.
    assert all(np.all(one == other) for one, other in pairs)

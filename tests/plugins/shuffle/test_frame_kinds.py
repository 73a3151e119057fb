"""Supported kinds of frames are recognised by names of types, without importing their library."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dask_gpurt.plugins.shuffle.frame_run import frame_kind, obstacle


class CategoricalDtype:
    def __init__(self, of=None):
        self.categories = None if of is None else Index(of)

    def __str__(self):
        return "category"

    def __repr__(self):
        raise RuntimeError("no CUDA-capable device is detected")


class StructDtype:
    pass


class Decimal64Dtype:
    pass


class IntervalDtype:
    pass


class ListDtype:
    def __init__(self, element_type):
        self.element_type = element_type


class Index:
    def __init__(self, *dtypes):
        self.nlevels = len(dtypes)
        self.name = None
        self.dtype = dtypes[0]
        self.dtypes = pd.Series(list(dtypes), dtype=object)


NUMBERS = np.dtype("i8")


def cudf_frame(*dtypes, index=(NUMBERS,)):
    """An object with the attributes of an empty cuDF frame."""
    frame = type("DataFrame", (), {"__module__": "cudf.core.dataframe"})()
    frame.dtypes = pd.Series(dict(zip("abcdef", dtypes, strict=False)), dtype=object)
    frame.index = Index(*index)
    return frame


TEXT = pd.StringDtype(na_value=np.nan)
CARRIED = [
    *map(np.dtype, ["i1", "u8", "f4", "f8", "?", "O", "M8[s]", "m8[ns]"]),
    *[pd.Int8Dtype(), pd.Float64Dtype(), pd.BooleanDtype(), pd.StringDtype(), TEXT],
    pd.DatetimeTZDtype("us", "Europe/Berlin"),
    *map(pd.ArrowDtype, [pa.int8(), pa.float64(), pa.bool_(), pa.string(), pa.timestamp("us")]),
    *[Decimal64Dtype(), CategoricalDtype(), CategoricalDtype(TEXT), CategoricalDtype(NUMBERS)],
    *[ListDtype(NUMBERS), ListDtype(TEXT), ListDtype(ListDtype(np.dtype("M8[ms]")))],
]
#: A cast to each of these fails, or changes values.
LEFT_TO_STOCK = [
    *map(np.dtype, ["f2", "M8[D]", "M8[10ns]", "S4", "c16"]),
    *[StructDtype(), IntervalDtype(), pd.PeriodDtype("D"), pd.SparseDtype("i8")],
    *map(pd.ArrowDtype, [pa.date32(), pa.time64("us"), pa.decimal128(7, 2), pa.null()]),
    *map(pd.ArrowDtype, [pa.binary(), pa.float16(), pa.timestamp("s", "UTC"), pa.list_(pa.int8())]),
    *map(CategoricalDtype, [IntervalDtype(), pd.Int64Dtype(), ListDtype(NUMBERS)]),
    *map(ListDtype, [Decimal64Dtype(), pd.Int64Dtype(), pd.ArrowDtype(pa.int64()), np.dtype("O")]),
    *map(ListDtype, [pd.StringDtype(), CategoricalDtype(), pd.DatetimeTZDtype("ns", "UTC")]),
    ListDtype(ListDtype(StructDtype())),
]


@pytest.mark.parametrize("dtype", CARRIED, ids=lambda one: f"{type(one).__name__}-{one!s:.20}")
def test_types_with_a_cast_are_carried_on_devices(dtype):
    frame = cudf_frame(NUMBERS, dtype, index=(dtype,))
    assert frame_kind(frame) == "cudf.core.dataframe.DataFrame"
    assert obstacle(frame) is None


@pytest.mark.parametrize("dtype", LEFT_TO_STOCK, ids=lambda one: type(one).__name__)
def test_types_without_a_cast_are_left_to_stock(dtype):
    assert "column 'b'" in obstacle(cudf_frame(NUMBERS, dtype))


@pytest.mark.parametrize(
    "frame, named",
    [
        (cudf_frame(np.dtype("i8"), StructDtype()), "column 'b'"),
        (cudf_frame(ListDtype(ListDtype(StructDtype()))), "column 'a'"),
        (cudf_frame(pd.ArrowDtype(pa.list_(pa.struct({"x": pa.int8()})))), "column 'a'"),
        (cudf_frame(index=(StructDtype(),)), "index level None"),
        (cudf_frame(index=(np.dtype("i8"), StructDtype())), "index level 1"),
    ],
)
def test_column_that_is_left_to_stock_is_named(frame, named):
    assert named in obstacle(frame)


def test_only_plain_pandas_frames_are_supported():
    frame = pd.DataFrame({"a": [1]})
    assert obstacle(frame) is None
    assert obstacle(type("Frame", (pd.DataFrame,), {})()) == (
        "there is no adapter for this kind of data"
    )


def test_series_has_no_adapter():
    """Dask converts a series to a frame before a shuffle; no adapter ever opens a series."""
    cudf_series = type("Series", (), {"__module__": "cudf.core.series"})()
    for series in (pd.Series([1]), cudf_series):
        assert obstacle(series) == "there is no adapter for this kind of data"


def test_frames_of_the_host_import_no_gpu_library():
    script = (
        "import sys, dask_gpurt.plugins.scheduler.gpurt_scheduler\n"
        "import dask_gpurt.plugins.worker.attachment\n"
        "print(sorted({'cudf', 'cupy', 'pylibcudf', 'nvidia'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr

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
    def __repr__(self):
        raise RuntimeError("no CUDA-capable device is detected")


class StructDtype:
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


def test_cudf_is_recognised_by_its_name():
    frame = cudf_frame(np.dtype("i8"), CategoricalDtype(), ListDtype(np.dtype("i4")))
    assert frame_kind(frame) == "cudf.core.dataframe.DataFrame"
    assert obstacle(frame) is None


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
def test_types_that_cannot_be_rebuilt_are_left_to_stock(frame, named):
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
        "import sys, dask_gpurt.plugins.scheduler, dask_gpurt.plugins.worker\n"
        "print(sorted({'cudf', 'cupy', 'pylibcudf', 'nvidia'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr

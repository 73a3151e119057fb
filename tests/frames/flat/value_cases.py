"""Values of all kinds, and a comparison of values with restored ones."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions

import numpy as np
import pandas as pd
import pyarrow as pa
from hypothesis import HealthCheck, settings

from dask_gpurt.frames import joining
from dask_gpurt.frames.flat.values import flatten, restore

#: Since version 3, pandas makes frames of blocks; before, a restored frame has a block a column.
MAKES_BLOCKS = joining.create_dataframe_from_blocks is not None

deterministic = settings(
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)


class Point(collections.namedtuple("Point", "x y")):
    """A tuple with attributes besides its items."""


class Tagged(np.ndarray):
    """An array with attributes besides its memory."""

    def __reduce__(self):
        return tagged, (np.asarray(self), self.tag)


def tagged(array, tag):
    made = array.view(Tagged)
    made.tag = tag
    return made


class Series(pd.Series):
    pass


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("no")


def copies_of(flat):
    """Return the buffers as a tier restores them: other memory, aligned, writable."""
    made = []
    for buffer in flat.buffers:
        block = np.empty(buffer.nbytes + 64, np.uint8)
        first = -block.ctypes.data % 64
        made.append(block[first : first + buffer.nbytes])
        made[-1][:] = buffer
    return made


def there_and_back(value):
    flat = flatten(value)
    for buffer in flat.buffers:
        assert buffer.dtype == np.uint8
        assert buffer.ndim == 1
        assert buffer.flags.c_contiguous
    assert flat.nbytes == len(flat.header) + sum(b.nbytes for b in flat.buffers)
    return restore(flat.header, copies_of(flat))


def assert_same(got, expected):
    """Check equality in everything that a program can observe."""
    assert type(got) is type(expected)
    if isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(got, expected, check_exact=True, check_freq=True)
        assert_same(got.index, expected.index)
        assert_same(got.columns, expected.columns)
        assert_same(got.attrs, expected.attrs)
        assert got.flags == expected.flags
        if MAKES_BLOCKS:
            ours, theirs = ([b.values.shape for b in f._mgr.blocks] for f in (got, expected))
            assert ours == theirs
    elif isinstance(expected, pd.Series):
        pd.testing.assert_series_equal(got, expected, check_exact=True, check_freq=True)
        assert_same(got.index, expected.index)
        assert_same(got.attrs, expected.attrs)
        assert got.flags == expected.flags
    elif isinstance(expected, pd.Index):
        pd.testing.assert_index_equal(got, expected, exact=True, check_exact=True)
        assert list(got.names) == list(expected.names)
        assert getattr(got, "freq", None) == getattr(expected, "freq", None)
        if isinstance(expected, pd.MultiIndex):
            assert got.sortorder == expected.sortorder
            for one, other in zip(got.levels, expected.levels, strict=True):
                assert_same(one, other)
    elif isinstance(expected, np.ma.MaskedArray):
        assert_same(got.data, expected.data)
        assert_same(got.mask, expected.mask)
        assert got.fill_value == expected.fill_value
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        assert got.dtype.metadata == expected.dtype.metadata
        assert got.dtype.isalignedstruct == expected.dtype.isalignedstruct
        assert got.shape == expected.shape
        assert got.flags.writeable == expected.flags.writeable
        if expected.dtype.hasobject:
            np.testing.assert_array_equal(got, expected, strict=True)
        else:
            assert got.tobytes() == expected.tobytes()
    elif isinstance(expected, (pa.Table, pa.RecordBatch)):
        assert got.schema.equals(expected.schema, check_metadata=True)
        assert got.num_rows == expected.num_rows
        assert_same(got.columns, expected.columns)
    elif isinstance(expected, pa.ChunkedArray):
        assert got.type == expected.type
        assert_same(got.chunks, expected.chunks)
    elif isinstance(expected, pa.Array):
        got.validate(full=True)
        assert got.type == expected.type
        assert got.to_pylist() == expected.to_pylist() or got.equals(expected)
    elif isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    else:
        assert got == expected or got != got


def read_only(array):
    array.flags.writeable = False
    return array


ARRAYS = {
    "numbers": np.arange(10),
    "no axes": np.array(3.5),
    "nothing": np.empty(0),
    "nothing, two axes": np.empty((0, 3), dtype="i4"),
    "nothing, Fortran": np.empty((3, 0, 2), order="F"),
    "C": np.arange(12.0).reshape(3, 4),
    "Fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "axes in another order": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
    "gaps": np.arange(40).reshape(5, 8)[::2, 1:7],
    "gaps, Fortran": np.arange(40).reshape(5, 8).T[1:7, ::2],
    "backwards": np.arange(10)[::-1],
    "one element repeated": np.broadcast_to(np.float32(2.5), (3, 4)),
    "rows repeated": np.broadcast_to(np.arange(4), (3, 4)),
    "columns repeated": np.broadcast_to(np.arange(3)[:, None], (3, 4)),
    "repeated, writable": np.lib.stride_tricks.as_strided(np.ones(1), (5,), (0,)),
    "windows": np.lib.stride_tricks.sliding_window_view(np.arange(9), 3),
    "read-only": read_only(np.arange(10)),
    "big endian": np.arange(10, dtype=">i4"),
    "half": np.arange(10, dtype="f2"),
    "long double": np.arange(10, dtype="g"),
    "complex": np.arange(10) * 1j,
    "bool": np.arange(10) % 2 == 0,
    "dates": np.arange(10).astype("M8[D]"),
    "days and nights": np.arange(10).astype("M8[12h]"),
    "spans": np.arange(10).astype("m8[us]"),
    "text": np.array(["a", "bcd", ""]),
    "bytes": np.array([b"a", b"bcd", b""]),
    "opaque": np.zeros(3, "V5"),
    "opaque, of no length": np.zeros(3, "V0"),
    "structured": np.ones(3, dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "structured, aligned": np.ones(3, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "metadata": np.ones(3, dtype=np.dtype("f8", metadata={"unit": "m"})),
    "objects": np.array([1, "a", None, {"x": 2}], dtype=object),
    "objects in a structure": np.array([(1, "a")], dtype=[("n", "i4"), ("o", "O")]),
    "strings of any length": np.array(["a", "b" * 40], dtype=np.dtypes.StringDType()),
    "masked": np.ma.masked_array(np.arange(4.0), [0, 1, 0, 0], fill_value=9.0),
    "matrix": np.matrix([[1, 2], [3, 4]]),
    "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]).view(np.recarray),
    "subclass": tagged(np.arange(3), "tag"),
}


N = 6
COLUMNS = {
    "numbers": pd.Series(np.arange(N)),
    "float32": pd.Series(np.arange(N, dtype="f4")),
    "bool": pd.Series(np.arange(N) > 2),
    "complex": pd.Series(np.arange(N) * 1j),
    "dates": pd.Series(pd.date_range("2020", periods=N)),
    "seconds": pd.Series(np.arange(N).astype("M8[s]")),
    "spans": pd.Series(np.arange(N).astype("m8[ms]")),
    "zone": pd.Series(pd.date_range("2020", periods=N, tz="Europe/Berlin")),
    "zone, seconds": pd.Series(pd.DatetimeIndex(np.arange(N).astype("M8[s]"), tz="UTC")),
    "zone without a name": pd.Series(
        pd.date_range(
            "2020", periods=N, tz=datetime.timezone(datetime.timedelta(hours=1, seconds=2))
        )
    ),
    "months": pd.Series(pd.period_range("2020", periods=N, freq="M")),
    "category": pd.Series(pd.Categorical(list("abcabc"), categories=list("cabd"), ordered=True)),
    "category of dates": pd.Series(pd.date_range("2020", periods=N)).astype("category"),
    "category of ranges": pd.Series(pd.Categorical.from_codes([0, 1, 2, -1, 2, 0], range(3))),
    "intervals": pd.Series(pd.interval_range(0, N)),
    "intervals of dates": pd.Series(pd.interval_range(pd.Timestamp("2020"), periods=N)),
    "Int64": pd.Series(pd.array([1, None, 3, 4, 5, 6], dtype="Int64")),
    "Float32": pd.Series(pd.array([1, None, 3, 4, 5, 6], dtype="Float32")),
    "boolean": pd.Series(pd.array([True, None, False] * 2, dtype="boolean")),
    "text": pd.Series(["", "a", None, "ß", "bcd", "e" * 50], dtype="str"),
    "text, NA": pd.Series(["", "a", None, "ß", "b", "e"], dtype=pd.StringDtype("pyarrow", pd.NA)),
    "text, python": pd.Series(["", "a", None, "ß", "b", "e"], dtype="string[python]"),
    "arrow integers": pd.Series([1, None, 3, 4, 5, 6], dtype=pd.ArrowDtype(pa.int32())),
    "arrow text": pd.Series(["", None, "ä", "b", "c", "d"], dtype=pd.ArrowDtype(pa.string())),
    "arrow decimals": pd.Series(
        [decimal.Decimal("1.20"), None] * 3, dtype=pd.ArrowDtype(pa.decimal128(9, 2))
    ),
    "arrow zone": pd.Series(
        pd.date_range("2020", periods=N, tz="UTC"), dtype=pd.ArrowDtype(pa.timestamp("us", "UTC"))
    ),
    "arrow lists": pd.Series([[1], None, [], [2, 3]] + [[4]] * 2).astype(
        pd.ArrowDtype(pa.list_(pa.int64()))
    ),
    "arrow structs": pd.Series([{"a": 1}, None] * 3, dtype=pd.ArrowDtype(pa.struct({"a": "i8"}))),
    "arrow dictionary": pd.Series(
        ["x", "y", None] * 2, dtype=pd.ArrowDtype(pa.dictionary(pa.int8(), pa.string()))
    ),
    "sparse": pd.Series(pd.arrays.SparseArray([0, 0, 1, 0, 2, 0])),
    "objects": pd.Series([1, "a", None, 2.5, {"x": 1}, (1,)], dtype=object),
    "words as objects": pd.Series(list("abcdef"), dtype=object),
}
INDEXES = {
    "range": pd.RangeIndex(10, 30, 4, name="r"),
    "nothing": pd.RangeIndex(0),
    "no labels": pd.Index([], dtype=object),
    "numbers": pd.Index([3, 1, 2], name="n"),
    "labels": pd.Index(["a", 1, None, True], dtype=object, name=("a", 1)),
    "long labels": pd.Index(["a" * 1000, "\ud800", 2**70], dtype=object),
    "objects": pd.Index([(1, 2), fractions.Fraction(1, 2)], dtype=object, tupleize_cols=False),
    "text": pd.Index(["a", "b"], dtype="str", name="s"),
    "text, python": pd.Index(["a", "b"], dtype="string[python]"),
    "days": pd.date_range("2020", periods=4, name="d"),
    "days with a zone": pd.date_range("2020", periods=4, tz="UTC", freq="2h"),
    "days without a rhythm": pd.DatetimeIndex(["2020", "2022", "2021"]),
    "work days": pd.date_range(
        "2020",
        periods=4,
        freq=pd.offsets.CustomBusinessDay(holidays=["2020-01-02"]),
    ),
    "spans": pd.timedelta_range(0, periods=4, freq="3min"),
    "months": pd.period_range("2020", periods=4, freq="M", name=pd.Timestamp("2020")),
    "category": pd.CategoricalIndex(list("abab"), ordered=True, name="c"),
    "intervals": pd.interval_range(0, 4, closed="left", name="i"),
    "nullable": pd.Index([1, None], dtype="Int64"),
    "arrow": pd.Index([1, None], dtype=pd.ArrowDtype(pa.int8())),
    "levels": pd.MultiIndex.from_product([["a", "b"], range(3)], names=["x", None]),
    "levels with dates": pd.MultiIndex.from_arrays(
        [pd.date_range("2020", periods=3), [1.5, np.nan, 2.5]], sortorder=0
    ),
}


def all_columns():
    return pd.DataFrame(COLUMNS)


def with_attrs():
    frame = pd.DataFrame({"a": [1.0, 2.0]})
    frame.attrs = {"unit": "m", "weights": np.arange(3)}
    return frame


def of_many_blocks():
    frame = pd.DataFrame({"a": np.arange(4.0)})
    for number in range(5):
        frame.insert(0, f"c{number}", np.arange(4.0) * number)
    return frame


FRAMES = {
    "all types": all_columns(),
    "attrs": with_attrs(),
    "duplicate labels are forbidden": pd.DataFrame({"a": [1]}).set_flags(
        allows_duplicate_labels=False
    ),
    "columns of one name": pd.DataFrame(np.ones((2, 3)), columns=["a", "a", "b"]),
    "types taking turns": pd.DataFrame({i: np.arange(3).astype("if"[i % 2]) for i in range(9)}),
    "of an array": pd.DataFrame(np.arange(12.0).reshape(4, 3)),
    "of an array, Fortran": pd.DataFrame(np.asfortranarray(np.arange(12.0).reshape(4, 3))),
    "many blocks": of_many_blocks(),
    "some rows": all_columns().iloc[1:4],
    "some columns": all_columns()[["zone", "objects", "numbers"]],
    "no columns": pd.DataFrame(index=pd.RangeIndex(7)),
    "no rows": all_columns().iloc[:0],
    "nothing": pd.DataFrame(),
    "a name for the columns": pd.DataFrame({"a": [1]}).rename_axis(columns="what"),
    "transposed": pd.DataFrame({"a": np.arange(3), "b": np.arange(3)}).T,
    "two objects": pd.DataFrame({"a": [(1,), 2], "b": [None, {}]}, dtype=object),
    "read-only": pd.DataFrame(read_only(np.ones((3, 2))), copy=False),
}


ARROW = {
    "integers": pa.array([1, None, 3] * 10),
    "bits": pa.array([True, None, False] * 10),
    "text": pa.array(["a", None, "bcd", ""] * 10),
    "large text": pa.array(["a", None, "bcd", ""] * 10, pa.large_string()),
    "bytes": pa.array([b"a", None, b"bcd"] * 10, pa.large_binary()),
    "views of text": pa.array(["a", None, "b" * 30] * 10, pa.string_view()),
    "bytes of one length": pa.array([b"abc", None] * 10, pa.binary(3)),
    "halves": pa.array(np.arange(30, dtype="f2")),
    "decimals": pa.array([decimal.Decimal("1.5"), None] * 10, pa.decimal256(50, 2)),
    "intervals": pa.array([(1, 2, 3), None] * 10, pa.month_day_nano_interval()),
    "nulls": pa.nulls(30),
    "dictionary": pa.array(["x", "y", None] * 10).dictionary_encode(),
    "lists": pa.array([[1, 2], None, [], [3]] * 10),
    "structs": pa.array([{"a": 1, "b": "x"}, None] * 10),
    "maps": pa.array([[("a", 1)], None] * 10, pa.map_(pa.string(), pa.int64())),
    "runs": pa.RunEndEncodedArray.from_arrays([10, 30], ["a", "b"]),
    **(
        {"uuids": pa.array([b"0123456789abcdef", None] * 10, pa.uuid())}
        if hasattr(pa, "uuid")  # since pyarrow 18
        else {}
    ),
}

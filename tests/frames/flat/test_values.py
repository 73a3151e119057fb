"""Any value is restored from its buffers unchanged, over the given memory, without a copy."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import pickle
import tracemalloc
import zlib

import msgpack
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from distributed.protocol import pickle as dask_pickle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dask_gpurt.frames import joining
from dask_gpurt.frames.flat import flat_pandas, values
from dask_gpurt.frames.flat.values import flatten, restore

deterministic = settings(
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)


class Point(collections.namedtuple("Point", "x y")):
    """A tuple with more than its items."""


class Tagged(np.ndarray):
    """An array with more than its memory."""

    def __reduce__(self):
        return _tagged, (np.asarray(self), self.tag)


def _tagged(array, tag):
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


# ------------------------------------------------------------------ arrays


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
    "subclass": _tagged(np.arange(3), "tag"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name):
    assert_same(there_and_back(ARRAYS[name]), ARRAYS[name])


def test_a_subclass_keeps_its_extra_state():
    assert there_and_back(ARRAYS["subclass"]).tag == "tag"


@pytest.mark.parametrize("name", ["C", "Fortran", "axes in another order", "no axes", "dates"])
def test_order_of_the_axes_in_memory_is_kept(name):
    got, expected = there_and_back(ARRAYS[name]), ARRAYS[name]
    assert got.strides == expected.strides
    assert got.flags.f_contiguous == expected.flags.f_contiguous


DENSE = [
    *("numbers", "no axes", "C", "Fortran", "axes in another order", "read-only", "dates"),
    *("text", "structured", "one element repeated", "rows repeated", "columns repeated"),
]


@pytest.mark.parametrize("name", DENSE)
def test_arrays_are_not_copied(name):
    array = ARRAYS[name]
    flat = flatten(array)
    assert np.shares_memory(flat.buffers[0], array)
    buffers = copies_of(flat)
    assert np.shares_memory(restore(flat.header, buffers), buffers[0])


def test_repeated_elements_are_stored_once():
    assert flatten(np.broadcast_to(np.float64(1), (1000, 1000))).buffers[0].nbytes == 8
    assert flatten(np.broadcast_to(np.arange(10.0), (1000, 10))).buffers[0].nbytes == 80


def test_a_slice_keeps_itself_and_not_its_parent():
    flat = flatten(np.arange(1_000_000)[10:20])
    assert flat.buffers[0].nbytes == 80


def test_memory_that_may_be_written_to_can_be():
    flat = flatten(np.arange(5))
    (buffer,) = copies_of(flat)
    array = restore(flat.header, [buffer])
    array[0] = 7
    assert buffer.view("i8")[0] == 7
    buffer.flags.writeable = False
    assert not restore(flat.header, [buffer]).flags.writeable


@deterministic
@given(
    hnp.arrays(
        st.one_of(hnp.scalar_dtypes(), hnp.array_dtypes()),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    st.data(),
)
def test_any_array(array, data):
    if array.ndim:
        array = array.transpose(data.draw(st.permutations(range(array.ndim))))
        array = array[data.draw(hnp.basic_indices(array.shape, allow_newaxis=True))]
    if type(array) is np.ndarray:
        assert_same(there_and_back(array), array)


# ------------------------------------------------------------------ columns and indexes

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


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("rows", [slice(None), slice(0), slice(1, -1), slice(None, None, 2)])
def test_series(name, rows):
    series = COLUMNS[name].iloc[rows].rename(name)
    assert_same(there_and_back(series), series)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("rows", [slice(None), slice(0), slice(1, -1), slice(None, None, 2)])
def test_frames_of_each_type(name, rows):
    frame = pd.DataFrame({"a": COLUMNS[name], "b": 1.5, "c": COLUMNS[name]}).iloc[rows]
    assert_same(there_and_back(frame), frame)


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(name):
    index = INDEXES[name]
    assert_same(there_and_back(index), index)
    series = pd.Series(np.arange(len(index)), index=index)
    assert_same(there_and_back(series), series)
    frame = pd.DataFrame(np.ones((2, len(index))), columns=index)
    assert_same(there_and_back(frame), frame)


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


@pytest.mark.parametrize("name", FRAMES)
def test_frames(name):
    assert_same(there_and_back(FRAMES[name]), FRAMES[name])


def test_frames_can_be_written_to():
    frame = all_columns()
    got = there_and_back(frame)
    for column in frame.columns.drop("sparse"):
        for one in (frame, got):
            one.iloc[0, one.columns.get_loc(column)] = frame[column].iloc[1]
    assert_same(got, frame)
    got["numbers"].array[0] = 9
    got = there_and_back(FRAMES["read-only"])
    got.iloc[0, 0] = 5.0
    assert got.iloc[0, 0] == 5.0


PLAIN = [
    *("numbers", "bool", "dates", "zone", "months", "category", "Int64"),
    *("text", "arrow integers", "arrow text", "arrow dictionary"),
]


#: msgpack allocates 256 KiB at the start, independent of its output.
SLACK_NBYTES = 300_000


@pytest.mark.parametrize("name", PLAIN)
def test_columns_and_frames_need_no_pickle_and_no_copy(name, monkeypatch):
    monkeypatch.setattr(values._Flattening, "pickled", forbidden)
    monkeypatch.setattr(values._Restoring, "unpickled", forbidden)
    series = COLUMNS[name].take(np.arange(600_000) % N).reset_index(drop=True)
    for value in (series, series.to_frame("a"), pd.Index(series)):
        flat, allocated_nbytes = allocating(flatten, value)
        assert allocated_nbytes < SLACK_NBYTES
        assert len(flat.header) < 1_000
        buffers = copies_of(flat)
        got, allocated_nbytes = allocating(restore, flat.header, buffers)
        assert allocated_nbytes < SLACK_NBYTES
        assert_same(got, value)


def forbidden(*args):
    raise AssertionError("pickled")


def allocating(function, *args):
    """Return a function's result and its peak allocation, including NumPy's memory."""
    function(*args)  # allocates what is allocated only once
    tracemalloc.start()
    try:
        result = function(*args)
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def blocks_of(frame):
    return [np.asarray(block.values) for block in frame._mgr.blocks]


def test_frames_are_not_copied_for_any_block_order():
    rng = np.random.default_rng(0)
    rows_first = pd.DataFrame(rng.random((1000, 8)), copy=False)
    columns_first = pd.DataFrame({str(i): rng.random(1000) for i in range(8)})
    for frame in (rows_first, columns_first, rows_first.iloc[100:200]):
        flat = flatten(frame)
        (block,) = blocks_of(frame)
        assert any(np.shares_memory(buffer, block) for buffer in flat.buffers)
        buffers = copies_of(flat)
        got = restore(flat.header, buffers)
        (again,) = blocks_of(got)
        assert any(np.shares_memory(buffer, again) for buffer in buffers)
        assert again.flags.c_contiguous == block.flags.c_contiguous
        assert_same(got, frame)


def test_the_cost_of_a_wide_frame_does_not_grow_with_its_columns():
    def counts(n_columns):
        frame = pd.DataFrame(np.ones((10, n_columns)), columns=pd.RangeIndex(n_columns))
        frame = pd.concat([frame, frame.astype("i4")], axis=1, ignore_index=True)
        flat = flatten(frame)
        return len(flat.buffers), len(flat.header)

    few, many = counts(10), counts(2_000)
    assert many[0] == few[0] == 2
    assert many[1] < few[1] + 40


def test_without_pandas_blocks():
    """Other versions of pandas may store their memory differently. Then columns are separate."""
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"], "c": [3.0, 4.0]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "create_dataframe_from_blocks", None)
        pd.testing.assert_frame_equal(there_and_back(frame), frame)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_pandas, "_manager_of", lambda value: None)
        pd.testing.assert_frame_equal(there_and_back(frame), frame)
        for name in COLUMNS:
            assert_same(there_and_back(COLUMNS[name]), COLUMNS[name])


def test_a_freq_is_kept_without_the_private_way(monkeypatch):
    def public(index, freq):
        index.freq = freq

    monkeypatch.setattr(flat_pandas, "_set_freq", public)
    assert_same(there_and_back(INDEXES["days"]), INDEXES["days"])


# ------------------------------------------------------------------ Arrow

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
    "uuids": pa.array([b"0123456789abcdef", None] * 10, pa.uuid()),
}


@pytest.mark.parametrize("name", ARROW)
@pytest.mark.parametrize("first", [0, 3, 8, 11])
@pytest.mark.parametrize("length", [0, 1, 9])
def test_arrow(name, first, length):
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


def test_tables_without_rows_or_columns():
    table = pa.table({"a": [1, 2]})
    for value in (table.slice(0, 0), pa.table({}), table.to_batches()[0]):
        assert_same(there_and_back(value), value)
        assert there_and_back(value).num_rows == value.num_rows


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
def test_any_slice_of_text(words, first, length, kind):
    array = pa.array(words, pa.string())
    if kind == "dictionary":
        array = array.dictionary_encode()
    else:
        array = array.cast(kind)
    array = array.slice(min(first, len(array)), length)
    assert_same(there_and_back(array), array)


# ------------------------------------------------------------------ anything else

OTHERS = {
    "nothing": None,
    "number": 5,
    "large number": 2**63,
    "small number": -(2**63) - 1,
    "float": 0.1,
    "not a number": float("nan"),
    "text": "äöü",
    "half a pair": "\ud800",
    "long text": "x" * 1000,
    "bytes": b"abc",
    "many bytes": b"abc" * 1000,
    "many bytes that change": bytearray(b"abc" * 1000),
    "NumPy number": np.float32(1.5),
    "NumPy date": np.datetime64("2020-01-01", "D"),
    "NumPy text": np.str_("abc"),
    "NumPy bytes": np.bytes_(b"a"),
    "NumPy record": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0],
    "type": np.dtype("i4"),
    "timestamp": pd.Timestamp("2020", tz="UTC"),
    "missing": pd.NaT,
    "set": {1, 2, 3},
    "fraction": fractions.Fraction(1, 3),
    "class": Point,
    "tuple that is more": Point(np.arange(3), 1),
    "subclass of a series": Series([1, 2]),
    "extension array": pd.array([1, None], dtype="Int64"),
    "dates of pandas": pd.date_range("2020", periods=3).array,
    "arrow scalar": pa.scalar(3),
    "no items": [(), [], {}],
    "few items": (1, "a", [None, {"b": 2.5}]),
    "keys of any kind": {(1, 2): np.arange(3), None: 1, 2.5: "x", fractions.Fraction(1, 2): []},
    "frames": (
        {"a": pd.DataFrame({"x": [1, 2]}), 1: [pd.Series([1.5])]},
        [np.arange(3), "text", None, {1, 2}],
    ),
    "many numbers": list(range(100_000)),
    "an array and many numbers": [np.arange(5), list(range(100_000))],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_values(name):
    got, expected = there_and_back(OTHERS[name]), OTHERS[name]
    if isinstance(expected, pd.api.extensions.ExtensionArray):
        pd.testing.assert_extension_array_equal(got, expected)
        assert type(got) is type(expected)
    elif name == "missing":
        assert got is pd.NaT
    else:
        assert_same(got, expected)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.builds(np.arange, st.integers(0, 5)),
    st.builds(lambda n: pd.Series(np.arange(n)), st.integers(0, 5)),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.tuples(st.text(), st.integers())), inner),
    ),
    max_leaves=12,
)


@deterministic
@given(TREES)
def test_any_tree(tree):
    assert_same(there_and_back(tree), tree)


def test_buffers_of_pickled_values_are_views():
    array = np.arange(1000.0)
    flat = flatten(Point(array, read_only(np.arange(500))))
    assert np.shares_memory(flat.buffers[0], array)
    buffers = copies_of(flat)
    got = restore(flat.header, buffers)
    assert np.shares_memory(got.x, buffers[0])
    assert got.x.flags.writeable
    assert not got.y.flags.writeable


class Gaps:
    """A value that gives pickle a buffer without raw bytes, which its stream cannot hold either."""

    def __reduce_ex__(self, protocol):
        return bytes, (pickle.PickleBuffer(memoryview(bytearray(b"abcdef"))[::2]),)


def test_other_ways_to_pickle_are_used():
    def dumps(value, *, protocol, buffer_callback=None):
        assert protocol == 5
        return b"!" + pickle.dumps(value, protocol=protocol, buffer_callback=buffer_callback)

    def loads(data, *, buffers=()):
        assert bytes(data[:1]) == b"!"
        return pickle.loads(data[1:], buffers=buffers)

    value = Point(np.arange(100), {1, 2})
    flat = flatten(value, dumps)
    assert_same(restore(flat.header, copies_of(flat), loads), value)
    with pytest.raises(pickle.UnpicklingError):
        restore(flat.header, copies_of(flat))


def test_objects_that_occur_twice_are_stored_once():
    array, frame = np.arange(1000), pd.DataFrame({"a": np.arange(1000)})
    value = [array, (frame, array), {"x": frame}, array]
    flat = flatten(value)
    assert sum(buffer.nbytes for buffer in flat.buffers) < 2.1 * array.nbytes
    got = restore(flat.header, copies_of(flat))
    assert got[0] is got[1][1] is got[3]
    assert got[1][0] is got[2]["x"]
    assert_same(got, value)


def test_series_of_one_index_share_it_again():
    index = pd.Index(np.random.default_rng(0).random(1000))
    got = there_and_back([pd.Series(np.ones(1000), index=index), pd.Series(0, index=index)])
    assert np.shares_memory(got[0].index.to_numpy(), got[1].index.to_numpy())


def test_a_list_that_holds_itself():
    value = [np.arange(3)]
    value.append(value)
    got = there_and_back(value)
    assert got[1] is got
    assert got[0].tolist() == [0, 1, 2]


def test_a_list_too_deep_to_go_down():
    value = inner = [np.arange(3)]
    for _ in range(200):
        inner.append([np.arange(2)])
        inner = inner[-1]
    got = there_and_back(value)
    for _ in range(200):
        got = got[-1]
    assert_same(got, inner)


def test_errors_name_the_unpicklable_type():
    with pytest.raises(TypeError, match=r"test_values\.Unpicklable"):
        flatten(Unpicklable())
    with pytest.raises(TypeError, match=r"test_values\.Gaps"):
        flatten(Gaps())
    with pytest.raises(TypeError, match=r"builtins\.generator"):
        flatten(i for i in "abc")
    with pytest.raises(TypeError, match=r"builtins\.list .*'generator'"):
        flatten([np.arange(3), (i for i in "abc")])


class Model:
    def __init__(self, weights):
        self.weights = weights


class Optimizer:
    def __init__(self, model):
        self.model = model


@pytest.mark.parametrize("wrap", [tuple, list, lambda items: dict(enumerate(items)), lambda x: [x]])
def test_objects_of_one_value_still_refer_to_one_another(wrap):
    model, history = Model(np.arange(100)), np.zeros(100_000)
    value = wrap([model, Optimizer(model), model.weights, history])
    flat = flatten(value)
    # Memory stays separate from pickled data.
    assert len(flat.header) < 2_000
    got = restore(flat.header, copies_of(flat))
    items = got[0] if len(got) == 1 else [got[n] for n in range(4)]
    assert items[1].model is items[0]
    assert items[0].weights is items[2]
    assert_same(items[3], history)


def test_dict_keys_may_be_tuples_and_labels_may_be_dates():
    frame = pd.DataFrame({"a": np.arange(100)})
    value = {
        ("x", 1): frame,
        "made": pd.Timestamp("2026-01-01"),
        "of": [np.float32(1), b"z", frame],
    }
    flat = flatten(value)
    assert sum(buffer.nbytes for buffer in flat.buffers) < 1_000
    got = restore(flat.header, copies_of(flat))
    assert got["x", 1] is got["of"][2]
    assert_same(got, value)


# ------------------------------------------------------------------ damage

DAMAGED = [
    ARRAYS["Fortran"],
    ARRAYS["rows repeated"],
    FRAMES["all types"].drop(columns=["objects", "words as objects", "sparse"]),
    pd.Series([1, 2], index=INDEXES["levels"][:2]),
    [np.arange(3), {"a": pd.Series([1.5])}],
    pa.table({"a": ["x", None], "b": [1, 2]}),
]


@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_a_damaged_header_is_a_value_error(number):
    flat = flatten(DAMAGED[number])
    buffers = copies_of(flat)
    rng = np.random.default_rng(0)
    for end in {0, 1, 7, 8, *rng.integers(0, len(flat.header), 20)}:
        with pytest.raises(ValueError):
            restore(flat.header[:end], buffers)
    for position in rng.integers(0, len(flat.header), 300):
        damaged = bytearray(flat.header)
        damaged[position] ^= 1 << int(rng.integers(8))
        with pytest.raises(ValueError):
            restore(bytes(damaged), buffers)


@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_buffers_of_another_header_are_a_value_error(number):
    flat = flatten(DAMAGED[number])
    buffers = copies_of(flat)
    for wrong in (
        buffers[:-1],
        [*buffers, buffers[0]],
        [buffers[0][:-1], *buffers[1:]],
        [np.append(buffers[0], np.uint8(0)), *buffers[1:]],
    ):
        with pytest.raises(ValueError, match="length"):
            restore(flat.header, wrong)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_value_error(header):
    with pytest.raises(ValueError):
        restore(header, [])


def sealed(plain):
    return values._PREAMBLE.pack(values.MAGIC, values.VERSION, zlib.crc32(plain)) + plain


def replaced(node, target, leaf):
    """Return a copy of a node with leaf number `target` replaced, and the number of leaves."""
    count = 0

    def walk(inner):
        nonlocal count
        if isinstance(inner, list):
            return [walk(item) for item in inner]
        count += 1
        return leaf if count - 1 == target else inner

    return walk(node), count


@pytest.mark.parametrize("number", range(len(DAMAGED)))
@pytest.mark.parametrize("leaf", [None, -1, 1 << 40, "?", [], b""])
def test_an_inconsistent_node_is_a_value_error_or_a_value(number, leaf):
    """A wrong header with a valid checksum gives an error or another value, never a crash."""
    flat = flatten(DAMAGED[number])
    sizes, node = msgpack.unpackb(flat.header[values._PREAMBLE.size :])
    _, n_leaves = replaced(node, -1, None)
    for target in range(n_leaves):
        wrong, _ = replaced(node, target, leaf)
        try:
            restore(sealed(msgpack.packb([sizes, wrong])), copies_of(flat))
        except (ValueError, EOFError, pickle.UnpicklingError):
            pass  # pickle raises the last two for invalid streams


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("gone"), KeyError("k"), MemoryError("no"), OSError(2, "gone")]
)
@pytest.mark.parametrize("column", [False, True])
def test_an_error_of_the_values_class_is_raised_unchanged(error, column):
    def loads(data, *, buffers=()):
        raise error

    value = fractions.Fraction(1, 2)
    flat = flatten(pd.DataFrame({"a": [1], "b": [value]}) if column else value)
    with pytest.raises(type(error)) as raised:
        restore(flat.header, copies_of(flat), loads)
    assert raised.value is error


def test_the_way_dask_pickles_will_do():
    value = [np.arange(3), lambda x: x + 1, Point(np.arange(1000), "y")]
    flat = flatten(value, dask_pickle.dumps)
    array, function, point = restore(flat.header, copies_of(flat), dask_pickle.loads)
    assert function(1) == 2
    assert_same([array, point], [value[0], value[2]])
    assert sum(buffer.nbytes for buffer in flat.buffers) > 8_000


def test_a_key_that_is_also_in_a_value():
    key = ("x", 0)
    assert_same(there_and_back({key: (key, np.arange(3))}), {key: (key, np.arange(3))})
    assert there_and_back({key: key, "a": b"1" * 1000}) == {key: key, "a": b"1" * 1000}
    named = pd.Series([1, 2], name=key)
    assert_same(there_and_back({key: named})[key], named)


def test_an_index_and_its_categories_of_one_name():
    name = ("n", 1)
    labels = pd.Index(["a", "b"], name=name)
    index = pd.CategoricalIndex(pd.Categorical(["a", "b"], categories=labels), name=name)
    assert_same(there_and_back(index), index)


def test_elements_that_share_memory_do_not_become_writable():
    row = np.broadcast_to(np.array([1.0, 2.0, 3.0]), (4, 3))
    for value in (pd.DataFrame(row, copy=False), pd.Series(row[:, 0], copy=False)):
        found = there_and_back(value)
        with pytest.raises(ValueError, match="read-only"):
            found.iloc[0] = 99.0
        assert_same(found, value)

"""The pandas adapter passes the conformance suite with several kinds of frames, and more tests."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from dask.dataframe.dispatch import to_pyarrow_table_dispatch
from distributed.shuffle._arrow import convert_shards
from hypothesis import event, given
from hypothesis import strategies as st

from dask_gpurt.frames import joining
from dask_gpurt.frames.adapter import Piece, Selection
from dask_gpurt.frames.columns import decompose_index
from dask_gpurt.frames.layouts import FrameLayout
from dask_gpurt.frames.pandas_ import PandasFrames
from tests.conformance.frame_suite import HostFrameSuite
from tests.frames.pandas_rows import PandasRows


class PandasSuite(PandasRows, HostFrameSuite):
    def adapter(self, frame):
        return PandasFrames(frame.iloc[:0], "slot", drop_column=True)

    def frame(self, rows, seed):
        rng = np.random.default_rng(seed)
        made = pd.DataFrame({"slot": rng.integers(0, self.n_slots, rows)})
        return self.filled(made, rng, rows)

    def filled(self, made, rng, rows):
        raise NotImplementedError


class TestNumbers(PandasSuite):
    def filled(self, made, rng, rows):
        return made.assign(
            a=rng.random(rows),
            b=rng.random(rows).astype("f4"),
            c=rng.integers(0, 9, rows),
            d=rng.integers(0, 9, rows).astype("i1"),
            e=rng.random(rows) > 0.5,
            f=rng.random(rows) * 1j,
            g=np.arange(rows).astype("M8[ns]"),
        )


class TestMixed(PandasSuite):
    def filled(self, made, rng, rows):
        return made.assign(
            text=pd.array(rng.choice(["", "a", "bcd", None], rows), dtype="str"),
            zone=pd.DatetimeIndex(np.arange(rows).astype("M8[s]"), tz="UTC"),
            mode=pd.Categorical(rng.choice(["p", "q"], rows), categories=["p", "q"]),
            maybe=pd.array(np.where(rng.random(rows) > 0.5, 1, None), dtype="Int64"),
            amount=pd.Series(rng.integers(0, 9, rows), dtype=pd.ArrowDtype(pa.int32())).array,
            span=pd.arrays.IntervalArray.from_breaks(np.arange(rows + 1.0)),
            month=pd.arrays.PeriodArray(np.arange(rows), dtype="period[M]"),
        )


class TestObjects(PandasSuite):
    def filled(self, made, rng, rows):
        values = pd.Series([{"n": i} if i % 3 else i for i in range(rows)], dtype=object)
        return made.assign(thing=values.array, holes=pd.arrays.SparseArray(np.arange(rows) % 2))


class TestIndexed(PandasSuite):
    def filled(self, made, rng, rows):
        made = made.assign(value=rng.random(rows))
        names = pd.array([f"r{i}" for i in range(rows)], dtype="str")
        return made.set_index(pd.MultiIndex.from_arrays([np.arange(rows), names], names=["n", "s"]))


class TestNothingButTheIndex(PandasSuite):
    def filled(self, made, rng, rows):
        return made.set_index(pd.Index(rng.random(rows), name="x"))

    def test_wrong_kind_and_wrong_columns_are_refused(self):
        with pytest.raises(ValueError, match="columns"):
            self.adapter(self.frame(3, 0)).open(pd.DataFrame({"other": [1]}))


class TestManyShapesOfOneColumn:
    def test_partitions_of_several_types_are_joined_in_order(self):
        parts = [
            pd.DataFrame({"slot": 0, "v": pd.Series([1, 2])}),
            pd.DataFrame({"slot": 0, "v": pd.Series([1.5])}),
            pd.DataFrame({"slot": 0, "v": pd.Series([3], dtype="i4")}),
        ]
        adapter = PandasFrames(parts[0].iloc[:0], "slot", drop_column=True)
        pieces = []
        for part in parts:
            opened = adapter.open(part)
            (body,) = opened.gather([Selection(np.arange(len(part)), False)])
            pieces.append(Piece(body, 0, len(part)))
        got = adapter.concatenate(pieces)
        assert got["v"].tolist() == [1.0, 2.0, 1.5, 3.0]
        assert got["v"].dtype == np.float64

    def test_columns_in_another_order_follow_the_meta(self):
        meta = pd.DataFrame({"slot": [0], "a": [1], "b": ["x"]}).iloc[:0]
        adapter = PandasFrames(meta, "slot", drop_column=True)
        opened = adapter.open(pd.DataFrame({"b": ["y"], "slot": [0], "a": [2]}))
        (body,) = opened.gather([Selection(np.arange(1), False)])
        assert adapter.concatenate([Piece(body, 0, 1)]).to_dict("list") == {"a": [2], "b": ["y"]}


class TestMixedWithoutBlocks(TestMixed):
    """pandas before version 3 has no such constructor, so columns are joined one by one."""

    @pytest.fixture(autouse=True)
    def without_blocks(self, monkeypatch):
        monkeypatch.setattr(joining, "create_dataframe_from_blocks", None)


@st.composite
def nearly_keys(draw):
    """Draw keys of real layouts, with up to two bytes replaced."""
    names = draw(st.lists(st.text("abc", min_size=1, max_size=3), max_size=4, unique=True))
    frame = pd.DataFrame({"slot": [0], **{name: [1.5] for name in names}})
    adapter = PandasFrames(frame.iloc[:0], "slot", drop_column=True)
    key = bytearray(adapter.open(frame).layout.key)
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        key[draw(st.integers(0, len(key) - 1))] = draw(st.integers(0, 255))
    return bytes(key)


@given(st.binary(max_size=80) | nearly_keys())
def test_layout_key_of_any_bytes_is_a_layout_or_refused(key):
    try:
        layout = FrameLayout.from_key(key)
    except ValueError:
        event("refused")
    else:
        event("a layout")
        assert FrameLayout.from_key(layout.key) == layout


def test_layout_is_restored_from_its_key():
    frame = TestMixed().frame(10, 0)
    layout = PandasFrames(frame.iloc[:0], "slot", drop_column=True).open(frame).layout
    assert FrameLayout.from_key(layout.key) == layout


def test_an_index_of_strings_held_by_python_keeps_its_type():
    index = pd.Index(["a", "b"], dtype="string[python]")
    assert decompose_index(index).objects.dtype == index.dtype


def opened_objects(values, sizeof=sys.getsizeof):
    frame = pd.DataFrame({"slot": 0, "v": pd.Series(values, dtype=object)})
    adapter = PandasFrames(frame.iloc[:0], "slot", True, sizeof)
    return adapter, adapter.open(frame)


def test_objects_count_with_their_measured_size():
    adapter, opened = opened_objects([bytes(5000 + n) for n in range(400)])
    assert 5000 < opened.row_nbytes < 5400
    rows = np.arange(100, 300)
    here, away = opened.gather([Selection(rows, False), Selection(rows, True)])
    assert here.nbytes == pytest.approx(away.buffer.nbytes, rel=0.02)
    # The buffer is in memory together with the restored objects.
    unpacked = adapter.unpack(opened.layout_key, away)
    assert unpacked.nbytes == away.buffer.nbytes + away.pickle_nbytes


def test_small_objects_count_more_than_their_pickle():
    adapter, opened = opened_objects(range(400))
    (away,) = opened.gather([Selection(np.arange(400), True)])
    assert adapter.unpack(opened.layout_key, away).nbytes > 10 * away.pickle_nbytes


def test_a_sample_of_distinct_objects_is_measured():
    measured = []

    def sizeof(value):
        measured.append(value)
        return 1000

    _, opened = opened_objects([*range(9000), *["same"] * 9000], sizeof)
    assert 40 < len(measured) <= 51
    assert measured[-1] == "same"
    assert 500 < opened.row_nbytes < 540


def test_a_partition_without_rows_has_no_objects_to_measure():
    _, opened = opened_objects([])
    assert opened.row_nbytes > 0


def shuffled(*parts: pd.DataFrame) -> pd.DataFrame:
    """Return the result of a run over all rows of some partitions. The first gives the meta."""
    adapter = PandasFrames(
        parts[0].iloc[:0].assign(_partitions=np.array([], "int64")), "_partitions", True
    )
    pieces = []
    for part in parts:
        opened = adapter.open(part.assign(_partitions=0))
        (shard,) = opened.gather([Selection(np.arange(len(part)), True)])
        pieces.append(Piece(adapter.unpack(opened.layout_key, shard), 0, len(part)))
    return adapter.concatenate(pieces)


def stock_shuffled(*parts: pd.DataFrame) -> pd.DataFrame:
    numbered = [part.assign(_partitions=0) for part in parts]
    tables = []
    for number, part in enumerate(numbered):
        table = to_pyarrow_table_dispatch(part, preserve_index=True)
        numbers = pa.array([number] * len(part), pa.uint32())
        tables.append(table.append_column("__input_partition_id__", numbers))
    found = convert_shards(tables, numbered[0].iloc[:0], "_partitions", True)
    return found.drop(columns="_partitions")


def categories(*values, dtype=None):
    return pd.DataFrame({"a": pd.Series(values, dtype=dtype).astype("category")})


def arrow(*values, dtype):
    return pd.DataFrame({"a": pd.array(values, dtype=pd.ArrowDtype(dtype))})


UNLIKE = {
    "categories, few and many": (categories("k1"), categories(*[f"k{i}" for i in range(300)])),
    "categories, another column wider": (
        categories("x").assign(b=1),
        categories("y").assign(b=1.5),
    ),
    "integers, then nullable ones": (
        pd.DataFrame({"a": [1, 2]}),
        pd.DataFrame({"a": pd.array([3, 4], "Int64")}),
    ),
    "categories, integers and none": (categories(1, 2), categories(None, dtype=object)),
    "categories, strings and none": (categories("q"), categories(None, dtype=object)),
    "categories, integers and floats": (categories(1), categories(1.5)),
    "Arrow, none": (arrow(1, dtype=pa.int64()), arrow(None, dtype=pa.null())),
    "Arrow, times": (
        arrow(pd.Timestamp("2020"), dtype=pa.timestamp("us")),
        arrow(pd.Timestamp("2021"), dtype=pa.timestamp("ns")),
    ),
    "strings of Python, then objects": (
        pd.DataFrame({"a": pd.array(["x"], dtype="string[python]")}),
        pd.DataFrame({"a": pd.Series([None, "z"], dtype=object)}),
    ),
}


@pytest.mark.parametrize(
    ("plain", "nullable"), [("i8", "Int64"), ("f4", "Float32"), ("?", "boolean")]
)
def test_complete_nullable_columns_get_the_promised_type(plain, nullable):
    """In stock Dask, the partition that arrives first determines the type."""
    meta = pd.DataFrame({"a": pd.Series([], dtype=plain)})
    whole = pd.DataFrame({"a": pd.array([1, 0], nullable)})
    missing = pd.DataFrame({"a": pd.array([1, None], nullable)})
    assert shuffled(meta, whole)["a"].dtype == np.dtype(plain)
    assert shuffled(meta.reindex([0]).fillna(1).astype(plain), whole)["a"].tolist() == [1, 1, 0]
    assert shuffled(meta, missing)["a"].dtype == nullable
    assert shuffled(meta, whole, missing)["a"].dtype == nullable
    other = pd.DataFrame({"a": pd.array([1], "Int8")})
    assert shuffled(pd.DataFrame({"a": pd.Series([], dtype="i8")}), other)["a"].dtype == "Int64"


@pytest.mark.parametrize("parts", UNLIKE.values(), ids=UNLIKE)
def test_partitions_of_several_types_are_joined(parts):
    ours, stock = shuffled(*parts), stock_shuffled(*parts)
    pd.testing.assert_frame_equal(
        ours.reset_index(drop=True), stock.reset_index(drop=True), check_categorical=False
    )


@pytest.mark.parametrize("n_levels", [1, 2])
@pytest.mark.parametrize("unlike", ["categories, few and many", "categories, another column wider"])
def test_categories_of_an_index_are_united(unlike, n_levels):
    levels = ["a", "number"][:n_levels]
    parts = [part.assign(number=7, c=1).set_index(levels) for part in UNLIKE[unlike]]
    ours, stock = shuffled(*parts), stock_shuffled(*parts)
    pd.testing.assert_frame_equal(ours, stock, check_categorical=False)
    assert isinstance(ours.index.get_level_values("a").dtype, pd.CategoricalDtype)


@pytest.mark.parametrize("index", [pa.int8(), pa.int16()], ids=str)
def test_dictionary_too_large_for_its_index_is_an_error(index):
    texts = [[f"{part} {number}" for number in range(100)] for part in range(2)]
    parts = [arrow(*some, dtype=pa.dictionary(index, pa.string())) for some in texts]
    if index == pa.int16():
        assert shuffled(*parts)["a"].tolist() == texts[0] + texts[1]
    else:
        with pytest.raises(ValueError, match=r"column 'a', dictionary.*Give it a wider type"):
            shuffled(*parts)


def test_values_that_an_arrow_type_cannot_hold_keep_their_type():
    """Stock Dask raises an error for them."""
    parts = arrow(1, dtype=pa.int64()), arrow(1.5, dtype=pa.float64())
    assert shuffled(*parts)["a"].tolist() == [1.0, 1.5]


def test_the_promised_type_replaces_stocks_objects():
    large = arrow("b", dtype=pa.large_string())
    found = shuffled(arrow("a", dtype=pa.string()), large)["a"]
    assert (found.dtype, found.tolist()) == (pd.ArrowDtype(pa.string()), ["a", "b"])
    objects = pd.DataFrame({"a": pd.Series([None, "z"], dtype=object)})
    strings = pd.DataFrame({"a": pd.array(["x"], dtype="string[python]")})
    assert shuffled(objects, strings)["a"].tolist() == [None, "z", "x"]


def test_outputs_do_not_share_the_names_of_their_columns():
    """A program may name the columns of one output."""
    parts = [pd.DataFrame({"slot": 0, "v": [1.0]}) for _ in range(2)]
    adapter = PandasFrames(parts[0].iloc[:0], "slot", drop_column=True)
    found = []
    for part in parts:
        (body,) = adapter.open(part).gather([Selection(np.arange(1), False)])
        found.append(adapter.concatenate([Piece(body, 0, 1)]))
    found[0].columns.name = "named"
    assert found[1].columns.name is None

"""Values that are no arrays, frames or tables are pickled, with shared parts only once."""

from __future__ import annotations

import datetime
import fractions
import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.frames.flat.values import flatten, restore
from tests.frames.flat.value_cases import (
    Point,
    Series,
    Unpicklable,
    assert_same,
    copies_of,
    deterministic,
    read_only,
    there_and_back,
)

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
def test_other_value_is_restored_equal(name):
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
def test_any_tree_is_restored_equal(tree):
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


def test_given_pickling_functions_are_used():
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


def test_objects_of_inner_containers_are_stored_once():
    """A container without an array could have a pickle of its own."""
    shared, text = [], "h" * 100_000
    rows = [(np.arange(3), {"day": datetime.date(2020, 1, n + 1), "text": text}) for n in range(20)]
    value = {"first": {"list": shared, b"key": 1}, "rows": rows, "last": shared}
    flat = flatten(value)
    assert flat.nbytes < 1.1 * len(pickle.dumps(value))
    found = restore(flat.header, copies_of(flat))
    assert found["first"]["list"] is found["last"]
    assert len({id(row[1]["text"]) for row in found["rows"]}) == 1
    assert [row[1] for row in found["rows"]] == [row[1] for row in rows]


def test_an_inner_container_that_shares_nothing_has_one_pickle():
    """Thousands of pickles would take long."""
    days = [datetime.date(2020, 1, 1) + datetime.timedelta(n) for n in range(5_000)]
    flat = flatten((np.arange(3), days))
    assert len(flat.buffers) == 2
    assert restore(flat.header, copies_of(flat))[1] == days


def test_objects_that_occur_twice_are_stored_once():
    array, frame = np.arange(1000), pd.DataFrame({"a": np.arange(1000)})
    value = [array, (frame, array), {"x": frame}, array]
    flat = flatten(value)
    assert sum(buffer.nbytes for buffer in flat.buffers) < 2.1 * array.nbytes
    got = restore(flat.header, copies_of(flat))
    assert got[0] is got[1][1] is got[3]
    assert got[1][0] is got[2]["x"]
    assert_same(got, value)


def test_series_of_one_index_share_it_after_restoring():
    index = pd.Index(np.random.default_rng(0).random(1000))
    got = there_and_back([pd.Series(np.ones(1000), index=index), pd.Series(0, index=index)])
    assert np.shares_memory(got[0].index.to_numpy(), got[1].index.to_numpy())


def test_list_that_holds_itself_is_restored():
    value = [np.arange(3)]
    value.append(value)
    got = there_and_back(value)
    assert got[1] is got
    assert got[0].tolist() == [0, 1, 2]


def test_deeply_nested_list_is_restored():
    value = inner = [np.arange(3)]
    for _ in range(200):
        inner.append([np.arange(2)])
        inner = inner[-1]
    got = there_and_back(value)
    for _ in range(200):
        got = got[-1]
    assert_same(got, inner)


def test_errors_name_the_unpicklable_type():
    with pytest.raises(TypeError, match=r"value_cases\.Unpicklable"):
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
def test_references_between_objects_of_a_value_are_kept(wrap):
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

"""A damaged header or buffer of a flat value is an error."""

from __future__ import annotations

import fractions
import pickle
import zlib

import msgpack
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from distributed.protocol import pickle as dask_pickle
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.frames.flat import values
from dask_gpurt.frames.flat.values import flatten, restore
from tests.frames.flat.value_cases import (
    ARRAYS,
    FRAMES,
    INDEXES,
    Point,
    assert_same,
    copies_of,
    there_and_back,
)

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
def test_header_of_any_bytes_is_a_value_error(header):
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
    buffers = copies_of(flat)
    sizes, node = msgpack.unpackb(flat.header[values._PREAMBLE.size :])
    _, n_leaves = replaced(node, -1, None)
    for target in range(n_leaves):
        wrong, _ = replaced(node, target, leaf)
        try:
            restore(sealed(msgpack.packb([sizes, wrong])), buffers)
        except (ValueError, EOFError, pickle.UnpicklingError):
            pass  # pickle raises the last two for invalid streams
    # None of them changed the buffers.
    assert_same(restore(flat.header, buffers), DAMAGED[number])


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


def test_pickling_functions_of_dask_work():
    value = [np.arange(3), lambda x: x + 1, Point(np.arange(1000), "y")]
    flat = flatten(value, dask_pickle.dumps)
    array, function, point = restore(flat.header, copies_of(flat), dask_pickle.loads)
    assert function(1) == 2
    assert_same([array, point], [value[0], value[2]])
    assert sum(buffer.nbytes for buffer in flat.buffers) > 8_000


def test_key_that_also_occurs_in_a_value_is_restored():
    key = ("x", 0)
    assert_same(there_and_back({key: (key, np.arange(3))}), {key: (key, np.arange(3))})
    assert there_and_back({key: key, "a": b"1" * 1000}) == {key: key, "a": b"1" * 1000}
    named = pd.Series([1, 2], name=key)
    assert_same(there_and_back({key: named})[key], named)


def test_index_and_categories_may_share_a_name():
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

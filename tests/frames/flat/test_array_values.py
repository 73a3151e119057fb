"""Arrays are restored equal from their flat form, without a copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dask_gpurt.frames.flat.values import flatten, restore
from tests.frames.flat.value_cases import (
    ARRAYS,
    assert_same,
    copies_of,
    deterministic,
    there_and_back,
)

# ------------------------------------------------------------------ arrays


@pytest.mark.parametrize("name", ARRAYS)
def test_array_is_restored_equal(name):
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


def test_slice_stores_only_its_own_elements():
    flat = flatten(np.arange(1_000_000)[10:20])
    assert flat.buffers[0].nbytes == 80


def test_array_over_writable_memory_is_writable():
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
def test_any_array_is_restored_equal(array, data):
    if array.ndim:
        array = array.transpose(data.draw(st.permutations(range(array.ndim))))
        array = array[data.draw(hnp.basic_indices(array.shape, allow_newaxis=True))]
    # An index of every axis gives a scalar.
    assume(type(array) is np.ndarray)
    assert_same(there_and_back(array), array)

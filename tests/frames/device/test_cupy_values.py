"""CuPy arrays are taken apart and restored; the arrays are real ones over host memory."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


def over(host):
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(host.shape, dtype=host.dtype, memptr=pointer, strides=host.strides)


def seen(array):
    raw = (ctypes.c_char * array.nbytes).from_address(array.data.ptr)
    return np.ndarray(array.shape, array.dtype, raw, strides=array.strides)


@pytest.mark.parametrize(
    "host",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        np.array(7.0),
        np.arange(6) > 2,
        np.arange(5, dtype=np.complex64),
        np.zeros((0, 3), dtype=np.int16),
    ],
    ids=["matrix", "transposed", "scalar", "flags", "complex", "empty"],
)
def test_cupy_array_is_restored_over_its_own_memory(host):
    from dask_gpurt.frames.device.cupy_ import put_together, take_apart

    array = over(host)
    header, memory = take_apart(array)
    assert (memory.dtype, memory.nbytes) == (np.uint8, host.nbytes)
    again = put_together(header, memory)
    assert type(again) is cupy.ndarray
    assert (again.shape, again.dtype) == (host.shape, host.dtype)
    if host.size:
        assert again.data.ptr == host.ctypes.data
        assert again.strides == host.strides
        np.testing.assert_array_equal(seen(again), host)

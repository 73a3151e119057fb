"""CuPy's arrays: every call to CuPy that a rechunk and the store need, but for NumPy's names.

Importing this imports CuPy, so only what has met an array of it does. Memory comes from CuPy's
current allocator, which is RMM's where that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.adapter import Landing


class CupyMemory:
    """Memory of CuPy's allocator, as `DeviceMemory`."""

    def __init__(self, array: cupy.ndarray) -> None:
        self.array = array

    @classmethod
    def empty(cls, nbytes: int) -> CupyMemory:
        """Uninitialised memory that any stream may use.

        Raises
        ------
        MemoryError
            The device has no room.
        """
        memory = cls(cupy.empty(nbytes, dtype=np.uint8))
        # It may have been somebody else's until work that is still queued is done.
        cupy.cuda.get_current_stream().synchronize()
        return memory

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def __len__(self) -> int:
        return self.nbytes

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        interface: Mapping[str, Any] = self.array.__cuda_array_interface__
        return interface

    def copy_to_host(self, out: npt.NDArray[np.uint8], start: int = 0) -> None:
        if start + out.nbytes > self.nbytes:
            raise IndexError(f"{out.nbytes} bytes from {start} of {self.nbytes}")
        if out.nbytes:
            self.array[start : start + out.nbytes].get(out=out)


class CupyArrays:
    """See `DeviceArrays` of `frames.arrays`."""

    def __init__(self, room: Landing) -> None:
        self.room = room

    def elements(self, memory: CupyMemory, dtype: np.dtype[Any]) -> cupy.ndarray:
        return memory.array.view(dtype)

    def empty(self, nbytes: int) -> CupyMemory:
        return CupyMemory.empty(nbytes)

    def to_device(self, buffer: npt.NDArray[np.uint8]) -> CupyMemory:
        memory = CupyMemory.empty(buffer.nbytes)
        if buffer.nbytes:
            memory.array.set(buffer)
            self.finish()
        return memory

    def finish(self) -> None:
        cupy.cuda.get_current_stream().synchronize()


def take_apart(array: cupy.ndarray) -> tuple[Any, cupy.ndarray]:
    """What it takes to put an array together again, and its memory as an array of bytes.

    An array with gaps is copied on the device first, one that is a transpose of a dense one is not.
    """
    is_transposed = array.flags.f_contiguous and not array.flags.c_contiguous
    dense = array.T if is_transposed else cupy.ascontiguousarray(array)
    return (array.dtype, array.shape, is_transposed), dense.reshape(-1).view(np.uint8)


def put_together(header: Any, memory: cupy.ndarray) -> cupy.ndarray:
    """The inverse, over the memory given."""
    dtype, shape, is_transposed = header
    elements = memory.view(dtype)
    return elements.reshape(shape[::-1]).T if is_transposed else elements.reshape(shape)

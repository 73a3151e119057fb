"""The calls to CuPy that a rechunk and the store need, except those with NumPy's names.

Importing this module imports CuPy, so import it only after a CuPy array appears. Memory comes from
CuPy's current allocator, which may be RMM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.adapter import DeviceAllocator, DeviceMemory, while_room

#: The type of CuPy's arrays.
Array = cupy.ndarray


class CupyMemory:
    """Memory of CuPy's allocator as a `DeviceMemory`."""

    def __init__(self, array: cupy.ndarray) -> None:
        self.array = array

    @classmethod
    def empty(cls, nbytes: int) -> CupyMemory:
        """Allocate uninitialized memory. Its previous owner may have work queued.

        Raises
        ------
        MemoryError
            The device has no room.
        """
        return cls(cupy.empty(nbytes, dtype=np.uint8))

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
            raise IndexError(f"{out.nbytes} bytes at {start} exceed a buffer of {self.nbytes}")
        if out.nbytes:
            # Not on the default stream, where the tasks' work is queued.
            self.array[start : start + out.nbytes].get(out=out, stream=own_stream())


class CupyArrays:
    """The `DeviceArrays` of `frames.chunks` for CuPy."""

    def __init__(self, room: DeviceAllocator) -> None:
        self.room = room

    def elements(self, memory: CupyMemory, dtype: np.dtype[Any]) -> cupy.ndarray:
        return memory.array.view(dtype)

    def empty(self, nbytes: int) -> CupyMemory:
        return CupyMemory.empty(nbytes)

    def to_device(self, buffer: npt.NDArray[np.uint8]) -> CupyMemory:
        memory = CupyMemory.empty(buffer.nbytes)
        if buffer.nbytes:
            with self.computing():
                memory.array.set(buffer)
        return memory

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        stream = own_stream()
        stream.wait_event(recorded(cupy.cuda.get_current_stream()))
        with stream:
            yield
            done = recorded(stream)
        done.synchronize()

    def arriving(self, sizes: Sequence[int]) -> list[DeviceMemory]:
        found = while_room(self.room, sizes)
        if found:
            recorded(cupy.cuda.get_current_stream()).synchronize()
        return found


def own_stream() -> cupy.cuda.Stream:
    """Return our stream of the current device.

    It does not wait for the default stream, nor that for it.
    """
    return _own_stream(cupy.cuda.get_device_id())


@cache
def _own_stream(device: int) -> cupy.cuda.Stream:
    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True)


def recorded(stream: cupy.cuda.Stream) -> cupy.cuda.Event:
    """Return an event at the end of the work queued so far."""
    # An event that blocks frees the processor while the host waits.
    event = cupy.cuda.Event(block=True, disable_timing=True)
    stream.record(event)
    return event


def take_apart(array: cupy.ndarray) -> tuple[Any, cupy.ndarray]:
    """Decompose an array into a header and an array of bytes.

    An array with gaps is first copied on the device. The transpose of a dense array is not copied.
    """
    is_transposed = array.flags.f_contiguous and not array.flags.c_contiguous
    dense = array.T if is_transposed else cupy.ascontiguousarray(array)
    return (array.dtype, array.shape, is_transposed), dense.reshape(-1).view(np.uint8)


def put_together(header: Any, memory: cupy.ndarray) -> cupy.ndarray:
    """Compose an array over the given memory. This is the inverse of `take_apart`."""
    dtype, shape, is_transposed = header
    elements = memory.view(dtype)
    return elements.reshape(shape[::-1]).T if is_transposed else elements.reshape(shape)


def is_for_amd() -> bool:
    """Return whether CuPy is built for AMD's GPUs."""
    return bool(cupy.cuda.runtime.is_hip)


def to_host(memory: cupy.ndarray) -> npt.NDArray[np.uint8]:
    """Copy an array of bytes to the host."""
    host: npt.NDArray[np.uint8] = cupy.asnumpy(memory)
    return host


def from_host(buffer: Any) -> cupy.ndarray:
    """Copy bytes of the host to an array on the device."""
    return cupy.asarray(np.frombuffer(buffer, dtype=np.uint8))

"""Packings for device values: copy their memory to the host and back.

`device_packing` handles arrays of the device port (`devices.array`). `library_packing` handles
values of GPU libraries: the library's own serialization names the pieces of memory of a value.
The pieces are copied one by one. To pack them on the device first, as much memory would have to be
free there as the value takes. But values are evicted because no memory is free.

Each direction has a stream of its own, so that neither waits for the other. A caller waits for its
own copy, never for the whole device.

A value of a library is flattened like any other (`frames.flat.values`), but its pieces stay on the
device until a tier asks for them. A tier with pinned memory has them copied there directly.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.cuda.driver import Driver
from dask_gpurt.devices.device import Device, Priority, Stream
from dask_gpurt.devices.host_memory.pinned import Scattered
from dask_gpurt.errors import ValueRefusedError
from dask_gpurt.frames.flat.values import Flat, flatten, restore
from dask_gpurt.memory.tiers import Packing

#: Format of the number of device buffers. It precedes the header; these buffers come last.
_N_DEVICE = struct.Struct("<I")

#: Splits a value into a header and pieces of memory. Device pieces have `__cuda_array_interface__`.
TakeApart = Callable[[Any], tuple[Any, Sequence[Any]]]
#: The inverse of `TakeApart`.
PutTogether = Callable[[Any, Sequence[Any]], Any]


def is_on_device(value: Any) -> bool:
    """Return whether a value's top level is the device."""
    return isinstance(value, DeviceArray)


def device_packing(device: Device) -> Packing:
    """Return a packing for arrays of a device, and open streams on it.

    The buffer of a flat array raises the error of a kernel that failed to fill the array. `restore`
    raises MemoryError if the device has no room, even after evictions.
    """
    out = device.stream("values out", Priority.HIGH)
    back = device.stream("values back", Priority.HIGH)
    # Memory is freed after the last kernel that uses it, and copies must not wait for kernels.
    frees = device.stream("values freed")

    def flattened(array: DeviceArray) -> Flat:
        # The text of a dtype takes less room than its pickle, but lacks the names of fields.
        dtype = array.dtype.str if array.dtype.names is None else array.dtype
        return Flat(flatten([dtype, *array.shape]).header, (ArrayBuffer(array, out),))

    def restored(header: bytes, buffers: Any) -> DeviceArray:
        dtype, *shape = restore(header, ())
        (source,) = buffers
        memory = device.allocate(source.nbytes, back)
        try:
            for start, part in _placed(_parts_of(source)):
                back.to_device(memory.part(start, part.nbytes), part)
        except BaseException:
            memory.free(back)
            raise
        array = DeviceArray(device, memory, dtype, tuple(shape), frees, back.record())
        # The copy reads the host memory until it is complete; the return frees that memory.
        array.ready.synchronize()
        return array

    return Packing(lambda array: array.nbytes, flattened, restored)


class ArrayBuffer:
    """The memory of an array of a device, as a `DeviceBuffer`."""

    def __init__(self, array: DeviceArray, stream: Stream) -> None:
        self._array = array
        self._stream = stream

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def copy_into(self, parts: Sequence[npt.NDArray[np.uint8]]) -> None:
        array, stream = self._array, self._stream
        # The stream itself must not wait for a kernel: a failed kernel would stop it for good.
        array.ready.synchronize()
        stream.wait(array.ready)
        try:
            for start, part in _placed(parts):
                stream.to_host(part, array.buffer.part(start, part.nbytes))
        finally:
            # Even after an error: queued copies still write to the memory.
            copied = stream.record()
            array.used(copied)
            copied.synchronize()


def _parts_of(buffer: npt.NDArray[np.uint8] | Scattered) -> Sequence[npt.NDArray[np.uint8]]:
    return buffer.parts if isinstance(buffer, Scattered) else (buffer,)


def _placed(
    parts: Iterable[npt.NDArray[np.uint8]],
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield each part that is not empty, with its position in all of them together."""
    start = 0
    for part in parts:
        if part.nbytes:
            yield start, part
        start += part.nbytes


class LibraryCopies:
    """Copies between the host and memory of GPU libraries. Thread-safe.

    Libraries work on the device's default stream, and reuse freed memory in the order of that
    stream. So a copy waits for the work that was queued there when it began, and is complete when
    the method returns. The target memory of a copy is allocated on that stream.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._out = driver.open_stream(Priority.HIGH)
        self._back = driver.open_stream(Priority.HIGH)

    def on_default_stream(self) -> AbstractContextManager[None]:
        """Return a context in which libraries work on the default stream."""
        return self.driver.computing(self.driver.default_stream)

    def leaving(self, pieces: Iterable[Any]) -> list[LibraryBuffer]:
        """Return buffers that copy pieces of device memory to the host when they are asked to.

        Raises
        ------
        ValueRefusedError
            A piece is on another GPU. Nothing here waits for that GPU's default stream.
        """
        pieces = list(pieces)
        if any(piece.nbytes and self.driver.is_elsewhere(piece) for piece in pieces):
            raise ValueRefusedError("it is on another GPU")
        return [LibraryBuffer(self, piece) for piece in pieces]

    def to_host(self, piece: Any, parts: Iterable[npt.NDArray[np.uint8]]) -> None:
        """Fill pieces of host memory, one after the other, from a piece of device memory."""
        driver, stream = self.driver, self._out
        driver.make_wait(stream, driver.record(driver.default_stream))
        try:
            for start, part in _placed(parts):
                driver.copy_out(stream, part, driver.borrow(piece), start)
        finally:
            # Even after an error: queued copies still write to the memory.
            driver.wait_for(driver.record(stream))

    def to_device(self, buffers: Iterable[npt.NDArray[np.uint8] | Scattered]) -> list[Any]:
        """Copy buffers to device memory that the libraries allocate.

        Raises
        ------
        MemoryError
            The device has no room.
        """
        driver, stream = self.driver, self._back
        held = [
            (driver.allocate(max(1, buffer.nbytes), driver.default_stream), buffer)
            for buffer in buffers
        ]
        # Queued work may still use this memory for its previous owner.
        driver.make_wait(stream, driver.record(driver.default_stream))
        try:
            for memory, buffer in held:
                for start, part in _placed(_parts_of(buffer)):
                    driver.copy_in(stream, memory, start, part)
        finally:
            # Even after an error: queued copies still read the memory.
            driver.wait_for(driver.record(stream))
        return [driver.array(memory, 0, buffer.nbytes) for memory, buffer in held]


class LibraryBuffer:
    """A piece of a value of a GPU library, as a `DeviceBuffer`. It keeps the piece alive."""

    def __init__(self, copies: LibraryCopies, piece: Any) -> None:
        self._copies = copies
        self._piece = piece

    @property
    def nbytes(self) -> int:
        return int(self._piece.nbytes)

    def copy_into(self, parts: Sequence[npt.NDArray[np.uint8]]) -> None:
        if self.nbytes:
            self._copies.to_host(self._piece, parts)


def library_packing(
    copies: Callable[[], LibraryCopies],
    host: Packing,
    take_apart: TakeApart,
    put_together: PutTogether,
) -> Packing:
    """Return a packing for values of GPU libraries.

    Parameters
    ----------
    copies
        Returns the object that copies; called only once there are values.
    host
        Measures values, and packs their host memory.
    """

    def flattened(value: Any) -> Flat:
        gpu = copies()
        with gpu.on_default_stream():
            header, pieces = take_apart(value)
        on_device = [hasattr(type(piece), "__cuda_array_interface__") for piece in pieces]
        on_host = [not is_device for is_device in on_device]
        leaving = gpu.leaving(compress(pieces, on_device))
        parts = [np.frombuffer(piece, dtype=np.uint8) for piece in compress(pieces, on_host)]
        flat = host.flatten([header, on_device, parts])
        return Flat(_N_DEVICE.pack(len(leaving)) + flat.header, (*flat.buffers, *leaving))

    def restored(flat_header: bytes, buffers: Any) -> Any:
        gpu = copies()
        (n_device,) = _N_DEVICE.unpack_from(flat_header)
        n_host = len(buffers) - n_device
        header, on_device, parts = host.restore(flat_header[_N_DEVICE.size :], buffers[:n_host])
        if sum(on_device) != n_device:
            raise ValueError("the buffers of a value differ in number from its header")
        device_parts = iter(gpu.to_device(buffers[n_host:]))
        host_parts = iter(parts)
        pieces = [
            next(device_parts) if is_device else next(host_parts).data for is_device in on_device
        ]
        with gpu.on_default_stream():
            return put_together(header, pieces)

    return Packing(host.sizeof, flattened, restored)

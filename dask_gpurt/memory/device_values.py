"""Packings for device values: copy their memory to the host and back.

`device_packing` handles arrays of the device port (`devices.array`). `library_packing` handles
values of GPU libraries: the library's own serialization names the pieces of memory of a value.
The pieces are copied one by one. To pack them on the device first would take as much memory there
as the value does, and values are evicted because there is none.

Each direction has a stream of its own, so that neither waits for the other. A caller waits for its
own copy, never for the whole device. Once on the host, a value is flattened like any other
(`frames.flat.values`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.cuda.driver import Driver
from dask_gpurt.devices.device import Device, Priority
from dask_gpurt.errors import ValueRefusedError
from dask_gpurt.frames.flat.values import Flat, flatten, restore
from dask_gpurt.memory.tiers import Packing

#: Splits a value into a header and pieces of memory. Device pieces have `__cuda_array_interface__`.
TakeApart = Callable[[Any], tuple[Any, Sequence[Any]]]
#: The inverse of `TakeApart`.
PutTogether = Callable[[Any, Sequence[Any]], Any]


def is_on_device(value: Any) -> bool:
    """Return whether a value's top level is the device."""
    return isinstance(value, DeviceArray)


def device_packing(device: Device) -> Packing:
    """Return a packing for arrays of a device, and open streams on it.

    `flatten` raises the error of a kernel that failed to fill the array. `restore` raises
    MemoryError if the device has no room, even after evictions.
    """
    out = device.stream("values out", Priority.HIGH)
    back = device.stream("values back", Priority.HIGH)
    # Memory is freed after its last use, by kernels too: copies must not wait for that.
    frees = device.stream("values freed")

    def flattened(array: DeviceArray) -> Flat:
        # The stream itself must not wait for a kernel: a failed kernel would stop it for good.
        array.ready.synchronize()
        host, copied = array.to_host(out)
        copied.synchronize()
        return flatten(host)

    def restored(header: bytes, buffers: Any) -> DeviceArray:
        host = restore(header, buffers)
        array = DeviceArray.from_host(host, device, back, frees)
        # The copy reads the host memory until it is complete; the return frees that memory.
        array.ready.synchronize()
        return array

    return Packing(lambda array: array.nbytes, flattened, restored)


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

    def to_host(self, pieces: Iterable[Any]) -> list[npt.NDArray[np.uint8]]:
        """Copy pieces of device memory to the host.

        Raises
        ------
        ValueRefusedError
            A piece is on another GPU. Nothing here waits for that GPU's default stream.
        """
        driver, stream = self.driver, self._out
        pieces = list(pieces)
        if any(piece.nbytes and driver.is_elsewhere(piece) for piece in pieces):
            raise ValueRefusedError("it is on another GPU")
        driver.make_wait(stream, driver.record(driver.default_stream))
        copies = []
        for piece in pieces:
            copies.append(np.empty(piece.nbytes, dtype=np.uint8))
            if piece.nbytes:
                driver.copy_out(stream, copies[-1], driver.borrow(piece), 0)
        driver.wait_for(driver.record(stream))
        return copies

    def to_device(self, buffers: Iterable[npt.NDArray[np.uint8]]) -> list[Any]:
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
        for memory, buffer in held:
            if buffer.nbytes:
                driver.copy_in(stream, memory, 0, buffer)
        driver.wait_for(driver.record(stream))
        return [driver.array(memory, 0, buffer.nbytes) for memory, buffer in held]


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
        device_parts = iter(gpu.to_host(compress(pieces, on_device)))
        parts = [
            next(device_parts) if is_device else np.frombuffer(piece, dtype=np.uint8)
            for piece, is_device in zip(pieces, on_device, strict=True)
        ]
        return host.flatten([header, on_device, parts])

    def restored(flat_header: bytes, buffers: Any) -> Any:
        gpu = copies()
        header, on_device, parts = host.restore(flat_header, buffers)
        device_parts = iter(gpu.to_device(compress(parts, on_device)))
        pieces = [
            next(device_parts) if is_device else part.data
            for part, is_device in zip(parts, on_device, strict=True)
        ]
        with gpu.on_default_stream():
            return put_together(header, pieces)

    return Packing(host.sizeof, flattened, restored)

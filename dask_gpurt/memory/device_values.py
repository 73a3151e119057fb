"""How values of a device are taken apart and put together: copied to the host, and back.

`device_packing` is for arrays over the port of a device (`devices.array`), `library_packing` for
what GPU libraries make, whose own serialization says which pieces of memory a value consists of.
Those are copied one by one: to pack them on the device first would take as much memory there as
the value has, and values leave because there is none.

The copies go on streams of their own, one for each direction, so that neither waits for the other.
Whoever asks waits for its own copy, never for the device. From there on a value is one like any of
the host (`frames.flat.values`).
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

#: A value to a header, and pieces of which those of the device have `__cuda_array_interface__`.
TakeApart = Callable[[Any], tuple[Any, Sequence[Any]]]
#: The inverse.
PutTogether = Callable[[Any, Sequence[Any]], Any]


def is_on_device(value: Any) -> bool:
    """Whether a value's home is the device."""
    return isinstance(value, DeviceArray)


def device_packing(device: Device) -> Packing:
    """Packs values of a device; opens streams on it.

    `flatten` raises what a kernel raised that was to fill the array; `restore` raises MemoryError
    if the device has no room, whatever left it.
    """
    out = device.stream("values out", Priority.HIGH)
    back = device.stream("values back", Priority.HIGH)
    # Memory is freed after all its uses, by kernels as well: copies must not wait for that.
    frees = device.stream("values freed")

    def flattened(array: DeviceArray) -> Flat:
        # The stream itself must not wait for a kernel: one that fails would stop it for good.
        array.ready.synchronize()
        host, copied = array.to_host(out)
        copied.synchronize()
        return flatten(host)

    def restored(header: bytes, buffers: Any) -> DeviceArray:
        host = restore(header, buffers)
        array = DeviceArray.from_host(host, device, back, frees)
        # The host's memory belongs to the copy until then, and is let go of on return.
        array.ready.synchronize()
        return array

    return Packing(lambda array: array.nbytes, flattened, restored)


class LibraryCopies:
    """Copies between the host and what GPU libraries allocated. Safe to use from any thread.

    Libraries work on the device's default stream, and give memory back to whoever comes next on
    it. So a copy comes after what was queued there when it began; it is done when it returns; and
    memory that is filled here is allocated there.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._out = driver.open_stream(Priority.HIGH)
        self._back = driver.open_stream(Priority.HIGH)

    def on_default_stream(self) -> AbstractContextManager[None]:
        """What libraries do inside, they do where they do everything else."""
        return self.driver.computing(self.driver.default_stream)

    def to_host(self, pieces: Iterable[Any]) -> list[npt.NDArray[np.uint8]]:
        """Copies of memory of any library.

        Raises
        ------
        ValueRefusedError
            It is another device's, whose default stream nothing here waits for.
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
        """Arrays of bytes in memory that the libraries allocated.

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
        # It may have been somebody else's until work that is still queued is done.
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
    """Packs values of GPU libraries.

    Parameters
    ----------
    copies
        Gives what makes copies, once there are values.
    host
        Measures, and packs what is in the host's memory.
    """

    def flattened(value: Any) -> Flat:
        gpu = copies()
        with gpu.on_default_stream():
            header, pieces = take_apart(value)
        are_there = [hasattr(type(piece), "__cuda_array_interface__") for piece in pieces]
        there = iter(gpu.to_host(compress(pieces, are_there)))
        parts = [
            next(there) if is_there else np.frombuffer(piece, dtype=np.uint8)
            for piece, is_there in zip(pieces, are_there, strict=True)
        ]
        return host.flatten([header, are_there, parts])

    def restored(flat_header: bytes, buffers: Any) -> Any:
        gpu = copies()
        header, are_there, parts = host.restore(flat_header, buffers)
        there = iter(gpu.to_device(compress(parts, are_there)))
        pieces = [
            next(there) if is_there else part.data
            for part, is_there in zip(parts, are_there, strict=True)
        ]
        with gpu.on_default_stream():
            return put_together(header, pieces)

    return Packing(host.sizeof, flattened, restored)

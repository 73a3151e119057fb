"""A device array as a task's output: dtype and shape over a buffer.

It replaces the array of a GPU library where the store keeps, moves and drops values. It does no
arithmetic. Its memory is freed when it is garbage collected.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.devices.device import Buffer, Device, Event, Stream


class DeviceArray:
    """A contiguous array in device memory.

    Parameters
    ----------
    stream
        The stream that frees the memory, after all uses. Work queued there later waits for them.
    ready
        Work on other streams must wait for this event.

    Attributes
    ----------
    buffer
        The memory. To use it on another stream, wait for `ready` first, and call `used` after.
    """

    def __init__(
        self,
        device: Device,
        buffer: Buffer,
        dtype: npt.DTypeLike,
        shape: tuple[int, ...],
        stream: Stream,
        ready: Event,
    ) -> None:
        self.device = device
        self.buffer = buffer
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.shape = shape
        self.ready = ready
        self._stream = stream
        self._lock = threading.Lock()
        buffer.last_uses.append(ready)

    @classmethod
    def from_host(
        cls,
        array: npt.NDArray[Any],
        device: Device,
        stream: Stream,
        frees: Stream | None = None,
    ) -> DeviceArray:
        """Copy an array to the device. It must not change until `ready` is done.

        Parameters
        ----------
        frees
            The stream that frees the memory, instead of `stream`.

        Raises
        ------
        MemoryError
            The device has no room.
        ValueError
            The array contains Python objects, or is not C-contiguous.
        """
        if array.dtype.hasobject:
            raise ValueError("Python objects cannot be on a device")
        if not array.flags.c_contiguous:
            raise ValueError("only contiguous arrays can be copied to a device")
        buffer = device.allocate(array.nbytes, stream)
        try:
            stream.to_device(buffer, array)
        except BaseException:
            buffer.free(stream)
            raise
        return cls(device, buffer, array.dtype, array.shape, frees or stream, stream.record())

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def to_host(
        self, stream: Stream, out: npt.NDArray[Any] | None = None
    ) -> tuple[npt.NDArray[Any], Event]:
        """Copy the array to the host.

        Parameters
        ----------
        out
            Target of the copy: an array of the same dtype and shape. None for new memory.

        Returns
        -------
        array, event
            Read the array only after the event is done.
        """
        if out is None:
            out = np.empty(self.shape, self.dtype)
        elif out.dtype != self.dtype or out.shape != self.shape:
            raise ValueError(f"cannot copy {self.dtype}{self.shape} into {out.dtype}{out.shape}")
        stream.wait(self.ready)
        stream.to_host(out, self.buffer)
        event = stream.record()
        self.used(event)
        return out, event

    def used(self, event: Event) -> None:
        """Delay the freeing of the memory until after this event."""
        # Several threads may use one array. The lock keeps them from losing each other's events.
        with self._lock:
            _, *later = uses = self.buffer.last_uses
            uses[1:] = [one for one in later if not one.is_done()]
            uses.append(event)

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.device.free_later(self.buffer, self._stream)

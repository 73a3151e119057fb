"""An array on a device, as a task's output: dtype and shape over a buffer.

It stands in for a GPU library's array where values are kept, moved and dropped, and does no
arithmetic. Its memory is freed when it dies.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.devices.device import Buffer, Device, Event, Stream


class DeviceArray:
    """A contiguous array in memory of a device.

    Parameters
    ----------
    stream
        Where its memory is freed, after all its uses: work that is queued there later waits for
        them.
    ready
        Work on other streams waits for this.

    Attributes
    ----------
    buffer
        Its memory. Whoever queues work on it on another stream waits for `ready` before, and calls
        `used` after.
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
        self._uses: list[Event] = []

    @classmethod
    def from_host(
        cls,
        array: npt.NDArray[Any],
        device: Device,
        stream: Stream,
        frees: Stream | None = None,
    ) -> DeviceArray:
        """Copy an array to the device; it must not change until `ready` is done.

        Parameters
        ----------
        frees
            Where its memory is freed, instead of on `stream`.

        Raises
        ------
        MemoryError
            The device has no room.
        ValueError
            It has Python objects, or is not C-contiguous.
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
        """Copy it to the host on any stream.

        Parameters
        ----------
        out
            Where to, instead of new memory: an array of its dtype and shape.

        Returns
        -------
        array, event
            The array may be read once the event is done.
        """
        if out is None:
            out = np.empty(self.shape, self.dtype)
        elif out.dtype != self.dtype or out.shape != self.shape:
            raise ValueError(f"{self.dtype}{self.shape} into {out.dtype}{out.shape}")
        stream.wait(self.ready)
        stream.to_host(out, self.buffer)
        event = stream.record()
        self.used(event)
        return out, event

    def used(self, event: Event) -> None:
        """Its memory must not be freed before this event."""
        # Several threads may use one array: none of them may forget the event of another.
        with self._lock:
            self._uses = [one for one in self._uses if not one.is_done()]
            self._uses.append(event)

    def __del__(self) -> None:
        if hasattr(self, "_uses"):
            self.device.free_later(self.buffer, self._stream, [self.ready, *self._uses])

"""The interface to libraries of device arrays, such as CuPy's `frames.device.cupy_`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.adapter import DeviceAllocator, DeviceMemory


class DeviceArrays(Protocol):
    """The functions of a device array library that are not part of NumPy's interface.

    Queued work may still use new memory for its previous owner. Use it in `computing`.
    """

    @property
    def room(self) -> DeviceAllocator:
        """The allocator of memory for shards."""

    def elements(self, memory: Any, dtype: np.dtype[Any]) -> Any:
        """Return a one-dimensional array over memory."""

    def empty(self, nbytes: int) -> DeviceMemory:
        """Allocate memory for other data than shards."""

    def to_device(self, buffer: npt.NDArray[np.uint8]) -> DeviceMemory:
        """Copy host memory to the device. The copy is done on return."""

    def computing(self) -> AbstractContextManager[None]:
        """Return a context for work that follows all queued work, and is done at its end."""

    def arriving(self, sizes: Sequence[int]) -> list[DeviceMemory]:
        """Allocate room for shards that anything may write at once: the first ones that fit."""


#: Libraries by the full name of their array type. A library is loaded at its first array.
Devices = Mapping[str, Callable[[], DeviceArrays]]


class DeviceLibraries:
    """The device array libraries. Each is loaded at first use."""

    def __init__(self, known: Devices) -> None:
        self.known = known
        self._loaded: dict[str, DeviceArrays] = {}

    def get(self, name: str) -> DeviceArrays | None:
        """Return the library of a device array type; None for the empty name, which is NumPy's."""
        return self[name] if name else None

    def __getitem__(self, name: str) -> DeviceArrays:
        found = self._loaded.get(name)
        if found is None:
            found = self._loaded.setdefault(name, self.known[name]())
        return found

"""Base classes of the devices: parts of memory, checks of arguments, and deferred freeing.

`CudaDevice` and `EmulatedDevice` build on them. This module checks bounds, lengths and owners. Each
device itself decides whether memory may be used, and when it is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from dask_gpurt.devices.device import Buffer, Event, HostMemory, OnFull, Stream
from dask_gpurt.devices.host_memory.pool import Buffer as Bytes

A = TypeVar("A", bound="_Allocation")
T = TypeVar("T", bound="_Owned")


class _Owned(Protocol):
    device: Any


class _Allocation(Protocol):
    device: Any
    nbytes: int
    last_uses: list[Event]


class Span(Generic[A]):
    """An allocation, or a part of one.

    Attributes
    ----------
    allocation
        The object that all spans of the same memory share.
    start, nbytes
        The bytes of the allocation that belong to this span.
    """

    def __init__(self, allocation: A, start: int, nbytes: int) -> None:
        self.allocation = allocation
        self.device = allocation.device
        self.start = start
        self.nbytes = nbytes

    @property
    def last_uses(self) -> list[Event]:
        return self.allocation.last_uses

    def part(self, start: int, nbytes: int) -> Self:
        if not 0 <= start <= start + nbytes <= self.nbytes:
            raise IndexError(f"{nbytes} bytes at {start} exceed a buffer of {self.nbytes}")
        return type(self)(self.allocation, self.start + start, nbytes)

    def overlaps(self, other: Span[Any]) -> bool:
        return (
            self.allocation is other.allocation
            and self.start < other.start + other.nbytes
            and other.start < self.start + self.nbytes
        )


class BaseStream:
    """The methods of a stream that its device answers."""

    device: Any

    def record(self) -> Any:
        return self.device._record(self)

    def wait(self, event: Event) -> None:
        self.device._make_wait(self, event)

    def synchronize(self) -> None:
        self.record().synchronize()


class BaseDevice:
    """The owner checks and the deferred freeing that all devices share."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._on_full: OnFull | None = None
        # A deque, because destructors append to it wherever the garbage collector runs. They must
        # not take the lock: the same thread may hold it.
        self._dead: deque[tuple[Any, Any]] = deque()

    def on_full(self, callback: OnFull | None) -> None:
        with self._lock:
            self._on_full = callback

    def free_later(self, buffer: Buffer, stream: Stream) -> None:
        self._dead.append((buffer, stream))

    def _own(self, things: Iterable[Any], kind: type[T], what: str) -> list[T]:
        """Return buffers, streams or events of this device; raise ValueError for any others."""
        mine = []
        for thing in things:
            if not isinstance(thing, kind) or thing.device is not self:
                raise ValueError(f"{what} belongs to another device")
            mine.append(thing)
        return mine


def require_whole(buffer: Span[Any]) -> None:
    """Raise ValueError for a part of an allocation, which cannot be freed on its own."""
    if buffer.nbytes != buffer.allocation.nbytes:
        raise ValueError("a part of a buffer cannot be freed")


def source_bytes(source: HostMemory, target: Span[Any]) -> Bytes:
    """Return the bytes that a copy to the device reads, after the checks of `Stream.to_device`."""
    data = _bytes_of(source)
    _require_same_length(target.nbytes, data.nbytes)
    return data


def target_bytes(target: HostMemory, source: Span[Any]) -> Bytes:
    """Return the bytes that a copy to the host fills, after the checks of `Stream.to_host`."""
    data = _bytes_of(target)
    _require_same_length(data.nbytes, source.nbytes)
    if not data.flags.writeable:
        raise ValueError("the target of a copy is read-only")
    return data


def require_copy(target: Span[Any], source: Span[Any]) -> None:
    """Raise ValueError unless the spans have the same length and do not overlap."""
    _require_same_length(target.nbytes, source.nbytes)
    if target.overlaps(source):
        raise ValueError("the two ends of a copy overlap")


def _bytes_of(memory: HostMemory) -> Bytes:
    if not memory.flags.c_contiguous:
        raise ValueError("host memory at the end of a copy must be contiguous")
    return memory.reshape(-1).view(np.uint8)


def _require_same_length(target_nbytes: int, source_nbytes: int) -> None:
    if target_nbytes != source_nbytes:
        raise ValueError(f"cannot copy {source_nbytes} bytes into {target_nbytes}")

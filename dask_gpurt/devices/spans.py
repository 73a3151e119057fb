"""What memory of a device and the ends of a copy have in common on every device.

Bounds and lengths only: whose memory it is, and whether it may be used, is for the device to say.
"""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

import numpy as np

from dask_gpurt.devices.device import HostMemory
from dask_gpurt.devices.host_memory.pool import Buffer as Bytes

A = TypeVar("A")


class Span(Generic[A]):
    """An allocation, or a part of one.

    Attributes
    ----------
    allocation
        What spans of the same memory share.
    start, nbytes
        Which bytes of it.
    """

    def __init__(self, allocation: A, start: int, nbytes: int) -> None:
        self.allocation = allocation
        self.start = start
        self.nbytes = nbytes

    def part(self, start: int, nbytes: int) -> Self:
        if not 0 <= start <= start + nbytes <= self.nbytes:
            raise IndexError(f"{nbytes} bytes from {start} of {self.nbytes}")
        return type(self)(self.allocation, self.start + start, nbytes)

    def overlaps(self, other: Span[Any]) -> bool:
        return (
            self.allocation is other.allocation
            and self.start < other.start + other.nbytes
            and other.start < self.start + self.nbytes
        )


def bytes_of(memory: HostMemory) -> Bytes:
    """Host memory at the end of a copy, as bytes."""
    if not memory.flags.c_contiguous:
        raise ValueError("host memory at the end of a copy must be contiguous")
    return memory.reshape(-1).view(np.uint8)


def require_writable(target: Bytes) -> None:
    if not target.flags.writeable:
        raise ValueError("the target of a copy is read-only")


def require_same_length(target_nbytes: int, source_nbytes: int) -> None:
    if target_nbytes != source_nbytes:
        raise ValueError(f"a copy of {source_nbytes} bytes into {target_nbytes}")


def require_apart(target: Span[Any], source: Span[Any]) -> None:
    if target.overlaps(source):
        raise ValueError("the two ends of a copy overlap")

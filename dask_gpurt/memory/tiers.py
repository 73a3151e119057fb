"""Interfaces of the store: tiers that keep flattened values, packings, and lanes that do the work.

Task outputs live as objects. An evicted value is flattened by the frames room and put into a tier
below: pinned or compressed host memory, or disk. A tier only keeps bytes.
`memory.decisions.residency` decides which value goes where, and when; `memory.store` carries it
out. Every tier has to pass `tests/conformance/tier_suite.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dask_gpurt.frames.flat.values import Flat


class Tier(Protocol):
    """A level that keeps flattened values. Any number of threads may call any method at once."""

    @property
    def name(self) -> str:
        """Name that users see: `pinned`, `compressed`, `disk`."""

    @property
    def capacity_nbytes(self) -> int | None:
        """Most bytes the tier may keep; None if only the system limits it."""

    @property
    def used_nbytes(self) -> int:
        """Bytes kept now."""

    def put(self, flat: Flat) -> Any:
        """Keep a value; return its place, which has an `nbytes`.

        The buffers are not needed once this returns. If it raises, nothing is kept.

        Raises
        ------
        TierFullError
            The value does not fit now.
        ValueRefusedError
            The value will never fit, or is not worth keeping here.
        OSError
            The value could not be written.
        """

    def get(self, place: Any) -> Flat:
        """Read a value into memory of its own.

        Raises
        ------
        DamagedValueError
            The bytes are not those that were put.
        OSError
            The value could not be read.
        """

    def drop(self, place: Any) -> None:
        """Free a value; never raises. A `get` in flight ends as if there had been no `drop`."""

    def close(self) -> None:
        """Free all values."""


@runtime_checkable
class DirectTier(Tier, Protocol):
    """A tier that devices copy to and from without other host memory between.

    Its `put` takes device buffers (`frames.flat.values.DeviceBuffer`).
    """

    def lent(self, place: Any) -> AbstractContextManager[tuple[bytes, Any]]:
        """Lend the header and the buffers of a value, for a `with` block.

        Buffers that came from a device are `devices.host_memory.pinned.Scattered`.
        """


#: Runs calls later, elsewhere, in order. Accepts `path` (the levels that bytes move between) and
#: `nbytes` (how many).
Lane = Callable[..., object]


@dataclass(frozen=True)
class Packing:
    """The functions that measure, flatten and restore the values of one top level.

    Attributes
    ----------
    sizeof
        Returns the bytes that an object takes in memory.
    flatten, restore
        Functions with the contract of those in `frames.flat.values`.
    """

    sizeof: Callable[[Any], int]
    flatten: Callable[[Any], Flat]
    restore: Callable[[bytes, Any], Any]


@dataclass(frozen=True)
class Lanes:
    """The four lanes of a store.

    Attributes
    ----------
    write
        Writes and drops copies.
    read
        Reads copies.
    owner
        Runs decisions on the owner's thread.
    later
        As `owner`, after a short delay.
    """

    write: Lane
    read: Lane
    owner: Lane
    later: Lane

"""The ports of the store: tiers that keep flattened values, and what it does its work with.

Task outputs live as objects. What has to leave the objects' memory is flattened by the frames room
and put into a tier below: pinned or compressed host memory, or disk. A tier only keeps bytes. Which
value goes where, and when, is decided by `memory.decisions.residency`; `memory.store` does it.
`tests/conformance/tier_suite.py` is the suite every tier has to pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dask_gpurt.frames.flat.values import Flat


class Tier(Protocol):
    """Keeps flattened values. Every method may be called from any thread, several at a time."""

    @property
    def name(self) -> str:
        """What users see: `pinned`, `compressed`, `disk`."""

    @property
    def capacity_nbytes(self) -> int | None:
        """Most bytes it may keep; None when only the system limits it."""

    @property
    def used_nbytes(self) -> int:
        """Bytes kept now."""

    def put(self, flat: Flat) -> Any:
        """Keep a value; returns the place it is at, which has an `nbytes`.

        The buffers are not needed any more once this returns.

        Raises
        ------
        TierFullError
            It does not fit now. Nothing was kept.
        ValueRefusedError
            It never will. Nothing was kept.
        OSError
            It could not be written. Nothing was kept.
        """

    def get(self, place: Any) -> Flat:
        """Read a value back, into memory of its own.

        Raises
        ------
        DamagedValueError
            What is there is not what was put.
        OSError
            It could not be read.
        """

    def drop(self, place: Any) -> None:
        """Let go of a value; never raises. A `get` that is under way ends as if it had not been."""

    def close(self) -> None:
        """Let go of everything."""


#: Takes a call and makes it later, elsewhere, in order. May be told `path`, between which levels
#: bytes go, and `nbytes`, how many.
Lane = Callable[..., object]


@dataclass(frozen=True)
class Packing:
    """How values are measured and taken apart.

    Attributes
    ----------
    sizeof
        Bytes an object takes in memory.
    flatten, restore
        As `frames.flat.values` has them.
    """

    sizeof: Callable[[Any], int]
    flatten: Callable[[Any], Flat]
    restore: Callable[[bytes, Any], Any]


@dataclass(frozen=True)
class Lanes:
    """Where work is done: writing and dropping, reading, deciding, and deciding in a moment."""

    write: Lane
    read: Lane
    owner: Lane
    later: Lane

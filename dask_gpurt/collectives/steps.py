"""Steps of a collective operation, as seen by one rank.

All ranks do the same number of steps; in some of them, a rank may have nothing to do. A rank sends
slices as they were before the step. Received slices replace its own ones, or are added to them. If
several ranks send the same slice, their values and the rank's own are added in the order of ranks.
So a result does not depend on the order of arrival, and has the same bits each time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SliceSend:
    """Slices for one other rank."""

    peer: int
    slices: range


@dataclass(frozen=True, slots=True)
class SliceReceive:
    """Slices from one other rank, which are added to those here or replace them."""

    peer: int
    slices: range
    adds: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank."""

    sends: tuple[SliceSend, ...] = ()
    receives: tuple[SliceReceive, ...] = ()


#: A step in which a rank waits for others.
NOTHING = Step()


def one_slice(number: int) -> range:
    """Return the slices of a message that has this one alone."""
    return range(number, number + 1)


def slice_bounds(length: int, n_slices: int) -> list[int]:
    """Return where the slices of a value begin and end: `n_slices + 1` positions.

    The first slices are longer by one element where the length does not divide evenly.
    """
    each, more = divmod(length, n_slices)
    return [number * each + min(number, more) for number in range(n_slices + 1)]

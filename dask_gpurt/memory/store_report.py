"""Reports about a store: where a value is and why, what levels hold, how much is spilled.

The functions read `memory.decisions.residency` and `memory.decisions.admission`. The caller holds
the store's lock.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from dask_gpurt.memory.decisions.admission import Admission
from dask_gpurt.memory.decisions.levels import Value
from dask_gpurt.memory.decisions.moves import Load, Put
from dask_gpurt.memory.decisions.residency import SMALL_NBYTES, Residency


def explained(residency: Residency, key: Hashable) -> dict[str, Any]:
    """Return where a value is, and why it may or may not be evicted.

    Raises
    ------
    KeyError
        There is no such value.
    """
    value = residency.values[key]
    names = [level.name for level in residency.levels]
    return {
        "reason": _reason(residency, value),
        "home": names[value.top_level],
        "nbytes": value.nbytes,
        "levels": {names[level]: nbytes for level, nbytes in sorted(value.copies.items())},
        "moving": type(value.moving).__name__.lower() if value.moving else None,
        "pins": value.pins,
        "next_use": residency.next_use(key),
        "policy": residency.policy.name,
        "refused_by": [names[level] for level in sorted(value.refused)],
    }


def _reason(residency: Residency, value: Value) -> str:
    """Return a sentence that says why a value is where it is."""
    names = [level.name for level in residency.levels]
    top_level = names[value.top_level]
    if isinstance(value.moving, Load):
        return f"it is being read back from {names[value.moving.source]}"
    if not value.in_memory:
        return f"{top_level} was needed for other values; it is loaded when a task needs it"
    if value.pins:
        return f"running or starting tasks use it ({value.pins}), so it stays in {top_level}"
    if isinstance(value.moving, Put):
        return f"it is being copied to {names[value.moving.target]}, to leave {top_level}"
    if value.refused.issuperset(residency.chains[value.top_level]):
        return f"nothing below {top_level} takes a value of this kind"
    if value.nbytes < SMALL_NBYTES:
        return f"it is small, and small values leave {top_level} last"
    if value.eviction_deferred:
        return "a task that used it has just ended, and may have been the last one"
    return f"there is room for it in {top_level}"


def reported(
    residency: Residency, admission: Admission, io: Mapping[tuple[str, str], float]
) -> dict[str, Any]:
    """Return the state of levels, the number of waiting tasks, and the I/O totals."""
    return {
        "policy": residency.policy.name,
        "levels": [
            {
                "name": level.name,
                "used_nbytes": level.used_nbytes,
                "reserved_nbytes": level.reserved_nbytes,
                "capacity_nbytes": level.capacity_nbytes,
                "values": len(level.members),
                "is_blocked": level.is_blocked,
            }
            for level in residency.levels
        ],
        "waiting": admission.n_waiting,
        "overcommitted": admission.overcommitted,
        "io": {f"{label}-{unit}": amount for (label, unit), amount in sorted(io.items())},
    }


class Spilled(NamedTuple):
    """Bytes of spilled values, with the names that Dask's own store has for them."""

    memory: int
    disk: int


def spilled_nbytes(residency: Residency) -> Spilled:
    """Return the bytes of spilled values: their size in memory, and their stored size."""
    memory = kept = 0
    for value in residency.values.values():
        if not value.in_memory:
            memory += value.nbytes
            kept += value.copies[max(value.copies)]
    return Spilled(memory, kept)

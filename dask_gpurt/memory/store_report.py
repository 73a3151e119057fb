"""What a store says of itself: where a value is and why, what levels hold, what counts as spilled.

Reads `memory.decisions.residency` and `memory.decisions.admission`; whoever calls holds the store's
lock.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from dask_gpurt.memory.decisions.admission import Admission
from dask_gpurt.memory.decisions.moves import Load, Put
from dask_gpurt.memory.decisions.residency import SMALL_NBYTES, Residency, Value


def explained(residency: Residency, key: Hashable) -> dict[str, Any]:
    """Where a value is, and why it may or may not leave.

    Raises
    ------
    KeyError
        It is not here.
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
    """One sentence on why a value is where it is."""
    names = [level.name for level in residency.levels]
    top_level = names[value.top_level]
    if isinstance(value.moving, Load):
        return f"it is being read back from {names[value.moving.source]}"
    if not value.in_memory:
        return f"{top_level} was needed for others; it comes back when a task takes it"
    if value.pins:
        return (
            f"tasks that run, or are about to, take it ({value.pins}), so it stays in {top_level}"
        )
    if isinstance(value.moving, Put):
        return f"it is being copied to {names[value.moving.target]}, to leave {top_level}"
    if value.refused.issuperset(residency.chains[value.top_level]):
        return f"nothing below {top_level} takes a value of this kind"
    if value.nbytes < SMALL_NBYTES:
        return f"it is small, and what is small leaves {top_level} last"
    if value.eviction_deferred:
        return "a task that took it has just ended, and it may not be wanted any more"
    return f"there is room for it in {top_level}"


def reported(
    residency: Residency, admission: Admission, io: Mapping[tuple[str, str], float]
) -> dict[str, Any]:
    """Levels, waiting tasks, and what was read and written."""
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


def spilled_nbytes(residency: Residency) -> tuple[int, int]:
    """Bytes of values that are not at home: what they would take there, and as they are kept."""
    memory = kept = 0
    for value in residency.values.values():
        if not value.in_memory:
            memory += value.nbytes
            kept += value.copies[max(value.copies)]
    return memory, kept

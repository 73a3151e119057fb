"""Adding up the values of ranks in memory: in place, piece by piece, in the order of ranks.

NumPy's functions also work on CuPy's arrays, which hand them to CuPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

Operation = Literal["sum", "prod", "min", "max", "any", "all"]

#: Bytes of a piece: a sum stays in a processor's cache while values are added to it.
PIECE_NBYTES = 1 << 18

_FUNCTIONS: dict[Operation, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "any": np.logical_or,
    "all": np.logical_and,
}


def add_up(operation: Operation, values: Sequence[Any], out: Any) -> None:
    """Combine values of equal length into one array, in their order.

    Parameters
    ----------
    values
        One-dimensional arrays of one type, at least one; `out` may be one of them.
    out
        Array of the same length and type.
    """
    combine = _FUNCTIONS[operation]
    # A device adds whole arrays: each call has a fixed cost there, and pieces gain nothing.
    length = len(out)
    each = max(1, PIECE_NBYTES // out.itemsize) if isinstance(out, np.ndarray) else max(1, length)
    for start in range(0, length, each):
        first, *rest = (value[start : start + each] for value in values)
        target = out[start : start + each]
        total = first
        for number, piece in enumerate(rest, 1):
            # Until the last sum, `target` may still be one of the values.
            if number == len(rest):
                combine(total, piece, out=target)
            elif number == 1:
                total = combine(total, piece).astype(target.dtype, copy=False)
            else:
                combine(total, piece, out=total)
        if not rest and values[0] is not out:
            target[...] = first


def disagreement(kinds: Mapping[int, tuple[tuple[int, ...], str]]) -> str | None:
    """Return how the values of ranks differ, or None if all have one shape and type.

    Parameters
    ----------
    kinds
        By rank: shape and name of the type of its value.
    """
    first, *others = sorted(kinds)
    for rank in others:
        if kinds[rank] != kinds[first]:
            return ", ".join(
                f"rank {number} has {shape} {name}"
                for number in (rank, first)
                for shape, name in [kinds[number]]
            )
    return None

"""Answers that do not depend on the engine, and their comparison. Needs NumPy alone.

Engines hash keys in ways of their own, so partitions differ between them. The sums over all
partitions do not, and in each engine all rows of a key are in one partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

#: One key of so many is followed to its partitions.
SAMPLED = 1024
#: A prime. Groups have weights below it, so that a sum in the wrong group shows.
WEIGHTS = 997
#: Engines add floats in different orders.
TOLERANCE = 1e-9

Array = npt.NDArray[Any]


def sums_of_partition(key: Array, x: Array, y: Array, n: Array) -> dict[str, Any]:
    """Return the sums of one output partition, and the keys in it that are followed."""
    return {
        "rows": len(key),
        "key": int(key.sum()),
        "n": int(n.sum()),
        "x": float(x.sum()),
        "y": float(y.sum()),
        "keys": np.unique(key[key % SAMPLED == 0]).tolist(),
    }


def of_shuffle(partitions: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the answer of a shuffle: sums over its partitions, and where the keys are.

    A shuffle is right if no key is in two partitions.
    """
    filled = [one for one in partitions if one["rows"]]
    places = Counter(key for one in filled for key in one["keys"])
    return {
        "partitions": len(filled),
        **{name: sum(one[name] for one in filled) for name in ("rows", "key", "n", "x", "y")},
        "keys followed": len(places),
        "keys in several partitions": sum(count > 1 for count in places.values()),
    }


def of_aggregation(group: Array, sums: Array, means: Array, counts: Array) -> dict[str, Any]:
    """Return the answer of an aggregation, or the part of it that these groups are."""
    return {
        "groups": len(group),
        "rows": int(counts.sum()),
        "sum": float(sums.sum()),
        "mean": float(means.sum()),
        "weighted": float((sums * (group % WEIGHTS)).sum()),
    }


def added(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of several parts of an answer."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return in words where an answer is not what it must be."""
    return [
        f"{name} is {found.get(name)!r}, not {value!r}"
        for name, value in expected.items()
        if not _equal(found.get(name), value)
    ]


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        return abs(found - expected) <= TOLERANCE * max(abs(expected), 1.0)
    return type(found) is type(expected) and bool(found == expected)

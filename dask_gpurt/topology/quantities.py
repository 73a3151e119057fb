"""Amounts with units, as people write them: sizes, rates and times."""

from __future__ import annotations

import re
from collections.abc import Mapping

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([A-Za-z/]*)\s*", re.IGNORECASE)
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
#: Bytes by unit, such as "GB" and "GiB".
SIZES = {f"{p}B": n for p, n in (_PREFIXES | _BINARY).items()}
#: Bytes per second by unit, such as "GB/s" for bytes and "Gb/s" for bits.
RATES = {f"{unit}/s": n for unit, n in SIZES.items()}
RATES |= {f"{p}{bit}/s": n / 8 for p, n in _PREFIXES.items() for bit in ("b", "bit")}
#: Seconds by unit.
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def amount(value: object, units: Mapping[str, float]) -> float | None:
    """Return the amount in a text, in the unit whose factor is 1; None if it is none of these."""
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if found is None or found[2] not in units:
        return None
    number = float(found[1]) * units[found[2]]
    return number if number < float("inf") else None

"""Comparison of what a program printed on stock Dask, and with the runtime. Pure.

Programs print times, addresses and names of their own making, and sums whose last digits depend on
the order of additions. A comparison says what kind of difference there is.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

#: Most lines of a diff, and most characters of one of them.
MAX_LINES = 20
MAX_WIDTH = 160
#: Most lines of each output in which differences are looked for, from the first one on.
MAX_COMPARED = 1_000
#: Relative difference of numbers that counts as rounding, and numbers that count as zero: such as
#: the mean of values that were made to have none.
ROUNDING = 1e-9
ZERO = 1e-15

EQUAL = "equal"
ALIKE = "equal but for times, addresses and the like"
ROUNDED = "equal but for the last digits of numbers"
REORDERED = "the same lines in another order"
DIFFERENT = "different"

# No part of a pattern starts anew within a long word or number: that would take quadratic time.
_NUMBER = r"(?<![\d.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_CHANGING = re.compile(
    "|".join(
        [
            r"\b[a-z]{2,8}://[^\s'\",)>\]]+",
            r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?)?",
            r"\b\d{1,4}:\d\d:\d\d(?:[.,]\d+)?",
            r"\b0x[0-9a-fA-F]+",
            r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
            # Not the digits of 1.234567890123e+20, which end in `e`.
            r"(?<!\d\.)\b(?!\d+e[+-]\d)(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,}\b",
            # Not over the end of a line: `describe()` has a row `min` below `std`.
            _NUMBER + r"[^\S\n]?(?:ns|us|µs|ms|s|sec|secs|seconds?|min|mins|minutes?|[KMG]i?B/s)\b",
        ]
    )
)


@dataclass(frozen=True)
class Difference:
    """How two outputs differ: one of the kinds above, and a diff if they are different."""

    kind: str
    diff: tuple[str, ...] = ()


def difference(stock: str, enabled: str) -> Difference:
    """Return how the output with the runtime differs from that of stock Dask."""
    if stock == enabled:
        return Difference(EQUAL)
    one, other = (_CHANGING.sub("~", text) for text in (stock, enabled))
    if one == other:
        return Difference(ALIKE)
    if _is_rounded(one, other):
        return Difference(ROUNDED)
    if sorted(one.splitlines()) == sorted(other.splitlines()):
        return Difference(REORDERED)
    return Difference(DIFFERENT, _diff(stock, enabled))


def _is_rounded(one: str, other: str) -> bool:
    """Return whether two texts differ at most in the last digits of numbers with a fraction."""
    if re.sub(_NUMBER, "#", one).split() != re.sub(_NUMBER, "#", other).split():
        return False
    pairs = zip(re.findall(_NUMBER, one), re.findall(_NUMBER, other), strict=True)
    return all(
        a == b
        or (
            re.search("[.eE]", a + b) is not None
            and math.isclose(float(a), float(b), rel_tol=ROUNDING, abs_tol=ZERO)
        )
        for a, b in pairs
    )


def _diff(stock: str, enabled: str) -> tuple[str, ...]:
    one, other = stock.splitlines(), enabled.splitlines()
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    # A diff of very many lines would take quadratic time.
    start, end = max(0, same - 1), same + MAX_COMPARED
    names = "stock Dask", "dask_gpurt"
    parts = one[start:end], other[start:end]
    found = [*difflib.unified_diff(*parts, *names, n=1, lineterm="")]
    shown = [line if len(line) <= MAX_WIDTH else line[:MAX_WIDTH] + "..." for line in found]
    if len(shown) > MAX_LINES:
        shown = [*shown[:MAX_LINES], f"... and {len(shown) - MAX_LINES} more lines"]
    # Lines may differ in their ends alone, or far below.
    return tuple(shown) or (f"{len(one):,} lines and {len(other):,} lines",)

"""How many of similar, slow cases run: a few each time, all of them with `GPURT_TESTS=all`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

RUNS_ALL = os.environ.get("GPURT_TESTS") == "all"


def some(cases: Iterable[T], n: int) -> list[T]:
    """Return the first `n` of these cases, or all of them."""
    found = list(cases)
    return found if RUNS_ALL else found[:n]

"""How many of similar, slow cases run: a few each time, all of them with `GPURT_TESTS=all`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")

RUNS_ALL = os.environ.get("GPURT_TESTS") == "all"
#: Marks a slow test that has quick ones beside it.
only_if_all = pytest.mark.skipif(not RUNS_ALL, reason="slow; GPURT_TESTS=all runs it")


def some(cases: Iterable[T], n: int) -> list[T]:
    """Return the first `n` of these cases, or all of them."""
    found = list(cases)
    return found if RUNS_ALL else found[:n]

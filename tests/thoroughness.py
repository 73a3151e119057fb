"""How many of similar, slow cases run: a few each time, all of them with `GPURT_TESTS=all`."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
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


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that the marks `share` leave out.

    Which ones run depends on their names alone, so all processes agree. At least one case of each
    test does.
    """
    cases: defaultdict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not RUNS_ALL and (mark := item.get_closest_marker("share")) is not None:
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    found: set[pytest.Item] = set()
    for (_, n), of_test in cases.items():
        of_test.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        found.update(of_test[-(-len(of_test) // n) :])
    return found

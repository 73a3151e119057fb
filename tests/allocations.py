"""How much memory a call allocates, although other threads allocate at the same time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

#: Clusters of the test process allocate while a call is measured, but not during each call.
N_CALLS = 5


def peak_nbytes(function: Callable[..., Any], *args: Any) -> int:
    """Return the peak of what a call allocates, including NumPy's memory: the least of some calls.

    Some functions allocate memory in their first call only, so that call does not count.
    """
    function(*args)
    return min(_peak_nbytes(function, args) for _ in range(N_CALLS))


def _peak_nbytes(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    tracemalloc.start()
    try:
        function(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

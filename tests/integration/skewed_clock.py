"""A preload for workers: their clock is ahead by 5 s, and gains 50 us in each second.

Dask loads it before the worker exists, and so before this package reads the clock.
"""

from __future__ import annotations

import os
import time


def _skewed() -> float:
    # Not the function that this replaces: Dask may load this file twice.
    return time.clock_gettime(time.CLOCK_MONOTONIC) * (1 + 50e-6) + 5.0


if os.environ.get("GPURT_TEST_SKEWED") == "1":
    time.perf_counter = _skewed

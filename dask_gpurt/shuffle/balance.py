"""Which worker gets which output partitions, when some are much fuller than others. Pure.

Stock Dask gives each worker a range of partitions, whatever is in them. With hot keys the worker
that owns the hot partitions gets most of the rows. Here a sample of the rows says how full each
partition will be. Where ranges would do, they stay: neighbours on one worker are what a sort
wants. Otherwise the fullest partition goes to the least loaded worker, and so on (Graham's longest
processing time rule, at most 4/3 of the best that is possible; R. L. Graham, Bounds on
Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17(2), 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

#: Ranges stay up to this many times the mean load: a sample is not all of the data. What is beyond
#: it when all of the data came is told.
TOLERATED = 1.2


def by_range(n_partitions: int, workers: Sequence[str]) -> dict[int, str]:
    """Owners as stock Dask has them: ranges of equal length."""
    return {p: workers[p * len(workers) // n_partitions] for p in range(n_partitions)}


def load(rows: Sequence[int], owners: dict[int, str]) -> dict[str, int]:
    """Rows of each worker."""
    total = dict.fromkeys(owners.values(), 0)
    for partition, worker in owners.items():
        total[worker] += rows[partition]
    return total


@lru_cache(64)
def owners(rows: tuple[int, ...], workers: tuple[str, ...]) -> dict[int, str]:
    """Owner of each output partition.

    Parameters
    ----------
    rows
        Rows of each partition in a sample.
    workers
        In the order in which ranges are given out.
    """
    ranges = by_range(len(rows), workers)
    mean = sum(rows) / len(workers)
    if max(load(rows, ranges).values(), default=0) <= TOLERATED * mean:
        return ranges
    # Partitions that the sample says nothing of are spread evenly: every partition counts a little.
    weight = mean / (1000 * len(rows))
    heap = [(0.0, number) for number in range(len(workers))]
    found = {}
    for partition in sorted(range(len(rows)), key=lambda p: (-rows[p], p)):
        loaded, number = heapq.heappop(heap)
        found[partition] = workers[number]
        heapq.heappush(heap, (loaded + rows[partition] + weight, number))
    return found

"""Assignment of output partitions to workers, balanced by sampled row counts.

Stock Dask gives each worker a range of partitions, whatever they hold. With hot keys, the worker
that owns the hot partitions gets most of the rows. This module estimates the size of each partition
from a sample of the rows. If ranges are balanced enough they stay, because a sort wants
neighbouring partitions on one worker. Otherwise each partition, largest first, goes to the least
loaded worker (Graham's longest processing time rule, at most 4/3 of the optimum; R. L. Graham,
Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17(2), 1969).

Pure functions over numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

#: Ranges are kept up to this many times the mean load, because a sample is not all of the data. The
#: report of a run names partitions that exceed it once all data has arrived.
TOLERATED = 1.2


def by_range(n_partitions: int, workers: Sequence[str]) -> dict[int, str]:
    """Return the owners as stock Dask assigns them: ranges of equal length."""
    return {p: workers[p * len(workers) // n_partitions] for p in range(n_partitions)}


def load(rows: Sequence[int], owners: dict[int, str]) -> dict[str, int]:
    """Return the number of rows of each worker."""
    total = dict.fromkeys(owners.values(), 0)
    for partition, worker in owners.items():
        total[worker] += rows[partition]
    return total


def owners(rows: Sequence[int], workers: Sequence[str]) -> dict[int, str]:
    """Return the owner of each output partition.

    Parameters
    ----------
    rows
        Rows of each partition in a sample.
    workers
        Workers in the order in which they get ranges.
    """
    ranges = by_range(len(rows), workers)
    mean = sum(rows) / len(workers)
    if max(load(rows, ranges).values(), default=0) <= TOLERATED * mean:
        return ranges
    # Each partition weighs a little, so that partitions without sampled rows are spread evenly.
    weight = mean / (1000 * len(rows))
    heap = [(0.0, number) for number in range(len(workers))]
    found = {}
    for partition in sorted(range(len(rows)), key=lambda p: (-rows[p], p)):
        loaded, number = heapq.heappop(heap)
        found[partition] = workers[number]
        heapq.heappush(heap, (loaded + rows[partition] + weight, number))
    return found


class LatestOwners:
    """Remembers the owners of one run, because Dask asks for one partition after the other.

    Dask passes the same objects in each call, so they are compared by identity. To compare their
    content would take too long in each call.
    """

    def __init__(self) -> None:
        self._rows: Sequence[int] = ()
        self._workers: Sequence[str] = ()
        self._owners: dict[int, str] = {}

    def of(self, rows: Sequence[int], workers: Sequence[str]) -> dict[int, str]:
        """Return the owner of each output partition, as `owners` does."""
        if rows is not self._rows or workers is not self._workers:
            self._owners = owners(rows, workers)
            self._rows, self._workers = rows, workers
        return self._owners

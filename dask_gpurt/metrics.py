"""Counters of shuffle traffic and work on one worker process.

Each worker process has one `Counters`. Its integers only grow, so the difference of two snapshots
counts what happened between them. No clock, no event loop, nothing of Dask.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

#: Names of the counters and their meanings. `dask gpurt status` prints these texts.
MEANING: dict[str, str] = {
    "sent_nbytes": "shuffle bytes sent to other workers",
    "received_nbytes": "shuffle bytes received from other workers",
    "local_nbytes": "shuffle bytes that stayed on their worker",
    "spilled_nbytes": "shuffle bytes written to disk",
    "unspilled_nbytes": "shuffle bytes read back from disk",
    "messages": "shuffle messages sent",
    "partitions_in": "input partitions cut",
    "partitions_out": "output partitions joined",
    "shuffle_runs": "shuffle runs, counted on each worker that took part",
}

#: Sums over all workers and figures of the scheduler that live verdicts use, and their meanings.
SPENT: dict[str, str] = {
    "task_s": "seconds of all tasks",
    "cpu_s": "seconds of tasks on a processor",
    "noncpu_s": "seconds of tasks without a processor: locks, the interpreter's lock, files",
    "held_back_s": "seconds that tasks waited for slow peers of a shuffle",
    "disk_s": "seconds that tasks waited for inputs to be read from disk",
    "room_s": "seconds that tasks waited for memory",
    "scheduler_s": "seconds of the scheduler's event loop on a processor",
    "fetch_s": "seconds of fetching inputs of tasks from other workers",
    "moved_nbytes": "bytes of shuffles sent to other workers",
    "written_nbytes": "bytes written to disk, of task outputs and of shuffles",
}


class Counters:
    """Named integers that only grow. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(MEANING, 0)

    def add(self, **amounts: int) -> None:
        """Add to several counters at once. Raises `KeyError` for an unknown name."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)


def since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return the growth of each counter between two snapshots."""
    return {name: value - before.get(name, 0) for name, value in now.items()}


def total(snapshots: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of several snapshots, counter by counter."""
    sums = dict.fromkeys(MEANING, 0)
    for snapshot in snapshots:
        for name, value in snapshot.items():
            sums[name] = sums.get(name, 0) + value
    return sums

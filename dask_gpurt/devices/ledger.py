"""What was moved and computed when: the ledger, and how much of it went on at the same time.

An entry is one piece of work of one lane: a copy, a pack, a write to disk, a kernel. The ledger
keeps the newest of them and the sums of all. `overlap` makes a number of them, of which
0 means one after the other and 1 that only the busiest lane took any time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: The lanes of tasks, wherever they run, and of sending and receiving what they hand in.
COMPUTE, COMMUNICATION = "compute", "communication"
#: Path of an entry that is not work but the lack of it: within another entry of its lane, the one
#: who did that waited for another lane.
WAITING = "waiting"


class Entry(NamedTuple):
    """One piece of work.

    Attributes
    ----------
    lane
        Who did it: a lane's or a stream's name.
    path
        What it was, or between which places bytes went.
    nbytes
        What was moved; 0 if nothing was.
    start_s, end_s
        By the ledger's clock.
    """

    lane: str
    path: str
    nbytes: int
    start_s: float
    end_s: float


class Sum(NamedTuple):
    """All entries of one lane and path that there ever were."""

    n: int
    nbytes: int
    busy_s: float


class Ledger:
    """The newest entries and the sums of all. Safe to use from any thread.

    Parameters
    ----------
    capacity
        Entries that are kept; older ones are only in the sums.
    clock
        Seconds, from any beginning.
    """

    def __init__(self, capacity: int = 4096, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque(maxlen=capacity)
        self._sums: dict[tuple[str, str], Sum] = {}

    def add(self, entry: Entry) -> None:
        busy_s = entry.end_s - entry.start_s
        key = entry.lane, entry.path
        with self._lock:
            self._entries.append(entry)
            n, nbytes, seconds = self._sums.get(key, (0, 0, 0.0))
            self._sums[key] = Sum(n + 1, nbytes + entry.nbytes, seconds + busy_s)

    @contextlib.contextmanager
    def timed(self, lane: str, path: str, nbytes: int = 0) -> Iterator[None]:
        """An entry for what is done inside, whether or not it ends well."""
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(Entry(lane, path, nbytes, start_s, self.clock()))

    def entries(self) -> list[Entry]:
        """The newest, in the order in which they ended."""
        with self._lock:
            return list(self._entries)

    def sums(self) -> dict[tuple[str, str], Sum]:
        """By lane and path, since the beginning."""
        with self._lock:
            return dict(self._sums)


@dataclass(frozen=True)
class Overlap:
    """How much of some work went on at the same time.

    Attributes
    ----------
    parts_s
        Seconds in which each lane did something; waiting for another lane is not.
    measured_s
        Seconds it took altogether.
    efficiency
        Saved time as a share of what could have been saved:
        (sum of parts - measured) / (sum of parts - longest part). Below 0 if it took longer than
        one after the other; None if only one lane did anything.
    """

    parts_s: dict[str, float]
    measured_s: float
    efficiency: float | None


def overlap(entries: Iterable[Entry], measured_s: float | None = None) -> Overlap:
    """How well lanes overlapped.

    Parameters
    ----------
    entries
        Those of the period in question.
    measured_s
        What it took altogether, if that is known better than from the first beginning to the last
        end. Gaps in which nothing went on count as time it took.
    """
    lanes: dict[str, list[Entry]] = {}
    for entry in entries:
        lanes.setdefault(entry.lane, []).append(entry)
    parts_s = {lane: _busy_s(found) for lane, found in sorted(lanes.items())}
    if measured_s is None:
        every = [entry for found in lanes.values() for entry in found]
        first_s = min((entry.start_s for entry in every), default=0.0)
        measured_s = max((entry.end_s for entry in every), default=0.0) - first_s
    total_s = sum(parts_s.values())
    could_save_s = total_s - max(parts_s.values(), default=0.0)
    efficiency = (total_s - measured_s) / could_save_s if could_save_s > 0 else None
    return Overlap(parts_s, measured_s, efficiency)


def _busy_s(entries: list[Entry]) -> float:
    """Time in which anybody worked: threads of one lane that work at once count once."""
    changes = []
    for entry in entries:
        by = -1 if entry.path == WAITING else 1
        changes += [(entry.start_s, by), (entry.end_s, -by)]
    busy_s = since_s = 0.0
    n_busy = 0
    for now_s, by in sorted(changes):
        if n_busy > 0:
            busy_s += now_s - since_s
        since_s = now_s
        n_busy += by
    return busy_s

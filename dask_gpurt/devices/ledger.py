"""A ledger of copies and computations, and a measure of how much of them overlapped.

An entry is one piece of work of one lane: a copy, a pack, a write to disk, a kernel. The ledger
keeps the newest entries. `overlap` turns entries into a number: 0 if the lanes worked one after the
other, and 1 if the total time is that of the busiest lane.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dask_gpurt.devices.cuda.ranges import process_range

#: Lanes of tasks on any device, and of sending and receiving.
COMPUTE, COMMUNICATION = "compute", "communication"
#: The path of an entry that marks idle time: within another entry of its lane, the worker of that
#: entry waited for another lane.
WAITING = "waiting"


class LedgerEntry(NamedTuple):
    """One piece of work.

    Attributes
    ----------
    lane
        Name of the lane or stream that did the work.
    path
        Kind of work, or source and target of a copy.
    nbytes
        Bytes moved; 0 if none.
    start_s, end_s
        Start and end on the ledger's clock.
    peer, way
        Address of the other worker and the transport, of a message.
    run, message
        Numbers of the shuffle run and of the message, counted by its sender; 0 without one.
    key
        Key of the task that did the work, or that the work is for.
    thread
        Identifier of the thread; 0 means the thread that adds the entry.
    encoded_nbytes
        Bytes of a message on the link; 0 if it was not encoded.
    """

    lane: str
    path: str
    nbytes: int
    start_s: float
    end_s: float
    peer: str = ""
    way: str = ""
    run: int = 0
    message: int = 0
    key: Any = None
    thread: int = 0
    encoded_nbytes: int = 0


class Ledger:
    """The newest entries. Safe to use from any thread.

    Parameters
    ----------
    capacity
        Number of entries to keep.
    clock
        Returns seconds since any fixed point.
    """

    def __init__(self, capacity: int = 4096, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        #: Gets every entry as well, while a trace is on. Called in the thread that adds the entry.
        self.recorder: Callable[[LedgerEntry], None] | None = None
        self._lock = threading.Lock()
        self._entries: deque[LedgerEntry] = deque(maxlen=capacity)

    def add(self, entry: LedgerEntry) -> None:
        with self._lock:
            self._entries.append(entry)
        if (recorder := self.recorder) is not None:
            recorder(entry)

    @contextlib.contextmanager
    def timed(self, lane: str, path: str, nbytes: int = 0) -> Iterator[None]:
        """Add an entry for the body of a `with` statement, even if the body raises.

        A profiler that listens shows a range of the same lane and path.
        """
        start_s = self.clock()
        try:
            with process_range(lane, path):
                yield
        finally:
            self.add(LedgerEntry(lane, path, nbytes, start_s, self.clock()))

    def entries(self) -> list[LedgerEntry]:
        """Return the newest entries, in the order in which they ended."""
        with self._lock:
            return list(self._entries)


@dataclass(frozen=True)
class Overlap:
    """The overlap of the work of several lanes.

    Attributes
    ----------
    parts_s
        Busy seconds of each lane, without the time it waited for another lane.
    measured_s
        Seconds of the whole period.
    efficiency
        Saved time as a share of the time that could have been saved:
        (sum of parts - measured) / (sum of parts - longest part). Negative if the period took
        longer than all parts one after the other. None if at most one lane did anything.
    """

    parts_s: dict[str, float]
    measured_s: float
    efficiency: float | None


def overlap(entries: Iterable[LedgerEntry]) -> Overlap:
    """Measure how well lanes overlapped, from the first start to the last end, gaps included."""
    lanes: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        lanes.setdefault(entry.lane, []).append(entry)
    every = [entry for found in lanes.values() for entry in found]
    first_s = min((entry.start_s for entry in every), default=0.0)
    last_s = max((entry.end_s for entry in every), default=0.0)
    parts_s = {lane: _busy_s(found) for lane, found in sorted(lanes.items())}
    return overlap_of_parts(parts_s, last_s - first_s)


def overlap_of_parts(parts_s: dict[str, float], measured_s: float) -> Overlap:
    """Measure how well lanes overlapped, from the busy seconds of each."""
    total_s = sum(parts_s.values())
    could_save_s = total_s - max(parts_s.values(), default=0.0)
    efficiency = (total_s - measured_s) / could_save_s if could_save_s > 0 else None
    return Overlap(parts_s, measured_s, efficiency)


def _busy_s(entries: list[LedgerEntry]) -> float:
    """Return the seconds in which at least one thread of the lane worked."""
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

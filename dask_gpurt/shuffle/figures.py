"""Statistics of one shuffle run: rows, bytes, seconds and skew, per worker and in total.

`RunFigures` collects them on a worker during the run. `RunSum` adds up the snapshots of all workers
and keeps none of them, so its size does not grow with their number. This module reads no clock: the
caller measures each phase.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from dask_gpurt.shuffle.balance import TOLERATED

#: Kind of a run that moves array chunks.
ARRAY = "array"

#: Phases of a run that a worker measures.
PHASES: dict[str, str] = {
    "partition": "cutting input partitions into shards",
    "held_back": "back-pressure: producers waiting for a slow peer",
    "send": "messages in flight, until acknowledged",
    "receive": "receiving shards from peers",
    "unpack": "assembling output partitions",
}
#: Number of the fullest partitions that a report names.
N_FULLEST = 3
_COUNTS = ("rows_in", "local_nbytes", "sent_nbytes", "raw_nbytes", "wire_nbytes", "messages")
#: Counts that a summary adds up over workers.
_TOTALS = (*_COUNTS, "n_owned")


class RunFigures:
    """Statistics of one run on one worker. Thread-safe."""

    def __init__(self, shuffle_id: str, run_id: int, kind: str, began_s: float) -> None:
        self._about = {"id": shuffle_id, "run": run_id, "kind": kind, "began_s": began_s}
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._links: dict[str, list[float]] = {}

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def spent(self, phase: str, seconds: float) -> None:
        """Add the duration of a phase; phases in several threads add up."""
        with self._lock:
            self._seconds[phase] += seconds

    def sent(
        self, peer: str, nbytes: int, raw_nbytes: int, wire_nbytes: int, seconds: float
    ) -> None:
        """Record a message that the peer acknowledged, with `nbytes` of shards.

        `raw_nbytes` of these had to leave this host; `wire_nbytes` were sent for them.
        """
        with self._lock:
            self._counts["sent_nbytes"] += nbytes
            self._counts["raw_nbytes"] += raw_nbytes
            self._counts["wire_nbytes"] += wire_nbytes
            self._counts["messages"] += 1
            self._seconds["send"] += seconds
            link = self._links.setdefault(peer, [0, 0.0])
            link[0] += nbytes
            link[1] += seconds

    def snapshot(self, rows_of_partition: Mapping[Any, int]) -> dict[str, Any]:
        """Return the statistics as plain values, with the busiest link alone.

        A summary over workers needs no other link. All links of 1,000 workers would be megabytes.

        Parameters
        ----------
        rows_of_partition
            Rows of each output partition that this worker owns.
        """
        fullest = sorted(rows_of_partition.items(), key=lambda item: -item[1])[:N_FULLEST]
        with self._lock:
            busiest = sorted(self._links, key=lambda peer: -self._links[peer][0])[:1]
            return {
                **self._about,
                **self._counts,
                "seconds": dict(self._seconds),
                "links": {peer: tuple(self._links[peer]) for peer in busiest},
                "rows_owned": sum(rows_of_partition.values()),
                "n_owned": len(rows_of_partition),
                "fullest": [(str(partition), rows) for partition, rows in fullest],
            }


class RunSum:
    """Statistics of one run, added up over workers.

    Parameters
    ----------
    first
        A snapshot of the run, of any worker. It is not counted yet.
    """

    def __init__(self, first: Mapping[str, Any]) -> None:
        self._about = {name: first[name] for name in ("id", "run", "kind")}
        self._began_s: float = first["began_s"]
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._busiest_link: tuple[str, str, int, float] | None = None
        #: Workers that own partitions: the rows of all, their number, and the rows of the fullest.
        self._rows, self._n_owners, self._most_rows = 0, 0, 0
        #: The fullest partitions, their rows, and all rows of their owners.
        self._fullest: list[tuple[str, int, int]] = []

    def add(self, worker: str, snapshot: Mapping[str, Any]) -> None:
        """Count the snapshot of a worker, by its address. Each worker counts once."""
        self._began_s = min(self._began_s, snapshot["began_s"])
        for name in _TOTALS:
            self._totals[name] += snapshot[name]
        for phase in PHASES:
            self._seconds[phase] += snapshot["seconds"][phase]
        for peer, (nbytes, seconds) in snapshot["links"].items():
            if self._busiest_link is None or nbytes > self._busiest_link[2]:
                self._busiest_link = (worker, peer, int(nbytes), seconds)
        rows = snapshot["rows_owned"]
        if snapshot["n_owned"]:
            self._rows += rows
            self._n_owners += 1
            self._most_rows = max(self._most_rows, rows)
        owned = [(partition, n, rows) for partition, n in snapshot["fullest"]]
        self._fullest = sorted([*self._fullest, *owned], key=lambda one: -one[1])[:N_FULLEST]

    def summary(self, more: Sequence[tuple[str, Mapping[str, Any]]] = ()) -> dict[str, Any]:
        """Return the sums as plain values.

        Parameters
        ----------
        more
            Addresses of further workers, with their snapshots. This object does not keep them.

        Returns
        -------
        dict
            `rows`; `nbytes` (sent to an owner, local ones included); `sent_nbytes`; `raw_nbytes`
            (the part of these that had to leave its host); `wire_nbytes` (bytes sent for that
            part); `seconds` by phase, summed over workers; `busiest_link` (from, to, bytes of
            shards, seconds); `skew` (rows of the most loaded worker over the mean); `fullest`
            partitions with their rows; `hot` ones of these, which alone load a worker beyond what
            the assignment of owners tolerates; and `mean_rows` of a partition. Chunks of arrays are
            never hot.
        """
        if more:
            whole = copy.deepcopy(self)
            for worker, snapshot in more:
                whole.add(worker, snapshot)
            return whole.summary()
        total = self._totals
        mean_rows = self._rows / max(total["n_owned"], 1)
        limit = TOLERATED * self._rows / max(self._n_owners, 1)
        return {
            **self._about,
            "began_s": self._began_s,
            "rows": total["rows_in"],
            "nbytes": total["local_nbytes"] + total["sent_nbytes"],
            "sent_nbytes": total["sent_nbytes"],
            "raw_nbytes": total["raw_nbytes"],
            "wire_nbytes": total["wire_nbytes"],
            "messages": total["messages"],
            "seconds": dict(self._seconds),
            "busiest_link": self._busiest_link,
            "skew": self._most_rows * self._n_owners / self._rows if self._rows else 1.0,
            "fullest": [(partition, rows) for partition, rows, _ in self._fullest],
            # If all partitions are about equally full, their number makes the skew; none is hot.
            "hot": [
                (partition, rows)
                for partition, rows, of_owner in self._fullest
                if of_owner > limit and rows > TOLERATED * mean_rows
                if self._about["kind"] != ARRAY
            ],
            "mean_rows": mean_rows,
        }

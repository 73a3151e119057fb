"""Statistics of one shuffle run: rows, bytes, seconds and skew, per worker and in total.

`RunFigures` collects them on a worker during the run. `summarised` merges the snapshots of all
workers into one entry for each run. This module reads no clock: the caller measures each phase.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
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
        """Return the statistics as plain values.

        Parameters
        ----------
        rows_of_partition
            Rows of each output partition that this worker owns.
        """
        fullest = sorted(rows_of_partition.items(), key=lambda item: -item[1])[:N_FULLEST]
        with self._lock:
            return {
                **self._about,
                **self._counts,
                "seconds": dict(self._seconds),
                "links": {peer: tuple(link) for peer, link in self._links.items()},
                "rows_owned": sum(rows_of_partition.values()),
                "n_owned": len(rows_of_partition),
                "fullest": [(str(partition), rows) for partition, rows in fullest],
            }


def summarised(reports: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return one entry for each run, merged from the snapshots of all workers; oldest first.

    Returns
    -------
    list of dict
        `rows`; `nbytes` (sent to an owner, local ones included); `sent_nbytes`; `raw_nbytes` (the
        part of these that had to leave its host); `wire_nbytes` (bytes sent for that part);
        `seconds` by phase, summed over workers; `busiest_link` (from, to, bytes of shards,
        seconds); `skew` (rows of the most loaded worker over the mean); `fullest` partitions with
        their rows; `hot` ones of these, which alone load a worker beyond what the assignment of
        owners tolerates; and `mean_rows` of a partition. Chunks of arrays are never hot.
    """
    runs: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for worker, snapshots in reports.items():
        for one in snapshots:
            runs.setdefault((one["id"], one["run"]), {})[worker] = one
    found = [_summary(of_worker) for of_worker in runs.values()]
    return sorted(found, key=lambda one: (one["began_s"], one["run"]))


def _summary(of_worker: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    snapshots = list(of_worker.values())
    total: dict[str, Any] = {name: sum(one[name] for one in snapshots) for name in _TOTALS}
    fullest = sorted(
        (entry for one in snapshots for entry in one["fullest"]), key=lambda entry: -entry[1]
    )
    named = [tuple(entry) for entry in fullest[:N_FULLEST]]
    mean_rows = sum(_rows_of_owners(snapshots)) / max(total["n_owned"], 1)
    overloaded = _overloaded(snapshots)
    # If all partitions are about equally full, their number makes the skew, and none is hot.
    hot = [entry for entry in named if entry in overloaded and entry[1] > TOLERATED * mean_rows]
    return {
        "id": snapshots[0]["id"],
        "run": snapshots[0]["run"],
        "kind": snapshots[0]["kind"],
        "began_s": min(one["began_s"] for one in snapshots),
        "rows": total["rows_in"],
        "nbytes": total["local_nbytes"] + total["sent_nbytes"],
        "sent_nbytes": total["sent_nbytes"],
        "raw_nbytes": total["raw_nbytes"],
        "wire_nbytes": total["wire_nbytes"],
        "messages": total["messages"],
        "seconds": {phase: sum(one["seconds"][phase] for one in snapshots) for phase in PHASES},
        "busiest_link": _busiest_link(of_worker),
        "skew": _skew(snapshots),
        "fullest": named,
        "hot": hot,
        "mean_rows": mean_rows,
    }


def _rows_of_owners(snapshots: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the rows of each worker that owns partitions."""
    return [one["rows_owned"] for one in snapshots if one["n_owned"]]


def _skew(snapshots: Iterable[Mapping[str, Any]]) -> float:
    rows = _rows_of_owners(snapshots)
    return max(rows) * len(rows) / sum(rows) if any(rows) else 1.0


def _overloaded(snapshots: Sequence[Mapping[str, Any]]) -> set[tuple[Any, ...]]:
    """Return the fullest partitions of workers with more rows than tolerated."""
    rows = _rows_of_owners(snapshots)
    limit = TOLERATED * sum(rows) / max(len(rows), 1)
    return {
        tuple(entry)
        for one in snapshots
        if one["rows_owned"] > limit and one["kind"] != ARRAY
        for entry in one["fullest"]
    }


def _busiest_link(
    of_worker: Mapping[str, Mapping[str, Any]],
) -> tuple[str, str, int, float] | None:
    links = [
        (worker, peer, int(nbytes), seconds)
        for worker, one in of_worker.items()
        for peer, (nbytes, seconds) in one["links"].items()
    ]
    return max(links, key=lambda link: link[2], default=None)

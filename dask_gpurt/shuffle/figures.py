"""What one run did: rows, bytes, seconds and skew, on one worker and over all of them.

`RunFigures` gathers them on a worker while the run goes on; `summarised` makes one table line of
what all workers say. No clock here: whoever times a phase says how long it took.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dask_gpurt.shuffle.balance import TOLERATED

#: Kind of a run that has chunks of arrays.
ARRAY = "array"

#: What a worker's threads and event loop spend a run's time on.
PHASES: dict[str, str] = {
    "partition": "taking input partitions apart",
    "held_back": "producers waiting for a slow peer",
    "send": "messages under way, until answered",
    "receive": "taking in what peers sent",
    "unpack": "putting output partitions together",
}
#: So many of the fullest partitions are named.
N_FULLEST = 3


class RunFigures:
    """One run on one worker. Safe to use from any thread."""

    def __init__(self, shuffle_id: str, run_id: int, kind: str, began_s: float) -> None:
        self._about = {"id": shuffle_id, "run": run_id, "kind": kind, "began_s": began_s}
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("rows_in", "local_nbytes", "sent_nbytes", "raw_nbytes", "wire_nbytes", "messages"), 0
        )
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._links: dict[str, list[float]] = {}

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def spent(self, phase: str, seconds: float) -> None:
        """A phase took this long; phases of several threads add up."""
        with self._lock:
            self._seconds[phase] += seconds

    def sent(
        self, peer: str, nbytes: int, raw_nbytes: int, wire_nbytes: int, seconds: float
    ) -> None:
        """A message was answered: `nbytes` of shards.

        `raw_nbytes` of these had to leave this host, and `wire_nbytes` left it for them.
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
        """Plain values.

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
    """One entry for each run, of what each worker reports of its runs; oldest first.

    Returns
    -------
    list of dict
        `rows`, `nbytes` (on the way to an owner, on any worker), `sent_nbytes`, `raw_nbytes` of
        these that had to leave their host, `wire_nbytes` that left it for them, `seconds` by phase
        (summed over workers), `busiest_link` (from, to, bytes of shards, seconds), `skew` (rows of
        the most loaded worker over the mean), `fullest` partitions with their rows, `hot` ones of
        these, which are why a worker has more than owners are chosen with, and `mean_rows` of a
        partition. Chunks of arrays are never hot.
    """
    runs: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for worker, snapshots in reports.items():
        for one in snapshots:
            runs.setdefault((one["id"], one["run"]), {})[worker] = one
    found = [_summary(of_worker) for of_worker in runs.values()]
    return sorted(found, key=lambda one: (one["began_s"], one["run"]))


def _summary(of_worker: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    all_of_it = list(of_worker.values())

    def total(name: str) -> Any:
        return sum(one[name] for one in all_of_it)

    links = [
        (worker, peer, int(nbytes), seconds)
        for worker, one in of_worker.items()
        for peer, (nbytes, seconds) in one["links"].items()
    ]
    fullest: list[Sequence[Any]] = sorted(
        (entry for one in all_of_it for entry in one["fullest"]), key=lambda entry: -entry[1]
    )
    owners = [one["rows_owned"] for one in all_of_it if one["n_owned"]]
    skew = max(owners) * len(owners) / sum(owners) if any(owners) else 1.0
    mean_rows = sum(owners) / max(total("n_owned"), 1)
    named = [tuple(entry) for entry in fullest[:N_FULLEST]]
    too_many = TOLERATED * sum(owners) / max(len(owners), 1)
    overloaded = {
        tuple(entry)
        for one in all_of_it
        if one["rows_owned"] > too_many and one["kind"] != ARRAY
        for entry in one["fullest"]
    }
    # Where all partitions are about as full, it is their number that makes the skew.
    hot = [entry for entry in named if entry in overloaded and entry[1] > TOLERATED * mean_rows]
    return {
        "id": all_of_it[0]["id"],
        "run": all_of_it[0]["run"],
        "kind": all_of_it[0]["kind"],
        "began_s": min(one["began_s"] for one in all_of_it),
        "rows": total("rows_in"),
        "nbytes": total("local_nbytes") + total("sent_nbytes"),
        "sent_nbytes": total("sent_nbytes"),
        "raw_nbytes": total("raw_nbytes"),
        "wire_nbytes": total("wire_nbytes"),
        "messages": total("messages"),
        "seconds": {phase: sum(one["seconds"][phase] for one in all_of_it) for phase in PHASES},
        "busiest_link": max(links, key=lambda link: link[2], default=None),
        "skew": skew,
        "fullest": named,
        "hot": hot,
        "mean_rows": mean_rows,
    }

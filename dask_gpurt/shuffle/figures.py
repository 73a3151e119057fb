"""Statistics of one shuffle run: rows, bytes, seconds and skew, per worker and in total.

`RunFigures` collects them on a worker during the run. `RunSum` adds up the snapshots of all workers
and keeps none of them, so its size does not grow with their number. This module reads no clock: the
caller measures each phase.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
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
#: Counts of one worker that grow during the run.
COUNTS = (
    "rows_in",
    "partitions_in",
    "local_nbytes",
    "sent_nbytes",
    "raw_nbytes",
    "wire_nbytes",
    "messages",
    "outputs",
)
#: Further counts and seconds in a snapshot. `cpu_s` is of the whole process. In `disk_wait_s`,
#: tasks and messages waited for shards to be written to disk or read back. In `remote_s`, a message
#: to another host was on its way.
MORE_COUNTS = ("rows_owned", "n_owned", "n_threads")
_MORE_SECONDS = ("lasted_s", "cpu_s", "disk_wait_s", "remote_s")
MORE_NUMBERS = (*_MORE_SECONDS, "bandwidth")
#: Counts and seconds that a summary adds up over workers.
_TOTALS = (*COUNTS, "n_owned", "n_threads")
_TOTAL_SECONDS = ("cpu_s", "disk_wait_s")


class RunFigures:
    """Statistics of one run on one worker. Thread-safe.

    Parameters
    ----------
    n_threads
        Threads of the worker.
    """

    def __init__(
        self, shuffle_id: str, run_id: int, kind: str, began_s: float, n_threads: int = 0
    ) -> None:
        self._about = {
            "id": shuffle_id,
            "run": run_id,
            "kind": kind,
            "began_s": began_s,
            "n_threads": n_threads,
        }
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._more = dict.fromkeys(_MORE_SECONDS, 0.0)
        self._links: dict[str, list[float]] = {}
        #: End of the latest message to another host, in seconds since the run began.
        self._remote_until_s = 0.0

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def spent(self, phase: str, seconds: float) -> None:
        """Add the duration of a phase; phases in several threads add up."""
        with self._lock:
            self._seconds[phase] += seconds

    def waited_for_disk(self, seconds: float) -> None:
        """Add seconds that a task or a message waited for shards to be written or read back."""
        with self._lock:
            self._more["disk_wait_s"] += seconds

    def still_runs(self, lasted_s: float, cpu_s: float) -> None:
        """Record that the run did something `lasted_s` seconds after it began here.

        `cpu_s` is the processor time of this process in these seconds.
        """
        with self._lock:
            self._more["lasted_s"] = max(self._more["lasted_s"], lasted_s)
            self._more["cpu_s"] = max(self._more["cpu_s"], cpu_s)

    def sent(
        self,
        peer: str,
        nbytes: int,
        raw_nbytes: int,
        wire_nbytes: int,
        seconds: float,
        until_s: float = 0.0,
    ) -> None:
        """Record a message that the peer acknowledged, with `nbytes` of shards.

        `raw_nbytes` of these had to leave this host; `wire_nbytes` were sent for them. The answer
        came `until_s` after the run began.
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
            if wire_nbytes:
                # Messages overlap. Each second with one on its way counts once.
                began_s = max(until_s - seconds, self._remote_until_s)
                self._more["remote_s"] += max(0.0, until_s - began_s)
                self._remote_until_s = max(self._remote_until_s, until_s)

    def snapshot(
        self,
        rows_of_partition: Mapping[Any, int],
        bandwidth: Callable[[str], float] = lambda peer: 0.0,
    ) -> dict[str, Any]:
        """Return the statistics as plain values, with the busiest link alone.

        A summary over workers needs no other link. All links of 1,000 workers would be megabytes.

        Parameters
        ----------
        rows_of_partition
            Rows of each output partition that this worker owns.
        bandwidth
            Returns the bytes a second that the link to a peer can carry; 0 if that is unknown.
        """
        fullest = sorted(rows_of_partition.items(), key=lambda item: -item[1])[:N_FULLEST]
        with self._lock:
            busiest = sorted(self._links, key=lambda peer: -self._links[peer][0])[:1]
            return {
                **self._about,
                **self._counts,
                **self._more,
                "seconds": dict(self._seconds),
                "links": {peer: tuple(self._links[peer]) for peer in busiest},
                "bandwidth": max(map(bandwidth, busiest), default=0.0),
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
        self._more = dict.fromkeys(_TOTAL_SECONDS, 0.0)
        self._lasted_s, self._n_workers = 0.0, 0
        #: Seconds of `unpack` for each thread, on the worker that had most.
        self._most_unpack_s = 0.0
        #: The worker that sent to other hosts for longest, its bytes on the wire, the seconds, and
        #: the bandwidth of its busiest link.
        self._longest_sender: tuple[str, int, float, float] | None = None
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
        for name in _TOTAL_SECONDS:
            self._more[name] += snapshot[name]
        self._lasted_s = max(self._lasted_s, snapshot["lasted_s"])
        self._n_workers += 1
        unpack_s = snapshot["seconds"]["unpack"] / max(snapshot["n_threads"], 1)
        self._most_unpack_s = max(self._most_unpack_s, unpack_s)
        remote_s = snapshot["remote_s"]
        if remote_s > (self._longest_sender or ("", 0, 0.0))[2]:
            rate = snapshot["bandwidth"]
            self._longest_sender = (worker, snapshot["wire_nbytes"], remote_s, rate)
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
            - `rows`: rows that went in.
            - `nbytes`: bytes sent to an owner, local ones included. `sent_nbytes` left their
              worker, and `raw_nbytes` their host; `wire_nbytes` were sent for these.
            - `seconds`: by phase, summed over workers.
            - `busiest_link`: from, to, bytes of shards, seconds.
            - `skew`: rows of the most loaded worker, divided by the mean.
            - `fullest`: partitions with their rows. A `hot` one alone gives its owner more rows
              than the assignment of owners allows; a chunk of an array never does.
            - `mean_rows`: of a partition.

            For a verdict:

            - `lasted_s`, `cpu_s`, the number of `workers`, and of their `threads`.
            - `partitions_in`, `partitions_out`, and how many `outputs` of these were assembled.
            - `disk_wait_s`: waits for shards to be written to disk, or to be read back.
            - `longest_sender`: worker, bytes on the wire, seconds in which it was sending to
              another host, and the bytes a second that its busiest link can carry; 0 if unknown.
            - `most_unpack_s`: seconds of `unpack` for each thread of the worker with most.
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
            "partitions_in": total["partitions_in"],
            "partitions_out": total["n_owned"],
            "outputs": total["outputs"],
            "workers": self._n_workers,
            "threads": total["n_threads"],
            "lasted_s": self._lasted_s,
            **self._more,
            "most_unpack_s": self._most_unpack_s,
            "longest_sender": self._longest_sender,
            "seconds": dict(self._seconds),
            "busiest_link": self._busiest_link,
            "skew": self._most_rows * self._n_owners / self._rows if self._rows else 1.0,
            "fullest": [(partition, rows) for partition, rows, _ in self._fullest],
            # If all partitions are about equally full, none is hot: skew only shows that workers
            # own different numbers of them.
            "hot": [
                (partition, rows)
                for partition, rows, of_owner in self._fullest
                if of_owner > limit and rows > TOLERATED * mean_rows
                if self._about["kind"] != ARRAY
            ],
            "mean_rows": mean_rows,
        }

"""Counters and runs of all workers, added up in one place beyond the workers' lifetimes.

Each worker repeatedly sends the totals it has counted so far, snapshots of its runs that ended, and
snapshots of open runs. Only the latest totals of a worker count, and one snapshot of each run, so
nothing counts twice. Snapshots of ended runs are added up at once: 1,000 workers with 32 runs would
have 32,000 of them. The size of a tally is bounded, and it validates what workers send. No clock,
no event loop, nothing of Dask.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from dask_gpurt import metrics
from dask_gpurt.shuffle.figures import (
    COUNTS,
    MORE_COUNTS,
    MORE_NUMBERS,
    N_FULLEST,
    PHASES,
    RunSum,
)

#: Number of runs kept: the open ones, and of others the newest.
MAX_RUNS = 32
#: Number of pairs of a run and a worker that are kept.
MAX_SNAPSHOTS = 32_768
#: Number of departed workers whose late messages still count. Older ones are folded into a sum.
MAX_DEPARTED = 256
#: Maximum length of a name or an address.
MAX_NAME = 256


class _KeptRun:
    """One run over all workers, by worker id."""

    def __init__(self, total: RunSum) -> None:
        self.total = total
        #: Workers whose last snapshot is in the total.
        self.ended: set[str] = set()
        #: Snapshots of workers where the run is open, or was open when they left.
        self.open: dict[str, dict[str, Any]] = {}

    @property
    def n_snapshots(self) -> int:
        return len(self.ended) + len(self.open)


class Tally:
    """Counters and runs of all workers that were ever ready."""

    def __init__(self) -> None:
        #: By worker id, which is unique. Another worker may reuse an address.
        self._counters: dict[str, dict[str, int]] = {}
        self._heartbeats: dict[str, int] = {}
        self._address_of: dict[str, str] = {}
        self._departed: OrderedDict[str, None] = OrderedDict()
        self._n_folded = 0
        self._folded = metrics.total([])
        self._runs: OrderedDict[tuple[str, int], _KeptRun] = OrderedDict()
        self._n_snapshots = 0
        #: Highest number of a run that was dropped. distributed's numbers only grow.
        self._last_dropped = -1

    def begin(self, worker: str, address: str) -> None:
        """Register a worker that is ready; its messages count from now on."""
        self._counters.setdefault(worker, {})
        self._address_of[worker] = address

    def leave(self, address: str) -> None:
        """Mark the workers at an address as departed. Their last message may still arrive."""
        for worker, of_worker in self._address_of.items():
            if of_worker == address and worker not in self._departed:
                self._departed[worker] = None
        while len(self._departed) > MAX_DEPARTED:
            oldest, _ = self._departed.popitem(last=False)
            del self._address_of[oldest]
            self._heartbeats.pop(oldest, None)
            self._folded = metrics.total([self._folded, self._counters.pop(oldest)])
            self._n_folded += 1

    def take(self, worker: str, said: Any) -> None:
        """Record a message of a worker: all its totals so far, and snapshots of runs.

        Raises
        ------
        ValueError
            The message is malformed; nothing has changed.
        """
        if not self._is_known(worker):
            return
        if not isinstance(said, Mapping):
            raise ValueError("malformed message of counters")
        counters = _checked_counts(said.get("counters"), metrics.MEANING)
        heartbeat = _checked_number(said.get("heartbeat", 0), int)
        self.take_runs(worker, said.get("runs"), said.get("open_runs", ()))
        # Counters only grow, and messages may overtake each other.
        self._heartbeats[worker] = max(heartbeat, self._heartbeats.get(worker, 0))
        last = self._counters[worker]
        self._counters[worker] = {n: max(count, last.get(n, 0)) for n, count in counters.items()}

    def has_heard(self, worker: str, heartbeat: int) -> bool:
        """Return whether a later heartbeat of a worker came, by the number of an earlier one."""
        return self._heartbeats.get(worker, 0) > heartbeat

    def take_runs(self, worker: str, ended: Any, still_open: Any) -> None:
        """Record a worker's snapshots of runs that ended there, and of runs that did not.

        Raises
        ------
        ValueError
            A snapshot is malformed; nothing has changed.
        """
        if not self._is_known(worker):
            return
        checked = [_checked_runs(ended), _checked_runs(still_open)]
        for runs, is_open in zip(checked, (False, True), strict=True):
            for run in runs:
                self._keep(worker, run, is_open)

    def _is_known(self, worker: str) -> bool:
        # Others were never ready, or departed long ago.
        return isinstance(worker, str) and worker in self._counters

    def _keep(self, worker: str, run: dict[str, Any], is_open: bool) -> None:
        key = (run["id"], run["run"])
        kept = self._runs.get(key)
        if kept is None:
            if run["run"] <= self._last_dropped:
                return  # this run was dropped: a new sum would lack other workers
            kept = self._runs[key] = _KeptRun(RunSum(run))
        if worker in kept.ended:
            return  # its final snapshot is in the total already
        self._n_snapshots -= kept.n_snapshots
        if is_open:
            kept.open[worker] = run
        else:
            kept.open.pop(worker, None)
            kept.ended.add(worker)
            kept.total.add(self._address(worker), run)
        self._n_snapshots += kept.n_snapshots
        while len(self._runs) > MAX_RUNS or self._n_snapshots > MAX_SNAPSHOTS:
            key = self._oldest()
            self._n_snapshots -= self._runs.pop(key).n_snapshots
            self._last_dropped = max(self._last_dropped, key[1])

    def _oldest(self) -> tuple[str, int]:
        """Return the oldest run, one that is open on no present worker if there is one."""
        present = self._counters.keys() - self._departed.keys()
        for key, kept in self._runs.items():
            if present.isdisjoint(kept.open):
                return key
        return next(iter(self._runs))

    def _address(self, worker: str) -> str:
        return self._address_of.get(worker, worker)

    def totals(self) -> dict[str, int]:
        """Return the sum over all workers, departed ones included."""
        return metrics.total([self._folded, *self._counters.values()])

    def departed(self) -> dict[str, Any]:
        """Return the number of departed `workers` and their `totals`, which the overall sum
        includes.
        """
        counters = (self._counters[worker] for worker in self._departed)
        n_workers = self._n_folded + len(self._departed)
        return {"workers": n_workers, "totals": metrics.total([self._folded, *counters])}

    def shuffles(self) -> list[dict[str, Any]]:
        """Return a summary of each run over all workers (`RunSum.summary`), oldest first."""
        found = [
            kept.total.summary([(self._address(one), run) for one, run in kept.open.items()])
            for kept in self._runs.values()
        ]
        # Not by time: the clock may be set back.
        return sorted(found, key=lambda one: one["run"])


def _checked_counts(said: Any, names: Iterable[str]) -> dict[str, int]:
    if not isinstance(said, Mapping):
        raise ValueError("counters are not a mapping")
    return {name: _checked_number(said.get(name, 0), int) for name in names}


def _checked_number(value: Any, kind: type[int] | type[float]) -> Any:
    number: float = value if isinstance(value, (int, kind)) else -1
    if isinstance(value, bool) or not 0 <= number < 2**63:
        raise ValueError("not a count")
    return value


def _checked_text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise ValueError("not a name")
    return value


def _checked_runs(said: Any) -> list[dict[str, Any]]:
    if not isinstance(said, (list, tuple)):
        raise ValueError("runs are not a list")
    return [_checked_run(run) for run in said[-MAX_RUNS:]]


def _checked_run(said: Any) -> dict[str, Any]:
    try:
        return {
            "id": _checked_text(said["id"]),
            "run": _checked_number(said["run"], int),
            "kind": _checked_text(said["kind"]),
            "began_s": _checked_number(said["began_s"], float),
            **_checked_counts(said, (*COUNTS, *MORE_COUNTS)),
            **{name: _checked_number(said.get(name, 0), float) for name in MORE_NUMBERS},
            "seconds": {p: _checked_number(said["seconds"].get(p, 0), float) for p in PHASES},
            "links": {
                _checked_text(peer): (_checked_number(nbytes, int), _checked_number(s, float))
                for peer, (nbytes, s) in islice(said["links"].items(), 1)
            },
            "fullest": [
                (_checked_text(partition), _checked_number(rows, int))
                for partition, rows in said["fullest"][:N_FULLEST]
            ],
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("not a snapshot of a run") from error

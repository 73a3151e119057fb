"""Counters and run snapshots of all workers, kept in one place beyond the workers' lifetimes.

Each worker repeatedly sends the totals it has counted so far, and a snapshot of each run that
ended. Only the latest totals of a worker count, so nothing counts twice. The size of a tally is
bounded, and it validates what workers send. No clock, no event loop, nothing of Dask.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from dask_gpurt import metrics
from dask_gpurt.shuffle.figures import N_FULLEST, PHASES

#: Number of runs kept; the newest win.
MAX_RUNS = 32
#: Number of run snapshots kept, over all runs and workers.
MAX_SNAPSHOTS = 4096
#: Number of departed workers whose late messages still count. Older ones are folded into a sum.
MAX_DEPARTED = 256
#: Maximum length of a name or an address.
MAX_TEXT = 256

_RUN_COUNTS = ("rows_in", "local_nbytes", "sent_nbytes", "raw_nbytes", "wire_nbytes", "messages")


def brief(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot with its busiest link alone; a summary needs no other link."""
    links = sorted(run["links"].items(), key=lambda link: -link[1][0])[:1]
    return {**run, "links": dict(links)}


class Tally:
    """Counters and runs of all workers that were ever ready."""

    def __init__(self) -> None:
        #: By worker id, which is unique. Another worker may reuse an address.
        self._counters: dict[str, dict[str, int]] = {}
        self._address_of: dict[str, str] = {}
        self._departed: OrderedDict[str, None] = OrderedDict()
        self._n_folded = 0
        self._folded = metrics.total([])
        self._runs: OrderedDict[tuple[str, int], dict[str, dict[str, Any]]] = OrderedDict()
        self._n_snapshots = 0

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
            self._folded = metrics.total([self._folded, self._counters.pop(oldest)])
            self._n_folded += 1

    def take(self, worker: str, said: Any) -> None:
        """Record a message of a worker: all its totals so far, and snapshots of runs.

        Raises
        ------
        ValueError
            The message is malformed; nothing has changed.
        """
        if not isinstance(worker, str) or worker not in self._counters:
            return  # never ready, or departed long ago
        if not isinstance(said, Mapping) or not isinstance(said.get("runs"), (list, tuple)):
            raise ValueError("malformed message of counters")
        counters = _checked_counts(said.get("counters"), metrics.MEANING)
        runs = [_checked_run(run) for run in said["runs"][-MAX_RUNS:]]
        # Counters only grow, and messages may overtake each other.
        last = self._counters[worker]
        self._counters[worker] = {n: max(count, last.get(n, 0)) for n, count in counters.items()}
        for run in runs:
            self._keep(worker, run)

    def _keep(self, worker: str, run: dict[str, Any]) -> None:
        of_worker = self._runs.setdefault((run["id"], run["run"]), {})
        self._n_snapshots += worker not in of_worker
        of_worker[worker] = run
        while len(self._runs) > MAX_RUNS or self._n_snapshots > MAX_SNAPSHOTS:
            _, oldest = self._runs.popitem(last=False)
            self._n_snapshots -= len(oldest)

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

    def runs_without(self, addresses: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """Return run snapshots by worker address, without those of the workers listed.

        The caller asks the listed workers directly.
        """
        asked = set(addresses)
        found: dict[str, list[dict[str, Any]]] = {}
        for of_worker in self._runs.values():
            for worker, run in of_worker.items():
                address = self._address_of.get(worker, worker)
                if worker in self._departed or address not in asked:
                    found.setdefault(address, []).append(run)
        return found


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
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError("not a name")
    return value


def _checked_run(said: Any) -> dict[str, Any]:
    try:
        links = brief(said)["links"].items()
        return {
            "id": _checked_text(said["id"]),
            "run": _checked_number(said["run"], int),
            "kind": _checked_text(said["kind"]),
            "began_s": _checked_number(said["began_s"], float),
            **_checked_counts(said, (*_RUN_COUNTS, "rows_owned", "n_owned")),
            "seconds": {p: _checked_number(said["seconds"].get(p, 0), float) for p in PHASES},
            "links": {
                _checked_text(peer): (_checked_number(nbytes, int), _checked_number(s, float))
                for peer, (nbytes, s) in links
            },
            "fullest": [
                (_checked_text(partition), _checked_number(rows, int))
                for partition, rows in said["fullest"][:N_FULLEST]
            ],
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("not a snapshot of a run") from error

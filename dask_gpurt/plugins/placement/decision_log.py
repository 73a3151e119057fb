"""A bounded log of the last placement decisions, with counts of all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from itertools import islice, starmap
from typing import Any

from dask_gpurt.placement.cost import Cost
from dask_gpurt.placement.explanation import REASONS, Record, explained

#: Limit of decisions kept (about a kilobyte each), and of differing ones that a summary shows.
MAX_RECORDS = 4_000
N_SHOWN = 5

_NO_COSTS: Mapping[str, Cost] = {}


class PlacementLog:
    """The log of one scheduler. Records are put into words only when they are shown."""

    def __init__(self) -> None:
        #: Arguments of records.
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=MAX_RECORDS)
        self._reasons = dict.fromkeys(REASONS, 0)
        self._n_differing = 0
        self._saved_s = 0.0
        self.steals_allowed = 0
        self.steals_refused = 0
        self.n_failed = 0

    def keep(
        self,
        key: Hashable,
        worker: str,
        reason: str,
        stock: str | None,
        costs: Mapping[str, Cost] = _NO_COSTS,
    ) -> None:
        """Record a decision, with the fields of `Record`.

        The oldest record is dropped if there are too many. This runs for every task, so there is no
        index by key: `explain` searches all records instead.
        """
        self._reasons[reason] += 1
        kept = key, worker, reason, stock, costs
        if worker != stock:
            record = Record(*kept)
            self._n_differing += record.differs
            self._saved_s += record.saved_s or 0.0
        self._kept.append(kept)

    def _latest(self) -> Iterator[Record]:
        return starmap(Record, reversed(self._kept))

    def explain(self, key: Hashable) -> dict[str, Any] | None:
        """Return plain values about the last decision on a task; None if it is not in the log."""
        record = next((one for one in self._latest() if one.key == key), None)
        return None if record is None else explained(record)

    def summary(self) -> dict[str, Any]:
        """Return counts and the last decisions that differ from stock Dask's, as plain values."""
        differing = (one for one in self._latest() if one.differs)
        return {
            "decisions": dict(self._reasons),
            "differ_from_stock": self._n_differing,
            "saved_s": self._saved_s,
            "failed": self.n_failed,
            "steals": {"allowed": self.steals_allowed, "refused": self.steals_refused},
            "last_differing": [explained(one) for one in islice(differing, N_SHOWN)],
        }

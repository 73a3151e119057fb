"""A decision in words and numbers, for somebody who asks why a task ran where it did. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from dask_gpurt.placement.cost import Cost

#: What decided, and what it means.
REASONS = {
    "cost": "lowest cost of the candidates",
    "holder": "has all inputs, and no other worker that comes into question can be better",
    "new": "has nearly all of the inputs, and nobody knows how long such a task takes",
    "most": "has most of the inputs and nothing to do, and others are reached alike, so that no"
    " other worker can be better",
    "small": "decided by stock Dask, since its inputs and its output take no longer to move than to"
    " ask for",
    "siblings": "has what a later task will need together with this one",
    "stock": "decided by stock Dask",
}


class Record(NamedTuple):
    """What is kept of a decision.

    Attributes
    ----------
    reason
        One of `REASONS`.
    stock
        What stock Dask would have chosen; None if it was not worked out.
    costs
        Of the candidates, where there were several.
    """

    key: Hashable
    worker: str
    reason: str
    stock: str | None
    costs: Mapping[str, Cost]

    @property
    def differs(self) -> bool:
        """Whether stock Dask would have chosen another worker."""
        return self.stock is not None and self.stock != self.worker

    @property
    def saved_s(self) -> float:
        """Seconds that the choice is better than stock's, by our own estimate; 0 if unknown."""
        mine, stock_s = self.costs.get(self.worker), self.costs.get(self.stock or "")
        return stock_s.total_s - mine.total_s if mine is not None and stock_s is not None else 0.0


def explained(record: Record) -> dict[str, Any]:
    """Plain values: what was chosen, why, what stock would have done, and each candidate's terms.

    Candidates are sorted by cost.
    """
    candidates = [
        {"worker": worker, "total_s": one.total_s, **one._asdict()}
        for worker, one in record.costs.items()
    ]
    return {
        "key": str(record.key),
        "worker": record.worker,
        "reason": REASONS[record.reason],
        "stock_worker": record.stock,
        "saved_s": record.saved_s,
        "candidates": sorted(candidates, key=lambda one: (one["total_s"], one["worker"])),
    }

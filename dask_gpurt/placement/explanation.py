"""Explanations of placement decisions, in plain values. Pure.

`dask_gpurt.plugins.placement.decision_log` keeps the records. `dask_gpurt.explain` shows them to a
user who asks why a task ran where it did.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from dask_gpurt.placement.cost import Cost

#: Texts that tell users what decided, by the `reason` of a rule.
REASONS = {
    "cost": "lowest cost of the candidates",
    "holder": "has all inputs, and no other candidate can be better",
    "new": "has nearly all of the inputs, and no task of this kind has ended yet",
    "most": "has most of the inputs and nothing to do, and all paths are equal, so no other worker"
    " can be better",
    "small": "decided by stock Dask, since its inputs and its output are so small that moving them"
    " takes no longer than asking for them",
    "shared": "has all inputs but those that nearly every worker fetches",
    "combine": "fetches the fewest of the results to combine, or is the least busy of such workers",
    "siblings": "has what a later task will need together with this one",
    "slice": "combines a slice of values, and other workers combine the other slices",
    "stuck": "has an input that cannot be moved to another worker",
    "stock": "decided by stock Dask",
}


class Record(NamedTuple):
    """A decision as the log keeps it.

    Attributes
    ----------
    reason
        A key of `REASONS`.
    stock
        Address of the worker that stock Dask would choose; None if it was not computed.
    costs
        Costs of the candidates, where several were weighed.
    """

    key: Hashable
    worker: str
    reason: str
    stock: str | None
    costs: Mapping[str, Cost]

    @property
    def differs(self) -> bool:
        """Whether stock Dask would choose another worker."""
        return self.stock is not None and self.stock != self.worker

    @property
    def saved_s(self) -> float | None:
        """Seconds that the choice saves over stock Dask's, by our own estimate.

        None if the two were not compared.
        """
        if self.worker == self.stock:
            return 0.0
        mine, of_stock = self.costs.get(self.worker), self.costs.get(self.stock or "")
        return None if mine is None or of_stock is None else of_stock.total_s - mine.total_s


def explained(record: Record) -> dict[str, Any]:
    """Return the choice, its reason, stock Dask's choice and all candidates, as plain values.

    Candidates are sorted by cost, each with the terms of its cost.
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

"""What a task's output will be needed together with, and where that is. Decides nothing.

Reads the graph that the scheduler has, a few tasks ahead. What joining costs is in
`dask_gpurt.placement.joins`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.placement.siblings import MAX_DEPENDENTS, MAX_INPUTS
from dask_gpurt.plugins.placement.output_sizes import ExpectedSizes

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

#: An input that more have is nearly everywhere; where it is tells nothing.
MAX_PLACES = 4
#: Tasks one after the other, each needing nothing but the one before, that are looked through.
MAX_CHAIN = 3
#: Joins of one output, each with something else, that a glance is enough for.
MAX_COUNTED_JOINS = 2
#: Results smaller than this are joined wherever it suits.
MIN_JOIN_NBYTES = 64 * 1024


class JoinPartners:
    """One a scheduler.

    Parameters
    ----------
    sizes
        Of results.
    """

    def __init__(self, sizes: ExpectedSizes) -> None:
        self._sizes = sizes

    def __call__(
        self, ts: TaskState, min_nbytes: int = MIN_JOIN_NBYTES, *, other_group: bool = False
    ) -> list[dict[str, float]]:
        """Where the other inputs are of those tasks that will need this one's output.

        A task that needs nothing else passes it on, and so it is looked through: of `x.T + x`,
        blocks meet that were made two tasks apart.

        Parameters
        ----------
        min_nbytes
            What is smaller is left out, on either side: that can be moved when it is time.
        other_group
            Leave out those of the task's own group.
        """
        found: list[dict[str, float]] = []
        if not ts.dependents:
            return found
        level = [ts]
        for _ in range(MAX_CHAIN):
            passed_on = []
            for one in level:
                dependents = one.dependents
                if not dependents or len(dependents) > MAX_DEPENDENTS:
                    continue
                if self._sizes(one) < min_nbytes:
                    continue
                for later in dependents:
                    n_needed = len(later.dependencies)
                    if n_needed == 1:
                        passed_on.append(later)
                    elif n_needed <= MAX_INPUTS:
                        placed = self._others(ts, one, later, min_nbytes, other_group)
                        if placed and placed not in found:
                            found.append(placed)
            level = passed_on
            if not level or len(found) >= MAX_DEPENDENTS:
                break
        return found

    def _others(
        self,
        ts: TaskState,
        one: TaskState,
        later: TaskState,
        min_nbytes: int,
        other_group: bool,
    ) -> dict[str, float]:
        """Bytes by worker of what `later` needs besides `one`, which comes of `ts`."""
        placed: dict[str, float] = {}
        for other in later.dependencies:
            if other is one or (ws := _place_of(other)) is None:
                continue
            if other_group and other.group is ts.group:
                continue
            if (n := self._sizes(other)) >= min_nbytes:
                placed[ws.address] = placed.get(ws.address, 0.0) + n
        return placed


def times_joined(ts: TaskState) -> int | None:
    """Of how many tasks at most `joins` tells; None if that takes more than a glance."""
    for _ in range(MAX_CHAIN):
        dependents = ts.dependents
        if len(dependents) != 1:
            if len(dependents) > MAX_COUNTED_JOINS:
                return None
            for one in dependents:
                if len(one.dependencies) == 1:
                    return None
            return len(dependents)
        (ts,) = dependents
        if len(ts.dependencies) > 1:
            return 1
    return 0


def _place_of(ts: TaskState) -> WorkerState | None:
    """Where a result is, or will be made; or what it will be made of, where that is one thing."""
    for _ in range(MAX_CHAIN):
        who = ts.who_has
        if who:
            if len(who) > MAX_PLACES:
                return None
            return min(who, key=lambda ws: ws.address) if len(who) > 1 else next(iter(who))
        if ts.processing_on is not None or len(ts.dependencies) != 1:
            return ts.processing_on
        (ts,) = ts.dependencies
    return None

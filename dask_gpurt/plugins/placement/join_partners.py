"""Join partners of a task: the results that later tasks need together with its output.

This module reads the scheduler's graph a few tasks ahead and decides nothing.
`dask_gpurt.placement.joins` computes what joining costs.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from dask_gpurt.placement.joins import Partners
from dask_gpurt.placement.siblings import MAX_DEPENDENTS, MAX_INPUTS
from dask_gpurt.plugins.placement.output_sizes import ExpectedSizes

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

#: An input with more holders is nearly everywhere, so its holders do not matter.
MAX_PLACES = 4
#: Limit of tasks in a chain, each with a single input, that are followed.
MAX_CHAIN = 3
#: `times_joined` counts at most this many joins of one output.
MAX_COUNTED_JOINS = 2
#: The location of smaller results does not matter.
MIN_JOIN_NBYTES = 64 * 1024


class JoinPartners:
    """Finds the join partners of tasks on one scheduler.

    Parameters
    ----------
    sizes
        Expected sizes of results.
    """

    def __init__(self, sizes: ExpectedSizes) -> None:
        self._sizes = sizes

    def __call__(
        self, ts: TaskState, min_nbytes: int = MIN_JOIN_NBYTES, *, other_group: bool = False
    ) -> list[Partners]:
        """Return join partners, for each task that will join the output.

        A later task that needs nothing else passes the output on, so its dependents count too. In
        `x.T + x`, one operand passes through another task before the two blocks meet. In a padded
        array, a block and its own edge meet before others join them.

        Parameters
        ----------
        min_nbytes
            Ignore smaller results on either side: they can be moved when the join is due.
        other_group
            Ignore partners of the task's own group.
        """
        found: list[Partners] = []
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
                    elif n_needed > MAX_INPUTS:
                        continue
                    elif is_made_of(later, ts):
                        passed_on.append(later)
                    else:
                        placed = self._others(ts, one, later, min_nbytes, other_group)
                        if placed and placed not in found:
                            found.append(placed)
            level = passed_on
            if not level or len(found) >= MAX_DEPENDENTS:
                break
        return found

    def may_be_joined(self, ts: TaskState) -> bool:
        """Return whether a later task needs a large part of the output together with others.

        Sizes that are not known yet count as large.
        """
        level = [ts]
        for _ in range(MAX_CHAIN):
            passed_on = []
            for one in level:
                if 0 < self._sizes(one) < MIN_JOIN_NBYTES:
                    continue
                for later in islice(one.dependents, MAX_DEPENDENTS):
                    if len(later.dependencies) > 1:
                        return True
                    passed_on.append(later)
            level = passed_on[:MAX_DEPENDENTS]
        return bool(level)

    def _others(
        self,
        ts: TaskState,
        one: TaskState,
        later: TaskState,
        min_nbytes: int,
        other_group: bool,
    ) -> Partners:
        """Return the inputs of `later` besides `one`, which follows `ts`."""
        placed = Partners({}, self._sizes(one) or inf)
        for other in later.dependencies:
            # A result that very many tasks need will be nearly everywhere.
            if other is one or len(other.dependents) > MAX_DEPENDENTS:
                continue
            if (ws := _place_of(other)) is None:
                continue
            if other_group and other.group is ts.group:
                continue
            if (n := self._sizes(other)) >= min_nbytes:
                placed[ws.address] = placed.get(ws.address, 0.0) + n
        return placed


def is_made_of(ts: TaskState, source: TaskState) -> bool:
    """Return whether all inputs of a task are a result, or are made of that result alone.

    Inputs that very many tasks need do not count, because they will be nearly everywhere.
    """
    for one in ts.dependencies:
        if len(one.dependents) > MAX_DEPENDENTS:
            continue
        for _ in range(MAX_CHAIN):
            if one is source or len(one.dependencies) != 1:
                break
            (one,) = one.dependencies
        if one is not source:
            return False
    return True


def _only_source(ts: TaskState) -> TaskState | None:
    """Return the nearest result that all inputs of a task are made of, as in `is_made_of`."""
    if len(ts.dependencies) == 1:
        return next(iter(ts.dependencies))
    if len(ts.dependencies) > MAX_INPUTS:
        return None
    one = next((one for one in ts.dependencies if len(one.dependents) <= MAX_DEPENDENTS), None)
    for _ in range(MAX_CHAIN):
        if one is None or is_made_of(ts, one):
            return one
        one = next(iter(one.dependencies)) if len(one.dependencies) == 1 else None
    return None


def times_joined(ts: TaskState) -> int | None:
    """Return the most joins that `JoinPartners` finds; None if they are not quick to count."""
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
    """Return the worker that has or computes a result; else the worker of its only source."""
    for _ in range(MAX_CHAIN):
        who = ts.who_has
        if who:
            if len(who) > MAX_PLACES:
                return None
            return min(who, key=lambda ws: ws.address) if len(who) > 1 else next(iter(who))
        if ts.processing_on is not None:
            return ts.processing_on
        source = _only_source(ts)
        if source is None:
            return None
        ts = source
    return None

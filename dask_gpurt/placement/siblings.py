"""Keeping together what will be joined: the worker of a task that has no data to go by yet. Pure.

Stock Dask deals root tasks out to whoever is least busy, one by one. Of `a + b`, the first chunks
of both collections then land on different workers, the second ones too, and half of the data is
moved without need. Here a root task goes to where the others are that a later task will need
together with it: its *siblings*.

Only small families count. A task whose output goes to very many, or one that needs very many
others, as in a shuffle or a broadcast, has to move data wherever the siblings are; and a group
that is all siblings of one another would end up on one worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: Tasks that need this one, and inputs each of those needs: from more on, it is no family.
MAX_DEPENDENTS = 8
MAX_INPUTS = 16


class Candidate(NamedTuple):
    """A worker that has siblings of a root task.

    Attributes
    ----------
    n_free
        Tasks it can be given before the scheduler calls it full; negative if it is overfull.
    ahead
        Tasks for each of its threads.
    saved_s
        Seconds of transfers that sitting here saves.
    is_certain
        Whether sizes are known; else seconds only say which of two candidates is the better one.
    """

    worker: str
    nthreads: int
    n_free: float
    ahead: float
    saved_s: float
    is_certain: bool = True


def best_candidate(
    candidates: Iterable[Candidate], *, ahead: float, duration_s: float, to_come: float
) -> str | None:
    """Where a root task should join its siblings.

    Parameters
    ----------
    ahead
        Tasks for each thread of the worker that it would go to otherwise.
    duration_s
        Of the task, expected.
    to_come
        Tasks for each thread of the cluster that nobody was given yet. A place that this task does
        not take is taken by one of those, so that waiting for the siblings' worker costs nothing
        as long as there are enough of them to make up for it.

    Returns
    -------
    str or None
        A worker, None if it should go where stock Dask would send it.
    """
    best: tuple[float, float, str] | None = None
    for one in candidates:
        # One task too many for each thread, for the sake of bytes that are known. It is memory
        # that is at stake: queueing is there to keep root tasks from piling up.
        if one.n_free <= (-one.nthreads if one.is_certain else 0):
            continue
        waited_s = max(0.0, one.ahead - ahead - to_come) * duration_s
        if waited_s > (one.saved_s if one.is_certain else 0.0):
            continue
        bid = waited_s - one.saved_s, one.ahead, one.worker
        if best is None or bid < best:
            best = bid
    return best and best[2]

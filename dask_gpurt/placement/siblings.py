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


class Seat(NamedTuple):
    """A worker that has siblings of a root task.

    Attributes
    ----------
    n_free
        Tasks it can be given before the scheduler calls it full; negative if it is overfull.
    ahead
        Tasks for each of its threads.
    saved_s
        Seconds of transfers that sitting here saves; None while sizes are unknown.
    """

    worker: str
    nthreads: int
    n_free: float
    ahead: float
    saved_s: float | None


def seat(seats: Iterable[Seat], *, ahead: float, duration_s: float, n_queued: int) -> str | None:
    """Where a root task should join its siblings.

    Parameters
    ----------
    ahead
        Tasks for each thread of the worker that it would go to otherwise.
    duration_s
        Of the task, expected.
    n_queued
        Tasks beyond those that all workers can take at once; may be negative. While there are
        some, a place that this task does not take is taken by another, so that waiting for the
        siblings' worker costs nothing.

    Returns
    -------
    str or None
        A worker, None if it should go where stock Dask would send it.
    """
    best: tuple[float, float, str] | None = None
    for one in seats:
        saved_s = one.saved_s
        if one.n_free <= 0:
            # One task too many for each thread, for the sake of bytes that are known. It is
            # memory that is at stake: queueing is there to keep root tasks from piling up.
            if saved_s is None or one.n_free <= -one.nthreads:
                continue
        waited_s = 0.0 if n_queued > 0 else max(0.0, one.ahead - ahead) * duration_s
        if saved_s is not None and waited_s > saved_s:
            continue
        bid = waited_s - (saved_s or 0.0), one.ahead, one.worker
        if best is None or bid < best:
            best = bid
    return best and best[2]

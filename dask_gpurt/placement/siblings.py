"""Placement of a root task, which has no inputs yet, next to the tasks it is joined with. Pure.

Stock Dask gives root tasks one by one to the least busy worker. In `a + b`, the first chunks of
both collections then land on different workers, and so do the second ones. Half of the data is
moved without need. Here a root task goes to the workers of its *siblings*: the tasks that a later
task will need together with it.

Only few siblings count. If an output goes to very many tasks, or is joined with very many others,
data has to move wherever the siblings are. Shuffles and broadcasts are such cases. A group of tasks
that are all siblings of one another would end up on one worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: Siblings are not looked for if a task has more dependents, or a dependent has more inputs.
MAX_DEPENDENTS = 8
MAX_INPUTS = 16


class Candidate(NamedTuple):
    """A worker near siblings of a root task.

    Attributes
    ----------
    n_free
        Tasks that the worker can be given before the scheduler calls it full; negative if overfull.
    ahead
        Tasks per thread of the worker.
    saved_s
        Seconds of transfers that are saved if the root task runs on this worker.
    is_certain
        Whether sizes are known. If not, `saved_s` only ranks candidates.
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
    """Return the worker on which a root task should join its siblings.

    Parameters
    ----------
    ahead
        Tasks per thread of the worker that stock Dask would choose.
    duration_s
        Expected duration of the task.
    to_come
        Root tasks per thread of the cluster that are not placed yet. If this task leaves a slot
        free, one of those takes it. So waiting for the siblings' worker costs nothing as long as
        enough tasks are to come.

    Returns
    -------
    str or None
        Address of a worker; None if the task should go where stock Dask would send it.
    """
    best: tuple[float, float, str] | None = None
    for one in candidates:
        # Known bytes justify one task too many per thread. More would cost memory: queueing exists
        # to keep root tasks from piling up.
        if one.n_free <= (-one.nthreads if one.is_certain else 0):
            continue
        waited_s = max(0.0, one.ahead - ahead - to_come) * duration_s
        if waited_s > (one.saved_s if one.is_certain else 0.0):
            continue
        bid = waited_s - one.saved_s, one.ahead, one.worker
        if best is None or bid < best:
            best = bid
    return best and best[2]

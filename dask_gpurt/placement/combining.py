"""The worker that combines results of a reduction, where workers hold the blocks already. Pure.

All combining tasks of a level become ready at about the same time, and each one fetches nearly all
of its inputs. By the costs of one task alone, a task avoids a link that is busy and fetches more
over others. All tasks together then take longer. So here a worker that has its share of the tasks
comes last. Among the others, the one that fetches the fewest bytes comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple


class Combiner(NamedTuple):
    """A worker with an input of a combining task.

    Attributes
    ----------
    missing_nbytes
        Bytes of the inputs that it has to fetch.
    fetch_s
        Seconds until it has them, links that are busy included.
    n_alike
        Combining tasks of the same level that it has been given and has not done.
    before_s
        Seconds of tasks that it does first.
    """

    address: str
    nthreads: int
    missing_nbytes: int
    fetch_s: float
    n_alike: int
    before_s: float
    nbytes: int


def best_combiner(
    workers: Iterable[Combiner], n_combining: int, total_nthreads: int, most_before_s: float
) -> str | None:
    """Return the worker for a combining task; None if it would have to wait too long there.

    Parameters
    ----------
    n_combining
        Combining tasks of the same level.
    total_nthreads
        Threads of all workers.
    most_before_s
        Seconds of other tasks that a thread of the worker may have to do first.
    """

    def bid(one: Combiner) -> tuple[bool, int, float, float, int, str]:
        has_share = one.n_alike >= ceil(n_combining * one.nthreads / total_nthreads)
        before_s = one.before_s / one.nthreads
        return has_share, one.missing_nbytes, one.fetch_s, before_s, one.nbytes, one.address

    best = min(workers, key=bid, default=None)
    if best is None or best.before_s > most_before_s * best.nthreads:
        return None
    return best.address

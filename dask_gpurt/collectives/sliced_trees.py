"""Choice of the levels of a reduction tree that combine slices, and of the number of slices.

Dask reduces by a tree: a task combines the whole values of about four others. Towards the root
there are fewer tasks than workers, so few links are busy, each with several whole values. A level
in slices has the same tree for each slice: all workers combine slices at the same time, and the
root joins them.

Lower levels have a task for each worker, and often the inputs of a task are on one worker. Slices
would gain nothing there, and cost tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dask_gpurt.collectives.slicing import ALIGNMENT

#: Smaller results are left alone: their transfers take less than the additional tasks.
LEAST_NBYTES = 16 << 20
#: Smaller slices are not made.
LEAST_SLICE_NBYTES = 1 << 20
#: Seconds that each task costs the scheduler and a worker while other tasks wait.
TASK_S = 5e-4
#: A tree is left alone if slices need more than this part of its time.
WORTHWHILE = 0.8


@dataclass(frozen=True, slots=True)
class Slicing:
    """The cut of a reduction tree into slices.

    Attributes
    ----------
    level
        The first level that combines slices. Level 0 combines the values of the chunks.
    n_slices
        Number of slices of each value; 1 if all levels combine whole values.
    seconds, whole_s
        Seconds of the levels from `level` on, in slices and as they are.
    """

    level: int
    n_slices: int
    seconds: float
    whole_s: float


def choose(
    n_values: Sequence[int],
    n_trees: int,
    nbytes: int,
    width: int,
    n_workers: int,
    rate: float,
    least_level: int = 0,
) -> Slicing:
    """Choose the level and the number of slices with which a tree takes least.

    Parameters
    ----------
    n_values
        Number of values before each level, and 1 after the last one.
    n_trees
        Number of such trees: the chunks of the result.
    nbytes
        Size of the result of a tree.
    width
        Elements along the axis that is cut.
    rate
        Bytes a second from one worker to another.
    least_level
        Lower levels combine values of one worker, and stay as they are.
    """
    n_levels = len(n_values) - 1
    level = least_level
    while level < n_levels and n_values[level + 1] * n_trees >= n_workers:
        level += 1
    levels = [*zip(n_values[level:], n_values[level + 1 :], strict=False)]
    value_s = nbytes / rate
    whole_s = sum(_moved(pair, n_trees, n_workers, 1) for pair in levels) * value_s
    best = Slicing(level, 1, whole_s, whole_s)
    most = min(n_workers // n_trees, nbytes // LEAST_SLICE_NBYTES, width // ALIGNMENT)
    if max(n_values[level:], default=0) < 3:
        most = 1  # half of each value crosses a link, and half of the result again
    for n_slices in _candidates(most):
        moved = sum(_moved(pair, n_trees, n_workers, n_slices) for pair in levels)
        n_tasks = n_trees * n_slices * sum(n_values[level:])
        seconds = (moved + 1 - 1 / n_slices) * value_s + n_tasks * TASK_S
        if seconds < min(best.seconds, WORTHWHILE * whole_s):
            best = Slicing(level, n_slices, seconds, whole_s)
    return best


def _candidates(most: int) -> list[int]:
    """Return numbers of slices to compare: powers of two, and the largest number."""
    return sorted({min(1 << power, most) for power in range(1, most.bit_length() + 1)} - {0, 1})


def _moved(pair: tuple[int, int], n_trees: int, n_workers: int, n_slices: int) -> float:
    """Return how many values the busiest worker receives in a level."""
    before, after = pair
    inputs = before / after
    here = min(inputs, max(1.0, before * n_trees / n_workers))
    n_tasks = after * n_trees * n_slices
    return (inputs - here) / n_slices * max(1.0, n_tasks / n_workers)

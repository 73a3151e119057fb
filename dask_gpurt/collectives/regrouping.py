"""Trees of a reduction that begin where its values are.

Dask combines neighbours in the order of their numbers, wherever they are. If workers hold the
values already, these trees combine the values of each worker first. Then only one value of each
worker crosses a link. That changes the order in which values are combined. A result that does not
depend on the order, such as a sum of integers, has the same bits either way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain

#: A level of a tree: for each of its tasks, the numbers of the values below that it combines.
TreeLevel = list[list[int]]


def regrouped(
    holders: Sequence[Hashable], most_inputs: int, n_local: int = 0, n_across: int = 0
) -> tuple[list[TreeLevel], list[TreeLevel]] | None:
    """Return the levels that combine values of one worker, and those across workers.

    Parameters
    ----------
    holders
        The worker that holds each value.
    most_inputs
        Most values that a task combines.
    n_local, n_across
        Least numbers of levels. Trees that share layers of a graph have equal numbers; a task of a
        level that a tree does not need takes one value.

    Returns
    -------
    tuple of two lists of levels, or None
        None if no worker has two values: then there is nothing to combine first.
    """
    of_worker: dict[Hashable, list[int]] = {}
    for number, holder in enumerate(holders):
        of_worker.setdefault(holder, []).append(number)
    if len(of_worker) == len(holders):
        return None
    local = _levels([*of_worker.values()], most_inputs, n_local)
    across = _levels([[*range(len(of_worker))]], most_inputs, n_across)
    return local, across


def _levels(groups: list[list[int]], most_inputs: int, least: int) -> list[TreeLevel]:
    """Return levels that combine each group into one value."""
    levels: list[TreeLevel] = []
    while len(levels) < least or any(len(group) > 1 for group in groups):
        cuts = [_parts(group, most_inputs) for group in groups]
        levels.append([*chain.from_iterable(cuts)])
        groups, n = [], 0
        for parts in cuts:
            groups.append([*range(n, n + len(parts))])
            n += len(parts)
    return levels


def _parts(group: list[int], most_inputs: int) -> list[list[int]]:
    """Cut a group into as few parts as possible, of about equal length."""
    n = -(-len(group) // most_inputs)
    return [group[i * len(group) // n : (i + 1) * len(group) // n] for i in range(n)]

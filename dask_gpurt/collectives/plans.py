"""The steps of an operation for one rank, by the name of its algorithm.

`choice` compares the same algorithms.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

from dask_gpurt.collectives import schedules, two_level
from dask_gpurt.collectives.schedules import Schedule
from dask_gpurt.collectives.steps import SliceReceive, SliceSend, Step

Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "broadcast"]

#: Algorithms that treat all ranks alike. `two-level` and `chain` know their hosts.
FLAT: dict[Collective, dict[str, Schedule]] = {
    "all-reduce": {
        "tree": schedules.tree,
        "one-shot": schedules.one_shot,
        "two-shot": schedules.two_shot,
        "ring": schedules.ring,
    },
    "reduce-scatter": {
        "ring": schedules.ring_reduce_scatter,
        "direct": schedules.direct_reduce_scatter,
    },
    "all-gather": {
        "ring": schedules.ring_all_gather,
        "direct": schedules.direct_all_gather,
    },
    "broadcast": {
        "tree": schedules.tree_broadcast,
        "two-shot": schedules.two_shot_broadcast,
    },
}


def steps_of(
    collective: Collective,
    algorithm: str,
    rank: int,
    hosts: Sequence[Hashable],
    n_slices: int,
    root: int = 0,
) -> list[Step]:
    """Return the steps of a rank.

    Parameters
    ----------
    hosts
        The host of each rank.
    n_slices
        Number of slices of a `chain`. The other algorithms have a fixed number.
    root
        The rank whose value is broadcast.

    Raises
    ------
    ValueError
        There is no such algorithm.
    """
    if (collective, algorithm) == ("all-reduce", "two-level"):
        return two_level.all_reduce(rank, hosts)
    n = len(hosts)
    # Algorithms copy the value of rank 0. So ranks are counted from the root.
    shifted = (rank - root) % n
    if (collective, algorithm) == ("broadcast", "chain"):
        turned = [hosts[(number + root) % n] for number in range(n)]
        found = two_level.broadcast(shifted, turned, n_slices)
    elif (schedule := FLAT[collective].get(algorithm)) is not None:
        found = schedule(shifted, n)
    else:
        raise ValueError(f"there is no {algorithm} {collective}")
    return found if root == 0 else [_turned(step, root, n) for step in found]


def _turned(step: Step, root: int, n: int) -> Step:
    """Return a step whose peers are counted from rank 0 instead of from the root."""
    return Step(
        tuple(SliceSend((one.peer + root) % n, one.slices) for one in step.sends),
        tuple(SliceReceive((one.peer + root) % n, one.slices, one.adds) for one in step.receives),
    )

"""Algorithms that treat all ranks alike, as lists of steps for one rank.

With N ranks, a value of S bytes, and a rate of B bytes a second in each direction of a link:

=============  =========  ====================  ==========================================
all-reduce     steps      bytes a rank sends    good for
=============  =========  ====================  ==========================================
`one-shot`     1          (N - 1) S             tiny values
`two-shot`     2          2 (N - 1) / N S       most values; the steps do not grow with N
`tree`         2 log2 N   at most log2 N S      links that all ranks share
`ring`         2 (N - 1)  2 (N - 1) / N S       links between neighbours only
=============  =========  ====================  ==========================================

`two-shot` is a reduce-scatter and an all-gather of one step each. TensorRT-LLM calls it MultiShot
where a switch copies the second step to all (research: systems, 5.1).
"""

from __future__ import annotations

from collections.abc import Callable

from dask_gpurt.collectives.steps import NOTHING, SliceReceive, SliceSend, Step, one_slice

#: Makes the steps of a rank among N.
Schedule = Callable[[int, int], list[Step]]


def _others(rank: int, n_ranks: int) -> list[int]:
    """Return the other ranks, beginning with the next: ranks do not all begin with the same one."""
    return [(rank + distance) % n_ranks for distance in range(1, n_ranks)]


def direct_reduce_scatter(rank: int, n_ranks: int) -> list[Step]:
    """Each rank sends slice i to rank i, which adds up. N slices."""
    others = _others(rank, n_ranks)
    sends = tuple(SliceSend(peer, one_slice(peer)) for peer in others)
    return [Step(sends, tuple(SliceReceive(peer, one_slice(rank), adds=True) for peer in others))]


def direct_all_gather(rank: int, n_ranks: int) -> list[Step]:
    """Rank i sends slice i to each other rank. N slices."""
    others = _others(rank, n_ranks)
    sends = tuple(SliceSend(peer, one_slice(rank)) for peer in others)
    return [Step(sends, tuple(SliceReceive(peer, one_slice(peer)) for peer in others))]


def ring_reduce_scatter(rank: int, n_ranks: int) -> list[Step]:
    """Sums of slices go round the ring, and slice i ends at rank i. N slices."""
    after, before = (rank + 1) % n_ranks, (rank - 1) % n_ranks
    return [
        Step(
            (SliceSend(after, one_slice((rank - step - 1) % n_ranks)),),
            (SliceReceive(before, one_slice((rank - step - 2) % n_ranks), adds=True),),
        )
        for step in range(n_ranks - 1)
    ]


def ring_all_gather(rank: int, n_ranks: int) -> list[Step]:
    """Slice i goes round the ring from rank i. N slices."""
    after, before = (rank + 1) % n_ranks, (rank - 1) % n_ranks
    return [
        Step(
            (SliceSend(after, one_slice((rank - step) % n_ranks)),),
            (SliceReceive(before, one_slice((rank - step - 1) % n_ranks)),),
        )
        for step in range(n_ranks - 1)
    ]


def two_shot(rank: int, n_ranks: int) -> list[Step]:
    """All-reduce in two steps. N slices."""
    return direct_reduce_scatter(rank, n_ranks) + direct_all_gather(rank, n_ranks)


def ring(rank: int, n_ranks: int) -> list[Step]:
    """All-reduce in 2 (N - 1) steps between neighbours. N slices."""
    return ring_reduce_scatter(rank, n_ranks) + ring_all_gather(rank, n_ranks)


def one_shot(rank: int, n_ranks: int) -> list[Step]:
    """All-reduce in one step: each rank sends its whole value to each other one. One slice."""
    others = _others(rank, n_ranks)
    sends = tuple(SliceSend(peer, one_slice(0)) for peer in others)
    return [Step(sends, tuple(SliceReceive(peer, one_slice(0), adds=True) for peer in others))]


def tree(rank: int, n_ranks: int) -> list[Step]:
    """All-reduce by halves: rank 0 gets the sum of all, and sends it back. One slice."""
    return _tree_reduce(rank, n_ranks) + tree_broadcast(rank, n_ranks)


def _tree_reduce(rank: int, n_ranks: int) -> list[Step]:
    steps = []
    for level in range(n_levels(n_ranks)):
        reach = 1 << level
        if rank % (2 * reach) == reach:
            steps.append(Step((SliceSend(rank - reach, one_slice(0)),)))
        elif rank % (2 * reach) == 0 and rank + reach < n_ranks:
            steps.append(Step((), (SliceReceive(rank + reach, one_slice(0), adds=True),)))
        else:
            steps.append(NOTHING)
    return steps


def tree_broadcast(rank: int, n_ranks: int) -> list[Step]:
    """Copy rank 0's value: in each step, every rank that has it sends it to one. One slice."""
    steps = []
    for level in reversed(range(n_levels(n_ranks))):
        reach = 1 << level
        if rank % (2 * reach) == 0 and rank + reach < n_ranks:
            steps.append(Step((SliceSend(rank + reach, one_slice(0)),)))
        elif rank % (2 * reach) == reach:
            steps.append(Step((), (SliceReceive(rank - reach, one_slice(0)),)))
        else:
            steps.append(NOTHING)
    return steps


def two_shot_broadcast(rank: int, n_ranks: int) -> list[Step]:
    """Rank 0 deals its slices, and all ranks exchange them. N slices."""
    if rank:
        first = Step((), (SliceReceive(0, one_slice(rank)),))
    else:
        first = Step(tuple(SliceSend(peer, one_slice(peer)) for peer in range(1, n_ranks)))
    (second,) = direct_all_gather(rank, n_ranks)
    # Rank 0 has all slices already.
    receives = second.receives if rank else ()
    sends = tuple(send for send in second.sends if send.peer)
    return [first, Step(sends, receives)]


def n_levels(n_ranks: int) -> int:
    """Return the height of a binary tree of ranks: the logarithm, rounded up."""
    return max(0, n_ranks - 1).bit_length()

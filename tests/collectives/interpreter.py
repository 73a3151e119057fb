"""Runs the steps of all ranks on values that record how they were added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dask_gpurt.collectives.steps import Step


@dataclass(frozen=True)
class Value:
    """A rank's own value, or a sum.

    Attributes
    ----------
    ranks
        One bit for each rank whose value is in the sum.
    order
        Equal for sums that were added up in the same order and grouping: they have the same bits.
    """

    ranks: int
    order: int


def own_value(rank: int) -> Value:
    return Value(1 << rank, hash((rank,)))


def total(values: list[Value]) -> Value:
    ranks = 0
    for value in values:
        assert not ranks & value.ranks, "a rank's value would be added twice"
        ranks |= value.ranks
    return Value(ranks, hash(tuple(value.order for value in values)))


def run(of_rank: Callable[[int], list[Step]], n_ranks: int, n_slices: int) -> list[list[Value]]:
    """Return each rank's slices at the end; raise if a message is sent or awaited in vain."""
    values: list[list[Value]] = [[own_value(rank)] * n_slices for rank in range(n_ranks)]
    for step in zip(*map(of_rank, range(n_ranks)), strict=True):
        messages = {
            (rank, send.peer): [values[rank][number] for number in send.slices]
            for rank, one in enumerate(step)
            for send in one.sends
        }
        assert len(messages) == sum(len(one.sends) for one in step)
        for rank, one in enumerate(step):
            added: dict[int, list[tuple[int, Value]]] = {}
            for receive in one.receives:
                sent = messages.pop((receive.peer, rank))
                for number, value in zip(receive.slices, sent, strict=True):
                    if receive.adds:
                        added.setdefault(number, []).append((receive.peer, value))
                    else:
                        assert number not in added
                        values[rank][number] = value
            for number, others in added.items():
                by_rank = dict([(rank, values[rank][number]), *others])
                values[rank][number] = total([by_rank[one] for one in sorted(by_rank)])
        assert not messages, f"nobody receives {messages}"
    return values


def assert_all_have_the_sum(values: list[list[Value]]) -> None:
    """All ranks have the same sums, added up in the same way, of all ranks once."""
    assert all(one == values[0] for one in values)
    assert {value.ranks for value in values[0]} == {(1 << len(values)) - 1}

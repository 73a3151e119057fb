"""Ranking of the values of one level for eviction, kept from one eviction to the next. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Values ranked at a time: some 10 ms of the event loop.
RANKED_AT_ONCE = 2048


class EvictionOrder(Generic[T]):
    """The values of a level, ordered for eviction.

    With many small values, ranking all of them at each eviction would cost more than the eviction
    itself. So an order is kept until a share of it has changed. Values that arrive meanwhile are
    evicted last.

    Very many values are ranked in batches. Each batch is a sample of all values. The next value to
    evict comes from the first sixteenth of a batch, so it is about in the first sixteenth of all.

    Parameters
    ----------
    rank
        Key function: the value with the highest rank is evicted first.

    Attributes
    ----------
    ranked
        Values in order; the next one to evict is last.
    """

    def __init__(self, rank: Callable[[T], Any]) -> None:
        self.ranked: list[T] = []
        self._rank = rank
        self._members: dict[T, None] = {}
        #: Batches that are not ranked yet; the next one is last.
        self._batches: list[Sequence[T]] = []
        #: Values that arrived since the batches were made.
        self._late: list[T] = []
        self._changes = 0
        self._turn = 0
        self._is_unranked = True

    def add(self, value: T) -> None:
        self._members[value] = None
        if not self._is_outdated():
            self._late.append(value)
        self._changes += 1

    def remove(self, value: T) -> None:
        """Rank a value no more; it may have been removed before."""
        if value in self._members:
            del self._members[value]
            self._changes += 1

    def changed(self) -> None:
        """Count a value whose rank changed."""
        self._changes += 1

    def refresh(self) -> None:
        """Make a new order if there is none, or if too much has changed since."""
        if self.ranked and not self._is_outdated():
            return
        # A new sample each time: the first values of a fixed one would soon be used up.
        self._turn += 1
        self._batches = _samples([*self._members], self._turn)
        self._batches.reverse()
        self._changes = 0
        self._is_unranked = False
        self.ranked, self._late = [], []
        self.rank_more()

    def _is_outdated(self) -> bool:
        return self._is_unranked or self._changes * 16 > min(len(self._members), RANKED_AT_ONCE)

    def rank_more(self) -> bool:
        """Rank the next batch if `ranked` is used up; return False if no value is left."""
        if not self.ranked:
            if not self._batches and self._late:
                self._batches, self._late = [self._late], []
            while self._batches and not self.ranked:
                self.ranked = sorted(self._batches.pop(), key=self._rank)
        return bool(self.ranked)


def _samples(values: Sequence[T], turn: int) -> list[Sequence[T]]:
    n = -(-len(values) // RANKED_AT_ONCE)
    return [values[(turn + number) % n :: n] for number in range(n)]

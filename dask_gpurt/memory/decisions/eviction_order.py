"""In what order values would leave a level, kept from one eviction to the next. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: So many are ranked at a time, which takes some 10 ms of the event loop.
RANKED_AT_ONCE = 2048


class EvictionOrder(Generic[T]):
    """Values of a level in the order in which they would leave, last first.

    Ranking everything at every eviction would cost more than the eviction where there are many
    small values. So an order is kept until a share of it has changed; what comes meanwhile leaves
    last. Where there are very many, they are ranked a batch at a time, and each batch is a sample
    of all: whoever leaves would be among the first sixteenth of a batch, and is among the first
    sixteenth of all, more or less.

    Parameters
    ----------
    rank
        Of two values, which one leaves first: the one that has more of this.
    """

    def __init__(self, rank: Callable[[T], Any]) -> None:
        self.ranked: list[T] = []
        self._rank = rank
        self._members: dict[T, None] = {}
        #: Not ranked yet, the next one last.
        self._batches: list[Sequence[T]] = []
        #: Came after the rest was put in order.
        self._late: list[T] = []
        self._changes = 0
        self._turn = 0
        self._is_new = True

    def add(self, value: T) -> None:
        self._members[value] = None
        if not self._is_outdated():
            self._late.append(value)
        self._changes += 1

    def remove(self, value: T) -> None:
        del self._members[value]
        self._changes += 1

    def changed(self) -> None:
        """One of them has another rank now."""
        self._changes += 1

    def refresh(self) -> None:
        """Find an order if there is none, or the one there was does not hold any more."""
        if self.ranked and not self._is_outdated():
            return
        # Another sample each time: the first of one would soon be used up.
        self._turn += 1
        self._batches = _samples([*self._members], self._turn)
        self._batches.reverse()
        self._changes = 0
        self._is_new = False
        self.ranked, self._late = [], []
        self.rank_more()

    def _is_outdated(self) -> bool:
        return self._is_new or self._changes * 16 > min(len(self._members), RANKED_AT_ONCE)

    def rank_more(self) -> bool:
        """Rank some more, where all that were ranked are through; False if there are none."""
        if not self.ranked:
            if not self._batches and self._late:
                self._batches, self._late = [self._late], []
            while self._batches and not self.ranked:
                self.ranked = sorted(self._batches.pop(), key=self._rank)
        return bool(self.ranked)


def _samples(values: Sequence[T], turn: int) -> list[Sequence[T]]:
    n = -(-len(values) // RANKED_AT_ONCE)
    return [values[(turn + number) % n :: n] for number in range(n)]

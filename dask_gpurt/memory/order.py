"""In what order values would leave a level, kept from one eviction to the next. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: So many are ranked at a time, which takes some 10 ms of the event loop.
RANKED_AT_ONCE = 2048


class Order(Generic[T]):
    """Values of a level in the order in which they would leave, last first.

    Ranking everything at every eviction would cost more than the eviction where there are many
    small values. So an order is kept until a share of it has changed. Where there are very many,
    they are ranked a batch at a time, and each batch is a sample of all: whoever leaves would be
    among the first sixteenth of a batch, and is among the first sixteenth of all, more or less.
    """

    def __init__(self) -> None:
        self.left: list[T] = []
        #: Not ranked yet, the next one last.
        self._batches: list[Sequence[T]] = []
        self._rank: Callable[[T], Any] = id
        self._changes = 0
        self._turn = 0
        self._is_new = True

    def changed(self) -> None:
        self._changes += 1

    def is_stale(self, n_members: int) -> bool:
        n_ranked = min(n_members, RANKED_AT_ONCE)
        return self._is_new or not self.left or self._changes * 16 > n_ranked

    def renew(self, groups: Iterable[Sequence[T]], rank: Callable[[T], Any]) -> None:
        """Begin anew with values whose order has to be found.

        Parameters
        ----------
        groups
            Those of a group leave before those of the next, whatever their ranks.
        """
        # Another sample each time: the first of one would soon be used up.
        self._turn += 1
        self._batches = [batch for group in groups for batch in _samples(group, self._turn)]
        self._batches.reverse()
        self._rank = rank
        self._changes = 0
        self._is_new = False
        self.left = []
        self.go_on()

    def go_on(self) -> bool:
        """Rank the next batch, where all that were ranked are through; False if there is none."""
        while self._batches and not self.left:
            self.left = sorted(self._batches.pop(), key=self._rank)
        return bool(self.left)


def _samples(values: Sequence[T], turn: int) -> list[Sequence[T]]:
    n = -(-len(values) // RANKED_AT_ONCE)
    return [values[(turn + number) % n :: n] for number in range(n)]

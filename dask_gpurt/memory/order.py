"""In what order values would leave a level, kept from one eviction to the next. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Order(Generic[T]):
    """Values of a level in the order in which they would leave, last first.

    Ranking everything at every eviction would cost more than the eviction where there are many
    small values. So an order is kept until a share of the level has changed.
    """

    def __init__(self) -> None:
        self.left: list[T] = []
        self._changes = 0
        self._is_new = True

    def changed(self) -> None:
        self._changes += 1

    def is_stale(self, n_members: int) -> bool:
        return self._is_new or not self.left or self._changes * 16 > n_members

    def renew(self, order: list[T]) -> None:
        self.left = order
        self._changes = 0
        self._is_new = False

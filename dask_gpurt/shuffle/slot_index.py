"""The index from slots to the shards that have rows for them, built once all shards are there.

With as many inputs as outputs there are very many pairs of a shard and a slot, and each has few
rows. So the index is made and read by NumPy, slot by slot, with no Python object for a pair.
`shuffle.shards` keeps the shards themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class WithRows(Protocol):
    """A shard, as far as the index reads it."""

    @property
    def first_slot(self) -> int: ...

    @property
    def rows_per_slot(self) -> npt.NDArray[np.uint32]: ...


class SlotIndex:
    """Row ranges in shards, by slot.

    Parameters
    ----------
    slots
        First slot, and one past the last.
    shards
        All shards, in the order in which their rows go into an output partition.
    """

    def __init__(self, slots: tuple[int, int], shards: Sequence[WithRows]) -> None:
        self._first, end = slots
        filled = [np.flatnonzero(shard.rows_per_slot) for shard in shards]
        stops = [np.cumsum(shard.rows_per_slot, dtype=np.int64) for shard in shards]
        n_filled = [len(one) for one in filled]
        slot = _joined(one + shard.first_slot for one, shard in zip(filled, shards, strict=True))
        order = np.argsort(slot, kind="stable")
        self._shard = np.repeat(np.arange(len(shards), dtype=np.int32), n_filled)[order]
        self._stop = _joined(one[n] for one, n in zip(stops, filled, strict=True))[order]
        n_rows = _joined(s.rows_per_slot[n] for s, n in zip(shards, filled, strict=True))[order]
        self._start = self._stop - n_rows
        per_slot = np.bincount(slot - self._first, minlength=end - self._first)
        self._bounds = np.concatenate([[0], np.cumsum(per_slot)])

    def rows_of(self, slot: int) -> tuple[list[int], list[int], list[int]]:
        """Return the numbers of the shards with rows for a slot; the first row, one past the last.

        Shards come in their order.
        """
        a, b = self._bounds[slot - self._first : slot - self._first + 2]
        return self._shard[a:b].tolist(), self._start[a:b].tolist(), self._stop[a:b].tolist()

    def shards_of(self, slot: int) -> list[int]:
        """Return the numbers of the shards with rows for a slot."""
        a, b = self._bounds[slot - self._first : slot - self._first + 2]
        found: list[int] = self._shard[a:b].tolist()
        return found


def _joined(arrays: Iterable[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays])

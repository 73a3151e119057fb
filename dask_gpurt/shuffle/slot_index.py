"""The index from slots to the shards that have rows for them, built once all shards are there.

With as many inputs as outputs there are very many pairs of a shard and a slot, and each has few
rows. So the index is made and read by NumPy, slot by slot, with no Python object for a pair.
`shuffle.shards` keeps the shards themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.shuffle.shard import Shard


class SlotIndex:
    """Row ranges in shards, by slot.

    Parameters
    ----------
    slots
        First slot, and one past the last.
    shards
        All shards.
    """

    def __init__(self, slots: tuple[int, int], shards: Sequence[Shard]) -> None:
        self._first, end = slots
        in_one = not are_interleaved(shards)
        entries = [shard.runs(in_one=in_one) for shard in shards]
        slot = _joined(one[0] for one in entries) - self._first
        source = _joined(one[1] for one in entries)
        n_rows = _joined(one[2] for one in entries)
        stop = _joined(np.cumsum(one[2]) for one in entries)
        shard = np.repeat(np.arange(len(shards)), [len(one[0]) for one in entries])
        # Both sorts are stable, so the order is by slot, and by source within a slot.
        order = np.argsort(source, kind="stable")
        order = order[np.argsort(slot[order], kind="stable")]
        slot, shard, stop = slot[order], shard[order], stop[order]
        start = stop - n_rows[order]
        # Rows that follow one another in a shard and in the output are one range.
        goes_on = (slot[1:] == slot[:-1]) & (shard[1:] == shard[:-1]) & (start[1:] == stop[:-1])
        ends = np.flatnonzero(~goes_on)
        firsts = np.concatenate([[0], ends + 1])[: len(slot)]
        lasts = np.append(ends, len(slot) - 1)[: len(slot)]
        self._shard, self._start, self._stop = shard[firsts], start[firsts], stop[lasts]
        per_slot = np.bincount(slot[firsts], minlength=end - self._first)
        self._bounds = np.concatenate([[0], np.cumsum(per_slot)])

    def rows_of(self, slot: int) -> tuple[list[int], list[int], list[int]]:
        """Return the row ranges of a slot: numbers of shards, first rows, one past the last rows.

        The ranges come in the order of their sources. A shard may have several ranges.
        """
        a, b = self._bounds[slot - self._first : slot - self._first + 2]
        return self._shard[a:b].tolist(), self._start[a:b].tolist(), self._stop[a:b].tolist()


def are_interleaved(shards: Iterable[Shard]) -> bool:
    """Return whether an output may have other rows between two runs of one shard."""
    spans: dict[Any, tuple[int, int]] = {}
    for shard in shards:
        batch: Any = shard.source
        first = last = shard.source
        if shard.origins is not None:
            batch = shard.origins.batch, shard.layout_key
            first, last = int(shard.origins.source.min()), int(shard.origins.source.max())
            if not shard.origins.ascends:
                return True
        known_first, known_last = spans.get(batch, (first, last))
        spans[batch] = min(first, known_first), max(last, known_last)
    return any(after[0] <= before[1] for before, after in pairwise(sorted(spans.values())))


def _joined(arrays: Iterable[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays])

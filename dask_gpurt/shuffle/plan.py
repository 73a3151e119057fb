"""The map from output partitions to workers, and the cutting of input partitions into shards.

Pure decisions over numbers. This module knows nothing of frames (`frames`), of memory
(`shuffle.shards`) or of the scheduler that assigned the owners (`plugins`).

Output partitions get *slots*: consecutive numbers in which the partitions of each worker are
adjacent, in the order in which tasks will read them. Grouping rows by slot therefore groups them by
worker too, so one sort and one gather are enough. A shard covers adjacent slots, so all of it is
read soon after its first slot. Dask reads partitions in an order of its own (mostly by name), so
adjacent partition numbers would not do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.gather import gather_into
from dask_gpurt.transport.wire import RowRuns

#: Target size of a shard. Smaller shards are freed sooner, because a shard lives until its last
#: partition was read. Larger ones cost less bookkeeping.
SHARD_TARGET_NBYTES = 1 << 20
#: A number of readers that no slot ever has: the slot is never released.
_NEVER_RELEASED = 1 << 62


@dataclass(frozen=True)
class ExchangePlan:
    """Owners of the output partitions of one run.

    Parameters
    ----------
    worker_for
        Owner of each wanted output partition. Unlisted partitions are dropped. A partition is a
        number or any other sortable value: array chunks have tuples.
    read_order
        Partitions in the order in which tasks will read them, each once for every task that reads
        it. Unlisted ones come last.
    keeps_outputs
        Whether to keep partitions that all tasks of `read_order` have read: later tasks may come.
    """

    worker_for: Mapping[Any, str]
    read_order: Sequence[Any] = ()
    keeps_outputs: bool = False

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """Owners, in the order of their slots."""
        return tuple(dict.fromkeys(self.worker_for[p] for p in self.partitions))

    @cached_property
    def partitions(self) -> tuple[Any, ...]:
        """Partition of each slot."""
        rank: dict[str, int] = {}
        for partition in sorted(self.worker_for):
            rank.setdefault(self.worker_for[partition], len(rank))
        turn = {partition: number for number, partition in enumerate(self.read_order)}
        last = len(turn)
        return tuple(
            sorted(
                self.worker_for,
                key=lambda p: (rank[self.worker_for[p]], turn.get(p, last), p),
            )
        )

    @cached_property
    def slot_of(self) -> dict[Any, int]:
        return {partition: slot for slot, partition in enumerate(self.partitions)}

    @cached_property
    def readers_of_slot(self) -> dict[int, int]:
        """Number of tasks that may read a slot, for slots with more than one reader."""
        if self.keeps_outputs:
            return dict.fromkeys(range(self.n_slots), _NEVER_RELEASED)
        readers = Counter(self.read_order)
        return {self.slot_of[p]: n for p, n in readers.items() if n > 1 and p in self.slot_of}

    @property
    def n_slots(self) -> int:
        return len(self.partitions)

    @cached_property
    def slots_of_worker(self) -> dict[str, tuple[int, int]]:
        """First slot and one past the last slot of each owner."""
        ranges: dict[str, tuple[int, int]] = {}
        for slot, partition in enumerate(self.partitions):
            worker = self.worker_for[partition]
            first, _ = ranges.get(worker, (slot, slot))
            ranges[worker] = (first, slot + 1)
        return ranges

    @cached_property
    def slot_table(self) -> npt.NDArray[np.intp]:
        """Slot of each partition number; the last entry, -1, stands for any other number."""
        table = np.full(max(self.partitions, default=-1) + 2, -1, dtype=np.intp)
        table[list(self.partitions)] = np.arange(self.n_slots)
        return table

    def slots(self, partitions: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
        """Return the slot of each row, given the output partition number of each row.

        Rows of unwanted partitions, and missing values, get -1. Stock Dask joins the partition
        column with the owners, and drops rows without a match.
        """
        values = np.asarray(partitions)
        table = self.slot_table
        last = len(table) - 1
        if values.dtype.kind not in "iub":
            values = values.astype(np.float64)
            whole = (values == np.floor(values)) & (np.abs(values) <= last)
            values = np.where(whole, values, -1.0)
        codes = values.astype(np.intp)
        # Compare before widening: Dask's numbers have the narrowest type, which compares faster.
        if len(values) and not (values.min() >= 0 and values.max() <= last):
            codes[~((values >= 0) & (values <= last))] = last
        gather_into(table, codes, codes)
        return codes


@dataclass(frozen=True, eq=False)
class RowsBySlot:
    """Rows of one layout of an input partition, or of several, ordered by slot.

    Attributes
    ----------
    before
        Running total of the rows over all slots, with one entry more than there are slots.
    row_nbytes
        Estimated bytes of one row.
    target_nbytes
        Target size of a shard.
    sources
        Numbers of the input partitions; empty if there is only one.
    n_rows
        Rows of each of them in each slot. Within a slot they come in the order of `sources`.
    """

    layout_key: bytes
    before: npt.NDArray[np.int64]
    row_nbytes: float
    target_nbytes: int = SHARD_TARGET_NBYTES
    sources: Sequence[int] = ()
    n_rows: npt.NDArray[np.int64] | None = None

    def cuts(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the first and one past the last slot of each shard for a range of slots."""
        before = self.before[first : end + 1]
        cuts = cut_shards(before, self.row_nbytes, self.target_nbytes)
        return [(first + a, first + b) for a, b in cuts]

    def origins(self, first: int, end: int) -> RowRuns | None:
        """Return the runs of a shard's rows, with slots from its first one; None for one source."""
        if self.n_rows is None:
            return None
        n_rows = self.n_rows[:, first:end].T
        slot, number = np.nonzero(n_rows)
        return slot, np.asarray(self.sources)[number], n_rows[slot, number]


def cut_shards(
    rows_before_slot: npt.ArrayLike,
    row_nbytes: float,
    target_nbytes: int = SHARD_TARGET_NBYTES,
) -> list[tuple[int, int]]:
    """Cut consecutive slots into shards of about `target_nbytes`.

    A shard exceeds the target only if it would otherwise be less than half of it. A worker that is
    short of memory may read a spilled shard again for each of its slots.

    Parameters
    ----------
    rows_before_slot
        Running total of rows, with one entry more than there are slots.
    row_nbytes
        Estimated bytes of one row.

    Returns
    -------
    list of (first slot, one past the last)
        Covers every slot that has rows; a slot is never divided. Ranges neither begin nor end with
        an empty slot.
    """
    before = np.asarray(rows_before_slot)
    filled = np.flatnonzero(np.diff(before))
    # Running totals after each slot that has rows.
    after = before[filled + 1]
    limit = max(1.0, target_nbytes / max(row_nbytes, 1.0))
    cuts: list[tuple[int, int]] = []
    position, n_before = 0, before[0]
    while position < len(filled):
        # The slot with which the shard reaches the limit, if any does.
        last = int(np.searchsorted(after, n_before + limit))
        if last == len(filled) or (
            last > position
            and after[last] - n_before > limit
            and after[last - 1] - n_before >= limit / 2
        ):
            last -= 1
        cuts.append((int(filled[position]), int(filled[last]) + 1))
        position, n_before = last + 1, after[last]
    return cuts

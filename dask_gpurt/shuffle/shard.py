"""One shard: rows of an input partition, or of several, for adjacent output partitions of a worker.

`shuffle.shards` stores shards, `shuffle.merging` makes few of many, and `shuffle.slot_index` finds
those that have rows of an output partition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.adapter import Packed
from dask_gpurt.shuffle.spill_file import Extent, SpillFile
from dask_gpurt.transport.wire import RowRuns


class Origins(NamedTuple):
    """The origins of a shard's rows, in the order of the rows: by slot.

    Attributes
    ----------
    slot, source, n_rows
        One entry for each run of rows of one slot and one source.
    batch
        Equal for all shards that were made in one merge, or of the inputs of one task.
    """

    slot: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    n_rows: npt.NDArray[np.int64]
    batch: object

    @property
    def ascends(self) -> bool:
        """Whether the sources of each slot ascend."""
        is_next_slot = self.slot[1:] != self.slot[:-1]
        return bool((is_next_slot | (self.source[1:] > self.source[:-1])).all())


@dataclass(eq=False)
class Shard:
    """Rows for consecutive output partitions of one worker.

    Attributes
    ----------
    source, attempt, number, count
        As in `wire.ShardHeader`. A merged shard has the least of its sources.
    origins
        None if all rows have one source.
    n_unreleased
        Number of output partitions that have rows here and are not released yet.
    """

    source: int
    attempt: int
    number: int
    count: int
    first_slot: int
    rows_per_slot: npt.NDArray[np.uint32]
    layout_key: bytes
    body: Any = None
    packed: Packed | None = None
    origins: Origins | None = None
    is_merged: bool = False
    on_disk: tuple[SpillFile, Extent] | None = None
    packed_nbytes: int = 0
    sections: tuple[int, int] = (0, 0)
    nbytes: int = 0
    n_rows: int = field(init=False)
    n_unreleased: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_rows = int(self.rows_per_slot.sum(dtype=np.int64))
        self.n_unreleased = int(np.count_nonzero(self.rows_per_slot))
        if self.body is not None:
            self.nbytes = self.body.nbytes
        elif self.packed is not None:
            self.nbytes = self.packed.buffer.nbytes

    @property
    def end_slot(self) -> int:
        return self.first_slot + len(self.rows_per_slot)

    def runs(self, *, in_one: bool = False) -> RowRuns:
        """Return slot, source and number of rows of each run of rows, in the order of the rows.

        Parameters
        ----------
        in_one
            Take all rows of a slot as one run, of the least source.
        """
        if self.origins is not None and not in_one:
            return self.origins.slot, self.origins.source, self.origins.n_rows
        filled = np.flatnonzero(self.rows_per_slot)
        n_rows = self.rows_per_slot[filled].astype(np.int64)
        source = self.source if self.origins is None else int(self.origins.source.min())
        return filled + self.first_slot, np.full(len(filled), source), n_rows

    @property
    def is_resident(self) -> bool:
        return self.body is not None or self.packed is not None

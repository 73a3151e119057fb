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


class Origins(NamedTuple):
    """The origins of a merged shard's rows, in the order of the rows: by slot, then by source.

    Attributes
    ----------
    slot, source, n_rows
        One entry for each pair with rows.
    batch
        The same object for all shards that were made in one merge.
    """

    slot: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    n_rows: npt.NDArray[np.int64]
    batch: object


@dataclass(eq=False)
class Shard:
    """Rows for consecutive output partitions of one worker.

    Attributes
    ----------
    source, attempt, number, count
        As in `wire.ShardHeader`. A merged shard has the least of its sources.
    origins
        None unless the shard was merged of several.
    unread
        Output partitions with rows here whose results are not safe yet.
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
    on_disk: tuple[SpillFile, Extent] | None = None
    packed_nbytes: int = 0
    sections: tuple[int, int] = (0, 0)
    nbytes: int = 0
    n_rows: int = field(init=False)
    unread: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_rows = int(self.rows_per_slot.sum(dtype=np.int64))
        self.unread = int(np.count_nonzero(self.rows_per_slot))
        if self.body is not None:
            self.nbytes = self.body.nbytes
        elif self.packed is not None:
            self.nbytes = self.packed.buffer.nbytes

    @property
    def end_slot(self) -> int:
        return self.first_slot + len(self.rows_per_slot)

    @property
    def is_resident(self) -> bool:
        return self.body is not None or self.packed is not None

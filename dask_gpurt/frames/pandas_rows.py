"""Rows of pandas frames, gathered into the bodies of shards.

The rows come from an input partition (`PandasPartition`), from several that one task hands over
(`JoinedFrames`), or from bodies that are merged (`MergedRows`). Merging turns many small shards
into few, ordered by output partition. `frames.pandas_` packs, unpacks and concatenates bodies;
`frames.columns` handles a single column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from dask_gpurt.frames.adapter import Packed, Selection, Slots, mean_nbytes
from dask_gpurt.frames.arrow_rows import ArrowRows
from dask_gpurt.frames.columns import Column, decompose_index
from dask_gpurt.frames.gather import Rows, Values, as_array, gather_columns, group_rows
from dask_gpurt.frames.joining import joined_objects
from dask_gpurt.frames.layouts import FrameLayout

if TYPE_CHECKING:
    from dask_gpurt.frames.pandas_ import PandasFrames

#: Bytes of an object in the column itself: its pointer.
_POINTER_NBYTES = np.dtype(object).itemsize


@dataclass
class PandasBody:
    """The rows of one shard. Its arrays may be views of one packed buffer."""

    layout: FrameLayout
    n_rows: int
    regions: list[npt.NDArray[Any]]
    batch: pa.RecordBatch | None = None
    objects: list[Any] = field(default_factory=list)
    held_nbytes: int = 0

    @property
    def layout_key(self) -> bytes:
        return self.layout.key

    @property
    def nbytes(self) -> int:
        return self.held_nbytes


class _PandasRows:
    """Decomposed columns, whose rows can be gathered.

    Parameters
    ----------
    arrow
        Arrow columns by number; may be empty if there are no rows.
    objects
        Object columns by number.
    """

    def __init__(
        self,
        adapter: PandasFrames,
        layout: FrameLayout,
        n_rows: int,
        arrow: Mapping[int, ArrowRows],
        objects: Mapping[int, Any],
    ) -> None:
        self._adapter = adapter
        self.layout = layout
        self._n_rows = n_rows
        self._arrow = arrow
        self._objects = objects
        #: Bytes of all objects in a row.
        self._objects_nbytes = sum(
            _POINTER_NBYTES + mean_nbytes(values, adapter.sizeof) for values in objects.values()
        )

    @property
    def layout_key(self) -> bytes:
        return self.layout.key

    def _values(self, group: int, position: int) -> Values:
        """Return one fixed-width part of a column, by its place in the layout."""
        raise NotImplementedError

    def _joined(self, group: int, parts: list[npt.NDArray[Any]]) -> Values:
        # With the type of the layout: NumPy's own choice is the order of bytes of this machine.
        return np.concatenate(parts, dtype=self.layout.groups[group].dtype)

    @property
    def row_nbytes(self) -> float:
        fixed = sum(len(g.members) * g.dtype.itemsize for g in self.layout.groups)
        arrow = sum(column.nbytes for column in self._arrow.values())
        return fixed + arrow / max(self._n_rows, 1) + self._objects_nbytes

    def gather(self, selections: Sequence[Selection]) -> list[PandasBody | Packed]:
        batches = self._gather_arrow(selections)
        shards: list[PandasBody | Packed] = []
        regions = []
        for selection, batch in zip(selections, batches, strict=True):
            n_rows = len(selection.rows)
            objects = [values.take(selection.rows) for values in self._objects.values()]
            if selection.leaves:
                packed = self._adapter.reserve(self.layout, n_rows, batch, objects, selection.empty)
                regions.append(self.layout.regions(packed.buffer, n_rows))
                shards.append(packed)
            else:
                buffer = selection.empty(self.layout.fixed_nbytes(n_rows))
                held = buffer.nbytes + (batch.nbytes if batch is not None else 0)
                held += int(self._objects_nbytes * n_rows)
                regions.append(self.layout.regions(buffer, n_rows))
                shards.append(PandasBody(self.layout, n_rows, regions[-1], batch, objects, held))
        gather_columns(
            (
                (self._values(number, position), [views[number][position] for views in regions])
                for number, group in enumerate(self.layout.groups)
                for position in range(len(group.members))
            ),
            [selection.rows for selection in selections],
            self._n_rows,
            ascending=all(selection.ascending for selection in selections),
        )
        return shards

    def _gather_arrow(self, selections: Sequence[Selection]) -> list[pa.RecordBatch | None]:
        if not self._arrow:
            return [None] * len(selections)
        names = list(map(str, self._arrow))
        taken = [[column.take(s.rows) for s in selections] for column in self._arrow.values()]
        return [
            pa.RecordBatch.from_arrays(list(arrays), names=names)
            for arrays in zip(*taken, strict=True)
        ]


class PandasPartition(_PandasRows):
    """One input partition with decomposed columns."""

    def __init__(self, frame: pd.DataFrame, adapter: PandasFrames) -> None:
        self._numbers, taken = adapter.columns_of(frame)
        index = frame.index
        levels = (
            [index.get_level_values(level) for level in range(index.nlevels)]
            if isinstance(index, pd.MultiIndex)
            else [index]
        )
        self._columns: list[Column] = taken + [
            decompose_index(level, adapter.pickling, adapter.name_of(len(taken) + number))
            for number, level in enumerate(levels)
        ]
        layout = adapter.interned(
            FrameLayout(
                tuple(column.layout for column in taken),
                tuple(column.layout for column in self._columns[len(taken) :]),
                tuple(index.names),
                adapter.pickling,
            )
        )
        objects = {number: self._columns[number].objects for number in layout.objects}
        for number, values in objects.items():
            adapter.pickling.try_some(values, adapter.name_of(number))
        arrow = {
            number: ArrowRows(self._columns[number].arrow)
            for number in (layout.arrow if len(frame) else ())
        }
        super().__init__(adapter, layout, len(frame), arrow, objects)

    def __len__(self) -> int:
        return self._n_rows

    def slots(self, slots: Slots) -> Rows:
        """Return the slot of each row; -1 if no worker wants the row."""
        return slots.slots(self._numbers)

    def group(self, slots: Slots) -> tuple[Rows, npt.ArrayLike]:
        return group_rows(self.slots(slots), slots.n_slots)

    def part(self, column: int, part: int) -> Values:
        """Return one fixed-width part of a column."""
        return self._columns[column].parts[part]

    def chunks(self, column: int) -> list[pa.Array]:
        """Return the rows of an Arrow column."""
        found = self._columns[column].arrow
        return list(found.chunks) if found is not None and self._n_rows else []

    def objects(self, column: int) -> Any:
        """Return an object column."""
        return self._objects[column]

    def _values(self, group: int, position: int) -> Values:
        return self.part(*self.layout.groups[group].members[position])


class JoinedFrames(_PandasRows):
    """Several input partitions of one layout, numbered one after the other."""

    def __init__(self, partitions: Sequence[PandasPartition], adapter: PandasFrames) -> None:
        self._partitions = partitions
        layout = partitions[0].layout
        n_rows = sum(map(len, partitions))
        arrow = {
            number: ArrowRows(pa.chunked_array([c for p in partitions for c in p.chunks(number)]))
            for number in (layout.arrow if n_rows else ())
        }
        objects = {
            number: joined_objects([one.objects(number) for one in partitions])
            for number in layout.objects
        }
        super().__init__(adapter, layout, n_rows, arrow, objects)

    def group_sources(self, slots: Slots) -> tuple[Rows, npt.ArrayLike, npt.NDArray[np.int64]]:
        slots_of = [one.slots(slots) for one in self._partitions]
        n_rows = [np.bincount(one + 1, minlength=slots.n_slots + 1)[1:] for one in slots_of]
        rows, offsets = group_rows(np.concatenate(slots_of), slots.n_slots)
        return rows, offsets, np.stack(n_rows)

    def _values(self, group: int, position: int) -> Values:
        # One part at a time: it is still in the processor's cache when its rows are gathered.
        member = self.layout.groups[group].members[position]
        return self._joined(
            group, [as_array(one.part(*member), len(one)) for one in self._partitions]
        )


class MergedRows(_PandasRows):
    """The rows of several bodies of one layout, numbered one body after the other."""

    def __init__(self, bodies: Sequence[PandasBody], adapter: PandasFrames) -> None:
        self._bodies = bodies
        layout = bodies[0].layout
        batches = [body.batch for body in bodies if body.batch is not None]
        arrow = {
            number: ArrowRows(pa.chunked_array([batch.column(j) for batch in batches]))
            for j, number in enumerate(layout.arrow if batches else ())
        }
        objects = {
            number: joined_objects([body.objects[j] for body in bodies])
            for j, number in enumerate(layout.objects)
        }
        super().__init__(adapter, layout, sum(body.n_rows for body in bodies), arrow, objects)

    def _values(self, group: int, position: int) -> Values:
        # One part at a time, so that little memory is needed in addition to the merged bodies.
        return self._joined(group, [body.regions[group][position] for body in self._bodies])

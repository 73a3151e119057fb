"""The adapter for pandas DataFrames: partition, pack, unpack and concatenate.

Each row is written three times. First it is gathered, column by column, into memory ordered by
output partition. Then it is moved, if it leaves the process. Last it is concatenated into its
output. Columns of one type always share a two-dimensional array. So pandas gets a consolidated
result, and a thousand columns cost little more than one.

`frames.pandas_rows` gathers rows; `frames.columns` handles a single column.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from dask_gpurt.frames.adapter import (
    OBJECT_NBYTES,
    ArrivalAllocator,
    Empty,
    Packed,
    Piece,
    Section,
    Selection,
    Sizeof,
    fresh,
)
from dask_gpurt.frames.columns import (
    Categories,
    Column,
    Part,
    compose,
    decompose,
    np_or_extension,
)
from dask_gpurt.frames.joining import (
    frame_of_blocks,
    index_of,
    join_arrow,
    join_categorical,
    join_objects,
    runs_of_one_shape,
    with_common_categories,
    with_common_index,
)
from dask_gpurt.frames.layouts import FrameLayout
from dask_gpurt.frames.pandas_rows import JoinedFrames, MergedRows, PandasBody, PandasPartition
from dask_gpurt.frames.pickling import Pickling
from dask_gpurt.frames.reconciling import (
    casts_between,
    with_casts,
    with_missing_like_meta,
)
from dask_gpurt.frames.sections import arrow_sections, read_batch


def _write_stream(sink: Any, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


class PandasFrames:
    """The adapter for the pandas DataFrames of one shuffle.

    Parameters
    ----------
    meta
        Empty frame with the planned columns and types of the shuffle.
    column
        Label of the column with the output partition of each row.
    drop_column
        Leave that column out of the output.
    sizeof
        Measures objects. Only the sizes of shards depend on it.
    pickling
        Pickles objects.
    """

    allocate_device: ArrivalAllocator | None = None
    shard_nbytes: int | None = None

    def __init__(
        self,
        meta: pd.DataFrame,
        column: Any,
        drop_column: bool,
        sizeof: Sizeof = sys.getsizeof,
        pickling: Pickling | None = None,
    ) -> None:
        self.sizeof = sizeof
        self.pickling = pickling or Pickling()
        self._categories = Categories(self.pickling)
        self._meta = meta
        #: Looked up once: pandas makes a series of them each time.
        self._dtypes = list(meta.dtypes)
        self._labels = meta.columns.tolist()
        self._drop_column = drop_column
        #: Position of the column. With several column levels, a label is only part of a name.
        self._position = _position_of(meta.columns, column)
        self._result_meta = _without(meta, self._position) if drop_column else meta
        self._result_dtypes = list(self._result_meta.dtypes)
        self._names = [str(name) for name in self._result_meta.columns]
        if len(set(self._names)) < len(self._names):
            self._names = [f"{name} (column {n})" for n, name in enumerate(self._names)]
        self._layouts: dict[bytes, FrameLayout] = {}
        self._casts: dict[tuple[Any, ...], dict[int, Any]] = {}

    def open(self, frame: Any) -> PandasPartition:
        if not isinstance(frame, pd.DataFrame):
            raise TypeError(f"Expected data={frame!r} to be a DataFrame, got {type(frame)}.")
        # Lists first: Arrow compares without the interpreter lock, and may wait long for it after.
        is_alike = frame.columns.tolist() == self._labels
        if not is_alike and not frame.columns.equals(self._meta.columns):
            if set(frame.columns) != set(self._meta.columns) or not frame.columns.is_unique:
                raise ValueError(
                    f"Expected self.meta.columns={self._meta.columns!r} to match "
                    f"data.columns={frame.columns!r}."
                )
            frame = frame[list(self._meta.columns)]
        return PandasPartition(frame, self)

    def join(self, partitions: Sequence[PandasPartition]) -> JoinedFrames:
        return JoinedFrames(partitions, self)

    def columns_of(self, frame: pd.DataFrame) -> tuple[npt.NDArray[Any], list[Column]]:
        """Return the output partition of each row, and the columns that travel."""
        numbers: Any = None
        taken: list[Column] = []
        for position, values in enumerate(_column_arrays(frame)):
            if position == self._position:
                numbers = _partition_numbers(values)
                if self._drop_column:
                    continue
            name = self.name_of(len(taken))
            taken.append(decompose(values, self._dtypes[position], self.pickling, name))
        return numbers, taken

    def interned(self, layout: FrameLayout) -> FrameLayout:
        """Return one object for equal layouts, so that derived data is computed once."""
        return self._layouts.setdefault(layout.key, layout)

    def _layout_of(self, key: bytes) -> FrameLayout:
        layout = self._layouts.get(key)
        if layout is None:
            layout = FrameLayout.from_key(key, self.pickling)
            if len(layout.columns) != len(self._names):
                raise ValueError(
                    f"a shard of {len(layout.columns)} columns in a shuffle of {len(self._names)}"
                )
            layout = self.interned(layout)
        return layout

    def name_of(self, number: int) -> str:
        """Return the name of a column or index level in errors. Levels follow the columns."""
        if number < len(self._names):
            return f"column {self._names[number]!r}"
        return f"index level {number - len(self._names)}"

    def _objects_of(self, layout: FrameLayout) -> str:
        return ", ".join(self.name_of(number) for number in layout.objects)

    def reserve(
        self,
        layout: FrameLayout,
        n_rows: int,
        batch: pa.RecordBatch | None,
        objects: list[Any],
        empty: Empty,
    ) -> Packed:
        """Allocate the buffer of a shard and write its Arrow and pickle sections."""
        fixed_nbytes = layout.fixed_nbytes(n_rows)
        arrow_nbytes = 0
        if batch is not None:
            measure = pa.MockOutputStream()
            _write_stream(measure, batch)
            arrow_nbytes = measure.size()
        pickled = b""
        if objects:
            pickled = self.pickling.dump_columns(
                objects, lambda position: self.name_of(layout.objects[position])
            )
        buffer = empty(fixed_nbytes + arrow_nbytes + len(pickled))
        if batch is not None:
            section = buffer[fixed_nbytes : fixed_nbytes + arrow_nbytes]
            _write_stream(pa.FixedSizeBufferWriter(pa.py_buffer(section)), batch)
        if pickled:
            buffer[fixed_nbytes + arrow_nbytes :] = np.frombuffer(pickled, dtype=np.uint8)
        return Packed(buffer, n_rows, arrow_nbytes, len(pickled))

    def merge(
        self, bodies: Sequence[PandasBody], selections: Sequence[Selection]
    ) -> list[PandasBody]:
        merged = MergedRows(bodies, self).gather(selections)
        return [body for body in merged if isinstance(body, PandasBody)]

    def pack(self, body: PandasBody) -> Packed:
        layout = body.layout
        packed = self.reserve(layout, body.n_rows, body.batch, body.objects, fresh)
        targets = layout.regions(packed.buffer, body.n_rows)
        for region, target in zip(body.regions, targets, strict=True):
            target[:] = region
        return packed

    def unpack(self, layout_key: bytes, packed: Packed) -> PandasBody:
        layout = self._layout_of(layout_key)
        buffer, n_rows = packed.buffer, packed.n_rows
        fixed_nbytes = layout.fixed_nbytes(n_rows)
        if fixed_nbytes + packed.arrow_nbytes + packed.pickle_nbytes != buffer.nbytes:
            raise ValueError(
                f"a shard of {n_rows} rows does not fit its buffer of {buffer.nbytes} bytes"
            )
        arrow_end = fixed_nbytes + packed.arrow_nbytes
        batch = None
        if packed.arrow_nbytes:
            batch = read_batch(buffer[fixed_nbytes:arrow_end])
        objects = []
        if packed.pickle_nbytes:
            data = buffer[arrow_end:].data
            objects = self.pickling.load_columns(data, lambda: self._objects_of(layout))
        n_arrow = batch.num_columns if batch is not None else 0
        wanted = (len(layout.arrow), len(layout.objects)) if n_rows else (n_arrow, len(objects))
        if (n_arrow, len(objects)) != wanted or (batch is not None and batch.num_rows != n_rows):
            raise ValueError("the sections of a shard do not match its layout")
        regions = layout.regions(buffer, n_rows)
        # The buffer stays in memory, and so does its pickle in addition to the objects.
        held = buffer.nbytes + max(packed.pickle_nbytes, OBJECT_NBYTES * n_rows * len(objects))
        return PandasBody(layout, n_rows, regions, batch, objects, held)

    def sections(self, layout_key: bytes, packed: Packed) -> list[Section]:
        layout = self._layout_of(layout_key)
        sections = layout.sections(
            packed.n_rows, packed.arrow_nbytes, packed.pickle_nbytes, self._names
        )
        if packed.arrow_nbytes:
            offset = layout.fixed_nbytes(packed.n_rows)
            (number,) = (n for n, section in enumerate(sections) if section[1] == offset)
            columns = [layout.name(n, self._names) for n in layout.arrow]
            sections[number : number + 1] = arrow_sections(
                packed.buffer, offset, packed.arrow_nbytes, columns
            )
        return sections

    def concatenate(self, pieces: Sequence[Piece], empty: Empty = fresh) -> pd.DataFrame:
        pieces = [piece for piece in pieces if piece.stop > piece.start]
        if not pieces:
            return self._result_meta.copy()
        frames = [self._concatenate_alike(run, empty) for run in runs_of_one_shape(pieces)]
        if len(frames) == 1:
            return frames[0]
        frames = with_missing_like_meta(frames, self._result_meta.dtypes)
        frames = with_common_index(with_common_categories(frames))
        return self._reconciled(pd.concat(frames), None)

    def _concatenate_alike(self, pieces: list[Piece], empty: Empty) -> pd.DataFrame:
        """Concatenate pieces that differ only in their categories to an output partition."""
        layout: FrameLayout = pieces[0].body.layout
        parts, blocks = _join_groups(layout, pieces, empty)
        arrow = {
            number: join_arrow(
                layout.name(number, self._names), [p.body.batch.column(j) for p in pieces], pieces
            )
            for j, number in enumerate(layout.arrow)
        }
        objects = {
            number: join_objects([p.body.objects[j] for p in pieces], pieces)
            for j, number in enumerate(layout.objects)
        }

        def column(number: int) -> Any:
            one = layout.all[number]
            mine = [parts[number, part] for part in range(len(one.parts))]
            if one.kind == "categorical":
                expected = None
                if number < len(layout.columns):
                    expected = self._result_dtypes[number]
                return join_categorical(number, mine[0], pieces, expected, self._categories)
            return compose(one, mine, arrow.get(number), objects.get(number))

        for number, one in enumerate(layout.columns):
            if one.kind != "plain":
                values = column(number)
                if isinstance(values, np.ndarray) or isinstance(values.dtype, pd.DatetimeTZDtype):
                    # pandas stores only these two kinds in two-dimensional blocks.
                    values = values.reshape(1, -1)
                blocks.append((values, np.array([number], dtype=np.intp)))
        n_columns = len(layout.columns)
        index = index_of(
            [column(n_columns + level) for level in range(len(layout.index))], layout.index_names
        )
        # A view: a program that names the columns of one output must not name those of all.
        frame = frame_of_blocks(blocks, index, self._result_meta.columns.view())
        return self._reconciled(frame, layout.shape)

    def _reconciled(self, frame: pd.DataFrame, shape: tuple[Any, ...] | None) -> pd.DataFrame:
        """Cast a frame to the types of the meta. Frames of one shape need the same casts."""
        casts = self._casts.get(shape) if shape is not None else None
        if casts is None:
            casts = casts_between(frame.dtypes, self._result_meta.dtypes)
            if shape is not None:
                self._casts[shape] = casts
        return with_casts(frame, casts) if casts else frame


def _join_groups(
    layout: FrameLayout, pieces: list[Piece], empty: Empty
) -> tuple[dict[tuple[int, int], Part], list[tuple[Any, npt.NDArray[np.intp]]]]:
    """Join the fixed-width parts of pieces of one layout.

    Returns
    -------
    parts, blocks
        The parts of columns that need composing, by column and part. And for each group, the block
        of its plain columns with their positions.
    """
    parts: dict[tuple[int, int], Part] = {}
    blocks: list[tuple[Any, npt.NDArray[np.intp]]] = []
    n_rows = sum([stop - start for _, start, stop in pieces])
    for number, group in enumerate(layout.groups):
        views = [body.regions[number][:, start:stop] for body, start, stop in pieces]
        out = empty(len(group.members) * n_rows * group.dtype.itemsize)
        joined = out.view(group.dtype).reshape(len(group.members), n_rows)
        np.concatenate(views, axis=1, out=joined)
        if group.n_plain:
            placement = np.array([m[0] for m in group.members[: group.n_plain]], dtype=np.intp)
            blocks.append((joined[: group.n_plain], placement))
        for position in range(group.n_plain, len(group.members)):
            parts[group.members[position]] = joined[position]
    return parts, blocks


def _column_arrays(frame: pd.DataFrame) -> Iterator[Any]:
    walk = getattr(frame, "_iter_column_arrays", None)
    if walk is not None:
        yield from walk()
    else:
        for position in range(frame.shape[1]):
            yield np_or_extension(frame.iloc[:, position])


def _position_of(columns: pd.Index, label: Any) -> int:
    found = np.arange(len(columns))[columns.get_loc(label)]
    if found.size != 1:
        raise ValueError(f"{found.size} columns have the name {label!r}")
    return int(found.item())


def _without(meta: pd.DataFrame, position: int) -> pd.DataFrame:
    meta = meta.iloc[:, [n for n in range(meta.shape[1]) if n != position]]
    if isinstance(meta.columns, pd.MultiIndex):
        # Removes the name of the column from its level.
        meta.columns = meta.columns.remove_unused_levels()
    return meta


def _partition_numbers(values: Any) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    return np.asarray(values.to_numpy(dtype=np.float64, na_value=np.nan))

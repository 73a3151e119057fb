"""pandas DataFrames: partition, pack, unpack and concatenate.

Each row is written three times on its way: gathered column by column into memory ordered by
output partition, moved (if it leaves the process), and concatenated into its output. Columns of
one type share one two-dimensional array all along, so the result is as consolidated as pandas
likes it and a thousand columns cost little more than one.

What a single column is made of is `frames.columns`' business.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from dask_gpurt.frames.columns import (
    Column,
    Layout,
    Part,
    categories_of,
    compose,
    compose_categorical,
    decompose,
    decompose_index,
    np_or_extension,
)
from dask_gpurt.frames.gather import Rows, gather_into
from dask_gpurt.frames.port import Empty, Packed, Piece, Selection, fresh

try:
    from pandas.api.internals import create_dataframe_from_blocks
except ImportError:  # pandas before 3
    create_dataframe_from_blocks = None  # type: ignore[assignment]

_ALIGNMENT = 8
#: Assumed size of a Python object. Only shard sizes depend on it, never correctness.
_OBJECT_NBYTES = 64

@dataclass(frozen=True)
class Group:
    """Parts of one NumPy type, which travel as the rows of one two-dimensional array.

    `members` are (column, part) pairs; columns count on into the index levels. The first
    `n_plain` of them are whole columns and become one block of the result.
    """

    dtype: np.dtype[Any]
    members: tuple[tuple[int, int], ...]
    n_plain: int


@dataclass(frozen=True)
class FrameLayout:
    """How every column and index level of a frame is carried."""

    columns: tuple[Layout, ...]
    index: tuple[Layout, ...]
    index_names: tuple[Any, ...]

    @cached_property
    def key(self) -> bytes:
        names: list[Any] = []
        for name in self.index_names:
            plain = name is None or type(name) in (str, int)
            names.append([plain, name if plain else pickle.dumps(name, protocol=5)])
        return msgpack.packb(  # type: ignore[no-any-return]
            [[c.to_plain() for c in self.columns], [i.to_plain() for i in self.index], names]
        )

    @staticmethod
    def from_key(key: bytes) -> FrameLayout:
        try:
            columns, index, names = msgpack.unpackb(key)
            return FrameLayout(
                tuple(Layout.from_plain(column) for column in columns),
                tuple(Layout.from_plain(level) for level in index),
                tuple(name if plain else pickle.loads(name) for plain, name in names),
            )
        except (TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
            raise ValueError(f"not the layout of a pandas frame: {error}") from error

    @cached_property
    def all(self) -> tuple[Layout, ...]:
        return self.columns + self.index

    @cached_property
    def shape(self) -> tuple[Any, ...]:
        """Everything but the categories: frames of one shape are concatenated directly."""

        def without_categories(layout: Layout) -> Any:
            detail = layout.detail[:1] if layout.kind == "categorical" else layout.detail
            children = tuple(without_categories(child) for child in layout.children)
            return (layout.kind, layout.parts, detail, children)

        return (tuple(without_categories(layout) for layout in self.all), self.index_names)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        plain: dict[str, list[tuple[int, int]]] = {}
        other: dict[str, list[tuple[int, int]]] = {}
        n_columns = len(self.columns)
        for number, layout in enumerate(self.all):
            is_column = layout.kind == "plain" and number < n_columns
            for part, dtype in enumerate(layout.parts):
                (plain if is_column else other).setdefault(dtype, []).append((number, part))
        dtypes = sorted(plain.keys() | other.keys(), key=lambda d: (-np.dtype(d).itemsize, d))
        return tuple(
            Group(
                np.dtype(dtype),
                tuple(plain.get(dtype, []) + other.get(dtype, [])),
                len(plain.get(dtype, [])),
            )
            for dtype in dtypes
        )

    @cached_property
    def arrow(self) -> tuple[int, ...]:
        return tuple(n for n, layout in enumerate(self.all) if layout.arrow)

    @cached_property
    def objects(self) -> tuple[int, ...]:
        return tuple(n for n, layout in enumerate(self.all) if layout.objects)

    def fixed_nbytes(self, n_rows: int) -> int:
        return sum(
            _aligned(len(group.members) * n_rows * group.dtype.itemsize) for group in self.groups
        )

    def regions(self, buffer: npt.NDArray[np.uint8], n_rows: int) -> list[npt.NDArray[Any]]:
        """Two-dimensional views of each group, laid out one after the other in `buffer`."""
        views = []
        first = 0
        for group in self.groups:
            nbytes = len(group.members) * n_rows * group.dtype.itemsize
            view = buffer[first : first + nbytes].view(group.dtype)
            views.append(view.reshape(len(group.members), n_rows))
            first += _aligned(nbytes)
        return views


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass
class PandasBody:
    """Rows of one shard. Arrays may be views of a message or of the input partition's Arrow data."""

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


class PandasPartition:
    """One input partition, its columns taken apart."""

    def __init__(self, frame: pd.DataFrame, adapter: PandasFrames):
        self._numbers, taken = adapter.columns_of(frame)
        index = frame.index
        levels = (
            [index.get_level_values(level) for level in range(index.nlevels)]
            if isinstance(index, pd.MultiIndex)
            else [index]
        )
        self._columns: list[Column] = taken + [decompose_index(level) for level in levels]
        self.layout = adapter.interned(
            FrameLayout(
                tuple(column.layout for column in taken),
                tuple(column.layout for column in self._columns[len(taken) :]),
                tuple(index.names),
            )
        )
        self._n_rows = len(frame)
        self._table = self._arrow_table()

    @property
    def layout_key(self) -> bytes:
        return self.layout.key

    def partition_numbers(self) -> npt.NDArray[Any]:
        return self._numbers

    @property
    def row_nbytes(self) -> float:
        fixed = sum(len(g.members) * g.dtype.itemsize for g in self.layout.groups)
        arrow = self._table.nbytes / self._n_rows if self._table is not None else 0.0
        return fixed + arrow + _OBJECT_NBYTES * len(self.layout.objects)

    def _arrow_table(self) -> pa.Table | None:
        if not self.layout.arrow or not self._n_rows:
            return None
        arrays = [self._columns[number].arrow for number in self.layout.arrow]
        table = pa.Table.from_arrays(arrays, names=[str(n) for n in self.layout.arrow])
        if any(column.num_chunks > 1 for column in table.columns):
            # Gathering from one chunk is several times faster than from many.
            table = table.combine_chunks()
        return table

    def gather(self, selections: Sequence[Selection]) -> list[PandasBody | Packed]:
        batches = self._gather_arrow(selections)
        shards: list[PandasBody | Packed] = []
        regions = []
        for selection, batch in zip(selections, batches, strict=True):
            n_rows = len(selection.rows)
            objects = [self._columns[n].objects.take(selection.rows) for n in self.layout.objects]
            if selection.leaves:
                packed = _reserve(self.layout, n_rows, batch, objects, selection.empty)
                regions.append(self.layout.regions(packed.buffer, n_rows))
                shards.append(packed)
            else:
                buffer = selection.empty(self.layout.fixed_nbytes(n_rows))
                held = buffer.nbytes + (batch.nbytes if batch is not None else 0)
                held += _OBJECT_NBYTES * n_rows * len(objects)
                regions.append(self.layout.regions(buffer, n_rows))
                shards.append(
                    PandasBody(self.layout, n_rows, regions[-1], batch, objects, held)
                )
        for number, group in enumerate(self.layout.groups):
            for position, (column, part) in enumerate(group.members):
                values = self._columns[column].parts[part]
                for selection, views in zip(selections, regions, strict=True):
                    gather_into(values, selection.rows, views[number][position])
        return shards

    def _gather_arrow(self, selections: Sequence[Selection]) -> list[pa.RecordBatch | None]:
        table = self._table
        if table is None:
            return [None] * len(selections)
        rows = [pa.array(selection.rows) for selection in selections]
        taken = [[_one_array(column.take(r)) for r in rows] for column in table.columns]
        return [
            pa.RecordBatch.from_arrays([column[i] for column in taken], names=table.column_names)
            for i in range(len(selections))
        ]


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def _write_stream(sink: Any, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _reserve(
    layout: FrameLayout, n_rows: int, batch: pa.RecordBatch | None, objects: list[Any], empty: Empty
) -> Packed:
    """Buffer for a whole shard, its Arrow and pickle sections already written."""
    fixed_nbytes = layout.fixed_nbytes(n_rows)
    arrow_nbytes = 0
    if batch is not None:
        measure = pa.MockOutputStream()
        _write_stream(measure, batch)
        arrow_nbytes = measure.size()
    pickled = pickle.dumps(objects, protocol=5) if objects else b""
    buffer = empty(fixed_nbytes + arrow_nbytes + len(pickled))
    if batch is not None:
        section = buffer[fixed_nbytes : fixed_nbytes + arrow_nbytes]
        _write_stream(pa.FixedSizeBufferWriter(pa.py_buffer(section)), batch)
    if pickled:
        buffer[fixed_nbytes + arrow_nbytes :] = np.frombuffer(pickled, dtype=np.uint8)
    return Packed(buffer, n_rows, arrow_nbytes, len(pickled))


class PandasFrames:
    """Adapter for the pandas DataFrames of one shuffle.

    Parameters
    ----------
    meta
        Empty frame with the columns and types that the shuffle was planned for.
    column
        Label of the column that holds each row's output partition.
    drop_column
        Whether that column is left out of the output.
    """

    def __init__(self, meta: pd.DataFrame, column: Any, drop_column: bool) -> None:
        self._meta = meta
        self._column = column
        self._drop_column = drop_column
        self._result_meta = meta.drop(columns=column) if drop_column else meta
        self._layouts: dict[bytes, FrameLayout] = {}
        self._casts: dict[tuple[Any, ...], dict[int, Any]] = {}

    def open(self, frame: Any) -> PandasPartition:
        if not isinstance(frame, pd.DataFrame):
            raise TypeError(f"Expected data={frame!r} to be a DataFrame, got {type(frame)}.")
        if not frame.columns.equals(self._meta.columns):
            if set(frame.columns) != set(self._meta.columns) or not frame.columns.is_unique:
                raise ValueError(
                    f"Expected self.meta.columns={self._meta.columns!r} to match "
                    f"data.columns={frame.columns!r}."
                )
            frame = frame[list(self._meta.columns)]
        return PandasPartition(frame, self)

    def columns_of(self, frame: pd.DataFrame) -> tuple[npt.NDArray[Any], list[Column]]:
        """Output partition of each row, and the columns that travel."""
        partition_column = self._meta.columns.get_loc(self._column)
        numbers: Any = None
        taken = []
        for position, values in enumerate(_column_arrays(frame)):
            if position == partition_column:
                numbers = _partition_numbers(values)
                if self._drop_column:
                    continue
            taken.append(decompose(values, self._meta.dtypes.iloc[position]))
        return numbers, taken

    def interned(self, layout: FrameLayout) -> FrameLayout:
        """One object for equal layouts, so that what is derived from them is derived once."""
        return self._layouts.setdefault(layout.key, layout)

    def pack(self, body: PandasBody) -> Packed:
        layout = body.layout
        packed = _reserve(layout, body.n_rows, body.batch, body.objects, fresh)
        targets = layout.regions(packed.buffer, body.n_rows)
        for region, target in zip(body.regions, targets, strict=True):
            target[:] = region
        return packed

    def unpack(self, layout_key: bytes, packed: Packed) -> PandasBody:
        layout = self._layouts.get(layout_key)
        if layout is None:
            layout = self.interned(FrameLayout.from_key(layout_key))
        buffer, n_rows = packed.buffer, packed.n_rows
        fixed_nbytes = layout.fixed_nbytes(n_rows)
        if fixed_nbytes + packed.arrow_nbytes + packed.pickle_nbytes != buffer.nbytes:
            raise ValueError(
                f"a shard of {n_rows} rows does not fit its buffer of {buffer.nbytes} bytes"
            )
        arrow_end = fixed_nbytes + packed.arrow_nbytes
        batch = None
        if packed.arrow_nbytes:
            try:
                with pa.ipc.open_stream(pa.py_buffer(buffer[fixed_nbytes:arrow_end])) as reader:
                    batch = reader.read_next_batch()
            except (pa.ArrowException, OSError, StopIteration) as error:
                raise ValueError(f"damaged Arrow section in a shard: {error}") from error
        objects = pickle.loads(buffer[arrow_end:]) if packed.pickle_nbytes else []
        n_arrow = batch.num_columns if batch is not None else 0
        wanted = (len(layout.arrow), len(layout.objects)) if n_rows else (n_arrow, len(objects))
        if (n_arrow, len(objects)) != wanted or (batch is not None and batch.num_rows != n_rows):
            raise ValueError("the sections of a shard do not match its layout")
        regions = layout.regions(buffer, n_rows)
        held = buffer.nbytes + _OBJECT_NBYTES * n_rows * len(objects)
        return PandasBody(layout, n_rows, regions, batch, objects, held)

    def concatenate(self, pieces: Sequence[Piece], empty: Empty = fresh) -> pd.DataFrame:
        pieces = [piece for piece in pieces if piece.stop > piece.start]
        if not pieces:
            return self._result_meta.copy()
        frames = [self._concatenate_alike(run, empty) for run in _runs_of_one_shape(pieces)]
        if len(frames) == 1:
            return frames[0]
        return self._reconciled(pd.concat(_with_common_categories(frames)), None)

    def _concatenate_alike(self, pieces: list[Piece], empty: Empty) -> pd.DataFrame:
        """One output partition out of pieces that only differ in their categories."""
        layout: FrameLayout = pieces[0].body.layout
        parts: dict[tuple[int, int], Part] = {}
        blocks: list[tuple[Any, npt.NDArray[np.intp]]] = []
        for number, group in enumerate(layout.groups):
            views = [piece.body.regions[number][:, piece.start : piece.stop] for piece in pieces]
            n_rows = sum(view.shape[1] for view in views)
            out = empty(len(group.members) * n_rows * group.dtype.itemsize)
            joined = out.view(group.dtype).reshape(len(group.members), n_rows)
            np.concatenate(views, axis=1, out=joined)
            if group.n_plain:
                placement = np.array([m[0] for m in group.members[: group.n_plain]], dtype=np.intp)
                blocks.append((joined[: group.n_plain], placement))
            for position in range(group.n_plain, len(group.members)):
                parts[group.members[position]] = joined[position]
        arrow = {
            number: _join_arrow([p.body.batch.column(j) for p in pieces], pieces)
            for j, number in enumerate(layout.arrow)
        }
        objects = {
            number: _join_objects([p.body.objects[j] for p in pieces], pieces)
            for j, number in enumerate(layout.objects)
        }

        def column(number: int) -> Any:
            one = layout.all[number]
            mine = [parts[number, part] for part in range(len(one.parts))]
            if one.kind == "categorical":
                expected = None
                if number < len(layout.columns):
                    expected = self._result_meta.dtypes.iloc[number]
                return _join_categorical(number, mine[0], pieces, expected)
            return compose(one, mine, arrow.get(number), objects.get(number))

        for number, one in enumerate(layout.columns):
            if one.kind != "plain":
                values = column(number)
                if isinstance(values, np.ndarray) or isinstance(values.dtype, pd.DatetimeTZDtype):
                    # pandas keeps these two, and only these, in two-dimensional blocks.
                    values = values.reshape(1, -1)
                blocks.append((values, np.array([number], dtype=np.intp)))
        n_columns = len(layout.columns)
        levels = [column(n_columns + level) for level in range(len(layout.index))]
        names = layout.index_names
        if len(levels) > 1:
            index: pd.Index = pd.MultiIndex.from_arrays(levels, names=names)
        else:
            # The type is spelled out: pandas would look into objects and guess.
            index = pd.Index(levels[0], dtype=levels[0].dtype, name=names[0], copy=False)
        frame = _frame_of_blocks(blocks, index, self._result_meta.columns)
        return self._reconciled(frame, layout.shape)

    def _reconciled(self, frame: pd.DataFrame, shape: tuple[Any, ...] | None) -> pd.DataFrame:
        """The frame with the types its meta promises, by the rules stock follows.

        A partition may have found a wider type than the plan knew of (a missing value among
        integers); stock then keeps the common type of both.
        """
        casts = self._casts.get(shape) if shape is not None else None
        if casts is None:
            casts = {}
            pairs = zip(frame.dtypes, self._result_meta.dtypes, strict=True)
            for position, (actual, expected) in enumerate(pairs):
                target = _common_type(actual, expected)
                if target is not None:
                    casts[position] = target
            if shape is not None:
                self._casts[shape] = casts
        if not casts:
            return frame
        columns = {i: frame.iloc[:, i] for i in range(frame.shape[1])}
        for position, target in casts.items():
            columns[position] = _cast(columns[position], target)
        result = pd.DataFrame(columns, index=frame.index, copy=False)
        result.columns = frame.columns
        return result


def _cast(column: pd.Series, target: Any) -> pd.Series:
    try:
        return column.astype(target)
    except (TypeError, ValueError):
        if isinstance(target, pd.StringDtype):
            return column  # objects that are no strings stay what they are
        raise


def _common_type(actual: Any, expected: Any) -> Any:
    """Type to cast to, or None where the column stays as it is."""
    if actual == expected:
        return None
    if isinstance(expected, pd.StringDtype) and (
        isinstance(actual, pd.StringDtype) or actual == np.dtype(object)
    ):
        return expected
    if isinstance(actual, pd.CategoricalDtype) and isinstance(expected, pd.CategoricalDtype):
        # Meta need not know the categories.
        return None
    from pandas.core.dtypes.cast import find_common_type

    common = find_common_type([actual, expected])
    return None if common == actual else common


def _column_arrays(frame: pd.DataFrame) -> Iterator[Any]:
    walk = getattr(frame, "_iter_column_arrays", None)
    if walk is not None:
        yield from walk()
    else:
        for position in range(frame.shape[1]):
            yield np_or_extension(frame.iloc[:, position])


def _partition_numbers(values: Any) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    return np.asarray(values.to_numpy(dtype=np.float64, na_value=np.nan))


def _runs_of_one_shape(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    run: list[Piece] = []
    for piece in pieces:
        if run:
            ours, theirs = run[-1].body.layout, piece.body.layout
            if ours is not theirs and ours.shape != theirs.shape:
                yield run
                run = []
        run.append(piece)
    yield run


def _join_arrow(arrays: list[pa.Array], pieces: list[Piece]) -> pa.Array:
    slices = [a.slice(p.start, p.stop - p.start) for a, p in zip(arrays, pieces, strict=True)]
    if len(slices) == 1:
        # Arrow hands a single array back as it is, and with it the whole shard's memory.
        slices.append(slices[0].slice(0, 0))
    return pa.concat_arrays(slices)


def _join_objects(arrays: list[Any], pieces: list[Piece]) -> Any:
    slices = [a[p.start : p.stop] for a, p in zip(arrays, pieces, strict=True)]
    if all(isinstance(s, np.ndarray) for s in slices):
        return np.concatenate(slices)
    return type(slices[0])._concat_same_type(slices)


def _join_categorical(
    number: int, codes: Part, pieces: list[Piece], expected: Any
) -> pd.Categorical:
    """Categorical out of joined codes, over the union of the pieces' categories.

    Categories that only some partitions have are appended in the order of the input partitions;
    stock appends them in the order in which shards happened to arrive.
    """
    details = [piece.body.layout.all[number].detail for piece in pieces]
    layouts = [piece.body.layout.all[number] for piece in pieces]
    if all(detail == details[0] for detail in details):
        categories = categories_of(layouts[0], expected)
        dtype = pd.CategoricalDtype(categories, ordered=details[0][0])
        return compose_categorical(codes, dtype)
    first = 0
    same: list[pd.Categorical] = []
    for piece, layout in zip(pieces, layouts, strict=True):
        last = first + piece.stop - piece.start
        dtype = pd.CategoricalDtype(categories_of(layout, expected), ordered=layout.detail[0])
        same.append(compose_categorical(codes[first:last], dtype))
        first = last
    return _union(same)


def _union(categoricals: Sequence[Any]) -> pd.Categorical:
    from pandas.api.types import union_categoricals

    ordered = all(c.ordered for c in categoricals)
    merged = union_categoricals(categoricals, ignore_order=True)
    if ordered:
        merged = merged.as_ordered()
    return merged


def _with_common_categories(frames: list[pd.DataFrame]) -> list[pd.DataFrame]:
    """Frames whose categorical columns share their categories: pandas would make objects of them."""
    n_columns = frames[0].shape[1]
    for position in range(n_columns):
        dtypes = [frame.dtypes.iloc[position] for frame in frames]
        if not all(isinstance(dtype, pd.CategoricalDtype) for dtype in dtypes):
            continue
        if all(dtype == dtypes[0] for dtype in dtypes):
            continue
        dtype = _union([frame.iloc[:, position] for frame in frames]).dtype
        for number, frame in enumerate(frames):
            frame = frame.copy(deep=False)
            frame.isetitem(position, frame.iloc[:, position].astype(dtype))
            frames[number] = frame
    return frames


def _frame_of_blocks(
    blocks: list[tuple[Any, npt.NDArray[np.intp]]], index: pd.Index, columns: pd.Index
) -> pd.DataFrame:
    if create_dataframe_from_blocks is not None:
        return create_dataframe_from_blocks(blocks, index=index, columns=columns)
    arrays: dict[int, Any] = {}
    for values, placement in blocks:
        rows = values if getattr(values, "ndim", 1) == 2 else [values]
        arrays.update(zip(placement.tolist(), rows, strict=True))
    frame = pd.DataFrame({i: arrays[i] for i in range(len(columns))}, index=index, copy=False)
    frame.columns = columns
    return frame

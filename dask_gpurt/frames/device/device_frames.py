"""The adapter for DataFrames in device memory: partition, pack, unpack and concatenate.

The device sorts rows by slot, gathers them shard by shard, and copies each shard into one buffer.
This buffer is sent, kept, or written to disk. Shards stay on the device up to the limit for shards
(`room`), and lie in host memory beyond. They return to the device when an output needs them.

`Tables` implements the operations on a library's tables: `frames.device.cudf_` for cuDF, and one in
host memory for tests. `frames.device.device_contents` defines the contents of a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import msgpack
import numpy as np

from dask_gpurt.frames.adapter import (
    DEVICE_SHARD_NBYTES,
    ArrivalAllocator,
    DeviceAllocator,
    DeviceMemory,
    Empty,
    Packed,
    Piece,
    Section,
    Selection,
    Slots,
    fresh,
    while_room,
)
from dask_gpurt.frames.device import device_contents
from dask_gpurt.frames.device.device_contents import DeviceColumn
from dask_gpurt.frames.sections import covering

_VERSION = 1

#: How to derive the type of a column or index level, with the types of the extra data. `meta`: the
#: type in the meta. `physical`: the library's type for the buffers. `category`: whether ordered,
#: and the categories as an Arrow stream. `zone`: instants in a time zone.
KINDS: dict[str, tuple[type, ...]] = {
    "meta": (),
    "physical": (),
    "category": (bool, bytes),
    "zone": (str,),
}
#: A kind with its extra data.
Kind = tuple[Any, ...]


class Tables(Protocol):
    """The operations on the tables of a library in device memory.

    A *table* is an object of the library with columns of one length. Arrays of row numbers are
    objects of the library too, and support slices. Memory and frames can be used at once, by any
    thread; tables by other methods here alone.
    """

    def is_frame(self, frame: Any) -> bool:
        """Return whether a frame belongs to this library."""

    def take_apart(self, frame: Any, meta: Any) -> tuple[Any, list[Kind]]:
        """Return a table of the columns and index levels of a frame, and the kind of each.

        Raises
        ------
        TypeError
            A column has an unsupported type.
        """

    def put_together(self, table: Any, kinds: Sequence[Kind], meta: Any) -> Any:
        """Compose a frame with the labels of the meta. This is the inverse of `take_apart`."""

    def joined(self, frames: list[Any], meta: Any) -> Any:
        """Concatenate frames, possibly of several types, to the types that stock Dask produces."""

    def group(self, numbers: Any, slots: Slots) -> tuple[Any, Sequence[int]]:
        """Group a frame's column of partition numbers. See `OpenPartition.group`."""

    def nbytes(self, table: Any) -> int:
        """Return the bytes of a table."""

    def gather(self, table: Any, rows: Any) -> Any:
        """Return a table of these rows. The row numbers come from `group` or from NumPy."""

    def slice(self, table: Any, start: int, stop: int) -> Any:
        """Return some rows of a table, possibly over the same memory."""

    def concatenate(self, tables: list[Any]) -> Any:
        """Concatenate one or more tables into new memory."""

    def pack(self, table: Any, empty: Callable[[int], Any]) -> tuple[Any, list[DeviceColumn], int]:
        """Copy the buffers of a table from `gather` one after the other, and then their contents.

        Parameters
        ----------
        empty
            Returns the target of the given length: device memory, or an array in host memory.

        Returns
        -------
        target, columns, contents_nbytes
            `device_contents.encode` describes the contents.
        """

    def view(self, memory: DeviceMemory, columns: Sequence[DeviceColumn]) -> Any:
        """Return a table over packed memory, at checked places. The memory must stay alive."""

    def to_device(self, buffer: Any, memory: DeviceMemory | None = None) -> DeviceMemory:
        """Copy host memory to the device, into given memory for shards or into new memory."""

    def wait(self) -> None:
        """Wait until no earlier work uses memory that was allocated for shards."""


@dataclass(frozen=True)
class DeviceLayout:
    """The types of a frame's columns and index levels."""

    kinds: tuple[Kind, ...]

    @cached_property
    def key(self) -> bytes:
        return msgpack.packb([_VERSION, [list(kind) for kind in self.kinds]])  # type: ignore[no-any-return]

    @staticmethod
    def from_key(key: bytes, n_columns: int) -> DeviceLayout:
        """Decode a `key`.

        Raises
        ------
        ValueError
            The key is invalid, has another version, or another number of columns.
        """
        try:
            version, plain = msgpack.unpackb(key)
            kinds = tuple(tuple(kind) for kind in plain)
            are_kinds = all(tuple(map(type, kind[1:])) == KINDS[kind[0]] for kind in kinds)
        except (TypeError, KeyError, IndexError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"not the layout of a device frame: {error}") from error
        if version != _VERSION or not are_kinds or len(kinds) != n_columns:
            raise ValueError(f"not the layout of a device frame of {n_columns} columns and levels")
        return DeviceLayout(kinds)


class DeviceBody:
    """The rows of one shard: buffers and contents, on the device or still in host memory.

    Attributes
    ----------
    packed
        The packed shard. If there is room for it on the device, only the device has it after its
        first use.
    """

    def __init__(
        self, layout: DeviceLayout, packed: Packed, columns: tuple[DeviceColumn, ...]
    ) -> None:
        self.layout = layout
        self.columns = columns
        self._packed = packed
        self._table: Any = None

    @property
    def layout_key(self) -> bytes:
        return self.layout.key

    @property
    def nbytes(self) -> int:
        return int(self._packed.buffer.nbytes)

    @property
    def packed(self) -> Packed:
        return self._packed

    def rows(self, tables: Tables, start: int, stop: int, room: DeviceAllocator) -> Any:
        """Return some rows as a table on the device.

        A shard in host memory returns to the device if `room` allows it. Otherwise only these rows
        stay there: a shard may have rows for all outputs of a worker, and all of its shards
        together may be larger than the device.

        Two threads may copy the shard at the same time. Both tables are valid, and one is kept.
        """
        table = self._table
        if table is None:
            packed = self._packed
            if not packed.is_on_device:
                memory = room(packed.buffer.nbytes)
                if memory is None:
                    whole = tables.view(tables.to_device(packed.buffer), self.columns)
                    return tables.concatenate([tables.slice(whole, start, stop)])
                tables.to_device(packed.buffer, memory)
                packed = Packed(memory, packed.n_rows, 0, packed.pickle_nbytes)
            self._table = table = tables.view(packed.buffer, self.columns)
            self._packed = packed
        return tables.slice(table, start, stop)


class DevicePartition:
    """One input partition: a table, and the column with the target of each row."""

    def __init__(self, frame: Any, numbers: Any, adapter: DeviceFrames) -> None:
        self._adapter = adapter
        self._tables = adapter.tables
        self._numbers = numbers
        self._n_rows = len(frame)
        self._table, kinds = self._tables.take_apart(frame, adapter.result_meta)
        self.layout = adapter.interned(DeviceLayout(tuple(kinds)))

    @property
    def layout_key(self) -> bytes:
        return self.layout.key

    @property
    def row_nbytes(self) -> float:
        return self._tables.nbytes(self._table) / max(1, self._n_rows)

    def group(self, slots: Slots) -> tuple[Any, Sequence[int]]:
        return self._tables.group(self._numbers, slots)

    def gather(self, selections: Sequence[Selection]) -> list[DeviceBody | Packed]:
        # Shard by shard, unlike on the host. A device has no cache that would hold a column. All
        # rows at once would take as much memory as the partition again.
        shards: list[DeviceBody | Packed] = []
        for selection in selections:
            rows = self._tables.gather(self._table, selection.rows)
            empty = partial(self._empty, selection.empty)
            buffer, columns, contents_nbytes = self._tables.pack(rows, empty)
            packed = Packed(buffer, len(selection.rows), 0, contents_nbytes)
            if selection.leaves:
                shards.append(packed)
            else:
                shards.append(DeviceBody(self.layout, packed, tuple(columns)))
        return shards

    def _empty(self, on_host: Empty, nbytes: int) -> Any:
        memory = self._adapter.room(nbytes)
        return on_host(nbytes) if memory is None else memory


class DeviceFrames:
    """The adapter for the device frames of one shuffle.

    Parameters
    ----------
    tables
        Operations of the library.
    meta, column, drop_column
        As in `PandasFrames`.
    room
        Allocates device memory for shards, up to the limit.
    """

    shard_nbytes: int | None = DEVICE_SHARD_NBYTES
    merge = None
    join = None

    def __init__(
        self, tables: Tables, meta: Any, column: Any, drop_column: bool, room: DeviceAllocator
    ) -> None:
        self.tables = tables
        self.allocate_device: ArrivalAllocator | None = self._arriving
        self.room = room
        self.result_meta = meta.drop(columns=column) if drop_column else meta
        self._meta = meta
        self._column = column
        self._n_columns = self.result_meta.shape[1] + self.result_meta.index.nlevels
        self._layouts: dict[bytes, DeviceLayout] = {}

    def open(self, frame: Any) -> DevicePartition:
        if not self.tables.is_frame(frame):
            raise TypeError(f"Expected data={frame!r} to be a DataFrame, got {type(frame)}.")
        meta = self._meta
        if not frame.columns.equals(meta.columns):
            if set(frame.columns) != set(meta.columns) or not frame.columns.is_unique:
                raise ValueError(
                    f"Expected self.meta.columns={meta.columns!r} to match "
                    f"data.columns={frame.columns!r}."
                )
            frame = frame[list(meta.columns)]
        if frame.index.nlevels != meta.index.nlevels:
            raise ValueError(
                f"the index has {frame.index.nlevels} levels instead of {meta.index.nlevels}"
            )
        numbers = frame[self._column]
        if self.result_meta is not meta:
            frame = frame.drop(columns=self._column)
        return DevicePartition(frame, numbers, self)

    def _arriving(self, sizes: Sequence[int]) -> list[DeviceMemory]:
        """Allocate memory for a transport, which knows no streams."""
        found = while_room(self.room, sizes)
        if found:
            self.tables.wait()
        return found

    def interned(self, layout: DeviceLayout) -> DeviceLayout:
        """Return one object for equal layouts, so that comparisons are fast."""
        return self._layouts.setdefault(layout.key, layout)

    def pack(self, body: DeviceBody) -> Packed:
        return body.packed

    def unpack(self, layout_key: bytes, packed: Packed) -> DeviceBody:
        layout = self._layouts.get(layout_key)
        if layout is None:
            layout = self.interned(DeviceLayout.from_key(layout_key, self._n_columns))
        data_nbytes = packed.buffer.nbytes - packed.pickle_nbytes
        if packed.arrow_nbytes or data_nbytes < 0:
            raise ValueError("the sections of a shard do not match its layout")
        contents = np.empty(packed.pickle_nbytes, dtype=np.uint8)
        if packed.is_on_device:
            packed.buffer.copy_to_host(contents, data_nbytes)
        else:
            contents[:] = packed.buffer[data_nbytes:]
        columns = device_contents.decode(contents.tobytes(), packed.n_rows, data_nbytes)
        if len(columns) != self._n_columns:
            raise ValueError(
                f"a shard has {len(columns)} columns and levels instead of {self._n_columns}"
            )
        return DeviceBody(layout, packed, columns)

    def sections(self, layout_key: bytes, packed: Packed) -> list[Section]:
        body = self.unpack(layout_key, packed)
        return list(_sections(body.columns, packed.buffer.nbytes, packed.pickle_nbytes))

    def concatenate(self, pieces: Sequence[Piece], empty: Empty = fresh) -> Any:
        runs: list[list[Piece]] = []
        for piece in pieces:
            if piece.stop <= piece.start:
                continue
            if not runs or runs[-1][-1].body.layout is not piece.body.layout:
                runs.append([])
            runs[-1].append(piece)
        if not runs:
            return self.result_meta.copy()
        return self.tables.joined([self._alike(run) for run in runs], self.result_meta)

    def _alike(self, pieces: list[Piece]) -> Any:
        """Concatenate pieces of one layout."""
        tables = self.tables
        parts = [piece.body.rows(tables, piece.start, piece.stop, self.room) for piece in pieces]
        layout: DeviceLayout = pieces[0].body.layout
        return tables.put_together(tables.concatenate(parts), layout.kinds, self.result_meta)


def _sections(
    columns: Sequence[DeviceColumn], total_nbytes: int, contents_nbytes: int
) -> Iterator[Section]:
    """Return the buffers of packed columns, and the gaps between them."""
    found: list[Section] = []

    def add(column: DeviceColumn, name: str) -> None:
        if column.nbytes:
            itemsize = column.nbytes // column.n_rows if column.n_rows else 1
            is_regular = column.type != "STRING" and itemsize in (1, 2, 4, 8)
            found.append((name, column.offset, column.nbytes, itemsize if is_regular else 1))
        if column.mask is not None and column.n_rows:
            nbytes = device_contents.mask_nbytes(column.n_rows)
            found.append((f"{name} validity", column.mask, nbytes, 1))
        for number, child in enumerate(column.children):
            add(child, f"{name}.{number}")

    for number, column in enumerate(columns):
        add(column, f"column {number}")
    found.append(("contents", total_nbytes - contents_nbytes, contents_nbytes, 1))
    return covering(found, 0, total_nbytes, "padding")

"""The `Tables` of `DeviceFrames` for cuDF, with all calls to cuDF, pylibcudf, RMM and CuPy.

It uses public calls only: pylibcudf moves rows, and cuDF handles types. Importing this module
imports cuDF, so import it only after a cuDF frame appears.

Shards are made on a stream of ours, so that nothing waits for later work of other tasks. It begins
after the work that is queued on cuDF's stream. The host waits for the end of a shard, so that UCX
and other streams can use it. Outputs are made on cuDF's stream, as tasks expect.

Memory of shards belongs to our stream: RMM gives freed memory to later work of the same stream at
once. So our stream waits for each output that reads shards, before they are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import cudf
import cupy
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pylibcudf as plc
from pylibcudf.utils import CUDF_DEFAULT_STREAM  # type: ignore[attr-defined, unused-ignore]
from rmm import DeviceBuffer
from rmm.pylibrmm.device_buffer import copy_device_to_ptr, copy_host_to_ptr, copy_ptr_to_host
from rmm.pylibrmm.stream import PER_THREAD_DEFAULT_STREAM, Stream

from dask_gpurt.frames.adapter import DeviceMemory, Slots
from dask_gpurt.frames.device.cupy_ import own_stream, recorded
from dask_gpurt.frames.device.device_contents import TYPES, DeviceColumn, encode, mask_nbytes
from dask_gpurt.frames.device.device_frames import Kind
from dask_gpurt.frames.gather import slots_by_table

#: Buffers of a shard start at multiples of this, as libcudf's own do.
_ALIGNMENT = 64
#: The stream that cuDF works on.
_THEIRS = (
    cupy.cuda.Stream.ptds
    if CUDF_DEFAULT_STREAM is PER_THREAD_DEFAULT_STREAM
    else cupy.cuda.Stream.null
)


@cache
def _wrapped(stream: cupy.cuda.Stream) -> Stream:
    return Stream(stream)


def _ours() -> Stream:
    """Return our stream of the current device."""
    return _wrapped(own_stream())


def _wait_for_ours() -> None:
    """Wait on the host for the work that is queued on our stream now."""
    recorded(own_stream()).synchronize()


def _wait_for_theirs() -> None:
    """Let our stream wait for the work that is queued on cuDF's now. The host does not wait."""
    own_stream().wait_event(recorded(_THEIRS))


class CudfMemory:
    """Memory of RMM's current resource as a `DeviceMemory`."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self.buffer = buffer

    @classmethod
    def empty(cls, nbytes: int) -> CudfMemory:
        """Allocate uninitialized memory for work on our stream.

        Raises
        ------
        MemoryError
            The device has no room.
        """
        return cls(DeviceBuffer(size=nbytes, stream=_ours()))

    @property
    def nbytes(self) -> int:
        return int(self.buffer.nbytes)

    def __len__(self) -> int:
        return self.nbytes

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        interface: Mapping[str, Any] = self.buffer.__cuda_array_interface__
        return interface

    def copy_to_host(self, out: npt.NDArray[np.uint8], start: int = 0) -> None:
        if start + out.nbytes > self.nbytes:
            raise IndexError(f"{out.nbytes} bytes at {start} exceed a buffer of {self.nbytes}")
        if out.nbytes:
            copy_ptr_to_host(self.buffer.ptr + start, out, _ours())
            _wait_for_ours()


def with_addresses(arrays: Sequence[Any]) -> list[Any]:
    """Return device arrays as pylibcudf takes them for the memory of columns: with an address.

    cuDF itself accepts arrays of CuPy for its buffers, but pylibcudf cannot read columns over them.
    """
    return [
        plc.gpumemoryview(one) if hasattr(type(one), "__cuda_array_interface__") else one
        for one in arrays
    ]


class CudfTables:
    """The `Tables` of `frames.device.device_frames` for cuDF."""

    def is_frame(self, frame: Any) -> bool:
        return isinstance(frame, cudf.DataFrame)

    def take_apart(
        self, frame: cudf.DataFrame, meta: cudf.DataFrame
    ) -> tuple[plc.Table, list[Kind]]:
        levels = _levels(frame.index)
        if cudf.get_option("spill"):
            for one in (*frame._columns, *levels._columns):
                _expose(one.plc_column)
        dtypes = [*frame.dtypes, *levels.dtypes]
        expected = [*meta.dtypes, *_levels(meta.index).dtypes]
        kinds = [_kind(dtype, wanted) for dtype, wanted in zip(dtypes, expected, strict=True)]
        columns = frame.to_pylibcudf()[0].columns() + levels.to_pylibcudf()[0].columns()
        for column, dtype in zip(columns, dtypes, strict=True):
            if not _is_describable(column):
                raise TypeError(f"data of type {dtype} cannot be shuffled on a device")
        _wait_for_theirs()
        return plc.Table(columns), kinds

    def put_together(self, table: plc.Table, kinds: Sequence[Kind], meta: cudf.DataFrame) -> Any:
        labels = list(range(table.num_columns()))
        frame = cudf.DataFrame.from_pylibcudf(table, {"columns": labels})
        expected = [*meta.dtypes, *_levels(meta.index).dtypes]
        for label, kind, wanted in zip(labels, kinds, expected, strict=True):
            found = frame[label]
            typed = _typed(found, kind, wanted)
            if typed is not found:
                frame[label] = typed
        # In place: a new frame would copy the levels again.
        frame.set_index(labels[meta.shape[1] :], inplace=True)
        frame.index.names = meta.index.names
        frame.columns = meta.columns
        return frame

    def joined(self, frames: list[cudf.DataFrame], meta: cudf.DataFrame) -> Any:
        frame = frames[0] if len(frames) == 1 else cudf.concat(frames)
        for label, wanted in meta.dtypes.items():
            found = frame[label].dtype
            if found != wanted and _are_numbers(found, wanted):
                frame[label] = frame[label].astype(np.result_type(found, wanted))
        return frame

    def group(self, numbers: cudf.Series, slots: Slots) -> tuple[cupy.ndarray, Sequence[int]]:
        if not len(numbers):
            return cupy.empty(0, dtype=np.int32), [0] * (slots.n_slots + 1)
        is_plain = isinstance(numbers.dtype, np.dtype) and numbers.dtype.kind in "iu"
        if is_plain and not numbers.null_count:
            values = numbers.values
        else:
            # Missing values and fractions are rare. The host converts them as pandas does.
            exact = numbers.astype("float64").to_pandas().to_numpy(np.float64, na_value=np.nan)
            values = slots.slots(exact).astype(np.int32)
        with own_stream():
            if isinstance(values, np.ndarray):
                found = cupy.asarray(values)
            else:
                found = slots_by_table(cupy, values, slots.slot_table)
            order = plc.sorting.stable_sorted_order(
                plc.Table([plc.Column.from_cuda_array_interface(found)]),
                [plc.types.Order.ASCENDING],
                [plc.types.NullOrder.AFTER],
                stream=_ours(),
            )
            rows = cupy.asarray(order.data()).view(np.int32)
            # Slot -1, for rows that no worker wants, comes first. A count would wait three times.
            ends = cupy.arange(slots.n_slots + 1, dtype=found.dtype)
            before = cupy.searchsorted(found[rows], ends).get()
        return rows[before[0] :], (before - before[0]).tolist()

    def nbytes(self, table: plc.Table) -> int:
        return sum(column.device_buffer_size() for column in table.columns())

    def gather(self, table: plc.Table, rows: Any) -> plc.Table:
        with own_stream():
            return plc.copying.gather(
                table,
                plc.Column.from_cuda_array_interface(cupy.asarray(rows, dtype=np.int32)),
                plc.copying.OutOfBoundsPolicy.DONT_CHECK,
                stream=_ours(),
            )

    def slice(self, table: plc.Table, start: int, stop: int) -> plc.Table:
        (rows,) = plc.copying.slice(table, [start, stop])
        return rows

    def concatenate(self, tables: list[plc.Table]) -> plc.Table:
        whole = plc.concatenate.concatenate(tables)
        # The shards may be freed when this returns, and their memory belongs to our stream.
        _wait_for_theirs()
        return whole

    def pack(
        self, table: plc.Table, empty: Callable[[int], Any]
    ) -> tuple[Any, list[DeviceColumn], int]:
        # Not libcudf's `pack`: it takes 0.3 ms, whatever the size, and packs only into new memory.
        sources = _Sources()
        columns = [sources.placed(column) for column in table.columns()]
        contents = encode(columns)
        target = empty(sources.end + len(contents))
        stream = _ours()
        for address, offset, nbytes in sources.parts:
            if isinstance(target, np.ndarray):
                copy_ptr_to_host(address, target[offset : offset + nbytes], stream)
            else:
                copy_device_to_ptr(address, target.buffer.ptr + offset, nbytes, stream)
        if isinstance(target, np.ndarray):
            target[sources.end :] = np.frombuffer(contents, np.uint8)
        else:
            copy_host_to_ptr(contents, target.buffer.ptr + sources.end, stream)
        _wait_for_ours()
        return target, columns, len(contents)

    def view(self, memory: DeviceMemory, columns: Sequence[DeviceColumn]) -> plc.Table:
        return plc.Table([_column(memory, column) for column in columns])

    def to_device(
        self, buffer: npt.NDArray[np.uint8], memory: DeviceMemory | None = None
    ) -> DeviceMemory:
        if memory is None:
            memory = CudfMemory(DeviceBuffer.to_device(buffer, _ours()))
        elif buffer.nbytes:
            address, _ = memory.__cuda_array_interface__["data"]
            copy_host_to_ptr(buffer, address, _ours())
        self.wait()  # the caller returns the host memory to its pool when this method returns
        return memory

    def wait(self) -> None:
        _wait_for_ours()


class _Sources:
    """The buffers of columns, and their places one after the other.

    Attributes
    ----------
    parts
        Address, place and bytes of each buffer.
    end
        Bytes of all of them.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, int]] = []
        self.end = 0

    def placed(self, column: plc.Column) -> DeviceColumn:
        """Give places to the buffers of a column that is no slice."""
        data, n_missing = column.data(), column.null_count()
        nbytes = data.size if data is not None else 0
        return DeviceColumn(
            type=plc.TypeId(column.type().id()).name,
            n_rows=column.size(),
            n_missing=n_missing,
            offset=self._place(data, nbytes) if nbytes else 0,
            nbytes=nbytes,
            mask=self._place(column.null_mask(), mask_nbytes(column.size())) if n_missing else None,
            scale=column.type().scale(),
            children=tuple(map(self.placed, column.children())),
        )

    def _place(self, source: Any, nbytes: int) -> int:
        place = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        self.parts.append((source.ptr, place, nbytes))
        self.end = place + nbytes
        return place


def _levels(index: cudf.Index) -> cudf.DataFrame:
    """Return the levels of an index as the columns of a frame."""
    if index.nlevels > 1:
        return index.to_frame(index=False, name=list(range(index.nlevels)))
    return index.to_frame(index=False, name=0)


def _expose(column: plc.Column) -> None:
    """Have cuDF, which spills by itself, bring a column back and leave it on the device.

    Without that, pylibcudf gets a spilled buffer without its memory. cuDF does both when a program
    asks for the address of a buffer.
    """
    for buffer in (column.data(), column.null_mask()):
        if buffer is not None:
            buffer.ptr  # noqa: B018
    for child in column.children():
        _expose(child)


def _is_describable(column: plc.Column) -> bool:
    """Return whether the contents of a shard can describe the buffers of a column.

    Structures have types of their own, which a receiver could not rebuild. Intervals are structures
    without member names. The scheduler knows the meta's types, and a partition may have others.
    """
    name = plc.TypeId(column.type().id()).name
    return name in TYPES and name != "STRUCT" and all(map(_is_describable, column.children()))


def _kind(dtype: Any, expected: Any) -> Kind:
    """Return the kind of a column, from which a receiver restores its type."""
    if isinstance(dtype, cudf.CategoricalDtype):
        # Equal dtypes may order their categories differently, and codes are positions.
        same = (
            isinstance(expected, cudf.CategoricalDtype)
            and bool(dtype.ordered) == bool(expected.ordered)
            and dtype.categories is not None
            and expected.categories is not None
            and dtype.categories.dtype == expected.categories.dtype
            and dtype.categories.equals(expected.categories)
        )
        if same:
            return ("meta",)
        return ("category", bool(dtype.ordered), _packed(dtype.categories))
    if dtype == expected:
        return ("meta",)
    if isinstance(dtype, pd.DatetimeTZDtype):
        return ("zone", str(dtype.tz))
    return ("physical",)


def _typed(found: cudf.Series, kind: Kind, expected: Any) -> cudf.Series:
    """Restore the type of a column that has the library's type for its buffers."""
    if kind[0] == "category":
        return _categorical(found, _categories(kind[2]), kind[1])
    if kind[0] == "zone":
        return found.dt.tz_localize("UTC").dt.tz_convert(kind[1])
    if kind[0] == "physical" or found.dtype == expected:
        return found
    if isinstance(expected, cudf.CategoricalDtype):
        return _categorical(found, expected.categories, bool(expected.ordered))
    if isinstance(expected, pd.DatetimeTZDtype):
        return found.dt.tz_localize("UTC").dt.tz_convert(str(expected.tz))
    return found.astype(expected)


def _categorical(codes: cudf.Series, categories: cudf.Index, ordered: bool) -> cudf.Series:
    index = cudf.CategoricalIndex.from_codes(codes, categories=categories, ordered=ordered)
    return cudf.Series(index)


def _packed(categories: cudf.Index) -> bytes:
    table = pa.table({"categories": categories.to_arrow()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


@lru_cache(64)
def _categories(packed: bytes) -> cudf.Index:
    # Cached, because each output decodes the categories of its pieces.
    with pa.ipc.open_stream(packed) as reader:
        return cudf.Index.from_arrow(reader.read_all()["categories"].combine_chunks())


def _are_numbers(*dtypes: Any) -> bool:
    return all(isinstance(dtype, np.dtype) and dtype.kind in "iuf" for dtype in dtypes)


class _Part:
    """A part of packed memory, which it keeps alive.

    pylibcudf's own slices do not declare that they have no strides, and cuDF requires that.
    """

    def __init__(self, memory: DeviceMemory, offset: int, nbytes: int) -> None:
        address, is_fixed = memory.__cuda_array_interface__["data"]
        self.memory = memory
        self.__cuda_array_interface__ = {
            "data": (address + offset, is_fixed),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


def _column(memory: DeviceMemory, column: DeviceColumn) -> plc.Column:
    """Return a column over packed memory."""

    def part(offset: int, nbytes: int) -> plc.gpumemoryview:
        return plc.gpumemoryview(_Part(memory, offset, nbytes))

    return plc.Column(
        plc.DataType(plc.TypeId[column.type], column.scale),
        column.n_rows,
        part(column.offset, column.nbytes) if column.nbytes else None,
        part(column.mask, mask_nbytes(column.n_rows)) if column.mask is not None else None,
        column.n_missing,
        0,
        [_column(memory, child) for child in column.children],
    )

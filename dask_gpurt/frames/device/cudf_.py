"""The `Tables` of `DeviceFrames` for cuDF, with all calls to cuDF, pylibcudf, RMM and CuPy.

It uses public calls only: pylibcudf moves rows, and cuDF handles types. Importing this module
imports cuDF, so import it only after a cuDF frame appears.

All work runs on pylibcudf's default stream, which cuDF uses too. This module waits for the work on
data that it returns, so that other streams and UCX can use the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
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

from dask_gpurt.frames.adapter import DeviceMemory, Slots
from dask_gpurt.frames.device.device_contents import TYPES, DeviceColumn, mask_nbytes
from dask_gpurt.frames.device.device_frames import Kind
from dask_gpurt.frames.gather import slots_by_table


class CudfMemory:
    """Memory of RMM's current resource as a `DeviceMemory`."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self.buffer = buffer

    @classmethod
    def empty(cls, nbytes: int) -> CudfMemory:
        """Allocate uninitialized memory that any stream may use.

        Raises
        ------
        MemoryError
            The device has no room.
        """
        memory = cls(DeviceBuffer(size=nbytes, stream=CUDF_DEFAULT_STREAM))
        # Wait for queued work of the memory's previous owner.
        CUDF_DEFAULT_STREAM.synchronize()
        return memory

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
            copy_ptr_to_host(self.buffer.ptr + start, out, CUDF_DEFAULT_STREAM)
            CUDF_DEFAULT_STREAM.synchronize()


class CudfTables:
    """The `Tables` of `frames.device.device_frames` for cuDF."""

    def is_frame(self, frame: Any) -> bool:
        return isinstance(frame, cudf.DataFrame)

    def take_apart(
        self, frame: cudf.DataFrame, meta: cudf.DataFrame
    ) -> tuple[plc.Table, list[Kind]]:
        levels = _levels(frame.index)
        dtypes = [*frame.dtypes, *levels.dtypes]
        expected = [*meta.dtypes, *_levels(meta.index).dtypes]
        kinds = [_kind(dtype, wanted) for dtype, wanted in zip(dtypes, expected, strict=True)]
        columns = frame.to_pylibcudf()[0].columns() + levels.to_pylibcudf()[0].columns()
        for column, dtype in zip(columns, dtypes, strict=True):
            if not _is_describable(column):
                raise TypeError(f"data of type {dtype} cannot be shuffled on a device")
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
            found = slots_by_table(cupy, numbers.values, slots.slot_table)
        else:
            # Missing values and fractions are rare. The host converts them as pandas does.
            exact = numbers.astype("float64").to_pandas().to_numpy(np.float64, na_value=np.nan)
            found = cupy.asarray(slots.slots(exact).astype(np.int32))
        order = plc.sorting.stable_sorted_order(
            plc.Table([plc.Column.from_cuda_array_interface(found)]),
            [plc.types.Order.ASCENDING],
            [plc.types.NullOrder.AFTER],
        )
        # Slot -1, for rows that no worker wants, comes first.
        counts = cupy.asnumpy(cupy.bincount(found + 1, minlength=slots.n_slots + 1))
        rows = cupy.asarray(order.data()).view(np.int32)[counts[0] :]
        return rows, [0, *np.cumsum(counts[1:]).tolist()]

    def nbytes(self, table: plc.Table) -> int:
        return sum(column.device_buffer_size() for column in table.columns())

    def gather(self, table: plc.Table, rows: Any) -> plc.Table:
        if not len(rows):
            return plc.copying.empty_like(table)
        wanted = cupy.asarray(rows, dtype=np.int32)
        return plc.copying.gather(
            table,
            plc.Column.from_cuda_array_interface(wanted),
            plc.copying.OutOfBoundsPolicy.DONT_CHECK,
        )

    def slice(self, table: plc.Table, start: int, stop: int) -> plc.Table:
        (rows,) = plc.copying.slice(table, [start, stop])
        return rows

    def concatenate(self, tables: list[plc.Table]) -> plc.Table:
        return plc.concatenate.concatenate(tables)

    def pack(self, table: plc.Table) -> tuple[CudfMemory, list[DeviceColumn]]:
        metadata, data = plc.contiguous_split.pack(table).release()
        # libcudf describes the places in a format of its own. Let libcudf decode it.
        there = plc.contiguous_split.unpack_from_memoryviews(metadata, data)
        columns = [_described(column, data.ptr) for column in there.columns()]
        CUDF_DEFAULT_STREAM.synchronize()
        return CudfMemory(data.obj), columns

    def view(self, memory: DeviceMemory, columns: Sequence[DeviceColumn]) -> plc.Table:
        return plc.Table([_column(memory, column) for column in columns])

    def fill(self, target: CudfMemory, packed: CudfMemory, contents: bytes) -> None:
        to, stream = target.buffer.ptr, CUDF_DEFAULT_STREAM
        if packed.nbytes:
            copy_device_to_ptr(packed.buffer.ptr, to, packed.nbytes, stream)
        copy_host_to_ptr(contents, to + packed.nbytes, stream)
        stream.synchronize()

    def to_device(self, buffer: npt.NDArray[np.uint8]) -> CudfMemory:
        memory = DeviceBuffer.to_device(buffer, CUDF_DEFAULT_STREAM)
        # The caller returns the host memory to its pool when this method returns.
        CUDF_DEFAULT_STREAM.synchronize()
        return CudfMemory(memory)


def _levels(index: cudf.Index) -> cudf.DataFrame:
    """Return the levels of an index as the columns of a frame."""
    if index.nlevels > 1:
        return index.to_frame(index=False, name=list(range(index.nlevels)))
    return index.to_frame(index=False, name=0)


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


def _described(column: plc.Column, base: int) -> DeviceColumn:
    """Describe the buffers of a column in packed memory that starts at `base`."""
    data, mask = column.data(), column.null_mask()
    nbytes = data.size if data is not None else 0
    return DeviceColumn(
        type=plc.TypeId(column.type().id()).name,
        n_rows=column.size(),
        n_missing=column.null_count(),
        offset=data.ptr - base if data is not None and nbytes else 0,
        nbytes=nbytes,
        mask=mask.ptr - base if mask is not None and column.null_count() else None,
        scale=column.type().scale(),
        children=tuple(_described(child, base) for child in column.children()),
    )


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

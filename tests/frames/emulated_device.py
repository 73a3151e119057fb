"""A device emulated in host memory, as a replacement of cuDF in `DeviceFrames` and of CuPy.

Frames are pandas frames, and tables are lists of Arrow arrays. Device memory has the interface of
GPU memory. NumPy cannot read it, so no code can mistake it for host memory.
"""

from __future__ import annotations

import contextlib
import weakref

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_gpurt.frames.adapter import while_room
from dask_gpurt.frames.columns import _pack_index, _unpack_index
from dask_gpurt.frames.device.device_contents import DeviceColumn, encode, mask_nbytes
from dask_gpurt.frames.gather import group_rows

_TYPES = {
    "INT8": pa.int8(), "INT16": pa.int16(), "INT32": pa.int32(), "INT64": pa.int64(),
    "UINT8": pa.uint8(), "UINT16": pa.uint16(), "UINT32": pa.uint32(), "UINT64": pa.uint64(),
    "FLOAT32": pa.float32(), "FLOAT64": pa.float64(), "TIMESTAMP_SECONDS": pa.timestamp("s"),
    "TIMESTAMP_MICROSECONDS": pa.timestamp("us"), "TIMESTAMP_NANOSECONDS": pa.timestamp("ns"),
}  # fmt: skip
_NAMES = {kind: name for name, kind in _TYPES.items()}


def in_host_memory(nbytes: int) -> tuple[int, np.ndarray]:
    """Return memory's address for programs, and its bytes for functions that act as kernels."""
    # One byte more, because an empty array has no address.
    data = np.full(nbytes + 1, 0xA5, dtype=np.uint8)[:nbytes]
    return data.ctypes.data, data


class EmulatedMemory:
    """Memory of the emulated device.

    Attributes
    ----------
    provide
        Allocates memory, as `in_host_memory`. Another device takes its place for real libraries
        (`tests.standins.cuda_frames`).
    """

    provide = staticmethod(in_host_memory)

    #: For all instances: live bytes, and bytes copied to the host.
    used_nbytes = 0
    copied_nbytes = 0

    def __init__(self, nbytes: int) -> None:
        self._address, self._bytes = self.provide(nbytes)
        self.nbytes = nbytes
        EmulatedMemory.used_nbytes += nbytes
        weakref.finalize(self, EmulatedMemory._freed, nbytes)

    @staticmethod
    def _freed(nbytes):
        EmulatedMemory.used_nbytes -= nbytes

    def __len__(self):
        return self.nbytes

    @property
    def __cuda_array_interface__(self):
        place = (self._address, False)
        return {"data": place, "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def __array__(self, *args, **kwargs):
        raise TypeError("device memory was taken for the host's")

    def copy_to_host(self, out, start=0):
        EmulatedMemory.copied_nbytes += out.nbytes
        out[:] = self._bytes[start : start + out.nbytes]

    def on_device(self):
        """Return the bytes, for functions that act as kernels."""
        return self._bytes


class EmulatedTables:
    """The `Tables` of `frames.device.device_frames` over pandas and Arrow."""

    def is_frame(self, frame):
        return isinstance(frame, pd.DataFrame)

    def take_apart(self, frame, meta):
        levels = [frame.index.get_level_values(n) for n in range(frame.index.nlevels)]
        metas = [meta.index.get_level_values(n) for n in range(meta.index.nlevels)]
        values = [frame.iloc[:, n] for n in range(frame.shape[1])] + levels
        expected = [meta.iloc[:, n].dtype for n in range(meta.shape[1])]
        expected += [level.dtype for level in metas]
        table, kinds = [], []
        for one, dtype in zip(values, expected, strict=True):
            if isinstance(one.dtype, pd.CategoricalDtype):
                codes = pd.Series(one.array.codes)
                table.append(pa.array(codes.where(codes >= 0).astype("Int16")))
                packed = _pack_index(one.dtype.categories)
                kinds.append(("category", bool(one.dtype.ordered), packed))
            else:
                array = pa.array(one)
                if isinstance(array, pa.ChunkedArray):
                    array = array.combine_chunks()
                table.append(array.cast(pa.uint8()) if pa.types.is_boolean(array.type) else array)
                kinds.append(("meta",) if one.dtype == dtype else ("physical",))
        return table, kinds

    def put_together(self, table, kinds, meta):
        expected = [meta.iloc[:, n].dtype for n in range(meta.shape[1])]
        expected += [meta.index.get_level_values(n).dtype for n in range(meta.index.nlevels)]
        values = []
        for array, kind, dtype in zip(table, kinds, expected, strict=True):
            if kind[0] == "category":
                codes = array.fill_null(-1).to_numpy(zero_copy_only=False)
                wanted = pd.CategoricalDtype(_unpack_index(kind[2]), ordered=kind[1])
                values.append(pd.Categorical.from_codes(codes, dtype=wanted))
            elif kind[0] == "physical":
                values.append(array.to_pandas().array)
            else:
                if isinstance(dtype, pd.ArrowDtype):
                    array = array.cast(dtype.pyarrow_dtype)
                exact = pd.Series(pd.arrays.ArrowExtensionArray(pa.chunked_array([array])))
                values.append(exact.astype(dtype).array)
        n_columns = meta.shape[1]
        levels, names = values[n_columns:], meta.index.names
        if len(levels) > 1:
            index = pd.MultiIndex.from_arrays(levels, names=names)
        else:
            index = pd.Index(levels[0], dtype=levels[0].dtype, name=names[0])
        frame = pd.DataFrame(dict(enumerate(values[:n_columns])), index=index)
        frame.columns = meta.columns
        return frame

    def joined(self, frames, meta):
        return pd.concat(frames)

    def group(self, numbers, slots):
        rows, offsets = group_rows(slots.slots(numbers.to_numpy()), slots.n_slots)
        return rows, offsets.tolist()

    def nbytes(self, table):
        return sum(array.nbytes for array in table)

    def gather(self, table, rows):
        return [array.take(pa.array(rows)) for array in table]

    def slice(self, table, start, stop):
        return [array.slice(start, stop - start) for array in table]

    def concatenate(self, tables):
        return [
            pa.concat_arrays([*arrays, arrays[0].slice(0, 0)])
            for arrays in zip(*tables, strict=True)
        ]

    def pack(self, table, empty):
        parts, n = [], 0

        def add(buffer, nbytes):
            nonlocal n
            first = n
            data = np.zeros(-(-nbytes // 64) * 64, dtype=np.uint8)
            if nbytes:
                data[:nbytes] = np.frombuffer(buffer, np.uint8, nbytes)
            parts.append(data)
            n += data.nbytes
            return first

        def described(array):
            assert array.offset == 0
            rows, missing, buffers = len(array), array.null_count, array.buffers()
            mask = None
            if missing:
                mask = add(buffers[0], min(buffers[0].size, mask_nbytes(rows)))
            kind = array.type
            if pa.types.is_large_string(kind) or pa.types.is_string(kind):
                wide = pa.types.is_large_string(kind)
                name, dtype = ("INT64", "<i8") if wide else ("INT32", "<i4")
                if not rows:
                    return DeviceColumn("STRING", 0)
                itemsize = np.dtype(dtype).itemsize
                offsets = np.frombuffer(buffers[1], dtype, rows + 1)
                at = add(offsets, offsets.nbytes)
                child = DeviceColumn(name, rows + 1, 0, at, (rows + 1) * itemsize)
                chars = int(offsets[-1])
                at = add(buffers[2], chars)
                return DeviceColumn("STRING", rows, missing, at, chars, mask, children=(child,))
            if pa.types.is_list(kind):
                offsets = np.frombuffer(buffers[1], "<i4", rows + 1) if rows else np.zeros(1, "<i4")
                at = add(offsets, offsets.nbytes)
                children = (
                    DeviceColumn("INT32", rows + 1, 0, at, offsets.nbytes),
                    described(pa.concat_arrays([array.values])),
                )
                return DeviceColumn("LIST", rows, missing, mask=mask, children=children)
            if pa.types.is_decimal(kind):
                at = add(buffers[1], rows * 16)
                scale = -kind.scale
                return DeviceColumn("DECIMAL128", rows, missing, at, rows * 16, mask, scale)
            if pa.types.is_null(kind):  # an empty column of objects, before pandas 3
                return DeviceColumn("STRING", rows)
            nbytes = rows * kind.bit_width // 8
            at = add(buffers[1], nbytes)
            return DeviceColumn(_NAMES[kind], rows, missing, at, nbytes, mask)

        columns = [described(array) for array in table]
        contents = encode(columns)
        parts.append(np.frombuffer(contents, np.uint8))
        target = empty(n + len(contents))
        is_on_host = isinstance(target, np.ndarray)
        EmulatedMemory.copied_nbytes += is_on_host * target.nbytes
        (target if is_on_host else target.on_device())[:] = np.concatenate(parts)
        return target, columns, len(contents)

    def view(self, memory, columns):
        data = memory.on_device()

        def buffer(offset, nbytes):
            return pa.py_buffer(data[offset : offset + nbytes])

        def array(column):
            rows, missing = column.n_rows, column.n_missing
            mask = None
            if column.mask is not None:
                mask = buffer(column.mask, mask_nbytes(rows))
            if column.type == "STRING":
                if not column.children:
                    return pa.array([], pa.string())
                offsets = column.children[0]
                kind = pa.large_string() if offsets.type == "INT64" else pa.string()
                parts = [buffer(one.offset, one.nbytes) for one in (offsets, column)]
                return pa.Array.from_buffers(kind, rows, [mask, *parts], missing)
            if column.type == "LIST":
                offsets, values = column.children
                inner = array(values)
                parts = [mask, buffer(offsets.offset, offsets.nbytes)]
                kind = pa.list_(inner.type)
                return pa.Array.from_buffers(kind, rows, parts, missing, children=[inner])
            kind = _TYPES.get(column.type) or pa.decimal128(38, -column.scale)
            parts = [mask, buffer(column.offset, column.nbytes)]
            return pa.Array.from_buffers(kind, rows, parts, missing)

        return [array(column) for column in columns]

    def to_device(self, buffer, memory=None):
        memory = memory or EmulatedMemory(buffer.nbytes)
        memory.on_device()[:] = buffer
        return memory

    def wait(self):
        """All work is done at once."""


class EmulatedArray(np.ndarray):
    """An array of the emulated device, with a type of its own."""

    # NumPy concatenates arrays to the type with the highest priority.
    __array_priority__ = 1

    # If a type overrides this, Dask leaves concatenation to the library.
    def __array_function__(self, *args, **kwargs):
        return super().__array_function__(*args, **kwargs)


#: Full name of the type.
ARRAY = f"{EmulatedArray.__module__}.{EmulatedArray.__qualname__}"


class EmulatedArrays:
    """The `DeviceArrays` of `frames.chunks` over NumPy."""

    def __init__(self, room):
        self.room = room

    def elements(self, memory, dtype):
        return memory.on_device().view(dtype).view(EmulatedArray)

    def empty(self, nbytes):
        return EmulatedMemory(nbytes)

    def to_device(self, buffer):
        return EmulatedTables().to_device(buffer)

    def computing(self):
        return contextlib.nullcontext()

    def arriving(self, sizes):
        return while_room(self.room, sizes)

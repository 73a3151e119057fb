"""An input chunk: cut into shards, as plain memory or as pickles.

A shard's buffer contains only its pieces, one after the other. Its memory is a `PlainBody`. Some
chunks are not plain memory: objects, subclasses, other kinds of arrays, and chunks with an
unexpected shape. Their own indexing cuts them, and they travel as pickles, in a `PickledBody`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dask_gpurt.frames.adapter import OBJECT_NBYTES, Empty, Packed, Sizeof, fresh, mean_nbytes
from dask_gpurt.frames.chunks.chunk_layout import ChunkLayout
from dask_gpurt.frames.chunks.device_arrays import DeviceArrays, DeviceLibraries
from dask_gpurt.frames.chunks.rechunking import Box, Index, Rechunking, filled
from dask_gpurt.frames.pickling import Pickling

#: The layout of a shard with pickled pieces.
PICKLED = b"pickle"
#: The wire format counts rows in 32 bits.
_MOST_ROWS = (1 << 32) - 1


@dataclass
class PlainBody:
    """Pieces as plain memory. A row is one element.

    Attributes
    ----------
    device
        Library of the layout; None for NumPy.
    """

    layout: ChunkLayout
    packed: Packed
    device: DeviceArrays | None = None

    @property
    def layout_key(self) -> bytes:
        return self.layout.key

    @property
    def nbytes(self) -> int:
        return int(self.packed.buffer.nbytes)

    def elements(self, start: int, stop: int) -> Any:
        """Return some elements, of a device array on the device.

        A shard in host memory stays there: each output copies its own elements to the device.
        """
        dtype, buffer = self.layout.dtype, self.packed.buffer
        if self.device is None:
            return buffer.view(dtype)[start:stop]
        if self.packed.is_on_device:
            return self.device.elements(buffer, dtype)[start:stop]
        mine = buffer[start * dtype.itemsize : stop * dtype.itemsize]
        return self.device.elements(self.device.to_device(mine), dtype)


@dataclass
class PickledBody:
    """Pieces that are arrays of any kind. A row is one array."""

    arrays: list[Any]
    nbytes: int
    layout_key: bytes = PICKLED

    def pack(self, pickling: Pickling, what: str) -> Packed:
        """Return the pieces as one pickle. Errors call them `what`."""
        data = pickling.dump(self.arrays, what)
        return Packed(np.frombuffer(data, np.uint8), len(self.arrays), pickle_nbytes=len(data))


Body = PlainBody | PickledBody


class Part(NamedTuple):
    """The part of an input chunk in one output chunk."""

    output: Index
    box: Box
    shape: tuple[int, ...]
    #: Number of its rows in a shard.
    n_rows: int


class OpenChunk:
    """An input chunk and its parts.

    Attributes
    ----------
    parts
        One part for each output chunk that overlaps this chunk.
    row_nbytes, is_on_device
        Bytes of a row, and whether the chunk is in device memory.
    """

    def __init__(
        self,
        chunk: Any,
        index: Index,
        rechunking: Rechunking,
        devices: DeviceLibraries,
        sizeof: Sizeof,
        pickling: Pickling,
    ) -> None:
        self._chunk = chunk
        self._pickling = pickling
        self._name = f"chunk {index} of an array"
        self._devices = devices
        layout = ChunkLayout.of(chunk, devices.known)
        if layout is not None and (
            not rechunking.has_shape(index, chunk.shape) or chunk.size > _MOST_ROWS
        ):
            layout = None
        self._layout = layout
        self.is_on_device = layout is not None and bool(layout.library)
        parts = rechunking.of_input(index)
        if layout is None:
            pickling.try_some(chunk, self._name)
            self.layout_key = PICKLED
            self.parts = [Part(output, box, (), 1) for output, box, _ in parts]
            self._object_nbytes = _object_nbytes(chunk, sizeof)
            self.row_nbytes = held_nbytes(chunk, self._object_nbytes) / max(1, len(self.parts))
        else:
            self.layout_key = layout.key
            self.parts = []
            for output, box, lengths in parts:
                shape = filled(lengths, layout.shape)
                self.parts.append(Part(output, box, shape, n_rows_of(shape)))
            self.row_nbytes = float(layout.dtype.itemsize)

    def cut(self, parts: Sequence[Part], leaves: bool, empty: Empty = fresh) -> Packed | Body:
        """Return a shard of these parts. A shard that leaves this process is one buffer."""
        chunk, layout = self._chunk, self._layout
        if layout is None:
            # Copy views: a view would keep the whole chunk and its base alive.
            arrays = [_own(chunk[part.box]) for part in parts]
            held = sum(held_nbytes(array, self._object_nbytes) for array in arrays)
            pickled = PickledBody(arrays, held)
            return pickled.pack(self._pickling, self._name) if leaves else pickled
        n_rows = sum(part.n_rows for part in parts)
        nbytes = n_rows * layout.dtype.itemsize
        device = self._devices.get(layout.library)
        shard: Any
        memory: Any
        if device is None:
            shard = memory = empty(nbytes)
            elements = memory.view(layout.dtype)
        else:
            shard = device.room(nbytes)
            memory = shard if shard is not None else device.empty(nbytes)
            elements = device.elements(memory, layout.dtype)
        first = 0
        with device.computing() if device is not None else contextlib.nullcontext():
            for _, box, shape, n in parts:
                layout.shaped(elements[first : first + n], shape)[...] = chunk[box]
                first += n
        if shard is None:
            shard = empty(nbytes)
            memory.copy_to_host(shard)
        packed = Packed(shard, n_rows)
        return packed if leaves else PlainBody(layout, packed, device)


def n_rows_of(shape: tuple[int, ...]) -> int:
    """Return the rows of a piece in a shard.

    An empty piece takes one row, because an empty output gets its dtype from it.
    """
    return math.prod(shape) or 1


def _own(array: Any) -> Any:
    return array if getattr(array, "base", None) is None else array.copy()


def _object_nbytes(chunk: Any, sizeof: Sizeof) -> float:
    """Return the bytes of an element outside its array, if it is or contains objects."""
    if not isinstance(chunk, np.ndarray) or not chunk.dtype.hasobject:
        return OBJECT_NBYTES
    return mean_nbytes(np.asarray(chunk).flat, sizeof)


def held_nbytes(array: Any, object_nbytes: float = OBJECT_NBYTES) -> int:
    """Estimate the bytes of an array of any kind."""
    nbytes = int(getattr(array, "nbytes", OBJECT_NBYTES))
    if getattr(getattr(array, "dtype", None), "hasobject", False):
        nbytes += int(getattr(array, "size", 1) * object_nbytes)
    return nbytes

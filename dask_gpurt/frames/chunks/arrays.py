"""Chunks of arrays: cut, pack, unpack and join.

Each element is written three times. It is cut into a shard's buffer, moved if it leaves the
process, and put in its place in the output. A shard's buffer contains only its pieces, one after
the other. `rechunking` computes their places in chunks.

Device arrays (`DeviceArrays`) take the same steps. Their shards are in device memory up to the
limit for shards, and in host memory beyond.

Some chunks are not plain memory: objects, subclasses, other kinds of arrays, and chunks with an
unexpected shape. Their own indexing cuts them, they travel as pickles, and the join is that of
stock Dask.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from dask_gpurt.frames.adapter import (
    ArrivalAllocator,
    DeviceMemory,
    Empty,
    Packed,
    Piece,
    Section,
    Sizeof,
    fresh,
)
from dask_gpurt.frames.chunks.chunk_layout import ChunkLayout
from dask_gpurt.frames.chunks.device_arrays import DeviceLibraries, Devices
from dask_gpurt.frames.chunks.open_chunk import (
    PICKLED,
    Body,
    OpenChunk,
    PickledBody,
    PlainBody,
    held_nbytes,
    n_rows_of,
)
from dask_gpurt.frames.chunks.rechunking import Index, Rechunking, Shape, filled
from dask_gpurt.frames.pickling import Pickling


class Arrays:
    """The adapter for the chunks of one array.

    Parameters
    ----------
    rechunking
        The chunks before and after.
    join
        Joins nested lists of arrays, for outputs whose pieces are not all plain memory.
    devices
        Device libraries by array type.
    sizeof, pickling
        Measure objects, for the sizes of shards, and pickle arrays that are not plain memory.
    """

    def __init__(
        self,
        rechunking: Rechunking,
        join: Callable[[Any], Any],
        devices: Devices | None = None,
        sizeof: Sizeof = sys.getsizeof,
        pickling: Pickling | None = None,
    ) -> None:
        self.rechunking = rechunking
        self._pickling = pickling or Pickling()
        self._sizeof = sizeof
        self._join = join
        self._devices = DeviceLibraries(devices or {})
        self._layouts: dict[bytes, ChunkLayout] = {}
        self.merge = None
        #: Only data from device memory arrives in device memory, so its library is known.
        self.allocate_device: ArrivalAllocator | None = self._allocated if devices else None

    def _allocated(self, sizes: Sequence[int]) -> list[DeviceMemory]:
        (name,) = self._devices.known
        return self._devices[name].arriving(sizes)

    def open(self, chunk: Any, index: Index) -> OpenChunk:
        return OpenChunk(chunk, index, self.rechunking, self._devices, self._sizeof, self._pickling)

    def pack(self, body: Body) -> Packed:
        if isinstance(body, PlainBody):
            return body.packed
        return body.pack(self._pickling, "a piece of an array")

    def unpack(self, layout_key: bytes, packed: Packed) -> Body:
        if layout_key == PICKLED:
            if packed.pickle_nbytes != packed.buffer.nbytes:
                raise ValueError("a pickled shard has bytes beside the pickle")
            arrays = self._pickling.load_columns(packed.buffer.data, lambda: "pieces of an array")
            if len(arrays) != packed.n_rows:
                raise ValueError(f"{len(arrays)} pieces came instead of {packed.n_rows}")
            return PickledBody(arrays, max(packed.pickle_nbytes, sum(map(held_nbytes, arrays))))
        layout = self._layouts.get(layout_key)
        if layout is None:
            layout = ChunkLayout.from_key(layout_key)
            if len(layout.shape) != self.rechunking.ndim:
                raise ValueError(
                    f"a chunk has {len(layout.shape)} axes instead of {self.rechunking.ndim}"
                )
            if layout.library and layout.library not in self._devices.known:
                raise ValueError(f"this worker does not know arrays of type {layout.library}")
            self._layouts[layout_key] = layout
        if packed.is_on_device and not layout.library:
            raise ValueError("a chunk of a host array arrived in device memory")
        if packed.n_rows * layout.dtype.itemsize != packed.buffer.nbytes:
            raise ValueError(
                f"{packed.n_rows} elements do not fit a buffer of {packed.buffer.nbytes} bytes"
            )
        return PlainBody(layout, packed, self._devices.get(layout.library))

    def sections(self, layout_key: bytes, packed: Packed) -> list[Section]:
        if layout_key == PICKLED:
            return [("pickle", 0, packed.buffer.nbytes, 1)]
        itemsize = ChunkLayout.from_key(layout_key).dtype.itemsize
        # No codec shrinks structures as numbers.
        return [("elements", 0, packed.buffer.nbytes, itemsize if itemsize <= 8 else 1)]

    def concatenate(self, index: Index, pieces: Sequence[Piece], empty: Empty = fresh) -> Any:
        """Join the pieces of output chunk `index`, in the order of the input chunks.

        Raises
        ------
        ValueError
            They are not the pieces of this chunk.
        """
        grid, places = self.rechunking.of_output(index)
        if len(pieces) != math.prod(grid):
            raise ValueError(f"{len(pieces)} pieces came instead of {math.prod(grid)}")
        libraries = {_library(piece.body) for piece in pieces}
        if len(libraries) > 1 or None in libraries:
            arrays = [
                _array(piece, lengths)
                if isinstance(piece.body, PlainBody)
                else piece.body.arrays[piece.start]
                for (_, lengths), piece in zip(places, pieces, strict=True)
            ]
            return self._join(_nested(arrays, grid))
        first: PlainBody = pieces[0].body
        dtype, device = first.layout.dtype, first.device
        shape = filled(self.rechunking.shape_of_output(index), first.layout.shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if device is None:
            out = empty(nbytes).view(dtype).reshape(shape)
        else:
            out = device.elements(device.empty(nbytes), dtype).reshape(shape)
        for (place, lengths), piece in zip(places, pieces, strict=True):
            out[place] = _array(piece, lengths)
        return out


def _library(body: Body) -> str | None:
    """Return the library of a body's pieces, or None if they are not plain memory."""
    return body.layout.library if isinstance(body, PlainBody) else None


def _array(piece: Piece, lengths: Shape) -> Any:
    body: PlainBody = piece.body
    shape = filled(lengths, body.layout.shape)
    if piece.stop - piece.start != n_rows_of(shape):
        raise ValueError(f"{piece.stop - piece.start} elements came for a piece of {shape}")
    return body.layout.shaped(body.elements(piece.start, piece.stop), shape)


def _nested(arrays: list[Any], grid: tuple[int, ...]) -> Any:
    """Nest the arrays in lists, one level for each axis of the grid."""
    for length in reversed(grid[1:]):
        ends = range(0, len(arrays) + 1, length)
        arrays = [arrays[a:b] for a, b in pairwise(ends)]
    return arrays

"""Chunks of arrays: cut, pack, unpack and join.

Each element is written three times. It is cut into a shard's buffer, moved if it leaves the
process, and put in its place in the output. A shard's buffer contains only its pieces, one after
the other. `frames.rechunking` computes their places in chunks.

Device arrays (`DeviceArrays`) take the same steps. Their shards are in device memory up to the
limit for shards, and in host memory beyond.

Some chunks are not plain memory: objects, subclasses, other kinds of arrays, and chunks with an
unexpected shape. Their own indexing cuts them, they travel as pickles, and the join is that of
stock Dask.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
import tokenize
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.adapter import (
    OBJECT_NBYTES,
    ArrivalAllocator,
    DeviceAllocator,
    DeviceMemory,
    Empty,
    Packed,
    Piece,
    Section,
    Sizeof,
    fresh,
    mean_nbytes,
)
from dask_gpurt.frames.pickling import Pickling
from dask_gpurt.frames.rechunking import Box, Index, Rechunking, Shape, filled

#: The layout of a shard with pickled pieces.
_PICKLED = b"pickle"
#: The wire format counts rows in 32 bits.
_MOST_ROWS = (1 << 32) - 1
#: Longest valid layout.
_LONGEST_LAYOUT = 1 << 16


@lru_cache(maxsize=1024)
def _parsed(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parse shape, order and type in a NumPy header. A run has few headers for many shards.

    NumPy parses with `ast`, which has one recursion counter for all threads in CPython 3.11. If two
    threads parse at the same time, one may fail. A retry succeeds.
    """
    for _ in range(2):
        with contextlib.suppress(SystemError):
            return _read(header)
    return _read(header)


def _read(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    file = io.BytesIO(header)
    np.lib.format.read_magic(file)
    return np.lib.format.read_array_header_1_0(file, _LONGEST_LAYOUT)


class DeviceArrays(Protocol):
    """The functions of a device array library that are not part of NumPy's interface.

    Queued work may still use new memory for its previous owner. Use it in `computing`.
    """

    @property
    def room(self) -> DeviceAllocator:
        """The allocator of memory for shards."""

    def elements(self, memory: Any, dtype: np.dtype[Any]) -> Any:
        """Return a one-dimensional array over memory."""

    def empty(self, nbytes: int) -> DeviceMemory:
        """Allocate memory for other data than shards."""

    def to_device(self, buffer: npt.NDArray[np.uint8]) -> DeviceMemory:
        """Copy host memory to the device. The copy is done on return."""

    def computing(self) -> AbstractContextManager[None]:
        """Return a context for work that follows all queued work, and is done at its end."""

    def arriving(self, sizes: Sequence[int]) -> list[DeviceMemory]:
        """Allocate room for shards that anything may write at once: the first ones that fit."""


#: Libraries by the full name of their array type. A library is loaded at its first array.
Devices = Mapping[str, Callable[[], DeviceArrays]]


@dataclass(frozen=True)
class ChunkLayout:
    """Type and shape of the input chunk of pieces, and the order of their elements.

    Attributes
    ----------
    library
        Name of the device array type; empty for NumPy.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    library: str = ""

    @staticmethod
    def of(chunk: Any, devices: Devices) -> ChunkLayout | None:
        """Return the layout of a chunk, or None unless its elements are plain memory."""
        # Subclasses have a meaning beyond their memory.
        kind = type(chunk)
        library = "" if kind is np.ndarray else f"{kind.__module__}.{kind.__qualname__}"
        if (library and library not in devices) or chunk.dtype.hasobject:
            return None
        if not chunk.dtype.itemsize:
            return None
        order = chunk.flags
        is_fortran = order.f_contiguous and not order.c_contiguous
        layout = ChunkLayout(chunk.dtype, chunk.shape, bool(is_fortran), library)
        return layout if layout.says_it_all else None

    @property
    def says_it_all(self) -> bool:
        """True if the dtype survives encoding and decoding."""
        if self.dtype.metadata is not None:
            return False
        if self.dtype.isbuiltin == 1:
            return True
        try:
            again = ChunkLayout.from_key(self.key).dtype
        except (ValueError, TypeError):
            return False
        # Equal dtypes may still differ in alignment or in being records, at any depth.
        return (
            type(again) is type(self.dtype)
            and again == self.dtype
            and again.type is self.dtype.type
            and repr(again) == repr(self.dtype)
        )

    @cached_property
    def key(self) -> bytes:
        """The library's name, followed by a NumPy file header with the layout."""
        file = io.BytesIO()
        if self.library:
            file.write(self.library.encode() + b"\n")
        head = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": self.is_fortran,
            "shape": self.shape,
        }
        np.lib.format.write_array_header_1_0(file, head)
        return file.getvalue()

    @staticmethod
    def from_key(key: bytes) -> ChunkLayout:
        library, header = "", key
        if not key.startswith(np.lib.format.MAGIC_PREFIX):
            name, _, header = key.partition(b"\n")
            library = name.decode("ascii")
        try:
            shape, is_fortran, dtype = _parsed(header)
        except (tokenize.TokenError, SyntaxError, TypeError, OverflowError) as error:
            # NumPy retries a header that it cannot parse. The retry fails with other errors.
            raise ValueError(f"no chunk has the layout {key!r}") from error
        if dtype.hasobject or not dtype.itemsize or any(length < 0 for length in shape):
            raise ValueError(f"no chunk has the layout {key!r}")
        return ChunkLayout(dtype, shape, is_fortran, library)

    def shaped(self, rows: Any, shape: tuple[int, ...]) -> Any:
        """Return a piece of this shape over its rows."""
        if 0 in shape:
            rows = rows[:0]
        return rows.reshape(shape, order="F" if self.is_fortran else "C")


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

    @cached_property
    def elements(self) -> Any:
        """The elements. Data of a device array moves to the device at first use and stays there."""
        if self.device is None:
            return self.packed.buffer.view(self.layout.dtype)
        if not self.packed.is_on_device:
            memory = self.device.to_device(self.packed.buffer)
            self.packed = Packed(memory, self.packed.n_rows)
        return self.device.elements(self.packed.buffer, self.layout.dtype)


@dataclass
class PickledBody:
    """Pieces that are arrays of any kind. A row is one array."""

    arrays: list[Any]
    nbytes: int
    layout_key: bytes = _PICKLED


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
        devices: _Libraries,
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
            self.layout_key = _PICKLED
            self.parts = [Part(output, box, (), 1) for output, box, _ in parts]
            self._object_nbytes = _object_nbytes(chunk, sizeof)
            self.row_nbytes = _held_nbytes(chunk, self._object_nbytes) / max(1, len(self.parts))
        else:
            self.layout_key = layout.key
            self.parts = []
            for output, box, lengths in parts:
                shape = filled(lengths, layout.shape)
                self.parts.append(Part(output, box, shape, _rows(shape)))
            self.row_nbytes = float(layout.dtype.itemsize)

    def cut(self, parts: Sequence[Part], leaves: bool, empty: Empty = fresh) -> Packed | Body:
        """Return a shard of these parts. A shard that leaves this process is one buffer."""
        chunk, layout = self._chunk, self._layout
        if layout is None:
            # Copy views: a view would keep the whole chunk and its base alive.
            arrays = [_own(chunk[part.box]) for part in parts]
            held = sum(_held_nbytes(array, self._object_nbytes) for array in arrays)
            pickled = PickledBody(arrays, held)
            return _pack(pickled, self._pickling, self._name) if leaves else pickled
        n_rows = sum(part.n_rows for part in parts)
        nbytes = n_rows * layout.dtype.itemsize
        device = self._devices.of(layout)
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


def _rows(shape: tuple[int, ...]) -> int:
    # An empty piece takes one row: an empty output gets its dtype from it.
    return math.prod(shape) or 1


def _own(array: Any) -> Any:
    return array if getattr(array, "base", None) is None else array.copy()


def _object_nbytes(chunk: Any, sizeof: Sizeof) -> float:
    """Return the bytes of an element outside its array, if it is or contains objects."""
    if not isinstance(chunk, np.ndarray) or not chunk.dtype.hasobject:
        return OBJECT_NBYTES
    return mean_nbytes(np.asarray(chunk).flat, sizeof)


def _held_nbytes(array: Any, object_nbytes: float = OBJECT_NBYTES) -> int:
    """Estimate the bytes of an array of any kind."""
    nbytes = int(getattr(array, "nbytes", OBJECT_NBYTES))
    if getattr(getattr(array, "dtype", None), "hasobject", False):
        nbytes += int(getattr(array, "size", 1) * object_nbytes)
    return nbytes


def _pack(body: PickledBody, pickling: Pickling, what: str) -> Packed:
    data = pickling.dump(body.arrays, what)
    return Packed(np.frombuffer(data, np.uint8), len(body.arrays), pickle_nbytes=len(data))


class _Libraries:
    """The device array libraries. Each is loaded at first use."""

    def __init__(self, known: Devices) -> None:
        self.known = known
        self._loaded: dict[str, DeviceArrays] = {}

    def of(self, layout: ChunkLayout) -> DeviceArrays | None:
        """Return the library of a layout; None for NumPy."""
        return self[layout.library] if layout.library else None

    def __getitem__(self, name: str) -> DeviceArrays:
        found = self._loaded.get(name)
        if found is None:
            found = self._loaded.setdefault(name, self.known[name]())
        return found


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
        self._devices = _Libraries(devices or {})
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
        return _pack(body, self._pickling, "a piece of an array")

    def unpack(self, layout_key: bytes, packed: Packed) -> Body:
        if layout_key == _PICKLED:
            if packed.pickle_nbytes != packed.buffer.nbytes:
                raise ValueError("a pickled shard has bytes beside the pickle")
            arrays = self._pickling.load_columns(packed.buffer.data, lambda: "pieces of an array")
            if len(arrays) != packed.n_rows:
                raise ValueError(f"{len(arrays)} pieces came instead of {packed.n_rows}")
            return PickledBody(arrays, max(packed.pickle_nbytes, sum(map(_held_nbytes, arrays))))
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
        return PlainBody(layout, packed, self._devices.of(layout))

    def sections(self, layout_key: bytes, packed: Packed) -> list[Section]:
        if layout_key == _PICKLED:
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
    if piece.stop - piece.start != _rows(shape):
        raise ValueError(f"{piece.stop - piece.start} elements came for a piece of {shape}")
    return body.layout.shaped(body.elements[piece.start : piece.stop], shape)


def _nested(arrays: list[Any], grid: tuple[int, ...]) -> Any:
    """Nest the arrays in lists, one level for each axis of the grid."""
    for length in reversed(grid[1:]):
        ends = range(0, len(arrays) + 1, length)
        arrays = [arrays[a:b] for a, b in pairwise(ends)]
    return arrays

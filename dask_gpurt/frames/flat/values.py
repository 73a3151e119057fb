"""Conversion of any task output to a header and plain buffers, and back.

`flatten` copies no plain memory. `restore` builds the value over the given memory. A value without
a layout of its own is pickled with out-of-band buffers, as Dask does.

Tuples, lists and dicts are decomposed if they contain frames, arrays or memoryviews, and no other
objects. Other objects may refer to one another or to the arrays, and only a pickle of the whole
preserves such references. An object that occurs twice in a container is stored once. This module
does no I/O.

The header is for a process of the same environment, on the same machine::

    offset  size
         0     4  magic "GRV\\x01": the last byte is the version
         4     4  CRC-32 of everything after it, little-endian
         8        msgpack: bytes of each buffer, node of the value (`frames.flat.flattening`)
"""

from __future__ import annotations

import datetime
import functools
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.flat.flat_arrays import array_node, array_of, is_plain
from dask_gpurt.frames.flat.flattening import Buffer, LibraryNodes, Node, OutOf, is_scalar
from dask_gpurt.frames.pickling import Dumps, Loads

MAGIC = b"GRV"
VERSION = 1

_PREAMBLE = struct.Struct("<3sBI")
#: Containers with more items are pickled. Pickle is faster for many small items, and it handles
#: containers that contain themselves.
_MOST_ITEMS = 10_000
_DEEPEST = 32
#: Plain containers with at most this many items go into the header.
_FEW_ITEMS = 64
#: Smaller pickles go into the header.
_SMALL_PICKLE_NBYTES = 512

#: Decomposes a value with the serializer registered for its type; None if there is none.
TakeApart = Callable[[Any], tuple[bytes, Sequence[memoryview]] | None]
#: The inverse of `TakeApart`.
Rebuild = Callable[[bytes, Sequence[memoryview]], Any]


class DeviceBuffer(Protocol):
    """A buffer of a decomposed value that is still in device memory."""

    @property
    def nbytes(self) -> int:
        """Return the number of bytes."""

    def copy_into(self, parts: Sequence[Buffer]) -> None:
        """Fill pieces of host memory, one after the other. The copy is done on return."""


@dataclass(frozen=True)
class Flat:
    """A decomposed value.

    Attributes
    ----------
    header
        A small description that restores the value from its buffers.
    buffers
        Its memory: one-dimensional, contiguous arrays of bytes, or buffers on a device.
    """

    header: bytes
    buffers: tuple[npt.NDArray[Any] | DeviceBuffer, ...]

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """The buffers of a value that is on the host.

        Raises
        ------
        TypeError
            A buffer is on a device.
        """
        found = tuple(buffer for buffer in self.buffers if isinstance(buffer, np.ndarray))
        if len(found) < len(self.buffers):
            raise TypeError("a buffer of this value is on a device: call on_host() first")
        return found

    def on_host(self) -> Flat:
        """Return the value with all buffers in host memory. Arrays are not copied."""
        found = []
        for buffer in self.buffers:
            if not isinstance(buffer, np.ndarray):
                host = np.empty(buffer.nbytes, dtype=np.uint8)
                buffer.copy_into([host])
                buffer = host
            found.append(buffer)
        return Flat(self.header, tuple(found))

    @cached_property
    def nbytes(self) -> int:
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)


def flatten(value: Any, dumps: Dumps = pickle.dumps, take_apart: TakeApart | None = None) -> Flat:
    """Decompose a value.

    Parameters
    ----------
    take_apart
        Called first for values without a layout of their own, except those inside containers that
        have one.
    dumps
        Pickles all other values.

    Returns
    -------
    Flat
        Its buffers are views of the value's memory, except where that has gaps. They are valid
        until the value changes.

    Raises
    ------
    TypeError
        The value, or a part of it, cannot be pickled.
    """
    into = _Flattening(dumps, take_apart)
    node = into.node(value)
    sealed = msgpack.packb([[buffer.nbytes for buffer in into.buffers], node])
    header = _PREAMBLE.pack(MAGIC, VERSION, zlib.crc32(sealed)) + sealed
    return Flat(header, tuple(into.buffers))


def restore(
    header: bytes,
    buffers: Sequence[Buffer],
    loads: Loads = pickle.loads,
    rebuild: Rebuild | None = None,
) -> Any:
    """Compose a value over the given memory. This is the inverse of `flatten`.

    Arrays are writable if their buffers are, except arrays that were read-only. Buffers should
    start on 64-byte boundaries. Unaligned buffers work, but slowly.

    Raises
    ------
    ValueError
        Header and buffers are not a result of `flatten`.
    Exception
        Any error of the value's own code: of its class, or of the serializer registered for it.
    """
    restoring = _Restoring(buffers, loads, rebuild)
    try:
        nbytes, node = _decoded(header)
        if nbytes != [buffer.nbytes for buffer in buffers]:
            raise ValueError("the buffers of a value differ in length from its header")
        return restoring.value(node)
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        if restoring.is_error_of_others:
            raise
        raise ValueError(f"a value cannot be restored: {error!r}") from error


def _decoded(header: bytes) -> tuple[list[int], Node]:
    if len(header) < _PREAMBLE.size:
        raise ValueError("the header of a value is cut short")
    magic, version, seal = _PREAMBLE.unpack_from(header)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"the header of a value does not have version {VERSION}")
    sealed = memoryview(header)[_PREAMBLE.size :]
    if zlib.crc32(sealed) != seal:
        raise ValueError("the header of a value is damaged")
    nbytes, node = msgpack.unpackb(sealed)
    return nbytes, node


class _Flattening:
    """A value that is being decomposed."""

    def __init__(self, dumps: Dumps, take_apart: TakeApart | None) -> None:
        self.buffers: list[Buffer] = []
        self._dumps = dumps
        self._take_apart = take_apart
        #: Node of each object, by its address. The reference to the object keeps the address
        #: unique.
        self._seen: dict[int, tuple[Any, list[Any]]] = {}
        #: Whether all containers are decomposed: pickled alone, some would lose a shared object.
        self._is_sharing = False
        self._n_shared = 0

    def add(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def node(self, value: Any) -> Node:
        if is_scalar(value):
            return value
        seen = self._seen.get(id(value))
        if seen is None:
            node = self._made(value)
            self._seen[id(value)] = (value, node)
            return node
        node = seen[1]
        if node[0] != "first":
            # Earlier references hold this same list, so change it in place.
            node[:] = ["first", self._n_shared, list(node)]
            self._n_shared += 1
        return ["again", node[1]]

    def _made(self, value: Any) -> list[Any]:
        made: list[Any]
        if is_plain(value):
            made = array_node(value, self)
        elif (library := _library_of(value)) is not None:
            made = library.node(value, self)
        elif type(value) in (bytes, bytearray) and len(value) > _SMALL_PICKLE_NBYTES:
            made = [type(value).__name__, self.add(np.frombuffer(value, np.uint8))]
        elif type(value) in (tuple, list) and self._is_decomposed(value):
            made = [type(value).__name__, [self.node(item) for item in value]]
        elif type(value) is dict and self._is_decomposed(value):
            # Keys first, as in `_dict_of`: both orders must agree on the first of two references.
            keys = self.node(list(value))
            made = ["dict", keys, [self.node(item) for item in value.values()]]
        else:
            made = self._registered(value) or self.pickled(value)
        return made

    def _is_decomposed(self, container: Any) -> bool:
        if not self._is_sharing:
            judged = _judged(container)
            if not judged.is_worth_it:
                return False
            self._is_sharing = judged.is_sharing
        return True

    def _registered(self, value: Any) -> Node:
        apart = self._take_apart(value) if self._take_apart is not None else None
        if apart is None:
            return None
        header, frames = apart
        return ["registered", header, [self.add(np.asarray(frame)) for frame in frames]]

    def pickled(self, value: Any) -> Node:
        apart: list[pickle.PickleBuffer] = []
        try:
            data = self._dumps(value, protocol=5, buffer_callback=apart.append)
            views = [buffer.raw() for buffer in apart]
        except MemoryError:
            raise
        except Exception as error:
            raise TypeError(
                f"a value of type {_name_of(value)} cannot be pickled: {error}"
            ) from error
        numbers = [self.add(np.asarray(view)) for view in views]
        small = len(data) <= _SMALL_PICKLE_NBYTES
        stream = data if small else self.add(np.frombuffer(data, np.uint8))
        return ["pickle", stream, numbers, [view.readonly for view in views]]


class _Restoring:
    """A value that is being composed."""

    def __init__(self, buffers: Sequence[Buffer], loads: Loads, rebuild: Rebuild | None) -> None:
        self._buffers = buffers
        self._loads = loads
        self._rebuild = rebuild
        #: Whether foreign code raised the error. Storing the error would keep this object alive.
        self.is_error_of_others = False
        self._shared: dict[int, Any] = {}

    def buffer(self, number: int) -> Buffer:
        return self._buffers[number]

    def value(self, node: Node) -> Any:
        if not isinstance(node, list):
            return node
        return _maker_of(node[0])(node, self)

    def first(self, node: Node) -> Any:
        _, number, inner = node
        made = self._shared[number] = self.value(inner)
        return made

    def again(self, node: Node) -> Any:
        return self._shared[node[1]]

    def unpickled(self, node: Node) -> Any:
        _, stream, numbers, read_only = node
        data = stream if isinstance(stream, bytes) else self.buffer(stream).data
        views = [
            self.buffer(number).data.toreadonly() if fixed else self.buffer(number).data
            for number, fixed in zip(numbers, read_only, strict=True)
        ]
        with self._code_of_others():
            return self._loads(data, buffers=views)

    def rebuilt(self, node: Node) -> Any:
        _, header, numbers = node
        assert self._rebuild is not None
        frames = [self.buffer(number).data for number in numbers]
        with self._code_of_others():
            return self._rebuild(header, frames)

    @contextmanager
    def _code_of_others(self) -> Iterator[None]:
        """Record errors of foreign code."""
        try:
            yield
        except BaseException:
            self.is_error_of_others = True
            raise


def _dict_of(node: Node, out_of: OutOf) -> dict[Any, Any]:
    _, keys, values = node
    return dict(zip(out_of.value(keys), map(out_of.value, values), strict=True))


#: Function that composes the value of each kind of node without a library of its own.
_MAKERS: dict[str, Callable[[Node, Any], Any]] = {
    "array": array_of,
    "bytes": lambda node, out_of: out_of.buffer(node[1]).tobytes(),
    "bytearray": lambda node, out_of: bytearray(out_of.buffer(node[1])),
    "tuple": lambda node, out_of: tuple(map(out_of.value, node[1])),
    "list": lambda node, out_of: list(map(out_of.value, node[1])),
    "dict": _dict_of,
    "pickle": lambda node, out_of: out_of.unpickled(node),
    "registered": lambda node, out_of: out_of.rebuilt(node),
    "first": lambda node, out_of: out_of.first(node),
    "again": lambda node, out_of: out_of.again(node),
}


@functools.cache
def _nodes_of(library: str) -> LibraryNodes:
    # Not at import: every worker imports this module, and a program may need no pandas.
    if library == "pandas":
        from dask_gpurt.frames.flat import flat_pandas

        return flat_pandas.NODES
    from dask_gpurt.frames.flat import flat_arrow

    return flat_arrow.NODES


def _library_of(value: Any) -> LibraryNodes | None:
    """Return the nodes of a value's library, if it has one that takes the value."""
    library = str(type(value).__module__).partition(".")[0]
    if library not in ("pandas", "pyarrow"):
        return None
    nodes = _nodes_of(library)
    return nodes if nodes.accepts(value) else None


def _maker_of(kind: str) -> Callable[[Node, Any], Any]:
    if kind in _MAKERS:
        return _MAKERS[kind]
    return _nodes_of("pyarrow" if kind.startswith("arrow ") else "pandas").makers[kind]


#: Types, besides scalars, that contain no references another object could share.
_PLAIN_TYPES = frozenset({bytes, bytearray, str, int, complex})
_PLAIN_KINDS = (np.generic, np.dtype, datetime.date, datetime.time, datetime.timedelta, Decimal)


def _refers_to_nothing(item: Any) -> bool:
    return type(item) in _PLAIN_TYPES or isinstance(item, _PLAIN_KINDS)


class _Judged(NamedTuple):
    """Whether to decompose a container, and whether one of its objects occurs twice in it."""

    is_worth_it: bool
    is_sharing: bool


def _judged(container: Any) -> _Judged:
    """Judge a container. It must contain frames or arrays, or few scalars, and no other objects."""
    has_memory, all_scalars = False, True
    met: set[int] = set()
    n_met = 0
    n_items = 0
    waiting = [(container, 0)]
    while waiting:
        inner, depth = waiting.pop()
        items = [*inner, *inner.values()] if type(inner) is dict else inner
        n_items += len(items)
        if n_items > _MOST_ITEMS or depth > _DEEPEST:
            return _Judged(False, False)
        for item in items:
            if is_scalar(item):
                continue
            met.add(id(item))
            n_met += 1
            if type(item) in (tuple, list, dict):
                waiting.append((item, depth + 1))
            elif is_plain(item) or type(item) is memoryview or _library_of(item) is not None:
                has_memory = True
            elif _refers_to_nothing(item):
                all_scalars = False
            else:
                return _Judged(False, False)
    is_worth_it = has_memory or (all_scalars and n_items <= _FEW_ITEMS)
    return _Judged(is_worth_it, len(met) < n_met)


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"

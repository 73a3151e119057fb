"""Any task output as plain buffers, and back: how a value is kept outside of Python's objects.

`flatten` copies nothing where a value's memory is plain, `restore` builds the value over the memory
it is given. What has no layout of its own goes by pickle with its buffers apart, as Dask itself
would. Tuples, lists and dicts are taken apart where they hold frames or arrays, and no objects of
other kinds: those may refer to one another, or to the arrays, which only a pickle of all of it
keeps. What stands in such a container twice is kept once. This module does no I/O.

The header is for a process of the same environment, on the same machine::

    offset  size
         0     4  magic "GRV\\x01": the last byte is the version
         4     4  CRC-32 of everything after it, little-endian
         8        msgpack: bytes of each buffer, node of the value (`frames.flat.flattening`)
"""

from __future__ import annotations

import datetime
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.flat import flat_pandas
from dask_gpurt.frames.flat.flat_arrays import array_node, array_of, is_plain
from dask_gpurt.frames.flat.flat_arrow import arrow_node, arrow_of, is_arrow
from dask_gpurt.frames.flat.flat_pandas import is_pandas, pandas_node
from dask_gpurt.frames.flat.flattening import Buffer, Node, OutOf, is_scalar
from dask_gpurt.frames.pickling import Dumps, Loads

MAGIC = b"GRV"
VERSION = 1

_PREAMBLE = struct.Struct("<3sBI")
#: Containers are looked through up to here. Pickle is faster for many small things, and it knows
#: what to do with a container that holds itself.
_MOST_ITEMS = 10_000
_DEEPEST = 32
#: Plain containers up to here are written down as they are.
_FEW_ITEMS = 64
#: Pickles up to here go into the header.
_SMALL_PICKLE_NBYTES = 512

#: Takes a value apart by a serializer that was registered for its type; None if there is none.
TakeApart = Callable[[Any], tuple[bytes, Sequence[memoryview]] | None]
#: Its inverse.
Rebuild = Callable[[bytes, Sequence[memoryview]], Any]


@dataclass(frozen=True)
class Flat:
    """A value taken apart.

    Attributes
    ----------
    header
        What it takes to put it together again; small.
    buffers
        Its memory: one-dimensional, contiguous arrays of bytes.
    """

    header: bytes
    buffers: tuple[npt.NDArray[Any], ...]

    @cached_property
    def nbytes(self) -> int:
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)


def flatten(value: Any, dumps: Dumps = pickle.dumps, take_apart: TakeApart | None = None) -> Flat:
    """Take a value apart.

    Parameters
    ----------
    take_apart
        Asked first for what has no layout of its own. Not asked for what is in a container that
        has one.
    dumps
        Pickles what is left.

    Returns
    -------
    Flat
        Its buffers are views of the value's own memory wherever that has no gaps. They are what the
        value is as long as nobody writes to it.

    Raises
    ------
    TypeError
        The value, or something in it, cannot be pickled.
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
    """Put a value together over the memory given; the inverse of `flatten`.

    Arrays are writable if their buffers are, but for those that were read-only. Buffers should
    begin on 64-byte boundaries: what lies askew is right, but slow.

    Raises
    ------
    ValueError
        Header and buffers are not what `flatten` made.
    Exception
        Whatever the value's own code raises as it is put together: that of its class, or of a
        serializer that was registered for it.
    """
    restoring = _Restoring(buffers, loads, rebuild)
    try:
        nbytes, node = _decoded(header)
        if nbytes != [buffer.nbytes for buffer in buffers]:
            raise ValueError("the buffers of a value do not have the lengths in its header")
        return restoring.value(node)
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        if restoring.is_error_of_others:
            raise
        raise ValueError(f"a value cannot be put together: {error!r}") from error


def _decoded(header: bytes) -> tuple[list[int], Node]:
    if len(header) < _PREAMBLE.size:
        raise ValueError("header of a value cut short")
    magic, version, seal = _PREAMBLE.unpack_from(header)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"not the header of a value, version {VERSION}")
    sealed = memoryview(header)[_PREAMBLE.size :]
    if zlib.crc32(sealed) != seal:
        raise ValueError("header of a value is damaged")
    nbytes, node = msgpack.unpackb(sealed)
    return nbytes, node


class _Flattening:
    """A value that is being taken apart."""

    def __init__(self, dumps: Dumps, take_apart: TakeApart | None) -> None:
        self.buffers: list[Buffer] = []
        self._dumps = dumps
        self._take_apart = take_apart
        #: Node of each object by its address, which the object, held here, keeps to itself.
        self._seen: dict[int, tuple[Any, list[Any]]] = {}
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
            # Those before us hold this very list.
            node[:] = ["first", self._n_shared, list(node)]
            self._n_shared += 1
        return ["again", node[1]]

    def _made(self, value: Any) -> list[Any]:
        made: list[Any]
        if is_plain(value):
            made = array_node(value, self)
        elif is_pandas(value):
            made = pandas_node(value, self)
        elif is_arrow(value):
            made = arrow_node(value, self)
        elif type(value) in (bytes, bytearray) and len(value) > _SMALL_PICKLE_NBYTES:
            made = [type(value).__name__, self.add(np.frombuffer(value, np.uint8))]
        elif type(value) in (tuple, list) and _is_worth_it(value):
            made = [type(value).__name__, [self.node(item) for item in value]]
        elif type(value) is dict and _is_worth_it(value):
            # Keys come first, as they do when it is put together: what is in both is shared.
            keys = self.node(list(value))
            made = ["dict", keys, [self.node(item) for item in value.values()]]
        else:
            made = self._registered(value) or self.pickled(value)
        return made

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
                f"a value of type {_name_of(value)} cannot be kept outside of its objects: {error}"
            ) from error
        numbers = [self.add(np.asarray(view)) for view in views]
        small = len(data) <= _SMALL_PICKLE_NBYTES
        stream = data if small else self.add(np.frombuffer(data, np.uint8))
        return ["pickle", stream, numbers, [view.readonly for view in views]]


class _Restoring:
    """A value that is being put together."""

    def __init__(self, buffers: Sequence[Buffer], loads: Loads, rebuild: Rebuild | None) -> None:
        self._buffers = buffers
        self._loads = loads
        self._rebuild = rebuild
        #: Whether code of others raised what was raised. The error itself would hold this.
        self.is_error_of_others = False
        self._shared: dict[int, Any] = {}

    def buffer(self, number: int) -> Buffer:
        return self._buffers[number]

    def value(self, node: Node) -> Any:
        if not isinstance(node, list):
            return node
        return _MAKERS[node[0]](node, self)

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
        """Notes that an error is not ours."""
        try:
            yield
        except BaseException:
            self.is_error_of_others = True
            raise


def _dict_of(node: Node, out_of: OutOf) -> dict[Any, Any]:
    _, keys, values = node
    return dict(zip(out_of.value(keys), map(out_of.value, values), strict=True))


#: How each kind of node becomes a value.
_MAKERS: dict[str, Callable[[Node, Any], Any]] = {
    "array": array_of,
    "frame": flat_pandas.frame_of,
    "series": flat_pandas.series_of,
    "range": flat_pandas.range_of,
    "multi": flat_pandas.multi_of,
    "labels": flat_pandas.labels_of,
    "index": flat_pandas.index_of,
    "arrow array": arrow_of,
    "arrow chunks": arrow_of,
    "arrow table": arrow_of,
    "arrow batch": arrow_of,
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


#: Besides scalars, what refers to nothing that anything else could refer to.
_PLAIN_TYPES = frozenset({bytes, bytearray, str, int, complex})
_PLAIN_KINDS = (np.generic, np.dtype, datetime.date, datetime.time, datetime.timedelta, Decimal)


def _refers_to_nothing(item: Any) -> bool:
    return type(item) in _PLAIN_TYPES or isinstance(item, _PLAIN_KINDS)


def _is_worth_it(container: Any) -> bool:
    """Whether a container is taken apart: it holds frames or arrays, or little, and no objects."""
    has_memory, all_scalars = False, True
    n_items = 0
    waiting = [(container, 0)]
    while waiting:
        inner, depth = waiting.pop()
        items = [*inner, *inner.values()] if type(inner) is dict else inner
        n_items += len(items)
        if n_items > _MOST_ITEMS or depth > _DEEPEST:
            return False
        for item in items:
            if type(item) in (tuple, list, dict):
                waiting.append((item, depth + 1))
            elif is_plain(item) or is_pandas(item) or is_arrow(item):
                has_memory = True
            elif not is_scalar(item):
                if not _refers_to_nothing(item):
                    return False
                all_scalars = False
    return has_memory or (all_scalars and n_items <= _FEW_ITEMS)


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"

"""The port that a kind of data implements to be exchanged.

A *frame* here is one partition, such as a DataFrame of pandas or cuDF. The exchange asks an adapter
to open a partition, group its rows, gather some of them, and concatenate pieces of shards. The
exchange never looks inside a frame. Shards may lie in device memory; call `on_host` to get their
bytes in host memory.

Every adapter must pass `tests/conformance/frame_suite.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.gather import Rows

#: Returns an uninitialized array of the given number of bytes.
Empty = Callable[[int], npt.NDArray[np.uint8]]
#: Returns the bytes of a Python object, including its parts.
Sizeof = Callable[[Any], int]
#: A range of bytes of one kind in a packed shard: name, offset, bytes, bytes of one item.
Section = tuple[str, int, int, int]

#: Size of shards in device memory. A shard of any size costs a device a few hundred microseconds,
#: and an H100 copies as much as this in 45.
DEVICE_SHARD_NBYTES = 64 << 20

#: Assumed size of a Python object that was not measured.
OBJECT_NBYTES = 64
#: Objects measured per column. Larger samples cost more time than they add accuracy.
_MOST_MEASURED = 100


def fresh(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return new memory from NumPy."""
    return np.empty(nbytes, dtype=np.uint8)


def mean_nbytes(values: Any, sizeof: Sizeof) -> float:
    """Return the average size of the objects in an array, from a sample.

    This measures the objects, not their pickles: a shard holds the objects, and numbers in lists
    take several times the bytes of their pickle. An object that occurs several times counts once.
    """
    sample = values[:: -(-len(values) // _MOST_MEASURED) or 1].tolist()
    distinct = {id(value): value for value in sample}
    return sum(map(sizeof, distinct.values())) / max(1, len(sample))


class DeviceMemory(Protocol):
    """Bytes in device memory, which a transport may send from there, or write there.

    All work that fills or reads the memory is done when it is handed over, so the receiver needs no
    stream.
    """

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int:
        """Return the number of bytes."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...

    def copy_to_host(self, out: npt.NDArray[np.uint8], start: int = 0) -> None:
        """Fill `out` with the bytes from `start` on. The copy is done on return."""


#: Returns device memory of the given size, or None if the device has no room for it.
DeviceAllocator = Callable[[int], DeviceMemory | None]
#: Returns device memory for the first of some sizes, as far as the device has room. No queued work
#: uses it any more. One wait serves all: on a device that processes share, it takes milliseconds.
ArrivalAllocator = Callable[[Sequence[int]], list[DeviceMemory]]


def while_room(room: DeviceAllocator, sizes: Iterable[int]) -> list[DeviceMemory]:
    """Allocate memory of these sizes until there is no room."""
    found = []
    for nbytes in sizes:
        memory = room(nbytes)
        if memory is None:
            break
        found.append(memory)
    return found


class Body(Protocol):
    """The rows of one shard in memory, ready to be concatenated."""

    @property
    def layout_key(self) -> bytes:
        """Encoded layout. Bodies with equal keys consist of the same parts."""

    @property
    def nbytes(self) -> int:
        """Bytes that the body keeps in memory."""


@dataclass(frozen=True)
class Packed:
    """The rows of one shard in one buffer, ready to be sent or unpacked.

    Attributes
    ----------
    buffer
        Contiguous bytes in three sections: fixed-width parts, an Arrow stream, and a description (a
        pickle, or the contents of device columns). The buffer is an array in host memory, or
        `DeviceMemory`.
    n_rows
        Number of rows.
    arrow_nbytes, pickle_nbytes
        Lengths of the last two sections. The first section takes the rest.
    """

    buffer: Any
    n_rows: int
    arrow_nbytes: int = 0
    pickle_nbytes: int = 0

    @property
    def is_on_device(self) -> bool:
        return not isinstance(self.buffer, np.ndarray)


def on_host(packed: Packed, empty: Empty = fresh) -> Packed:
    """Return the shard in host memory. A shard in host memory is returned unchanged."""
    if not packed.is_on_device:
        return packed
    buffer = empty(packed.buffer.nbytes)
    packed.buffer.copy_to_host(buffer)
    return replace(packed, buffer=buffer)


class Piece(NamedTuple):
    """Rows `start` to `stop` of a body: the share of one shard in one output partition."""

    body: Any
    start: int
    stop: int


@dataclass(frozen=True)
class Selection:
    """Row numbers that become one shard, and the source of host memory for it.

    Attributes
    ----------
    rows
        Row numbers: an array of the adapter's library, or of NumPy.
    ascending
        The numbers ascend, as those of one slot do.
    """

    rows: Any
    leaves: bool
    empty: Empty = fresh
    ascending: bool = False


#: See `BodyAdapter.merge`.
Merge = Callable[[Sequence[Any], Sequence[Selection]], list[Any]]


class Slots(Protocol):
    """The mapping from output partitions to slots."""

    @property
    def n_slots(self) -> int: ...

    @property
    def slot_table(self) -> npt.NDArray[np.intp]:
        """Slot of each partition, by its number. The last entry, -1, is for any other number."""

    def slots(self, partitions: npt.NDArray[Any]) -> Rows:
        """Return the slot of each row; -1 if no worker wants the row."""


class GatheredRows(Protocol):
    """Rows of one layout, decomposed once, that are gathered into shards."""

    @property
    def layout_key(self) -> bytes:
        """Encoded layout of all shards of these rows."""

    @property
    def row_nbytes(self) -> float:
        """Average bytes of a row."""

    def gather(self, selections: Sequence[Selection]) -> list[Any]:
        """Gather a `Packed` for each selection that leaves this process, and a body for the others.

        One call serves all selections, so that each column is gathered for all shards while it is
        in the cache. Gathering shard by shard would read each cache line of a column once for each
        shard.
        """


class OpenPartition(GatheredRows, Protocol):
    """One input partition."""

    def group(self, slots: Slots) -> tuple[Any, npt.ArrayLike]:
        """Sort the row numbers by slot and keep their order within each slot.

        Returns
        -------
        rows, offsets
            `rows[offsets[s]:offsets[s + 1]]` are the row numbers of slot `s`, ascending: an array
            of the adapter's library.
        """


class JoinedPartitions(GatheredRows, Protocol):
    """Several input partitions of one layout, whose rows are numbered one after the other."""

    def group_sources(self, slots: Slots) -> tuple[Any, npt.ArrayLike, npt.NDArray[np.int64]]:
        """Sort the row numbers by slot, as `OpenPartition.group` does.

        Returns
        -------
        rows, offsets, n_rows
            The last is the number of rows of each partition in each slot, of shape (number of
            partitions, number of slots).
        """


#: See `FrameAdapter.join`.
Join = Callable[[Sequence[Any]], JoinedPartitions]


class BodyAdapter(Protocol):
    """The methods that send, spill and read back a body.

    Attributes
    ----------
    allocate_device
        Allocates memory for arriving shards, for transports that can write to a device. None for
        data in host memory.
    """

    allocate_device: ArrivalAllocator | None

    @property
    def merge(self) -> Merge | None:
        """Gathers rows of several bodies of one layout into new bodies, one for each selection.

        Rows are numbered as if the bodies were concatenated. No selection leaves this process. None
        if merging does not pay for this kind of data.
        """

    def pack(self, body: Any) -> Packed:
        """Return the body in one buffer for the disk, without a copy if possible."""

    def unpack(self, layout_key: bytes, packed: Packed) -> Any:
        """Return the body over the memory of `packed`. This is the inverse of `pack`.

        Raises
        ------
        ValueError
            The layout or the lengths do not describe the buffer.
        """

    def sections(self, layout_key: bytes, packed: Packed) -> list[Section]:
        """Return where `packed` holds bytes of one kind, for compression.

        Returns
        -------
        list of Section
            Sections in order, without overlap, that cover the buffer. Shards of one layout use the
            same names for the same sections.
        """


class FrameAdapter(BodyAdapter, Protocol):
    """The methods that the exchange needs for one kind of data.

    Attributes
    ----------
    shard_nbytes
        Target size of a shard; None for the size of the plan.
    """

    shard_nbytes: int | None

    @property
    def join(self) -> Join | None:
        """Takes several input partitions of one layout together.

        None if that does not pay for this kind of data. All workers must give the same answer.
        """

    def open(self, frame: Any) -> OpenPartition:
        """Decompose an input partition.

        Raises
        ------
        TypeError
            `frame` is of another kind.
        ValueError
            The columns differ from those of the shuffle's meta.
        """

    def concatenate(self, pieces: Sequence[Piece], empty: Empty = fresh) -> Any:
        """Concatenate the pieces in their order to an output partition. No pieces: an empty one."""

"""The port a kind of data implements so that it can be exchanged.

A *frame* here is whatever one partition is: a DataFrame of pandas or of cuDF. The exchange only
ever asks an adapter to open a partition, group its rows, gather some of them, and concatenate
pieces of shards; it never looks inside. What an adapter makes may lie in the memory of a device:
whoever needs its bytes in the host's asks `on_host` for them.
`tests/conformance/frame_suite.py` is the suite every adapter has to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.gather import Rows

#: Where memory comes from: bytes wanted to an uninitialised array of them.
Empty = Callable[[int], npt.NDArray[np.uint8]]
#: Bytes that a Python object takes, with what it is made of.
Sizeof = Callable[[Any], int]

#: Bytes of a Python object that was not measured.
OBJECT_NBYTES = 64
#: Objects of a column that are measured. More take longer than they tell.
_MOST_MEASURED = 100


def fresh(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory from NumPy."""
    return np.empty(nbytes, dtype=np.uint8)


def mean_nbytes(values: Any, sizeof: Sizeof) -> float:
    """Bytes that one of some objects takes on average, by a sample of them.

    Measured are the objects and not their pickle: they are what a shard holds, and numbers in
    lists take several times what is pickled of them. Those that are the same object count once.
    """
    sample = values[:: -(-len(values) // _MOST_MEASURED) or 1].tolist()
    distinct = {id(value): value for value in sample}
    return sum(map(sizeof, distinct.values())) / max(1, len(sample))


class DeviceMemory(Protocol):
    """Bytes in the memory of a device: what a transport may send from there, or write there.

    Work that fills or reads it is done when it changes hands, so that nobody needs to know of
    streams.
    """

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int:
        """Bytes, as of an array of them."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...

    def copy_to_host(self, out: npt.NDArray[np.uint8], start: int = 0) -> None:
        """Fill `out` with the bytes from `start` on; they are there on return."""


#: Memory of the device for so many bytes; None if it has no room to spare for them.
Landing = Callable[[int], DeviceMemory | None]


class Body(Protocol):
    """Rows of one shard, in memory, ready to be concatenated."""

    @property
    def layout_key(self) -> bytes:
        """Encoded layout; bodies with equal keys were taken apart in the same way."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""


@dataclass(frozen=True)
class Packed:
    """Rows of one shard as one buffer, ready to leave the process or to be unpacked.

    Attributes
    ----------
    buffer
        Contiguous bytes: fixed-width parts, then an Arrow stream, then what says how to read them
        (a pickle, or the contents of device columns). In memory of the host or, `DeviceMemory`, of
        a device.
    n_rows
        Rows in it.
    arrow_nbytes, pickle_nbytes
        Lengths of the last two sections; what is left is the first.
    """

    buffer: Any
    n_rows: int
    arrow_nbytes: int = 0
    pickle_nbytes: int = 0

    @property
    def is_on_device(self) -> bool:
        return not isinstance(self.buffer, np.ndarray)


def on_host(packed: Packed, empty: Empty = fresh) -> Packed:
    """The same in memory of the host; what is there already is passed on as it is."""
    if not packed.is_on_device:
        return packed
    buffer = empty(packed.buffer.nbytes)
    packed.buffer.copy_to_host(buffer)
    return replace(packed, buffer=buffer)


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a body: what one shard has for one output partition."""

    body: Any
    start: int
    stop: int


@dataclass(frozen=True)
class Selection:
    """Rows that become one shard, and where host memory for it comes from.

    Attributes
    ----------
    rows
        Numbers of rows: an array of the adapter's library, or of NumPy.
    ascending
        Whether the numbers ascend, as those of one slot do.
    """

    rows: Any
    leaves: bool
    empty: Empty = fresh
    ascending: bool = False


class Slots(Protocol):
    """Which slot a row belongs to, by the number of its output partition."""

    @property
    def n_slots(self) -> int: ...

    @property
    def slot_table(self) -> npt.NDArray[np.intp]:
        """Slot of each partition, by its number; the last entry, -1, is for any other number."""

    def slots(self, partitions: npt.NDArray[Any]) -> Rows:
        """Slot of each row, -1 for those that nobody wants."""


class OpenPartition(Protocol):
    """One input partition, taken apart once, from which rows are then gathered."""

    @property
    def layout_key(self) -> bytes:
        """Encoded layout of every shard that comes out of this partition."""

    @property
    def row_nbytes(self) -> float:
        """Bytes one row takes on average."""

    def group(self, slots: Slots) -> tuple[Any, Sequence[int]]:
        """Order rows by slot, keeping their order inside each.

        Returns
        -------
        rows, offsets
            `rows[offsets[s]:offsets[s + 1]]` are the numbers of the rows of slot `s`, ascending: an
            array of the adapter's library.
        """

    def gather(self, selections: Sequence[Selection]) -> list[Any]:
        """A `Packed` for each selection that leaves this process, a body for each that stays.

        All at once, so that a column can be gathered for every shard while it is in the cache:
        gathering shard by shard reads each cache line of a column once a shard.
        """


class BodyAdapter(Protocol):
    """What it takes to send or spill a body, and to read it again.

    Attributes
    ----------
    landing
        Memory for shards that arrive over a transport which can write to a device; None for data
        of the host.
    """

    landing: Landing | None

    def pack(self, body: Any) -> Packed:
        """One buffer of a body, to be written to disk; as far as that goes without a copy."""

    def unpack(self, layout_key: bytes, packed: Packed) -> Any:
        """Body over the memory of `packed`; the inverse of `pack`.

        Raises
        ------
        ValueError
            The layout or the lengths do not describe the buffer.
        """

    def sections(self, layout_key: bytes, packed: Packed) -> list[tuple[str, int, int, int]]:
        """Where in `packed` bytes of one kind lie, for whoever compresses them.

        Returns
        -------
        list of (name, offset, bytes, bytes of one item)
            In order, without overlap, covering the buffer. Shards of one layout have the same
            names, as far as they have the same sections.
        """


class FrameAdapter(BodyAdapter, Protocol):
    """What the exchange asks of one kind of data.

    Attributes
    ----------
    shard_nbytes
        Size to which a shard grows before the next one begins; None for the plan's own.
    """

    shard_nbytes: int | None

    def open(self, frame: Any) -> OpenPartition:
        """Take an input partition apart.

        Raises
        ------
        TypeError
            `frame` is of another kind.
        ValueError
            Its columns are not those of the shuffle's meta.
        """

    def concatenate(self, pieces: Sequence[Piece], empty: Empty = fresh) -> Any:
        """Output partition made of the pieces, in their order; empty without any."""

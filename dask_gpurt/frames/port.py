"""The port a kind of data implements so that it can be exchanged, and the list of those that do.

A *frame* here is whatever one partition is: today a pandas DataFrame. The exchange only ever asks
an adapter to open a partition, gather some of its rows, and concatenate pieces of shards; it never
looks inside. `tests/conformance/frame_suite.py` is the suite every adapter has to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.gather import Rows

#: Where memory comes from: bytes wanted to an uninitialised array of them.
Empty = Callable[[int], npt.NDArray[np.uint8]]


def fresh(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory from NumPy."""
    return np.empty(nbytes, dtype=np.uint8)


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
        Contiguous bytes: fixed-width parts, then an Arrow stream, then a pickle.
    n_rows
        Rows in it.
    arrow_nbytes, pickle_nbytes
        Lengths of the last two sections; what is left is the first.
    """

    buffer: npt.NDArray[np.uint8]
    n_rows: int
    arrow_nbytes: int = 0
    pickle_nbytes: int = 0


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a body: what one shard has for one output partition."""

    body: Any
    start: int
    stop: int


@dataclass(frozen=True)
class Selection:
    """Rows that become one shard, and where the memory for it comes from."""

    rows: Rows
    leaves: bool
    empty: Empty = fresh


class OpenPartition(Protocol):
    """One input partition, taken apart once, from which rows are then gathered."""

    @property
    def layout_key(self) -> bytes:
        """Encoded layout of every shard that comes out of this partition."""

    @property
    def row_nbytes(self) -> float:
        """Bytes one row takes on average."""

    def partition_numbers(self) -> npt.NDArray[Any]:
        """Output partition of each row."""

    def gather(self, selections: Sequence[Selection]) -> list[Any]:
        """A `Packed` for each selection that leaves this process, a body for each that stays.

        All at once, so that a column can be gathered for every shard while it is in the cache:
        gathering shard by shard reads each cache line of a column once a shard.
        """


class BodyAdapter(Protocol):
    """What it takes to send or spill a body, and to read it again."""

    def pack(self, body: Any) -> Packed:
        """One buffer of a body, to be written to disk."""

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
    """What the exchange asks of one kind of data."""

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

"""Tiers in host memory: pinned blocks, and compressed.

`PinnedTier` is where values of a device go first: its blocks are as fast to copy to and from as
host memory gets, and never cost an allocation once they are there. `CompressedTier` holds on to
more than fits, and refuses what does not shrink, so that it goes on to the next tier instead of
taking room and time here for nothing.

What is decided elsewhere: which value goes where (`memory.decisions.residency`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from dask_gpurt.codecs.codec import Bytes
from dask_gpurt.codecs.coders import compress, decompress
from dask_gpurt.devices.host_memory.pinned import Blocks, PinnedPool, plain
from dask_gpurt.errors import (
    DamagedValueError,
    ProtocolError,
    TierFullError,
    ValueRefusedError,
)
from dask_gpurt.frames.flat.values import Flat

#: Values are compressed in pieces: a piece is in the processor's cache while it is written to its
#: place, temporary memory is bounded, and a value that turns out badly is given up early.
_PIECE_NBYTES = 1 << 20
#: Bytes in the middle of each buffer by which a value is judged before any real work.
_SAMPLE_NBYTES = 64 << 10

#: Gives memory for a buffer that is read back.
Empty = Callable[[int], Bytes]


P = TypeVar("P")


class _HostTier(Generic[P]):
    """What tiers in host memory have in common: the places they keep, and their account."""

    def __init__(self, empty: Empty) -> None:
        self._empty = empty
        self._lock = threading.Lock()
        self._places: set[P] = set()
        self._used_nbytes = 0
        self._is_closed = False

    @property
    def used_nbytes(self) -> int:
        """Bytes kept now, and those that values on their way in are expected to take."""
        with self._lock:
            return self._used_nbytes

    def drop(self, place: P) -> None:
        """Let go of a value."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything; nothing can be put any more."""
        with self._lock:
            self._is_closed = True
            places = list(self._places)
        for place in places:
            self.drop(place)


# ------------------------------------------------------------------ pinned


@dataclass(eq=False)
class PinnedPlace:
    """Where a value lies in a `PinnedTier`.

    Attributes
    ----------
    nbytes
        What it takes of the tier: whole blocks.
    """

    nbytes: int
    header: bytes
    lengths: tuple[int, ...]
    blocks: Blocks = field(repr=False)
    #: Reads under way, and one more until it is dropped. The blocks go back with the last.
    users: int = 1
    is_dropped: bool = False


class PinnedTier(_HostTier[PinnedPlace]):
    """Keeps values in the blocks of a pool, which others may use as well.

    Parameters
    ----------
    empty
        Where the memory of values that are read back comes from.
    """

    name = "pinned"

    def __init__(self, pool: PinnedPool, empty: Empty = plain) -> None:
        super().__init__(empty)
        self._pool = pool

    @property
    def capacity_nbytes(self) -> int:
        """The pool's; what others use of it is not there for this tier."""
        return self._pool.capacity_nbytes

    def put(self, flat: Flat) -> PinnedPlace:
        """Copy a value into blocks.

        Raises
        ------
        TierFullError
            There are not enough blocks left.
        ValueRefusedError
            There never are so many.
        """
        # The header stays a Python object; it counts by the room that is taken for it here.
        if flat.nbytes > self._pool.capacity_nbytes:
            raise ValueRefusedError(
                f"no pinned memory for {flat.nbytes} bytes: all of it is "
                f"{self._pool.capacity_nbytes}"
            )
        try:
            blocks = self._pool.take(flat.nbytes)
        except MemoryError as error:
            raise TierFullError(f"no pinned memory for {flat.nbytes} bytes: {error}") from error
        lengths = tuple(buffer.nbytes for buffer in flat.buffers)
        place = PinnedPlace(self._pool.size_of(flat.nbytes), flat.header, lengths, blocks)
        try:
            start = 0
            for buffer in flat.buffers:
                blocks.write(start, buffer)
                start += buffer.nbytes
            with self._lock:
                if self._is_closed:
                    raise TierFullError("the pinned tier is closed")
                self._places.add(place)
                self._used_nbytes += place.nbytes
        except BaseException:
            self._pool.give_back(blocks)
            raise
        return place

    def get(self, place: PinnedPlace) -> Flat:
        """Copy a value out.

        Raises
        ------
        KeyError
            It was dropped before.
        """
        with self._lock:
            if place.is_dropped:
                raise KeyError("this value was dropped")
            place.users += 1
        try:
            buffers = []
            start = 0
            for length in place.lengths:
                out = self._empty(length)
                place.blocks.read(start, out)
                buffers.append(out)
                start += length
            return Flat(place.header, tuple(buffers))
        finally:
            self._leave(place)

    def drop(self, place: PinnedPlace) -> None:
        """Let go of a value. Its blocks are used again once nobody reads them."""
        with self._lock:
            if place.is_dropped:
                return
            place.is_dropped = True
        self._leave(place)

    def _leave(self, place: PinnedPlace) -> None:
        with self._lock:
            place.users -= 1
            if place.users:
                return
            self._places.discard(place)
            self._used_nbytes -= place.nbytes
        self._pool.give_back(place.blocks)


# ------------------------------------------------------------------ compressed


@dataclass(frozen=True)
class _Piece:
    """Some bytes of a buffer, compressed unless that made them longer."""

    raw_nbytes: int
    payload: Bytes
    is_raw: bool


@dataclass(eq=False)
class CompressedPlace:
    """Where a value lies in a `CompressedTier`.

    Attributes
    ----------
    nbytes
        What it takes of the tier.
    raw_nbytes
        What it is long.
    """

    nbytes: int
    raw_nbytes: int
    header: bytes
    #: Pieces of each buffer; None once it was dropped.
    buffers: tuple[tuple[_Piece, ...], ...] | None = field(repr=False)


class CompressedTier(_HostTier[CompressedPlace]):
    """Keeps values compressed.

    Parameters
    ----------
    capacity_nbytes
        Most it keeps, compressed.
    coder
        `lz4` or `zstd`, of `codecs.coders`.
    most
        A value whose compressed length is more than this part of it is refused.
    empty
        Where the memory of values that are read back comes from.
    """

    name = "compressed"

    def __init__(
        self, capacity_nbytes: int, coder: str = "lz4", most: float = 0.8, empty: Empty = plain
    ) -> None:
        super().__init__(empty)
        self.capacity_nbytes = capacity_nbytes
        self._coder = coder
        self._most = most

    def put(self, flat: Flat) -> CompressedPlace:
        """Compress a value.

        Raises
        ------
        TierFullError
            It does not fit.
        ValueRefusedError
            It does not shrink enough to be worth it, or to fit into all of this tier.
        """
        # Of this value alone: smaller ones need not wait for one that is more than there is room.
        most_nbytes = min(int(flat.nbytes * self._most), self.capacity_nbytes)
        expected_nbytes = self._expected(flat)
        if expected_nbytes > most_nbytes:
            raise ValueRefusedError(f"{flat.nbytes} bytes would be {expected_nbytes} compressed")
        # Taken before the work is done, so that two values do not both count on the same room.
        self._take(expected_nbytes)
        taken_nbytes = expected_nbytes
        try:
            nbytes, buffers = self._compressed(flat, most_nbytes)
            self._take(nbytes - taken_nbytes)
            taken_nbytes = nbytes
            place = CompressedPlace(nbytes, flat.nbytes, flat.header, buffers)
            with self._lock:
                if self._is_closed:
                    raise TierFullError("the compressed tier is closed")
                self._places.add(place)
        except BaseException:
            self._give_back(taken_nbytes)
            raise
        return place

    def _expected(self, flat: Flat) -> int:
        """A guess at the compressed length, from the middle of each buffer."""
        expected_nbytes = len(flat.header)
        for buffer in flat.buffers:
            if buffer.nbytes:
                start = max(0, (buffer.nbytes - _SAMPLE_NBYTES) // 2)
                sample = buffer[start : start + _SAMPLE_NBYTES]
                payload = compress(self._coder, sample)
                share = min(1.0, payload.nbytes / sample.nbytes)
                expected_nbytes += int(buffer.nbytes * share)
        return expected_nbytes

    def _compressed(
        self, flat: Flat, most_nbytes: int
    ) -> tuple[int, tuple[tuple[_Piece, ...], ...]]:
        nbytes = len(flat.header)
        buffers = []
        for buffer in flat.buffers:
            pieces = []
            for start in range(0, buffer.nbytes, _PIECE_NBYTES):
                raw = buffer[start : start + _PIECE_NBYTES]
                payload = compress(self._coder, raw)
                is_raw = payload.nbytes >= raw.nbytes
                # A copy: the coder's own memory has room for the worst case.
                pieces.append(_Piece(raw.nbytes, (raw if is_raw else payload).copy(), is_raw))
                nbytes += pieces[-1].payload.nbytes
                if nbytes > most_nbytes:
                    raise ValueRefusedError(f"{flat.nbytes} bytes do not shrink to {most_nbytes}")
            buffers.append(tuple(pieces))
        return nbytes, tuple(buffers)

    def _take(self, nbytes: int) -> None:
        with self._lock:
            if self._used_nbytes + nbytes > self.capacity_nbytes:
                raise TierFullError(
                    f"no room for {nbytes} compressed bytes beside {self._used_nbytes} "
                    f"of {self.capacity_nbytes}"
                )
            self._used_nbytes += nbytes

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._used_nbytes -= nbytes

    def get(self, place: CompressedPlace) -> Flat:
        """Decompress a value.

        Raises
        ------
        KeyError
            It was dropped before.
        DamagedValueError
            Its bytes do not decode any more.
        """
        kept = place.buffers
        if kept is None:
            raise KeyError("this value was dropped")
        buffers = []
        for pieces in kept:
            out = self._empty(sum(piece.raw_nbytes for piece in pieces))
            start = 0
            for piece in pieces:
                target = out[start : start + piece.raw_nbytes]
                start += piece.raw_nbytes
                try:
                    coder = "none" if piece.is_raw else self._coder
                    np.copyto(target, decompress(coder, piece.payload, piece.raw_nbytes))
                except ProtocolError as error:
                    raise DamagedValueError(f"a compressed value is damaged: {error}") from error
            buffers.append(out)
        return Flat(place.header, tuple(buffers))

    def drop(self, place: CompressedPlace) -> None:
        """Let go of a value. A `get` that is under way has its pieces still."""
        with self._lock:
            if place in self._places:
                self._places.discard(place)
                self._used_nbytes -= place.nbytes
                place.buffers = None

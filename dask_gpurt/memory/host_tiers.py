"""Two tiers in host memory: one of pinned blocks, and one of compressed values.

Device values go to `PinnedTier` first: pinned blocks are the fastest host memory to copy to and
from, and are reused without an allocation. `CompressedTier` keeps more than would fit uncompressed.
It refuses values that do not shrink: these go on to the next tier, instead of taking room and time
here for nothing.

`memory.decisions.residency` decides which value goes where.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np

from dask_gpurt.codecs.codec import Bytes
from dask_gpurt.codecs.coders import compress, decompress
from dask_gpurt.devices.host_memory.pinned import Blocks, PinnedPool, Scattered, plain
from dask_gpurt.errors import (
    DamagedValueError,
    ProtocolError,
    TierFullError,
    ValueRefusedError,
)
from dask_gpurt.frames.flat.values import Flat

#: Values are compressed in pieces of this size. A piece stays in the processor's cache until it is
#: copied to its place. Temporary memory is bounded, and a poor result ends the work early.
_PIECE_NBYTES = 1 << 20
#: Length of the sample, from the middle of each buffer, that predicts how well a value compresses.
_SAMPLE_NBYTES = 64 << 10
#: A value is refused if its compressed length is more than this share of its length.
_MOST_SHARE = 0.8

P = TypeVar("P")


class _HostTier(Generic[P]):
    """The places and the byte count that tiers in host memory have in common."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: set[P] = set()
        self._used_nbytes = 0
        self._is_closed = False

    @property
    def used_nbytes(self) -> int:
        """Bytes of values that are here; with compression, also bytes reserved for others."""
        with self._lock:
            return self._used_nbytes

    def drop(self, place: P) -> None:
        """Free a value."""
        raise NotImplementedError

    def close(self) -> None:
        """Free all values, and refuse further ones."""
        with self._lock:
            self._is_closed = True
            places = list(self._places)
        for place in places:
            self.drop(place)


# ------------------------------------------------------------------ pinned


@dataclass(eq=False)
class PinnedPlace:
    """The place of a value in a `PinnedTier`.

    Attributes
    ----------
    nbytes
        Bytes it takes in the tier: whole blocks.
    """

    nbytes: int
    header: bytes
    lengths: tuple[int, ...]
    #: Whether each buffer came from a device.
    are_devices: tuple[bool, ...]
    blocks: Blocks = field(repr=False)
    #: Reads in flight, plus one until the value is dropped. The last user frees the blocks.
    users: int = 1
    is_dropped: bool = False


class PinnedTier(_HostTier[PinnedPlace]):
    """A tier that keeps values in blocks of a pool. Other users may share the pool.

    Buffers on a device are copied from there into the blocks, and back from the blocks (`lent`).
    A detour through other host memory would cost a second copy.
    """

    name = "pinned"

    def __init__(self, pool: PinnedPool) -> None:
        super().__init__()
        self._pool = pool

    @property
    def capacity_nbytes(self) -> int:
        """Capacity of the pool. Blocks in use elsewhere are not available to this tier."""
        return self._pool.capacity_nbytes

    def put(self, flat: Flat) -> PinnedPlace:
        """Copy a value into blocks.

        Raises
        ------
        TierFullError
            Too few blocks are free.
        ValueRefusedError
            The value is larger than the whole pool.
        """
        # The header stays a Python object. Blocks are taken for a large one, so that it is counted.
        # A small one must not cost a block: a value of a MiB would then take two.
        block_nbytes = self._pool.block_nbytes
        nbytes = flat.nbytes - len(flat.header) % block_nbytes
        if nbytes > self._pool.capacity_nbytes:
            raise ValueRefusedError(
                f"no pinned memory for {nbytes} bytes: the pool has {self._pool.capacity_nbytes}"
            )
        try:
            blocks = self._pool.take(nbytes)
        except MemoryError as error:
            raise TierFullError(f"no pinned memory for {nbytes} bytes: {error}") from error
        place = PinnedPlace(
            self._pool.size_of(nbytes),
            flat.header,
            tuple(buffer.nbytes for buffer in flat.buffers),
            tuple(not isinstance(buffer, np.ndarray) for buffer in flat.buffers),
            blocks,
        )
        try:
            start = 0
            for buffer in flat.buffers:
                if isinstance(buffer, np.ndarray):
                    blocks.write(start, buffer)
                else:
                    buffer.copy_into(list(blocks.stretches(start, buffer.nbytes)))
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
        """Copy a value out of its blocks.

        Raises
        ------
        KeyError
            The value was dropped before.
        """
        with self._in_use(place):
            starts = self._starts(place)
            buffers = tuple(map(partial(self._copied, place), starts, place.lengths))
            return Flat(place.header, buffers)

    @contextmanager
    def lent(self, place: PinnedPlace) -> Iterator[tuple[bytes, tuple[Bytes | Scattered, ...]]]:
        """Lend a value for a `with` block: its header and its buffers.

        Buffers that came from a device stay in their blocks. Others are copied out of them.

        Raises
        ------
        KeyError
            The value was dropped before.
        """
        with self._in_use(place):
            buffers: list[Bytes | Scattered] = []
            for start, length, is_device in zip(
                self._starts(place), place.lengths, place.are_devices, strict=True
            ):
                if is_device:
                    buffers.append(Scattered(list(place.blocks.stretches(start, length))))
                else:
                    buffers.append(self._copied(place, start, length))
            yield place.header, tuple(buffers)

    @staticmethod
    def _starts(place: PinnedPlace) -> list[int]:
        return [0, *accumulate(place.lengths)][:-1]

    def _copied(self, place: PinnedPlace, start: int, length: int) -> Bytes:
        out = plain(length)
        place.blocks.read(start, out)
        return out

    @contextmanager
    def _in_use(self, place: PinnedPlace) -> Iterator[None]:
        with self._lock:
            if place.is_dropped:
                raise KeyError("this value was dropped")
            place.users += 1
        try:
            yield
        finally:
            self._release(place)

    def drop(self, place: PinnedPlace) -> None:
        """Free a value. Its blocks are reused once no read is in flight."""
        with self._lock:
            if place.is_dropped:
                return
            place.is_dropped = True
        self._release(place)

    def _release(self, place: PinnedPlace) -> None:
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
    """A piece of a buffer, compressed unless that made it longer."""

    raw_nbytes: int
    payload: Bytes
    is_raw: bool


@dataclass(eq=False)
class CompressedPlace:
    """The place of a value in a `CompressedTier`.

    Attributes
    ----------
    nbytes
        Bytes it takes in the tier.
    raw_nbytes
        Uncompressed length.
    """

    nbytes: int
    raw_nbytes: int
    header: bytes
    #: Pieces of each buffer; None once the value was dropped.
    buffers: tuple[tuple[_Piece, ...], ...] | None = field(repr=False)


class CompressedTier(_HostTier[CompressedPlace]):
    """A tier that keeps values compressed.

    Parameters
    ----------
    capacity_nbytes
        Most compressed bytes it keeps.
    coder
        `lz4` or `zstd`, of `codecs.coders`.
    """

    name = "compressed"

    def __init__(self, capacity_nbytes: int, coder: str = "lz4") -> None:
        super().__init__()
        self.capacity_nbytes = capacity_nbytes
        self._coder = coder

    def put(self, flat: Flat) -> CompressedPlace:
        """Compress a value.

        Raises
        ------
        TierFullError
            The value does not fit.
        ValueRefusedError
            The value does not shrink enough to be worth it, or is larger than the whole tier.
        """
        # Refused, not full: a full tier is blocked, and smaller values would have to wait.
        most_nbytes = min(int(flat.nbytes * _MOST_SHARE), self.capacity_nbytes)
        expected_nbytes = self._expected(flat)
        if expected_nbytes > most_nbytes:
            raise ValueRefusedError(f"{flat.nbytes} bytes would be {expected_nbytes} compressed")
        # Reserved before the work is done, so that two values cannot count on the same room.
        self._reserve(expected_nbytes)
        taken_nbytes = expected_nbytes
        try:
            nbytes, buffers = self._compressed(flat, most_nbytes)
            self._reserve(nbytes - taken_nbytes)
            taken_nbytes = nbytes
            place = CompressedPlace(nbytes, flat.nbytes, flat.header, buffers)
            with self._lock:
                if self._is_closed:
                    raise TierFullError("the compressed tier is closed")
                self._places.add(place)
        except BaseException:
            self._unreserve(taken_nbytes)
            raise
        return place

    def _expected(self, flat: Flat) -> int:
        """Estimate the compressed length from the middle of each buffer."""
        expected_nbytes = len(flat.header)
        for buffer in flat.arrays:
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
        for buffer in flat.arrays:
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

    def _reserve(self, nbytes: int) -> None:
        with self._lock:
            if self._used_nbytes + nbytes > self.capacity_nbytes:
                raise TierFullError(
                    f"no room for {nbytes} compressed bytes: {self._used_nbytes} of "
                    f"{self.capacity_nbytes} are used"
                )
            self._used_nbytes += nbytes

    def _unreserve(self, nbytes: int) -> None:
        with self._lock:
            self._used_nbytes -= nbytes

    def get(self, place: CompressedPlace) -> Flat:
        """Decompress a value.

        Raises
        ------
        KeyError
            The value was dropped before.
        DamagedValueError
            Its bytes cannot be decoded.
        """
        kept = place.buffers
        if kept is None:
            raise KeyError("this value was dropped")
        buffers = []
        for pieces in kept:
            out = plain(sum(piece.raw_nbytes for piece in pieces))
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
        """Free a value. A `get` in flight keeps its pieces."""
        with self._lock:
            if place in self._places:
                self._places.discard(place)
                self._used_nbytes -= place.nbytes
                place.buffers = None

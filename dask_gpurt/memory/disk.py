"""The disk tier: one file a value, named by a number, in a directory of this process alone.

What is written where is `memory.value_file`'s business, how bytes get to the disk that of
`memory.block_io`, and whose files may be removed that of `memory.directory`. This module keeps the
account and deals with what goes wrong: a value is either kept whole, or not at all.

Locking: `_lock` guards the account and is never held over I/O. Nothing here needs a file to be
there for longer than it takes to open it, so a value may be dropped while it is read.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dask_gpurt.codecs.coders import compress, decompress
from dask_gpurt.errors import DamagedValueError, ProtocolError, TierFullError
from dask_gpurt.frames.values import Flat
from dask_gpurt.memory.backoff import Backoff, Complaints
from dask_gpurt.memory.block_io import (
    Bounces,
    empty_blocks,
    is_aligned,
    read_into,
    write_all,
    write_through,
)
from dask_gpurt.memory.checksums import checksum
from dask_gpurt.memory.directory import ValueDirectory
from dask_gpurt.memory.value_file import (
    BLOCK_NBYTES,
    CODERS,
    SMALL_NBYTES,
    Bytes,
    Entry,
    Layout,
    layout_of,
    padded,
    read_lead,
    write_lead,
)

logger = logging.getLogger("dask_gpurt.memory")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Longer buffers are not compressed: what comes of it takes memory just when there is none left.
_MOST_COMPRESSED_NBYTES = 256 << 20

#: Told `disk-write` or `disk-read`, how many bytes and how long, in the thread that did it.
OnIO = Callable[[str, int, float], None]


@dataclass(frozen=True, eq=False)
class DiskPlace:
    """Where a value is.

    Attributes
    ----------
    nbytes
        It takes on the disk.
    file_nbytes, lead_nbytes
        Length of the file, and of its lead.
    blocks
        Bytes of each block that are read.
    is_direct
        Whether the file is read past the page cache.
    """

    path: str
    nbytes: int
    file_nbytes: int
    lead_nbytes: int
    blocks: tuple[int, ...]
    is_direct: bool


class DiskTier:
    """Keeps values in files; a `memory.port.Tier`.

    Parameters
    ----------
    directory
        Where this tier makes a directory of its own, when it is first needed.
    capacity_nbytes
        Most bytes of files; None for as much as the disk takes.
    compression
        `lz4` or `zstd`: compress large buffers, and keep what came of it where it is smaller.
    on_io
        Told about every read and write that succeeded.
    empty
        Where the memory comes from that values are read into. What does not lie on a 4 KiB boundary
        is read through the page cache.
    system, clock
        The module `os` and a clock, but in tests.
    """

    name = "disk"

    def __init__(
        self,
        directory: str,
        capacity_nbytes: int | None = None,
        compression: str | None = None,
        on_io: OnIO | None = None,
        *,
        empty: Callable[[int], Bytes] = empty_blocks,
        system: Any = os,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if compression is not None and compression not in CODERS[1:]:
            raise ValueError(f"no coder is called {compression!r}: {', '.join(CODERS[1:])}")
        self.capacity_nbytes = capacity_nbytes
        self._coder = CODERS.index(compression) if compression else 0
        self._on_io = on_io or (lambda label, nbytes, seconds: None)
        self._empty = empty
        self._system = system
        self._clock = clock
        self._directory = ValueDirectory(directory, system)
        self._bounces = Bounces()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        #: Bytes of what is kept, by path.
        self._kept: dict[str, int] = {}
        self._used_nbytes = 0
        self._n_writing = 0
        self._closed = False
        self._backoff = Backoff()
        self._complaints = Complaints()

    @property
    def used_nbytes(self) -> int:
        """Bytes of files, and of those that are being written."""
        return self._used_nbytes

    # -------------------------------------------------------------- in

    def put(self, flat: Flat) -> DiskPlace:
        """Write a value to a file of its own."""
        self._check_it_may_be_tried()
        stored, coders = self._encoded(flat.buffers)
        layout = layout_of(len(flat.header), [buffer.nbytes for buffer in stored])
        nbytes = padded(layout.nbytes)
        began_s = self._clock()
        with self._reserved(nbytes):
            try:
                place = self._write_anywhere(flat, stored, coders, layout)
            except OSError as error:
                raise self._failed(error) from error
            with self._lock:
                # A tier that was closed meanwhile has let go of the file, or its directory will.
                if self._closed:
                    raise TierFullError("the disk tier was closed")
                self._kept[place.path] = nbytes
                self._backoff = Backoff()
        self._on_io("disk-write", nbytes, self._clock() - began_s)
        return place

    def _check_it_may_be_tried(self) -> None:
        with self._lock:
            closed, backoff = self._closed, self._backoff
        if closed:
            raise TierFullError("the disk tier was closed")
        wait_s = backoff.until_s - self._clock()
        if backoff.is_waiting(self._clock()):
            raise TierFullError(f"writing to disk failed and is tried again in {wait_s:.0f} s")

    def _encoded(self, buffers: Sequence[Bytes]) -> tuple[list[Bytes], list[int]]:
        """Buffers as they are stored, and the number of the coder of each."""
        stored, coders = [], []
        for buffer in buffers:
            coder = 0
            if self._coder and SMALL_NBYTES <= buffer.nbytes <= _MOST_COMPRESSED_NBYTES:
                smaller = compress(CODERS[self._coder], buffer)
                if padded(smaller.nbytes) <= padded(buffer.nbytes) - BLOCK_NBYTES:
                    buffer, coder = smaller, self._coder
            stored.append(buffer)
            coders.append(coder)
        return stored, coders

    @contextmanager
    def _reserved(self, nbytes: int) -> Iterator[None]:
        """Bytes that are accounted for before they are written, and given back on an error."""
        with self._lock:
            capacity = self.capacity_nbytes
            if capacity is not None and self._used_nbytes + nbytes > capacity:
                raise TierFullError(
                    f"{nbytes} bytes do not fit on disk: {self._used_nbytes} of {capacity} are used"
                )
            self._used_nbytes += nbytes
            self._n_writing += 1
        try:
            yield
        except BaseException:
            with self._lock:
                self._used_nbytes -= nbytes
            raise
        finally:
            with self._lock:
                self._n_writing -= 1
                is_last = self._closed and not self._n_writing
            if is_last:
                self._directory.remove()

    def _write_anywhere(
        self, flat: Flat, stored: list[Bytes], coders: list[int], layout: Layout
    ) -> DiskPlace:
        directory, is_direct = self._directory.ready()
        try:
            return self._write(directory, is_direct, flat, stored, coders, layout)
        except FileNotFoundError:
            # Somebody tidied up. Values that were in there are lost; this one is not.
            logger.warning("%s was removed by somebody else; another one is made", directory)
            self._directory.lost(directory)
        directory, is_direct = self._directory.ready()
        return self._write(directory, is_direct, flat, stored, coders, layout)

    def _write(
        self,
        directory: str,
        is_direct: bool,
        flat: Flat,
        stored: list[Bytes],
        coders: list[int],
        layout: Layout,
    ) -> DiskPlace:
        system = self._system
        path = os.path.join(directory, f"{next(self._numbers):08d}")
        # Small values stay in the page cache: they would not fill a block, and come back soon.
        is_direct = is_direct and bool(layout.blocks)
        flags = system.O_RDWR | system.O_CREAT | system.O_EXCL | system.O_CLOEXEC
        if is_direct:
            flags |= system.O_DIRECT
        bounce = self._bounces.take() if is_direct else None
        fd = -1
        try:
            fd = system.open(path, flags, 0o600)
            if layout.blocks:
                # Whole blocks can be read to the end of the file, however it was written.
                system.ftruncate(fd, layout.nbytes)
            sums = [0] * len(stored)
            for number in layout.blocks:
                data = stored[number]
                sums[number] = write_through(system, fd, data, layout.offsets[number], bounce)
            for number, coder in enumerate(coders):
                if coder:
                    # What is decoded is checked, and with it the decoder.
                    sums[number] = checksum(flat.buffers[number])
            entries = [
                Entry(offset, data.nbytes, raw.nbytes, total, coder)
                for offset, data, raw, total, coder in zip(
                    layout.offsets, stored, flat.buffers, sums, coders, strict=True
                )
            ]
            lead = empty_blocks(layout.lead_nbytes)
            write_lead(lead, layout, flat.header, stored, entries)
            write_all(system, fd, lead, 0)
        except BaseException:
            if fd >= 0:
                self._close(fd)
                self._unlink(path)
            raise
        finally:
            if bounce is not None:
                self._bounces.put_back(bounce)
        try:
            system.close(fd)
        except OSError:
            # Some file systems only say here that the disk is full.
            self._unlink(path)
            raise
        return DiskPlace(
            path,
            padded(layout.nbytes),
            layout.nbytes,
            layout.lead_nbytes,
            tuple(padded(stored[number].nbytes) for number in layout.blocks),
            is_direct,
        )

    def _failed(self, error: OSError) -> OSError | TierFullError:
        """What to raise for an error; it is said once, and writing is not tried for a while."""
        now_s = self._clock()
        reason = error.strerror or str(error)
        with self._lock:
            self._backoff = self._backoff.after_failure(now_s)
            is_due = self._complaints.is_due(reason, now_s)
        if is_due:
            logger.error(
                "cannot write to %s (%s); values stay in memory, and it is tried again later. "
                "Free some space, or point Dask's temporary-directory to another disk.",
                self._directory.parent,
                reason,
            )
        if error.errno in _FULL:
            return TierFullError(f"no room in {self._directory.parent}: {reason}")
        return error

    # -------------------------------------------------------------- out

    def get(self, place: DiskPlace) -> Flat:
        """Read a value, each large buffer into memory of its own."""
        began_s = self._clock()
        lead = self._empty(place.lead_nbytes)
        blocks = [self._empty(nbytes) for nbytes in place.blocks]
        try:
            self._read(place, [lead, *blocks])
            took_s = self._clock() - began_s
            header, entries = read_lead(lead, place.file_nbytes)
            flat = Flat(header, tuple(_decoded(place, lead, blocks, entries)))
        except (EOFError, ValueError, FileNotFoundError) as error:
            reason = {EOFError: "it ended early", FileNotFoundError: "it is gone"}
            why = reason.get(type(error), str(error))
            raise DamagedValueError(f"{place.path} is not the value it was: {why}") from error
        self._on_io("disk-read", place.nbytes, took_s)
        return flat

    def _read(self, place: DiskPlace, parts: list[Bytes]) -> None:
        system = self._system
        flags = system.O_RDONLY | system.O_CLOEXEC
        if place.is_direct and all(is_aligned(part) for part in parts):
            flags |= system.O_DIRECT
        fd = system.open(place.path, flags)
        try:
            read_into(system, fd, parts)
        finally:
            self._close(fd)

    def drop(self, place: DiskPlace) -> None:
        """Remove a file. One that was dropped before is dropped already."""
        with self._lock:
            nbytes = self._kept.pop(place.path, None)
            self._used_nbytes -= nbytes or 0
        if nbytes is not None:
            self._unlink(place.path)

    def close(self) -> None:
        """Remove the directory; later if somebody is still writing to it."""
        with self._lock:
            self._closed = True
            self._used_nbytes -= sum(self._kept.values())
            self._kept.clear()
            is_quiet = not self._n_writing
        if is_quiet:
            self._directory.remove()

    def _close(self, fd: int) -> None:
        try:
            self._system.close(fd)
        except OSError:
            pass  # Linux lets go of the descriptor whatever it answers

    def _unlink(self, path: str) -> None:
        try:
            self._system.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("cannot remove %s, which goes when the worker closes: %s", path, error)


def _decoded(
    place: DiskPlace, lead: Bytes, blocks: list[Bytes], entries: list[Entry]
) -> Iterator[Bytes]:
    """Buffers of a value, checked.

    Raises
    ------
    ValueError
        One of them is not what was written.
    """
    waiting = iter(blocks)
    for entry in entries:
        if entry.is_in(place.lead_nbytes):
            data = lead[entry.offset : entry.offset + entry.stored_nbytes]
            if not entry.coder:
                yield data
                continue
        else:
            data = next(waiting)[: entry.stored_nbytes]
        if entry.coder:
            try:
                data = decompress(CODERS[entry.coder], data, entry.nbytes)
            except ProtocolError as error:
                raise ValueError(str(error)) from error
        if checksum(data) != entry.checksum:
            raise ValueError("a buffer is damaged")
        yield data

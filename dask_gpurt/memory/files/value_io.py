"""Writes and reads of value files: compressed or not, past the page cache or through it.

This module combines the file format (`memory.files.value_file`) with block I/O
(`memory.files.block_io`). `memory.files.disk_tier` decides which files there are, and handles
errors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dask_gpurt.codecs.checksums import checksum
from dask_gpurt.codecs.coders import compress, decompress
from dask_gpurt.errors import DamagedValueError, ProtocolError
from dask_gpurt.frames.adapter import fresh
from dask_gpurt.frames.flat.values import Flat
from dask_gpurt.memory.files.block_io import (
    BouncePool,
    empty_blocks,
    is_aligned,
    read_into,
    write_through,
)
from dask_gpurt.memory.files.value_file import (
    BLOCK_NBYTES,
    CODERS,
    SMALL_NBYTES,
    BufferEntry,
    Bytes,
    FileLayout,
    layout_of,
    padded,
    read_lead,
    write_lead,
)
from dask_gpurt.system_calls import write_all

logger = logging.getLogger("dask_gpurt.memory")

#: Longer buffers are not compressed: the result takes memory just when there is none left.
_MOST_COMPRESSED_NBYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class DiskPlace:
    """The place of a value on disk.

    Attributes
    ----------
    nbytes
        Bytes it takes on the disk.
    file_nbytes, lead_nbytes
        Length of the file, and of its lead.
    blocks
        Bytes to read of each block.
    is_direct
        Whether the file is read past the page cache.
    identity
        Number that only this file contains.
    """

    path: str
    nbytes: int
    file_nbytes: int
    lead_nbytes: int
    blocks: tuple[int, ...]
    is_direct: bool
    identity: int


@dataclass(frozen=True)
class EncodedValue:
    """A value in the form in which it is stored.

    Attributes
    ----------
    buffers
        Buffers of the value, some of them compressed.
    coders
        Number of each buffer's coder.
    """

    value: Flat
    buffers: tuple[Bytes, ...]
    coders: tuple[int, ...]
    layout: FileLayout

    @property
    def nbytes(self) -> int:
        """Bytes that the value takes on the disk."""
        return padded(self.layout.nbytes)


def encoded(value: Flat, coder: int) -> EncodedValue:
    """Return a value with its large buffers compressed where that saves a block.

    Parameters
    ----------
    coder
        Number in `value_file.CODERS`.
    """
    buffers: list[Bytes] = []
    coders = []
    for buffer in value.arrays:
        buffers.append(buffer)
        coders.append(0)
        if coder and SMALL_NBYTES <= buffer.nbytes <= _MOST_COMPRESSED_NBYTES:
            smaller = compress(CODERS[coder], buffer)
            if padded(smaller.nbytes) <= padded(buffer.nbytes) - BLOCK_NBYTES:
                buffers[-1], coders[-1] = smaller, coder
    layout = layout_of(len(value.header), [buffer.nbytes for buffer in buffers])
    return EncodedValue(value, tuple(buffers), tuple(coders), layout)


class ValueFiles:
    """A thread-safe writer and reader of value files.

    Parameters
    ----------
    system
        The module `os`, or a fake in tests.
    empty
        Allocates the memory that blocks are read into.
    """

    def __init__(self, system: Any = os, empty: Callable[[int], Bytes] = empty_blocks) -> None:
        self._system = system
        self._empty = empty
        self._bounces = BouncePool()

    def close(self) -> None:
        """Keep no memory for further writes. Those in flight go on."""
        self._bounces.close()

    def write(self, path: str, value: EncodedValue, identity: int, is_direct: bool) -> DiskPlace:
        """Write a value to a new file.

        Parameters
        ----------
        is_direct
            Whether to write past the page cache, where the file system supports that.

        Raises
        ------
        OSError
            The write failed, and left no file.
        """
        system, layout = self._system, value.layout
        # Small values go through the page cache: they do not fill a block, and are soon read again.
        is_direct = is_direct and bool(layout.blocks)
        flags = system.O_RDWR | system.O_CREAT | system.O_EXCL | system.O_CLOEXEC
        fd = system.open(path, flags | (system.O_DIRECT if is_direct else 0), 0o600)
        try:
            self._fill(fd, value, identity, is_direct)
        except BaseException:
            self._close(fd)
            self.remove(path)
            raise
        try:
            system.close(fd)
        except OSError:
            # Some file systems report only here that the disk is full.
            self.remove(path)
            raise
        blocks = tuple(padded(value.buffers[n].nbytes) for n in layout.blocks)
        return DiskPlace(
            path, value.nbytes, layout.nbytes, layout.lead_nbytes, blocks, is_direct, identity
        )

    def _fill(self, fd: int, value: EncodedValue, identity: int, is_direct: bool) -> None:
        layout, buffers = value.layout, value.buffers
        sums = [0] * len(buffers)
        if layout.blocks:
            # Direct reads need whole blocks to the end of the file, however it was written.
            self._system.ftruncate(fd, layout.nbytes)
            bounce = self._bounces.take() if is_direct else None
            try:
                for n in layout.blocks:
                    sums[n] = write_through(self._system, fd, buffers[n], layout.offsets[n], bounce)
            finally:
                if bounce is not None:
                    self._bounces.put_back(bounce)
        entries = [
            BufferEntry(offset, stored.nbytes, raw.nbytes, total, coder)
            for offset, stored, raw, total, coder in zip(
                layout.offsets, buffers, value.value.buffers, sums, value.coders, strict=True
            )
        ]
        lead = empty_blocks(layout.lead_nbytes)
        write_lead(lead, layout, identity, value.value.header, buffers, entries)
        write_all(fd, lead, 0, self._system)

    def read(self, place: DiskPlace) -> Flat:
        """Read a value, each large buffer into memory of its own.

        Raises
        ------
        DamagedValueError
            The file is missing, or does not hold the value that was written.
        OSError
            The file cannot be read.
        """
        # A small value is all lead: aligned memory would be mostly padding.
        lead = (self._empty if place.blocks else fresh)(place.lead_nbytes)
        blocks = [self._empty(nbytes) for nbytes in place.blocks]
        try:
            self._read(place, [lead, *blocks])
            header, entries = read_lead(lead, place.file_nbytes, place.identity)
            return Flat(header, tuple(_decoded(place, lead, blocks, entries)))
        except (EOFError, ValueError, FileNotFoundError) as error:
            reason = {EOFError: "it ended early", FileNotFoundError: "it is gone"}
            why = reason.get(type(error), str(error))
            raise DamagedValueError(f"{place.path} does not hold its value: {why}") from error

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

    def remove(self, path: str) -> None:
        """Remove a file; never raises."""
        try:
            self._system.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning(
                "cannot remove %s; it is removed when the worker closes: %s", path, error
            )

    def _close(self, fd: int) -> None:
        try:
            self._system.close(fd)
        except OSError:
            pass  # Linux frees the descriptor even if it reports an error


def _decoded(
    place: DiskPlace, lead: Bytes, blocks: list[Bytes], entries: list[BufferEntry]
) -> Iterator[Bytes]:
    """Yield the buffers of a value, verified and decoded.

    Raises
    ------
    ValueError
        A buffer is damaged.
    """
    waiting = iter(blocks)
    for entry in entries:
        if entry.is_in(place.lead_nbytes):
            data = lead[entry.offset : entry.offset + entry.stored_nbytes]
        else:
            data = next(waiting)[: entry.stored_nbytes]
            # Verified before decoding: decoders may not expect bytes that no encoder made.
            if checksum(data) != entry.checksum:
                raise ValueError("a buffer is damaged")
        if entry.coder:
            try:
                data = decompress(CODERS[entry.coder], data, entry.nbytes)
            except ProtocolError as error:
                raise ValueError(str(error)) from error
        yield data

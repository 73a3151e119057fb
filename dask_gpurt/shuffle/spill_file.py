"""Append-only files of spilled shards, closed when the last of their shards is released.

`shuffle.shards` decides what is spilled and when; its lock covers the reference count.

A file is unlinked as soon as it is open. So the system frees it however the process ends, and no
cleanup of the directory can delete it under a live process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dask_gpurt.codecs.checksums import STEP_NBYTES, checksum
from dask_gpurt.errors import ShardStorageError
from dask_gpurt.system_calls import preadv, write_all

logger = logging.getLogger("dask_gpurt.shuffle")

Buffer = npt.NDArray[np.uint8]

#: Checksums and I/O work in pieces that stay in the CPU cache between the two.
_PIECE_NBYTES = 16 * STEP_NBYTES


class Extent(NamedTuple):
    """Position of a shard in its file, and its checksum."""

    position: int
    checksum: int


class SpillFile:
    """An append-only file of shards, with a count of the shards that need it.

    Parameters
    ----------
    path
        Must not exist. Its directory is removed again if it is empty.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.unlink(path)
        except BaseException:
            os.close(self._fd)
            raise
        # Network file systems may keep another name until the file is closed.
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))
        self.nbytes = 0
        self._removing = threading.Lock()
        #: Number of shards that need the file, plus one while a writer uses it.
        self._live = 1

    def append(self, buffer: Buffer) -> Extent:
        """Write a buffer and return its extent."""
        first = self.nbytes
        position, total = first, 0
        for start in range(0, buffer.nbytes, _PIECE_NBYTES):
            piece = buffer[start : start + _PIECE_NBYTES]
            total = checksum(piece, total)
            write_all(self._fd, piece, position)
            position += piece.nbytes
        self.nbytes = position
        return Extent(first, total)

    def read_into(self, buffer: Buffer, extent: Extent) -> None:
        """Fill a buffer with a shard of the same length.

        Raises
        ------
        ShardStorageError
            The checksum does not match, or the file is too short.
        OSError
            The system cannot read the file.
        """
        position, total = extent.position, 0
        for start in range(0, buffer.nbytes, _PIECE_NBYTES):
            piece = buffer[start : start + _PIECE_NBYTES]
            view: Any = piece.data
            while len(view):
                count = preadv(self._fd, [view], position)
                if not count:
                    raise ShardStorageError(f"{self.path} ended before its shard did")
                position += count
                view = view[count:]
            total = checksum(piece, total)
        if total != extent.checksum:
            raise ShardStorageError(f"{self.path} returned other bytes than were written")

    @property
    def is_needed(self) -> bool:
        """Whether a shard or a writer still holds a reference."""
        return self._live > 0

    def keep(self) -> None:
        """Add a reference, for a shard or a writer."""
        self._live += 1

    def release(self) -> bool:
        """Drop a reference; return whether it was the last."""
        self._live -= 1
        return not self._live

    def remove(self) -> None:
        """Close the file, which frees its disk space; this takes time for a large file."""
        # A second caller waits, so that the space is free when either returns.
        with self._removing:
            fd, self._fd = self._fd, -1
            if fd < 0:
                return
            try:
                os.close(fd)
            except OSError as error:
                # Linux frees the descriptor anyway. A second close could close another file.
                logger.warning("cannot close %s without an error: %s", self.path, error)

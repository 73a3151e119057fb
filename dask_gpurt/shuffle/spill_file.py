"""Files of spilled shards: written from front to end, and removed with the last of their shards.

What is spilled, and when, is up to `shuffle.shards`, whose lock covers the counting.

A file loses its name as soon as it is open. So the system removes it however the process ends, and
nobody who tidies up a directory can take it from a living process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dask_gpurt.codecs.checksums import STEP_NBYTES, checksum
from dask_gpurt.errors import ShardStorageError
from dask_gpurt.system_calls import preadv

Buffer = npt.NDArray[np.uint8]

#: Bytes are summed and moved in pieces that stay in the cache between the two.
_PIECE_NBYTES = 16 * STEP_NBYTES


class Extent(NamedTuple):
    """Where a shard is in its file, and what its bytes add up to."""

    position: int
    checksum: int


class SpillFile:
    """Shards written one after the other; removed with the last of them.

    Parameters
    ----------
    path
        Nothing may be there. The directory of the path is removed again if it is empty.
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
        #: Shards that need the file, and one more while it is being written.
        self._live = 1

    def append(self, buffer: Buffer) -> Extent:
        """Write a buffer and return where it is."""
        first = self.nbytes
        position, total = first, 0
        for start in range(0, buffer.nbytes, _PIECE_NBYTES):
            piece = buffer[start : start + _PIECE_NBYTES]
            total = checksum(piece, total)
            view: Any = piece.data
            while len(view):
                written = os.pwrite(self._fd, view, position)
                if not written:
                    raise OSError(errno.EIO, "the system takes no more bytes and gives no reason")
                position += written
                view = view[written:]
        self.nbytes = position
        return Extent(first, total)

    def read_into(self, buffer: Buffer, extent: Extent) -> None:
        """Fill a buffer with a shard of its length.

        Raises
        ------
        ShardStorageError
            The bytes are not those that were written.
        OSError
            They cannot be read.
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
            raise ShardStorageError(f"{self.path} gave back other bytes than were written")

    @property
    def is_needed(self) -> bool:
        """Whether it is there, and stays until it is let go of."""
        return self._live > 0

    def keep(self) -> None:
        """One shard more needs this file, or a writer goes on with it."""
        self._live += 1

    def release(self) -> bool:
        """One shard less needs this file, or its writer is done; whether nobody needs it now."""
        self._live -= 1
        return not self._live

    def remove(self) -> None:
        """Give back the room on the disk, which takes time for a large file."""
        # A second caller waits, so that the room is free after this.
        with self._removing:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

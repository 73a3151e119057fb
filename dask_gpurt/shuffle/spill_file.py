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
from collections.abc import Callable, Iterator, Sequence
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
#: A file grows up to this size. Each one takes a descriptor.
FILE_NBYTES = 1 << 28


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
    reading
        A context for each read, which may time it.
    """

    def __init__(
        self,
        path: str,
        reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.path, self._reading = path, reading
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
        with self._reading():
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


class SpillFiles:
    """The spill files of one run. When one is full, the next one begins.

    Parameters
    ----------
    directory
        Made for the first file.
    lock
        Guards the references to files. Its owner holds it to change a single one.
    open_file
        Opens a file of this path.
    run_later
        Runs a call that may take long, off the critical path.
    """

    def __init__(
        self,
        directory: str,
        lock: threading.Lock,
        open_file: Callable[[str], SpillFile],
        run_later: Callable[[Callable[[], None]], object],
    ) -> None:
        self._directory, self._lock = directory, lock
        self._open_file, self._run_later = open_file, run_later
        self._files: list[SpillFile] = []

    def __iter__(self) -> Iterator[SpillFile]:
        return iter(self._files)

    def open_for_writing(self) -> SpillFile:
        """Return the last file if it may grow, or a new one, with a reference for the writer."""
        with self._lock:
            file = self._files[-1] if self._files else None
            if file is not None and file.is_needed and file.nbytes < FILE_NBYTES:
                file.keep()
                return file
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        file = self._open_file(os.path.join(self._directory, f"{len(self._files):06d}.shards"))
        with self._lock:
            self._files.append(file)
        return file

    def release(self, files: Sequence[SpillFile]) -> None:
        """Drop one reference to each of these files: that of a shard or of the writer."""
        with self._lock:
            unneeded = [file for file in files if file.release()]
        for file in unneeded:
            self._run_later(file.remove)

    def close(self) -> None:
        """Close all files. No writer may use one."""
        files, self._files = self._files, []
        for file in files:
            file.remove()
        with contextlib.suppress(OSError):
            os.rmdir(self._directory)

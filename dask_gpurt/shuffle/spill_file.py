"""Files of spilled shards: written from front to end, and removed with the last of their shards.

What is spilled, and when, is up to `shuffle.shards`, whose lock covers the counting.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import numpy as np

from dask_gpurt.errors import ShardStorageError


class SpillFile:
    """Shards written one after the other; removed with the last of them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.nbytes = 0
        self._removing = threading.Lock()
        #: Shards that need the file, and one more while it is being written.
        self._live = 1

    def append(self, buffer: np.ndarray[Any, Any]) -> int:
        """Write a buffer and return where it begins."""
        first = self.nbytes
        view = buffer.data
        position = first
        while len(view):
            written = os.pwrite(self._fd, view, position)
            position += written
            view = view[written:]
        self.nbytes = position
        return first

    def read_into(self, buffer: np.ndarray[Any, Any], position: int) -> None:
        view = buffer.data
        while len(view):
            count = os.preadv(self._fd, [view], position)
            if not count:
                raise ShardStorageError(f"{self.path} ended before its shard did")
            position += count
            view = view[count:]

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
        """Give back what it takes of the disk, which for a large file takes its time."""
        # Whoever comes second waits, so that the directory is empty after this.
        with self._removing:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path)

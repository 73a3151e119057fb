"""The budget for shuffle shards in the memory of a device.

The budget covers shards that stay on the device and shards that arrive there. Beyond the limit, the
caller keeps shards in host memory. The budget counts the live memory that it handed out, not the
free memory of the device. With free memory, a pool that owns most of the device would make it look
full.

This module imports no device library. The caller passes the function that allocates.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

#: Memory that supports weak references and is freed when it is garbage collected.
M = TypeVar("M")


class DeviceBudget:
    """A limit on the memory that shards take on one device. Safe to use from any thread.

    Parameters
    ----------
    limit_nbytes
        Most bytes that may be handed out at the same time.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self._lock = threading.Lock()
        self._used_nbytes = 0
        # A deque, because finalizers append to it wherever the garbage collector runs. They must
        # not take the lock: the same thread may hold it.
        self._freed: deque[int] = deque()

    def take(self, allocate: Callable[[int], M], nbytes: int) -> M | None:
        """Allocate memory; return None if the budget or the device has no room for it.

        Parameters
        ----------
        allocate
            Returns memory of the given number of bytes. Raises MemoryError if the device is full.
        """
        with self._lock:
            self._count_freed()
            if self._used_nbytes + nbytes > self.limit_nbytes:
                return None
            self._used_nbytes += nbytes
        try:
            memory = allocate(nbytes)
        except BaseException as error:
            self._freed.append(nbytes)
            if isinstance(error, MemoryError):
                return None
            raise
        weakref.finalize(memory, self._freed.append, nbytes)
        return memory

    @property
    def used_nbytes(self) -> int:
        """Bytes that were handed out and are still alive."""
        with self._lock:
            self._count_freed()
            return self._used_nbytes

    def _count_freed(self) -> None:
        while self._freed:
            self._used_nbytes -= self._freed.popleft()

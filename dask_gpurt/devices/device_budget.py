"""How much of a device's memory shards may take: those that stay there, and those that arrive.

Beyond the mark they are kept in the host's memory. It counts what it handed out and is still alive,
not what the device has left: a pool that owns most of the device would look like a full one.
Knows no device library: what allocates is handed in.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

#: Anything that can be referred to weakly and lets go of its memory as it dies.
M = TypeVar("M")


class DeviceBudget:
    """Memory of one device, up to a mark. Safe to use from any thread.

    Parameters
    ----------
    limit_nbytes
        Most that may be handed out at a time.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self._lock = threading.Lock()
        self._used_nbytes = 0
        # A deque: memory dies wherever the garbage collector runs, so nothing that happens then may
        # take the lock.
        self._freed: deque[int] = deque()

    def take(self, allocate: Callable[[int], M], nbytes: int) -> M | None:
        """Memory for so many bytes; None if that is more than the mark or the device allows.

        Parameters
        ----------
        allocate
            Bytes to memory of them; raises MemoryError if the device has none.
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
        """Bytes handed out and still alive."""
        with self._lock:
            self._count_freed()
            return self._used_nbytes

    def _count_freed(self) -> None:
        while self._freed:
            self._used_nbytes -= self._freed.popleft()

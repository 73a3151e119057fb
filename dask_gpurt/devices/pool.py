"""Host memory for shards: huge pages, kept warm, given back in the order shards die.

Most of the time of a naive exchange goes into page faults: the first touch of a fresh 4 KiB page
costs several times what copying into it does. So memory comes in slabs of a few huge pages, and a
slab whose buffers are all gone is handed out again while runs go on.

Buffers of one *lane* share slabs. Whoever asks puts what dies together into one lane (the shards
for one range of output partitions), so that slabs empty one by one while outputs are read, and
the memory of a shuffle shrinks as its result grows.

Covers host memory only; does not know what is in a buffer, nor any limit on it: that is
`shuffle.shards`' budget.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]

HUGE_PAGE_NBYTES = 2 << 20
SLAB_NBYTES = 2 * HUGE_PAGE_NBYTES
#: Buffers begin on cache lines, which also aligns every NumPy and Arrow type.
_ALIGNMENT = 64


class _Slab:
    """A few huge pages, filled from the front; empty again once every buffer in it is gone."""

    def __init__(self) -> None:
        # Private: shared anonymous memory gets no huge pages. Longer by one huge page, never
        # touched, so that the part in use can begin on one.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, SLAB_NBYTES + HUGE_PAGE_NBYTES, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # the kernel has none
                pass
        address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self._start = -address % HUGE_PAGE_NBYTES
        self._used_nbytes = 0
        #: Buffers in use, and one more while the slab is being filled.
        self.users = 1

    def take(self, nbytes: int) -> Buffer | None:
        if nbytes > SLAB_NBYTES - self._used_nbytes:
            return None
        first = self._start + self._used_nbytes
        self._used_nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return np.frombuffer(self._memory, dtype=np.uint8, count=nbytes, offset=first)

    def reset(self) -> None:
        self._used_nbytes = 0
        self.users = 1


class HostPool:
    """Buffers from warm huge pages.

    Parameters
    ----------
    keep_nbytes
        Empty slabs beyond this are given back to the system at once.
    """

    def __init__(self, keep_nbytes: int) -> None:
        self._keep = max(0, keep_nbytes // SLAB_NBYTES)
        self._lock = threading.Lock()
        self._filling: dict[Hashable, _Slab] = {}
        # A deque: buffers die in whatever thread lets go of them last, even inside `empty` when
        # the garbage collector runs there, so nothing that happens then may take the lock.
        self._dead: deque[_Slab] = deque()
        self._empty: list[_Slab] = []

    def empty(self, nbytes: int, lane: Hashable = None) -> Buffer:
        """Uninitialised bytes. They go back to the pool with the last view of them."""
        if nbytes > SLAB_NBYTES // 2:
            # Large enough for NumPy to ask for huge pages itself.
            return np.empty(nbytes, dtype=np.uint8)
        with self._lock:
            self._collect()
            slab = self._filling.get(lane)
            buffer = slab.take(nbytes) if slab is not None else None
            if buffer is None:
                if slab is not None:
                    self._dead.append(slab)
                slab = self._filling[lane] = self._empty.pop() if self._empty else _Slab()
                buffer = slab.take(nbytes)
                assert buffer is not None
            slab.users += 1
        # `frombuffer` makes a root array: every view made of it, however indirectly, keeps it.
        weakref.finalize(buffer, self._dead.append, slab).atexit = False
        return buffer

    def close_lane(self, lane: Hashable) -> None:
        """Nothing more will be asked for in a lane: let its last slab go as well."""
        with self._lock:
            slab = self._filling.pop(lane, None)
            if slab is not None:
                self._dead.append(slab)
            self._collect()

    def trim(self) -> None:
        """Give empty slabs back to the system."""
        with self._lock:
            self._collect()
            self._empty.clear()

    @property
    def idle_nbytes(self) -> int:
        """Bytes in slabs that nothing uses."""
        with self._lock:
            self._collect()
            return len(self._empty) * SLAB_NBYTES

    def _collect(self) -> None:
        """Account for buffers that died since; the lock is held."""
        while True:
            try:
                slab = self._dead.popleft()
            except IndexError:
                return
            slab.users -= 1
            if not slab.users and len(self._empty) < self._keep:
                slab.reset()
                self._empty.append(slab)


def huge_pages_available() -> str:
    """What the kernel does about huge pages for memory that asks for them: for `doctor`."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            words: list[Any] = file.read().split()
    except OSError:
        return "unknown"
    return next((str(w).strip("[]") for w in words if str(w).startswith("[")), "unknown")

"""A pool of host memory for shards and outputs: huge pages, kept warm and reused.

A naive exchange spends most of its time in page faults. The first touch of a fresh page costs
several times as much as copying into it. So buffers come from a pool of pages
(`devices.host_memory.pages`), and return to it with their last view.

Small buffers of one *lane* share pages. The caller puts buffers that die together into one lane,
such as the shards of one range of output partitions. Their pages are then freed one by one while
outputs are read, and hold the outputs next. So the memory of the shards becomes the memory of the
result.

The pool covers host memory only. It does not limit the memory in use; `shuffle.shards` has a
budget. Where the system cannot move pages, all buffers come from NumPy.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt

from dask_gpurt.devices.host_memory.pages import PAGE_NBYTES, PrivatePages, work_here

Buffer = npt.NDArray[np.uint8]

#: Buffers start on cache lines, which also satisfies the alignment of NumPy and Arrow types.
_ALIGNMENT = 64
#: Buffers below this size come from NumPy: a page is too coarse for them.
_SMALLEST_NBYTES = 16 << 10

_pools: weakref.WeakSet[HostPool] = weakref.WeakSet()


class _Run:
    """Contiguous pages in use. They are freed when the last user releases them."""

    __slots__ = ("address", "lane", "n_pages", "used_nbytes", "users")

    def __init__(self, address: int, n_pages: int) -> None:
        self.address = address
        self.n_pages = n_pages
        #: The lane that fills the run; None until a lane does.
        self.lane: Hashable = None
        self.used_nbytes = 0
        #: Number of buffers, plus one while a lane fills the run.
        self.users = 0


class _Lease:
    """The owner of a buffer's memory. NumPy refers to it while any view of the buffer is alive."""

    __slots__ = ("__array_interface__", "_dead", "_nbytes", "_run")

    def __init__(
        self, run: _Run, address: int, nbytes: int, dead: Callable[[_Run, int], None]
    ) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        self._run, self._nbytes = run, nbytes
        self._dead = dead

    def __del__(self) -> None:
        self._dead(self._run, self._nbytes)


class HostPool:
    """A pool of warm pages that hands out buffers.

    Parameters
    ----------
    keep_nbytes
        Unused pages beyond this are returned to the system.
    lane_pages
        Pages that the buffers of a lane share at a time. More pages waste less at their ends, but
        are freed later.
    source
        Source of the pages.
    """

    def __init__(
        self, keep_nbytes: int, lane_pages: int = 4, source: PrivatePages | None = None
    ) -> None:
        self._pages = source or PrivatePages()
        self._smallest_nbytes = _SMALLEST_NBYTES if work_here() else sys.maxsize
        self._lane_pages = lane_pages
        #: Most bytes in the pages that one lane fills.
        self.lane_nbytes = lane_pages * PAGE_NBYTES
        self._keep_pages = max(0, keep_nbytes // PAGE_NBYTES)
        self._lock = threading.Lock()
        self._filling: dict[Hashable, _Run] = {}
        # A deque, because buffers die in any thread, even inside `empty` when the garbage collector
        # runs there. Destructors must not take the lock: the same thread may hold it.
        self._dead: deque[tuple[_Run, int]] = deque()
        self._is_trimmed = False
        self._spare: list[int] = []
        self._used_pages = 0
        #: Bytes of buffers in use.
        self._live_nbytes = 0
        _pools.add(self)

    def empty(self, nbytes: int, lane: Hashable = None) -> Buffer:
        """Return uninitialized bytes. They return to the pool with their last view.

        Parameters
        ----------
        lane
            Buffers of one lane share pages, unless the buffers are large.

        Raises
        ------
        MemoryError
            The system has no more memory.
        """
        if nbytes < self._smallest_nbytes:
            return np.empty(nbytes, dtype=np.uint8)
        with self._lock:
            self._collect()
            if nbytes > self.lane_nbytes // 2:
                run = self._new_run(-(-nbytes // PAGE_NBYTES))
                first = run.address
            else:
                run, first = self._share(nbytes, lane)
            run.users += 1
            self._live_nbytes += nbytes
        return np.asarray(_Lease(run, first, nbytes, self._die))

    def empty_alone(self, nbytes: int) -> Buffer:
        """Return uninitialized bytes that share no page with other buffers, for long-lived data.

        If most of the last page would be wasted, the bytes come from NumPy.
        """
        n_pages = -(-nbytes // PAGE_NBYTES)
        wasted_nbytes = n_pages * PAGE_NBYTES - nbytes
        if nbytes < self._smallest_nbytes or wasted_nbytes > nbytes // 8:
            return np.empty(nbytes, dtype=np.uint8)
        with self._lock:
            self._collect()
            run = self._new_run(n_pages)
            run.users += 1
            self._live_nbytes += nbytes
        return np.asarray(_Lease(run, run.address, nbytes, self._die))

    def _new_run(self, n_pages: int) -> _Run:
        self._is_trimmed = False
        run = _Run(self._pages.build(n_pages, self._spare), n_pages)
        self._used_pages += n_pages
        return run

    def _share(self, nbytes: int, lane: Hashable) -> tuple[_Run, int]:
        run = self._filling.get(lane)
        if run is None or nbytes > run.n_pages * PAGE_NBYTES - run.used_nbytes:
            # A lane that continues gets more pages at a time: less is lost at the end of each run.
            n_pages = 1 if run is None and nbytes <= PAGE_NBYTES else self._lane_pages
            # Allocate first: if the system has no pages, the lane keeps its current run.
            new = self._new_run(n_pages)
            if run is not None:
                self._dead.append((run, 0))
            run = self._filling[lane] = new
            run.lane = lane
            run.users += 1
        first = run.address + run.used_nbytes
        run.used_nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return run, first

    def close_lane(self, lane: Hashable) -> None:
        """Release the pages that a lane was filling, and at once those that hold no buffer yet.

        A later request in the lane begins with another page.
        """
        with self._lock:
            run = self._filling.pop(lane, None)
            if run is not None:
                self._release(run, max(1, -(-run.used_nbytes // PAGE_NBYTES)))
                self._dead.append((run, 0))
            self._collect()

    def trim(self) -> None:
        """Return all unused pages to the system, and pages that become free from now on.

        The next request for a buffer makes the pool keep pages warm again.
        """
        with self._lock:
            self._is_trimmed = True
            self._collect()
            while self._spare:
                self._pages.give_back(self._spare.pop())

    def close(self) -> None:
        """Stop sharing the memory with other processes. The pool still hands out buffers."""
        # Under the lock, so that no thread builds or returns pages meanwhile. The number of a
        # closed file descriptor may belong to another file at once.
        with self._lock:
            self._pages.close()

    def reset_after_fork(self) -> None:
        """Reset the pool in a forked child, and leave shared pages to the parent."""
        # The parent's thread that holds the lock does not exist in the child.
        self._lock = threading.Lock()
        if self._pages.reset_after_fork():
            self._spare.clear()
            self._filling.clear()

    @property
    def idle_nbytes(self) -> int:
        """Bytes in unused pages."""
        with self._lock:
            self._collect()
            return len(self._spare) * PAGE_NBYTES

    @property
    def used_nbytes(self) -> int:
        """Bytes in pages that are in use."""
        with self._lock:
            self._collect()
            return self._used_pages * PAGE_NBYTES

    def wastes_more_than(self, nbytes: int) -> bool:
        """Return whether pages in use have more bytes than this that no buffer uses."""
        # Callers ask for every shard, so a look without the lock comes first. Buffers that died
        # since the pool was last used are not accounted for there.
        if self._wasted_nbytes <= nbytes:
            return False
        with self._lock:
            self._collect()
            return self._wasted_nbytes > nbytes

    @property
    def _wasted_nbytes(self) -> int:
        return self._used_pages * PAGE_NBYTES - self._live_nbytes

    def _die(self, run: _Run, nbytes: int) -> None:
        """Note the death of a buffer. The garbage collector calls this in any thread."""
        self._dead.append((run, nbytes))
        # While the pool is in use, the next request collects. A trimmed pool gets no request, and
        # results that outlive their shuffle would stay resident after they die. So it collects
        # here. It only tries the lock, because this thread may hold it.
        if self._is_trimmed and self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        """Account for buffers that died. The caller holds the lock."""
        while True:
            try:
                run, nbytes = self._dead.popleft()
            except IndexError:
                return
            self._live_nbytes -= nbytes
            run.users -= 1
            if run.users == 1 and self._filling.get(run.lane) is run:
                # Only its lane is left. An idle lane would pin the pages until it is closed.
                del self._filling[run.lane]
                run.users = 0
            if run.users:
                continue
            self._release(run, 0)

    def _release(self, run: _Run, first: int) -> None:
        """Take the pages of a run from this one on, and keep them or return them to the system."""
        for number in range(first, run.n_pages):
            address = run.address + number * PAGE_NBYTES
            if len(self._spare) < self._keep_pages and not self._is_trimmed:
                self._spare.append(address)
            else:
                self._pages.give_back(address)
        self._used_pages -= run.n_pages - first
        run.n_pages = first


def _reset_after_fork() -> None:
    for pool in list(_pools):
        pool.reset_after_fork()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_reset_after_fork)


class Tenant:
    """A user of pools that closes all the lanes it fills at once.

    Work that started before `close` may end after it, in any thread. A lane that is filled after
    `close` is closed again at once. Otherwise its page would stay in use forever.
    """

    def __init__(self) -> None:
        self._lanes: set[tuple[HostPool, Hashable]] = set()
        self._is_closed = False

    def empty(self, pool: HostPool, nbytes: int, lane: Hashable) -> Buffer:
        """Return uninitialized bytes from a pool, in a lane of this user only."""
        lane = (id(self), lane)
        self._lanes.add((pool, lane))
        buffer = pool.empty(nbytes, lane)
        # Checked after the lane is registered: a later `close` finds the lane in the set.
        if self._is_closed:
            pool.close_lane(lane)
        return buffer

    def close(self) -> None:
        """Release the pages that this user was filling. It asks for nothing more."""
        self._is_closed = True
        self.close_lanes()

    def close_lanes(self) -> None:
        """Release the pages that this user is filling, from any thread. It may ask for more."""
        while self._lanes:
            # Another thread may take the last one.
            with contextlib.suppress(KeyError):
                pool, lane = self._lanes.pop()
                pool.close_lane(lane)

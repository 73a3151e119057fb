"""Host memory for shards and outputs: huge pages, kept warm, never moved, soon used again.

Most of the time of a naive exchange goes into page faults: the first touch of a fresh page costs
several times what copying into it does. So memory comes from a pool of pages
(`devices.host_memory.pages`) and goes back to it with the last view of a buffer.

Small buffers of one *lane* share pages. Whoever asks puts what dies together into one lane (the
shards for one range of output partitions), so that pages come free one by one while outputs are
read, and become the outputs: the memory of a shuffle's shards turns into the memory of its result.

Covers host memory only. Sets no limit on what is in use: that is `shuffle.shards`' budget.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.devices.host_memory.pages import PAGE_NBYTES, PrivatePages

Buffer = npt.NDArray[np.uint8]

#: Buffers begin on cache lines, which also aligns every NumPy and Arrow type.
_ALIGNMENT = 64
#: Smaller buffers than this come from NumPy: a page is too coarse for them.
_SMALLEST_NBYTES = 16 << 10

_pools: weakref.WeakSet[HostPool] = weakref.WeakSet()


class _Run:
    """Contiguous pages that are in use; free again once everybody let go of them."""

    __slots__ = ("address", "n_pages", "used_nbytes", "users")

    def __init__(self, address: int, n_pages: int) -> None:
        self.address = address
        self.n_pages = n_pages
        self.used_nbytes = 0
        #: Buffers, and one more while a lane fills the run.
        self.users = 0


class _Lease:
    """What NumPy holds on to while any view of a buffer is alive."""

    __slots__ = ("__array_interface__", "_dead", "_run")

    def __init__(self, run: _Run, address: int, nbytes: int, dead: Callable[[_Run], None]) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        self._run = run
        self._dead = dead

    def __del__(self) -> None:
        self._dead(self._run)


class HostPool:
    """Buffers of warm pages.

    Parameters
    ----------
    keep_nbytes
        Pages that nobody uses are given back to the system beyond this.
    lane_pages
        Pages that the buffers of a lane share at a time. More of them waste less at their ends,
        and come free later.
    source
        Where pages come from.
    """

    def __init__(
        self, keep_nbytes: int, lane_pages: int = 4, source: PrivatePages | None = None
    ) -> None:
        self._pages = source or PrivatePages()
        self._lane_pages = lane_pages
        self._keep_pages = max(0, keep_nbytes // PAGE_NBYTES)
        self._lock = threading.Lock()
        self._filling: dict[Hashable, _Run] = {}
        # A deque: buffers die in whatever thread lets go of them last, even inside `empty` when
        # the garbage collector runs there, so nothing that happens then may take the lock.
        self._dead: deque[_Run] = deque()
        self._is_trimmed = False
        self._spare: list[int] = []
        self._used_pages = 0
        _pools.add(self)

    def empty(self, nbytes: int, lane: Hashable = None) -> Buffer:
        """Uninitialised bytes. They go back to the pool with the last view of them.

        Parameters
        ----------
        lane
            Buffers of one lane share pages, unless they are large.

        Raises
        ------
        MemoryError
            The system has no more.
        """
        if nbytes < _SMALLEST_NBYTES:
            return np.empty(nbytes, dtype=np.uint8)
        with self._lock:
            self._collect()
            if nbytes > self._lane_pages * PAGE_NBYTES // 2:
                run = self._new_run(-(-nbytes // PAGE_NBYTES))
                first = run.address
            else:
                run, first = self._share(nbytes, lane)
            run.users += 1
        return np.asarray(_Lease(run, first, nbytes, self._die))

    def empty_alone(self, nbytes: int) -> Buffer:
        """Uninitialised bytes that share their pages with nothing, for what is kept for long.

        From NumPy where pages would mostly be wasted.
        """
        n_pages = -(-nbytes // PAGE_NBYTES)
        if n_pages * PAGE_NBYTES - nbytes > nbytes // 8:
            return np.empty(nbytes, dtype=np.uint8)
        with self._lock:
            self._collect()
            run = self._new_run(n_pages)
            run.users += 1
        return np.asarray(_Lease(run, run.address, nbytes, self._die))

    def _new_run(self, n_pages: int) -> _Run:
        self._is_trimmed = False
        run = _Run(self._pages.build(n_pages, self._spare), n_pages)
        self._used_pages += n_pages
        return run

    def _share(self, nbytes: int, lane: Hashable) -> tuple[_Run, int]:
        run = self._filling.get(lane)
        if run is None or nbytes > run.n_pages * PAGE_NBYTES - run.used_nbytes:
            # A lane that goes on gets more at a time: less is lost where one run ends.
            n_pages = 1 if run is None and nbytes <= PAGE_NBYTES else self._lane_pages
            # First: where no pages are to be had, the lane keeps what it has.
            new = self._new_run(n_pages)
            if run is not None:
                self._dead.append(run)
            run = self._filling[lane] = new
            run.users += 1
        first = run.address + run.used_nbytes
        run.used_nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return run, first

    def close_lane(self, lane: Hashable) -> None:
        """Nothing more will be asked for in a lane: let go of the page it was filling."""
        with self._lock:
            run = self._filling.pop(lane, None)
            if run is not None:
                self._dead.append(run)
            self._collect()

    def trim(self) -> None:
        """Give back every page that nobody uses, and from now on those that come free.

        Until the next buffer is asked for: then pages are kept warm again.
        """
        with self._lock:
            self._is_trimmed = True
            self._collect()
            while self._spare:
                self._pages.give_back(self._spare.pop())

    def close(self) -> None:
        """Nobody reads this memory from outside any more. Buffers are handed out as before."""
        # Not beside whoever builds or gives back pages: the file's number may be another file's as
        # soon as it is closed.
        with self._lock:
            self._pages.close()

    def reset_after_fork(self) -> None:
        """In a forked child: leave to the parent what both have."""
        # The thread that held it in the parent is not there to release it.
        self._lock = threading.Lock()
        if self._pages.reset_after_fork():
            self._spare.clear()
            self._filling.clear()

    @property
    def idle_nbytes(self) -> int:
        """Bytes in pages that nobody uses."""
        with self._lock:
            self._collect()
            return len(self._spare) * PAGE_NBYTES

    @property
    def used_nbytes(self) -> int:
        """Bytes in pages that somebody uses."""
        with self._lock:
            self._collect()
            return self._used_pages * PAGE_NBYTES

    def _die(self, run: _Run) -> None:
        """A buffer of this run is gone. Called by the garbage collector, anywhere."""
        self._dead.append(run)
        # While the pool is in use, the next request collects. Otherwise nobody would: results that
        # outlived their shuffle would stay resident after they were dropped. The lock is only
        # tried, since whoever lets go of the buffer may be holding it.
        if self._is_trimmed and self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        """Account for what died since; the lock is held."""
        while True:
            try:
                run = self._dead.popleft()
            except IndexError:
                return
            run.users -= 1
            if run.users:
                continue
            self._used_pages -= run.n_pages
            for number in range(run.n_pages):
                address = run.address + number * PAGE_NBYTES
                if len(self._spare) < self._keep_pages and not self._is_trimmed:
                    self._spare.append(address)
                else:
                    self._pages.give_back(address)


def _reset_after_fork() -> None:
    for pool in list(_pools):
        pool.reset_after_fork()


os.register_at_fork(after_in_child=_reset_after_fork)


class Tenant:
    """One user of pools, who leaves all the lanes it fills at once.

    What it had begun may end later, in any thread: a lane that is filled after `close` is closed
    again at once. Otherwise the page would stay taken with nobody there to let go of it.
    """

    def __init__(self) -> None:
        self._lanes: set[tuple[HostPool, Hashable]] = set()
        self._is_closed = False

    def empty(self, pool: HostPool, nbytes: int, lane: Hashable) -> Buffer:
        """Uninitialised bytes from a pool, in a lane that is this tenant's alone."""
        lane = (id(self), lane)
        self._lanes.add((pool, lane))
        buffer = pool.empty(nbytes, lane)
        # Asked afterwards: whoever leaves later than this finds the lane among the others.
        if self._is_closed:
            pool.close_lane(lane)
        return buffer

    def close(self) -> None:
        """Nothing more will be asked for: let go of the pages that are being filled."""
        self._is_closed = True
        while self._lanes:
            pool, lane = self._lanes.pop()
            pool.close_lane(lane)


def pool_report(pool: HostPool) -> dict[str, Any]:
    """What a pool holds, for `status`."""
    return {"used_nbytes": pool.used_nbytes, "idle_nbytes": pool.idle_nbytes}

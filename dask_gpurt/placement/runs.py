"""Division of the leaves of a reduction tree into runs, one for each worker. Pure.

A reduction combines neighbouring blocks, a few at a time. Stock Dask gives queued tasks one by one
to the least busy worker. So neighbours are made on different workers, and nearly every combining
task fetches nearly all of its inputs. Here each worker gets a *run*: neighbouring leaves, as many
as its share of the threads. Then inputs are fetched only at the ends of runs and near the root.

A leaf is one input of the first combining task, with the tasks without inputs that it is made from.
A run is only a preference. Its tasks wait in the scheduler's queue, and a worker that has nothing
else to do can take them (`pays_to_take`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from heapq import heappop, heappush
from math import ceil
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

#: States of the task of a leaf that is not made yet.
UNMADE = ("released", "waiting", "queued")
_WANTED = (*UNMADE, "processing")


class _Waiting(NamedTuple, Generic[T]):
    """A task in the scheduler's queue; the least `order` comes first."""

    order: tuple[float, ...]
    number: int
    leaf: Hashable
    task: T


class Runs(Generic[T]):
    """The runs of one reduction tree.

    Parameters
    ----------
    n_leaves
        Number of leaves that are not made yet.
    is_queued
        Returns whether a task still waits: others may have been placed or released.
    """

    def __init__(self, n_leaves: int, is_queued: Callable[[T], bool]) -> None:
        self._n_leaves = n_leaves
        self._is_queued = is_queued
        #: Worker of each leaf that has one.
        self._owners: dict[Hashable, str] = {}
        #: Workers that have had their share of the leaves, with their numbers of threads.
        self._served: dict[str, int] = {}
        self._n_served = 0
        #: Tasks in the queue: of each run, as a heap, and of each leaf without an owner.
        self._waiting: dict[str, list[_Waiting[T]]] = {}
        self._unowned: dict[Hashable, list[_Waiting[T]]] = {}
        self._count = 0

    # ------------------------------------------------------------------ owners of leaves

    def owner(self, leaf: Hashable) -> str | None:
        """Return the worker whose run has a leaf."""
        return self._owners.get(leaf)

    def is_served(self, address: str) -> bool:
        """Return whether a worker has begun a run while others wait for theirs."""
        return address in self._served

    @property
    def is_used_up(self) -> bool:
        """Whether as many leaves have an owner as there were to make."""
        return len(self._owners) >= self._n_leaves

    @property
    def is_outgrown(self) -> bool:
        """Whether twice as many leaves have an owner: most of them are probably gone."""
        return len(self._owners) >= 2 * self._n_leaves

    def renew(self, n_unmade: int, states: Callable[[Hashable], str | None]) -> None:
        """Forget leaves that are made or gone, and count those of a later graph.

        Parameters
        ----------
        n_unmade
            Leaves that are not made yet, with or without an owner.
        states
            Returns the state of a leaf's task; None if it is gone.
        """
        known = {leaf: states(leaf) for leaf in self._owners}
        self._owners = {leaf: one for leaf, one in self._owners.items() if known[leaf] in _WANTED}
        n_owned = sum(state in UNMADE for state in known.values())
        self._n_leaves = len(self._owners) + max(0, n_unmade - n_owned)

    def share(self, address: str, nthreads: int, total_nthreads: int) -> int:
        """Return the leaves of a worker's next run: its share of those without an owner.

        Workers that have had a run get no share, until one of them needs another run.
        """
        left = total_nthreads - self._n_served
        if left < nthreads or address in self._served:
            # All workers share the rest.
            self._served.clear()
            self._n_served = 0
            left = max(total_nthreads, nthreads)
        self._served[address] = nthreads
        self._n_served += nthreads
        n_left = max(self._n_leaves - len(self._owners), 1)
        return ceil(n_left * nthreads / left)

    def begin(self, address: str, leaves: Iterable[Hashable]) -> None:
        """Give leaves to a worker, with those of their tasks that wait."""
        own = self._waiting.setdefault(address, [])
        for leaf in leaves:
            self._owners[leaf] = address
            for one in self._unowned.pop(leaf, ()):
                heappush(own, one)

    def _forget(self, address: str) -> None:
        self._n_served -= self._served.pop(address, 0)

    def remove_worker(self, address: str) -> None:
        """Take the leaves of a worker that left away from it."""
        self._forget(address)
        self._owners = {leaf: one for leaf, one in self._owners.items() if one != address}
        for one in sorted(self._waiting.pop(address, ())):
            self._unowned.setdefault(one.leaf, []).append(one)

    # ------------------------------------------------------------------ tasks in the queue

    def wait(self, leaf: Hashable, order: tuple[float, ...], task: T) -> None:
        """Note that a task is in the scheduler's queue."""
        self._count += 1
        waiting = _Waiting(order, self._count, leaf, task)
        address = self._owners.get(leaf)
        if address is None:
            self._unowned.setdefault(leaf, []).append(waiting)
        else:
            heappush(self._waiting.setdefault(address, []), waiting)

    def next_task(self, address: str) -> T | None:
        """Remove and return the first task of a worker's run; None if none waits."""
        own = self._waiting.get(address)
        while own:
            task = heappop(own).task
            if self._is_queued(task):
                return task
        return None

    def first_unowned(self) -> T | None:
        """Return the first task in the queue whose leaf has no owner; None if there is none."""
        while self._unowned:
            leaf, waiting = next(iter(self._unowned.items()))
            for one in waiting:
                if self._is_queued(one.task):
                    return one.task
            del self._unowned[leaf]
        return None

    def longest(self, but: str) -> tuple[str, list[T]] | None:
        """Return the worker for which most tasks wait, and these tasks in order.

        Parameters
        ----------
        but
            A worker to leave out.
        """
        while True:
            others = (one for one in self._waiting if one != but)
            address = max(others, key=lambda one: (len(self._waiting[one]), one), default=None)
            if address is None:
                return None
            n_before = len(self._waiting[address])
            queue = self._waiting[address] = sorted(
                one for one in self._waiting[address] if self._is_queued(one.task)
            )
            # Tasks that no longer waited made it look longer: another one may be the longest.
            if len(queue) == n_before:
                return (address, [one.task for one in queue]) if queue else None

    def take(self, victim: str, address: str) -> None:
        """Give a worker the later half of the tasks that wait for another one."""
        queue = sorted(self._waiting[victim])
        half = len(queue) // 2
        # A sorted list is a heap.
        self._waiting[victim], taken = queue[:half], queue[half:]
        for one in taken:
            self._owners[one.leaf] = address
            heappush(self._waiting.setdefault(address, []), one)

    @property
    def is_empty(self) -> bool:
        """Whether no task waits."""
        return not self._unowned and not any(self._waiting.values())


def pays_to_take(
    n_ahead: int,
    nthreads: int,
    n_ahead_of_thief: int,
    nthreads_of_thief: int,
    duration_s: float,
    moved_s: float,
) -> bool:
    """Return whether a task ends sooner on another worker, which has to send its result back.

    Parameters
    ----------
    n_ahead, n_ahead_of_thief
        Tasks that its worker does first, and tasks that the other worker has already.
    moved_s
        Seconds to move the result.
    """
    # A running task is half done, on average.
    wait_s = max(0.0, n_ahead / nthreads - 0.5) * duration_s
    thief_s = max(0.0, n_ahead_of_thief / nthreads_of_thief - 0.5) * duration_s
    return wait_s > thief_s + moved_s

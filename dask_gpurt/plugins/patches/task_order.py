"""Of tasks that make little of much, those whose inputs are in memory go first.

Dask orders tasks so that a result is used soon after it was made. Of tasks that leave next to
nothing it matters little when they run, and much what they have read: a pass over data of which
half is in memory, taken in order, reads more than the other half, because what is read takes the
place of what comes later in the same pass. Whoever begins with what is there has done with it by
the time that its room is needed.

Only among tasks of one name and one graph, and only while the next one would have to wait for the
disk. Which name that is, is learnt from what its tasks made so far. Eviction sees the same order
(`AtHand.use`); else it would make room for the next task by what is to run before it.

| what | why | taken back by |
|---|---|---|
| `WorkerState.ready`, a `HeapSet`, and its `pop` | which task is next | `AtHand.remove` |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from distributed.collections import HeapSet

if TYPE_CHECKING:
    from distributed import Worker

#: Tasks whose outputs are no larger than this share of their inputs may go out of order.
LITTLE_SHARE = 0.1
#: Inputs of less are read at once; their order is not worth a look.
LEAST_NBYTES = 1 << 20
#: Tasks of the queue that are looked at, a few microseconds each.
MAX_LOOKED_AT = 2_000
#: With nothing at hand, the queue is not looked through again for so many tasks; more, if it took
#: long.
TASKS_BETWEEN = 8
LOOKED_AT_PER_TASK = 64
#: A priority begins with what the tasks of a graph have in common: what its user said, and when it
#: was submitted. Then comes the number of the task in the graph, and that of its message.
_OF_GRAPH = 2
#: Earlier than any number that Dask gives a task of a graph.
_EARLIER = 1e12


class _Ready(HeapSet[Any]):
    """A worker's queue from which another task may be preferred to the first."""

    __slots__ = ("_choose",)

    def __init__(self, tasks: HeapSet[Any], choose: Callable[[Any], Any]) -> None:
        super().__init__(key=tasks.key)
        self._choose = choose
        for task in tasks.sorted():
            self.add(task)

    def pop(self) -> Any:
        chosen = self._choose(self.peek())
        self.discard(chosen)
        return chosen


class AtHand:
    """The order of one worker's tasks, until `remove`. On the event loop, but for `use`.

    Parameters
    ----------
    is_cold
        Whether a value is here, but would have to be read before a task could use it.
    """

    def __init__(self, worker: Worker, is_cold: Callable[[Hashable], bool]) -> None:
        self._state = worker.state
        self._is_cold = is_cold
        #: Names of tasks that make little of much.
        self._makes_little: set[str] = set()
        #: Tasks of one name and graph whose inputs were at hand when the queue was looked through.
        self._found: deque[Any] = deque()
        self._of: Any = None
        #: Tasks that had begun when the next look through the queue is due.
        self._next_look = 0
        #: Keys of tasks that left the queue and have not begun. When they do, their inputs are
        #: claimed; until then nothing else says that these are needed, and at once.
        self.leaving: set[Hashable] = set()
        self._state.ready = _Ready(self._state.ready, self._choose)

    def remove(self) -> None:
        """Give the worker back a queue as it had it."""
        ready: HeapSet[Any] = HeapSet(key=self._state.ready.key)
        for task in self._state.ready.sorted():
            ready.add(task)
        self._state.ready = ready
        self._found.clear()
        self.leaving.clear()

    def learn(self, name: str, taken_nbytes: int, made_nbytes: int) -> None:
        """A task of this name made so much of so much."""
        if taken_nbytes >= LEAST_NBYTES and made_nbytes <= LITTLE_SHARE * taken_nbytes:
            self._makes_little.add(name)
        else:
            self._makes_little.discard(name)

    def use(self, users: Iterable[Any], *, is_home: bool) -> tuple[float, ...] | None:
        """Priority of the first of some tasks to take a value; None if there is none."""
        first = min(users, key=_priority, default=None)
        if first is None:
            return None
        priority = _priority(first)
        if is_home and first.prefix in self._makes_little:
            return (*priority[:_OF_GRAPH], priority[_OF_GRAPH] - _EARLIER)
        return priority

    def begins(self, key: Hashable) -> None:
        """A task that left the queue begins."""
        self.leaving.discard(key)

    def _choose(self, first: Any) -> Any:
        """The task that leaves the queue, which the first one need not be."""
        chosen = self._preferred_to(first) or first
        self.leaving.add(chosen.key)
        return chosen

    def _preferred_to(self, first: Any) -> Any:
        if first.prefix not in self._makes_little or self._is_at_hand(first):
            return None
        kind = _kind(first)
        n_begun = self._state.executed_count
        if kind != self._of or (not self._found and n_begun >= self._next_look):
            looked_at = list(islice(self._state.ready.sorted(), MAX_LOOKED_AT))
            self._of = kind
            self._next_look = n_begun + max(TASKS_BETWEEN, len(looked_at) // LOOKED_AT_PER_TASK)
            self._found = deque(
                task for task in looked_at if _kind(task) == kind and self._is_at_hand(task)
            )
        while self._found:
            task = self._found.popleft()
            if task in self._state.ready and self._is_at_hand(task):
                return task
        return None

    def _is_at_hand(self, task: Any) -> bool:
        return not any(self._is_cold(dependency.key) for dependency in task.dependencies)


def _kind(task: Any) -> tuple[str, tuple[float, ...]]:
    """What the tasks of one name and one graph have in common."""
    return task.prefix, _priority(task)[:_OF_GRAPH]


def _priority(task: Any) -> tuple[float, ...]:
    priority: tuple[float, ...] = task.priority
    return priority

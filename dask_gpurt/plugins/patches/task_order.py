"""Order of a worker's reduction tasks: run first those whose inputs are in memory.

A reduction here is a task with large inputs and a small output. Dask orders tasks so that a result
is used soon after it was made. For reductions that order matters little, but the bytes they read
matter much. Suppose half of the inputs of a pass are in memory. A pass in order reads more than
the other half, because each read evicts an input that the same pass needs later. A worker that
begins with the inputs in memory has used them before their room is needed.

The order changes only among tasks of one prefix and one graph, and only while the next task would
wait for the disk. The worker learns from finished tasks which prefixes are reductions. Eviction
must see the same order (`TaskOrder.use`). Otherwise, making room for the next task would evict the
inputs of tasks that run before it.

| what | why | taken back by |
|---|---|---|
| `WorkerState.ready`, a `HeapSet`, and its `pop` | selects the next task | `TaskOrder.uninstall` |
| `HeapSet._heap`, `._data` | the first tasks of a long queue, without sorting it | |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from distributed.collections import HeapSet

if TYPE_CHECKING:
    from distributed import Worker

#: A task is a reduction if its output is no larger than this share of its inputs.
REDUCTION_SHARE = 0.1
#: Smaller inputs are read quickly, so the order of their tasks does not matter.
MIN_INPUT_NBYTES = 1 << 20
#: Tasks of the queue that one scan looks at, a few microseconds each.
MAX_SCANNED = 2_000
#: After a scan that found no task, at least `TASKS_BETWEEN_SCANS` tasks begin before the next
#: scan. After a long scan, at least one begins for each `SCANNED_PER_TASK` tasks that it read.
TASKS_BETWEEN_SCANS = 8
SCANNED_PER_TASK = 64
#: Leading elements of a priority that all tasks of a graph share: the user's priority and the time
#: of submission. The number of the task in the graph follows, then that of its message.
_OF_GRAPH = 2
#: Larger than any number that Dask gives a task of a graph.
_EARLIER = 1e12


class _Ready(HeapSet[Any]):
    """A worker's queue that may return another task than the first one."""

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

    def peekn(self, n: int) -> Iterator[Any]:
        """Yield the first `n` tasks in order. Stock's method sorts the whole queue."""
        # An entry and its place in the heap, where the entries after it are at 2 i + 1 and 2 i + 2.
        nearest = [(entry, 0) for entry in self._heap[:1]]
        # A task that was removed and added again may have two entries.
        seen: set[Any] = set()
        while nearest and len(seen) < n:
            entry, place = heappop(nearest)
            task = entry[-1]()
            if task in self._data and task not in seen:
                seen.add(task)
                yield task
            for after in range(2 * place + 1, min(2 * place + 3, len(self._heap))):
                heappush(nearest, (self._heap[after], after))


class TaskOrder:
    """The patch that orders one worker's tasks, until `uninstall`.

    All methods but `use` run on the event loop.

    Parameters
    ----------
    is_spilled
        Returns whether a value is here, but must be read before a task can use it.
    """

    def __init__(self, worker: Worker, is_spilled: Callable[[Hashable], bool]) -> None:
        self._state = worker.state
        self._is_spilled = is_spilled
        #: Prefixes of reductions.
        self._reductions: set[str] = set()
        #: Tasks of one kind whose inputs the last scan found in memory.
        self._found: deque[Any] = deque()
        self._found_kind: Any = None
        #: The next scan is due once this worker has begun this many tasks in all.
        self._next_scan = 0
        #: Keys of tasks that left the queue and have not begun. Their inputs are claimed only when
        #: they begin; until then, nothing else shows that these are needed at once.
        self.dequeued: set[Hashable] = set()
        self._state.ready = _Ready(self._state.ready, self._choose)

    def uninstall(self) -> None:
        """Give the worker a stock queue with the same tasks."""
        ready: HeapSet[Any] = HeapSet(key=self._state.ready.key)
        for task in self._state.ready.sorted():
            ready.add(task)
        self._state.ready = ready
        self._found.clear()
        self.dequeued.clear()

    def learn(self, prefix: str, input_nbytes: int, output_nbytes: int) -> None:
        """Learn from a finished task whether its prefix is a reduction."""
        is_large = input_nbytes >= MIN_INPUT_NBYTES
        if is_large and output_nbytes <= REDUCTION_SHARE * input_nbytes:
            self._reductions.add(prefix)
        else:
            self._reductions.discard(prefix)

    def use(self, first: Any, *, in_memory: bool) -> tuple[float, ...] | None:
        """Return the priority at which the first user of a value runs; None without a user."""
        if first is None:
            return None
        priority = _priority(first)
        if in_memory and first.prefix in self._reductions:
            return (*priority[:_OF_GRAPH], priority[_OF_GRAPH] - _EARLIER)
        return priority

    def begins(self, key: Hashable) -> None:
        """Note that a task that left the queue begins."""
        self.dequeued.discard(key)

    def _choose(self, first: Any) -> Any:
        """Return the task that leaves the queue."""
        chosen = self._preferred_to(first) or first
        self.dequeued.add(chosen.key)
        return chosen

    def _preferred_to(self, first: Any) -> Any:
        if first.prefix not in self._reductions or self._has_inputs(first):
            return None
        kind = _kind(first)
        n_begun = self._state.executed_count
        if kind != self._found_kind or (not self._found and n_begun >= self._next_scan):
            scanned = list(self._state.ready.peekn(MAX_SCANNED))
            self._found_kind = kind
            self._next_scan = n_begun + max(TASKS_BETWEEN_SCANS, len(scanned) // SCANNED_PER_TASK)
            self._found = deque(
                task for task in scanned if _kind(task) == kind and self._has_inputs(task)
            )
        while self._found:
            task = self._found.popleft()
            if task in self._state.ready and self._has_inputs(task):
                return task
        return None

    def _has_inputs(self, task: Any) -> bool:
        """Return whether all inputs of a task are in memory."""
        return not any(self._is_spilled(dependency.key) for dependency in task.dependencies)


def _kind(task: Any) -> tuple[str, tuple[float, ...]]:
    """Return what the tasks of one prefix and one graph have in common."""
    return task.prefix, _priority(task)[:_OF_GRAPH]


def _priority(task: Any) -> tuple[float, ...]:
    priority: tuple[float, ...] = task.priority
    return priority

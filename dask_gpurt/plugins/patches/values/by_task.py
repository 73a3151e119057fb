"""Facts about tasks of a scheduler, kept while the tasks exist.

Dask compares tasks by key. A weak dictionary would give a new task the facts of an earlier task
with its key, as long as something still refers to the earlier one. `ByTask` tells the two apart.

| what | why | taken back by |
|---|---|---|
| `distributed.scheduler.TaskState` | tasks with the same key are equal; weak references to them end
with them | |

Contract tests in `tests/plugins/patches/test_by_task.py` fail when distributed changes any of
these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import ref

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

V = TypeVar("V")


class ByTask(Generic[V]):
    """Values by task. A value ends with its task, or when another task with its key gets one."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[ref[TaskState], V]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def get(self, ts: TaskState) -> V | None:
        """Return the value of a task; None if it has none."""
        task, value = self._found.get(ts.key, (None, None))
        return value if task is not None and task() is ts else None

    def set(self, ts: TaskState, value: V) -> V:
        """Give a task a value, and return it."""
        key, found = ts.key, self._found

        def forget(dead: ref[TaskState]) -> None:
            if key in found and found[key][0] is dead:
                del found[key]

        found[key] = ref(ts, forget), value
        return value

    def drop(self, ts: TaskState) -> None:
        """Forget a task, if it has a value."""
        if self.get(ts) is not None:
            del self._found[ts.key]

    def clear(self) -> None:
        self._found.clear()

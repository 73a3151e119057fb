"""Values that could not be moved to another worker, and where tasks that need them may run.

Some values cannot be pickled: a lock, an open file, a generator. Stock Dask finds out when it moves
one, and the task that waits for it never starts. So such tasks go to a worker that has the value.

A worker asks for several values in one message. If one of them cannot be moved, the others count as
stuck, too. So a task with stuck values on several workers is tried on each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState


class StuckValues:
    """What is known of values that could not be moved. It keeps no task alive."""

    def __init__(self) -> None:
        self._values: WeakSet[TaskState] = WeakSet()
        #: Addresses of workers to which an input of a task could not be moved.
        self._tried: WeakKeyDictionary[TaskState, set[str]] = WeakKeyDictionary()

    def add(self, value: TaskState, waiting: TaskState, ws: WorkerState) -> None:
        """Record that a value could not be moved to the worker of a task that waits for it."""
        self._values.add(value)
        self._tried.setdefault(waiting, set()).add(ws.address)

    def workers(self, ts: TaskState) -> set[WorkerState] | None:
        """Return the workers to try for a task; None if none of its inputs is stuck."""
        if not self._values:
            return None
        holders = [
            set(one.who_has) for one in ts.dependencies if one in self._values and one.who_has
        ]
        if not holders:
            return None
        if common := set.intersection(*holders):
            return common
        tried = self._tried.get(ts, ())
        return {ws for ws in set.union(*holders) if ws.address not in tried}

"""Values that a worker could not fetch, although their holders are there: their tasks go elsewhere.

Some inputs cannot be pickled or unpickled: a lock, an open file, a generator. The worker that wants
such an input reports that it has failed. Stock Dask ignores that, because the input is in memory
elsewhere. So the task that needs it waits for ever. This patch moves that task to a worker with the
input, or lets it fail.

A worker asks for several values in one message. If one of them cannot be moved, the others count as
*stuck*, too. So a task with stuck inputs on several workers is tried on each of them.

A value is stuck for the workers that could not get it: one may lack a module that others have, or
may get it later. So a mark ends when the value reaches another worker, and when workers come or go.

| what | why | taken back by |
|---|---|---|
| stream handler `task-erred`, `TaskState.who_has`, `.dependents`, `.processing_on` | shows which
tasks wait for a value that did not arrive | `FailedMoves.uninstall` |
| `Scheduler._reschedule`, `.stimulus_queue_slots_maybe_opened` | gives a task to another worker | |
| `distributed.core.error_message` | makes the error that clients see | |

Contract tests in `tests/plugins/patches/test_failed_moves.py` fail when distributed changes any of
these names.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed.core import error_message

from dask_gpurt.plugins.patches.values.by_task import ByTask

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

logger = logging.getLogger("dask_gpurt.placement")


class _Mark(NamedTuple):
    """Addresses of the workers that had a stuck value, and of those that could not get it."""

    holders: set[str]
    failed: set[str]


class FailedMoves:
    """The patch of one scheduler, until `uninstall`, with the values that are known to be stuck."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._stuck: ByTask[_Mark] = ByTask()
        #: Addresses of workers to which an input of a task could not be moved.
        self._tried: ByTask[set[str]] = ByTask()
        self._ours = self._failed
        self._stock = scheduler.stream_handlers["task-erred"]
        scheduler.stream_handlers["task-erred"] = self._ours

    def uninstall(self) -> None:
        """Restore the stock handler."""
        if self._scheduler.stream_handlers.get("task-erred") is self._ours:
            self._scheduler.stream_handlers["task-erred"] = self._stock

    def workers_changed(self) -> None:
        """Forget what is stuck: workers joined or left."""
        self._stuck.clear()

    def _stuck_inputs(self, ts: TaskState) -> list[tuple[TaskState, _Mark]]:
        """Return the inputs of a task that are stuck still; forget those that were moved since."""
        found = []
        for one in ts.dependencies if self._stuck else ():
            mark = self._stuck.get(one)
            if mark is None or not one.who_has:
                continue
            if all(ws.address in mark.holders for ws in one.who_has):
                found.append((one, mark))
            else:
                self._stuck.drop(one)
        return found

    def has_stuck_input(self, ts: TaskState) -> bool:
        """Return whether an input of a task could not be moved."""
        return bool(self._stuck_inputs(ts))

    def may_try(self, ts: TaskState, ws: WorkerState) -> bool:
        """Return whether no input of a task is stuck for a worker."""
        return not any(ws.address in mark.failed for _, mark in self._stuck_inputs(ts))

    def workers(self, ts: TaskState) -> set[WorkerState]:
        """Return the workers to try for a task with stuck inputs; empty for any other task."""
        holders = [set(one.who_has or ()) for one, _ in self._stuck_inputs(ts)]
        if not holders:
            return set()
        found = set.intersection(*holders)
        if not found:
            tried = self._tried.get(ts) or ()
            found = {ws for ws in set.union(*holders) if ws.address not in tried}
        valid = None if ts.loose_restrictions else self._scheduler.valid_workers(ts)
        return found if valid is None else found & valid

    def _failed(self, key: Any, worker: str, stimulus_id: str, **kwargs: Any) -> None:
        """Handle the message that a task, or a value that it needs, failed on a worker."""
        ts, ws = self._scheduler.tasks.get(key), self._scheduler.workers.get(worker)
        if ts is None or ws is None or ts.state != "memory" or ws in (ts.who_has or ()):
            self._stock(key=key, worker=worker, stimulus_id=stimulus_id, **kwargs)
            return
        holders = {one.address for one in ts.who_has or ()}
        mark = self._stuck.get(ts) or self._stuck.set(ts, _Mark(set(), set()))
        mark.holders.update(holders)
        mark.failed.add(worker)
        for waiting in [one for one in ts.dependents if one.processing_on is ws]:
            (self._tried.get(waiting) or self._tried.set(waiting, set())).add(worker)
            if self.workers(waiting):
                self._scheduler._reschedule(waiting.key, worker, stimulus_id=stimulus_id)
            else:
                self._fail(waiting, ts, worker, stimulus_id, str(kwargs.get("exception_text", "")))
        self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)

    def _fail(
        self, waiting: TaskState, value: TaskState, worker: str, stimulus_id: str, why: str
    ) -> None:
        text = (
            f"{waiting.key!r} cannot run on any worker: its input {value.key!r} could not be moved"
            f" to {worker} ({why.partition(chr(10))[0]}). Return something that can be pickled"
            " instead, or make the input in the task that needs it."
        )
        logger.error("%s", text)
        message = error_message(TypeError(text))
        self._stock(
            key=waiting.key,
            worker=worker,
            stimulus_id=stimulus_id,
            run_id=waiting.run_id,
            **{name: one for name, one in message.items() if name != "status"},
        )

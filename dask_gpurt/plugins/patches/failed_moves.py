"""Values that a worker could not fetch, although their holders are there: their tasks go elsewhere.

A worker that cannot unpickle an input, or whose peer could not pickle it, reports that the input
has failed. Stock Dask ignores that, because the input is in memory elsewhere. So the task that
needs it waits for ever. This patch moves that task to a worker with the input, or lets it fail.

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
from typing import TYPE_CHECKING, Any, Protocol

from distributed.core import error_message

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

logger = logging.getLogger("dask_gpurt.placement")


class Moves(Protocol):
    """Decides about tasks whose input did not arrive."""

    def may_go_elsewhere(self, waiting: TaskState, value: TaskState, ws: WorkerState) -> bool:
        """Record that a value did not arrive on a worker; return whether its task has another."""


class FailedMoves:
    """The patch of one scheduler, until `uninstall`."""

    def __init__(self, scheduler: Scheduler, moves: Moves) -> None:
        self._scheduler = scheduler
        self._moves = moves
        self._ours = self._failed
        self._stock = scheduler.stream_handlers["task-erred"]
        scheduler.stream_handlers["task-erred"] = self._ours

    def uninstall(self) -> None:
        """Restore the stock handler."""
        if self._scheduler.stream_handlers.get("task-erred") is self._ours:
            self._scheduler.stream_handlers["task-erred"] = self._stock

    def _failed(self, key: Any, worker: str, stimulus_id: str, **kwargs: Any) -> None:
        """Handle the message that a task, or a value that it needs, failed on a worker."""
        ts, ws = self._scheduler.tasks.get(key), self._scheduler.workers.get(worker)
        if ts is None or ws is None or ts.state != "memory" or ws in (ts.who_has or ()):
            self._stock(key=key, worker=worker, stimulus_id=stimulus_id, **kwargs)
            return
        for waiting in [one for one in ts.dependents if one.processing_on is ws]:
            if self._moves.may_go_elsewhere(waiting, ts, ws):
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

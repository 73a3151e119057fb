"""Root tasks that stay in the scheduler's queue although a worker has a place, none for ever.

They wait for a better worker than that one. Stock looks at its queue when a task ends or a worker
comes, and what it keeps a place for may never end: it may wait for the outside, or its worker may
leave. So a task is held back for so long and no longer; then, or when a worker leaves, the
scheduler is told to look again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState


class QueueHold:
    """One a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: By key: until when, by the loop's clock, a task may be held back.
        self._until: dict[Hashable, float] = {}
        self._next: asyncio.TimerHandle | None = None
        self._looks_soon = False

    def may_wait(self, ts: TaskState, seconds: float) -> bool:
        """Whether a task may be held back, if it may be for so long from the first time on."""
        loop = asyncio.get_running_loop()
        until = self._until.get(ts.key)
        if until is None:
            until = self._until[ts.key] = loop.time() + seconds
            if self._next is None or until < self._next.when():
                self._look_at(until)
        return loop.time() < until

    def placed(self, ts: TaskState) -> None:
        """A task has a worker."""
        if self._until:
            self._until.pop(ts.key, None)

    def remove_worker(self) -> None:
        """A worker left: it may have been what tasks were held back for."""
        if self._until and not self._looks_soon:
            # Not before the scheduler is done with what the worker had.
            self._looks_soon = True
            asyncio.get_running_loop().call_soon(self._look)

    def close(self) -> None:
        """Hold nothing back any more; whoever decides from here on gets what was."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._until:
            self._until.clear()
            self._open_slots()

    def _look_at(self, when: float) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = asyncio.get_running_loop().call_at(when, self._time_is_up, when)

    def _time_is_up(self, when: float) -> None:
        self._next = None
        # Also where the loop calls a little early.
        self._until = {key: -inf if at <= when else at for key, at in self._until.items()}
        self._look()

    def _look(self) -> None:
        self._looks_soon = False
        tasks = self._scheduler.tasks
        self._until = {
            key: at
            for key, at in self._until.items()
            if key in tasks and tasks[key].state == "queued"
        }
        self._open_slots()
        later = [at for at in self._until.values() if at > -inf]
        if later and self._next is None:
            self._look_at(min(later))

    def _open_slots(self) -> None:
        self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id="gpurt-held-back")

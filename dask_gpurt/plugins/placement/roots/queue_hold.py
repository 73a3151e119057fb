"""Root tasks held in the scheduler's queue for a better worker, each for a limited time.

A held task stays in the queue although a worker has a free slot. Stock Dask looks at its queue when
a task ends or a worker joins. But the task that the held one waits for may never end: it may wait
for an external event, or its worker may leave. So each hold has a deadline. At the deadline, and
when a worker leaves, this module makes the scheduler look at its queue again.
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
    """The held tasks of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: Deadline of each held task, by key, in the loop's time.
        self._until: dict[Hashable, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._recheck_is_due = False

    def hold(self, ts: TaskState, seconds: float) -> bool:
        """Return whether to hold a task, given the seconds from its first hold to its deadline."""
        loop = asyncio.get_running_loop()
        until = self._until.get(ts.key)
        if until is None:
            until = self._until[ts.key] = loop.time() + seconds
            if self._timer is None or until < self._timer.when():
                self._recheck_at(until)
        return loop.time() < until

    def placed(self, ts: TaskState) -> None:
        """Release a task that has a worker."""
        if self._until:
            self._until.pop(ts.key, None)

    def remove_worker(self) -> None:
        """Look at the queue again after a worker left, since tasks may be held for that worker."""
        if self._until:
            self.look_soon()

    def look_soon(self) -> None:
        """Look at the queue again once the scheduler is done with what it does now."""
        if not self._recheck_is_due:
            self._recheck_is_due = True
            asyncio.get_running_loop().call_soon(self._recheck)

    def close(self) -> None:
        """Release all held tasks, and let the scheduler place them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._until.clear()
        self._open_slots()

    def _recheck_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._expire, when)

    def _expire(self, when: float) -> None:
        self._timer = None
        # Also if the loop calls a little early.
        self._until = {key: -inf if at <= when else at for key, at in self._until.items()}
        self._recheck()

    def _recheck(self) -> None:
        self._recheck_is_due = False
        tasks = self._scheduler.tasks
        self._until = {
            key: at
            for key, at in self._until.items()
            if key in tasks and tasks[key].state == "queued"
        }
        self._open_slots()
        later = [at for at in self._until.values() if at > -inf]
        if later and self._timer is None:
            self._recheck_at(min(later))

    def _open_slots(self) -> None:
        self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id="gpurt-held-back")

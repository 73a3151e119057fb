"""Predictions of when a value is used next, from the states of tasks. Pure.

Dask's priorities are the order in which one thread would run the whole graph. Real workers depart
from it in three ways that matter here:

- The scheduler queues root tasks until a worker is idle, and an idle worker has run everything
  else that it could. So a task that needs a queued root runs after all tasks that do not, whatever
  its priority. Without this rule, the pieces of a task-based shuffle look as if they were used at
  once, and evict the values that really are. A merge with little memory then moves over twice the
  bytes (`tests/memory/decisions/test_oracle.py`).
- Graphs that are submitted soon after one another are numbered alike, each from zero. So a task
  may have an earlier priority than its own inputs. Here a task always comes after its inputs.
- Workers do not keep the same pace. A worker that waits for a peer's output continues with its
  other tasks, beyond the priority of that output, until the peer makes it. So the position in the
  peer's queue predicts the time, not the priority. This saves 8 % of the bytes of the same merge.

A use is a tuple that compares: the smaller, the sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Task = TypeVar("Task", bound=Hashable)
Use = tuple[float, ...]

#: Tasks that can run, or that wait only for such tasks, come before all others.
_ASSIGNED = 0
_UNASSIGNED = 1
#: Most tasks whose inputs one outlook follows: 25 ms on the scheduler's event loop. Beyond that,
#: only inputs that were already followed count. Depth first finds roots early, so little is lost.
_MAX_TASKS = 5_000


def assigned_use(priority: tuple[float, ...]) -> Use:
    """Return the use by a task that is already assigned to a worker."""
    return (_ASSIGNED, *priority)


class Outlook(Generic[Task]):
    """A prediction of when tasks run, made at one moment for one query about many values.

    Parameters
    ----------
    priority
        Returns Dask's priority of a task.
    waits_for
        Returns the tasks that have not run and whose outputs a task needs.
    is_unassigned
        Returns whether a task could run, but is not assigned to a worker.
    turn_at_peer
        Returns how many tasks a peer runs before this one; None if the task is not assigned to a
        peer.
    queue
        Priorities of the tasks that are assigned to this worker, in order.
    """

    def __init__(
        self,
        priority: Callable[[Task], tuple[float, ...]],
        waits_for: Callable[[Task], Iterable[Task]],
        is_unassigned: Callable[[Task], bool],
        turn_at_peer: Callable[[Task], int | None] = lambda task: None,
        queue: Sequence[tuple[float, ...]] = (),
    ) -> None:
        self._priority = priority
        self._waits_for = waits_for
        self._is_unassigned = is_unassigned
        self._turn_at_peer = turn_at_peer
        self._queue = queue
        self._not_before: dict[Task, Use] = {}
        self._n_followed = 0

    def use(self, task: Task) -> Use:
        """Return when this task uses its inputs."""
        if self._turn_at_peer(task) is not None:
            # A peer fetches the inputs when the task is assigned to it, not when it runs the task.
            return assigned_use(self._priority(task))
        not_before = self._after_inputs(task)
        own = self._priority(task)
        # Tasks that wait for the same input follow it in the order of their priorities.
        return not_before if not_before[1:] == own else not_before + own

    def next_use(self, dependents: Iterable[Task]) -> Use | None:
        """Return the soonest use by any of these tasks; None if there are none."""
        return min(map(self.use, dependents), default=None)

    def _after_inputs(self, task: Task) -> Use:
        # Without recursion: graphs are deeper than Python's stack.
        known = self._not_before
        stack = [task]
        while stack:
            one = stack[-1]
            if one in known:
                stack.pop()
                continue
            inputs = list(self._waits_for(one))
            unknown = [other for other in inputs if other not in known]
            if unknown and self._n_followed < _MAX_TASKS:
                self._n_followed += 1
                stack += unknown
                continue
            known[one] = max(
                [self._turn(one), *(known[other] for other in inputs if other in known)]
            )
        return known[task]

    def _turn(self, task: Task) -> Use:
        """Return when a task would run if all its inputs were there."""
        if self._is_unassigned(task):
            return (_UNASSIGNED, *self._priority(task))
        own = assigned_use(self._priority(task))
        n_before = self._turn_at_peer(task)
        if n_before is None or not self._queue:
            return own
        # By then this worker has run as many tasks as the peer, or all of its own.
        return max(own, assigned_use(self._queue[min(n_before, len(self._queue) - 1)]))


class Pace:
    """A limit on the share of time that a server spends on answering.

    Each answer is followed by a pause, in which no client should ask. Pauses add up.

    Parameters
    ----------
    share
        Greatest share of the time.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._paid_until_s = 0.0

    def rest_s(self, took_s: float, now_s: float) -> float:
        """Return the seconds for which the client that was just answered should not ask again."""
        self._paid_until_s = max(self._paid_until_s, now_s) + took_s / self._share
        return self._paid_until_s - now_s

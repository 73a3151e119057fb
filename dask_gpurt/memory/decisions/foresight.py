"""When a value is used next, as far as the states of tasks tell. Pure.

Dask's priorities are an order in which one thread would run the whole graph. Real workers depart
from it in three ways that matter here, and a task comes after whatever it still waits for:

- The scheduler holds root tasks back until a worker is idle, and an idle worker has run everything
  else that it could. So a task that needs a root which is held back comes after all tasks that do
  not, whatever its priority. Without this rule the pieces of a shuffle by tasks look as if they
  were used at once, and what really is used at once is evicted for them: over twice the bytes for
  a merge with little memory (`tests/memory/decisions/test_oracle.py`).
- Graphs that are submitted soon after one another are numbered alike, each from zero. So a task may
  have a priority before that of its own inputs.
- Workers do not keep pace in it. One that waits for a peer's output goes on with what it was given,
  beyond the priority of what it waits for, until the peer comes to that. So where a peer is in its
  own queue says when, not the priority: 8 % of the bytes for the same merge.

A use is a tuple that compares: the smaller, the sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Task = TypeVar("Task", bound=Hashable)
Use = tuple[float, ...]

#: Tasks that can run, or wait only for tasks that can, come before all others.
_REACHABLE = 0
_UNASSIGNED = 1
#: Tasks whose inputs are followed for one outlook: 25 ms on the scheduler's event loop. Beyond,
#: only what is known of a task's inputs counts. Depth first finds roots early, so little is lost.
_MAX_TASKS = 5_000


def reachable(priority: tuple[float, ...]) -> Use:
    """The use by a task that a worker was given already."""
    return (_REACHABLE, *priority)


class Outlook(Generic[Task]):
    """When tasks run, seen from one moment. Made for one question about many values.

    Parameters
    ----------
    priority
        Of a task, as Dask has it.
    waits_for
        Tasks whose outputs a task needs and that have not run.
    is_held_back
        Whether a task could run, but was not given to any worker.
    turn_at_peer
        How many tasks a peer does before this one, which it was given; None of all others.
    queue
        Priorities of the tasks that this worker was given, in order.
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
        self._is_held_back = is_unassigned
        self._turn_at_peer = turn_at_peer
        self._queue = queue
        self._not_before: dict[Task, Use] = {}
        self._looked_at = 0

    def use(self, task: Task) -> Use:
        """When this task takes its inputs."""
        if self._turn_at_peer(task) is not None:
            # They are fetched when a worker is given a task, and not when it comes to it.
            return reachable(self._priority(task))
        not_before = self._after_inputs(task)
        own = self._priority(task)
        # What waits for the same comes after it, in the order of priorities.
        return not_before if not_before[1:] == own else not_before + own

    def next_use(self, dependents: Iterable[Task]) -> Use | None:
        """The soonest use by any of these tasks; None if there are none."""
        return min(map(self.use, dependents), default=None)

    def _after_inputs(self, task: Task) -> Use:
        # Depth first, without recursion: graphs are deeper than Python's stack.
        known = self._not_before
        stack = [task]
        while stack:
            one = stack[-1]
            if one in known:
                stack.pop()
                continue
            inputs = list(self._waits_for(one))
            unknown = [other for other in inputs if other not in known]
            if unknown and self._looked_at < _MAX_TASKS:
                self._looked_at += 1
                stack += unknown
                continue
            known[one] = max(
                [self._turn(one), *(known[other] for other in inputs if other in known)]
            )
        return known[task]

    def _turn(self, task: Task) -> Use:
        """When a task would run, were it not for its inputs."""
        if self._is_held_back(task):
            return (_UNASSIGNED, *self._priority(task))
        own = reachable(self._priority(task))
        n_before = self._turn_at_peer(task)
        if n_before is None or not self._queue:
            return own
        # By then this worker has done as many tasks, or all that it has.
        return max(own, reachable(self._queue[min(n_before, len(self._queue) - 1)]))


class Pace:
    """Has those that ask rest, so that answering takes no more than a share of one's time.

    Each answer is paid for by a time in which nobody should ask, one after the other.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._paid_until_s = 0.0

    def rest_s(self, took_s: float, now_s: float) -> float:
        """Seconds in which whoever was just answered should not ask again."""
        self._paid_until_s = max(self._paid_until_s, now_s) + took_s / self._share
        return self._paid_until_s - now_s

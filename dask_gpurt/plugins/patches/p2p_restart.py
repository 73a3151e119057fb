"""Restarts of shuffles: which tasks run again, and when.

A shuffle restarts in three cases: a worker of it leaves, its inputs came from several runs, or a
task asks for a released output. Stock Dask releases all tasks of that shuffle, so that
they run again in a new run. This patch differs in five ways:

- A task that failed for good stays failed. Stock would not restart because of it, and a task that
  waits for another output of the shuffle would ask for ever.
- Shuffles whose outputs go into the same tasks (the two sides of a join) restart together. The
  tasks read both sides again, and would otherwise ask the other side for released outputs.
- A barrier that asks to run again keeps its run, or gets a new one if there is none.
- When a released output is wanted again, tasks that have yet to run get all their inputs from the
  new run. So do the other tasks of their collections. Inputs may differ between runs (random
  numbers, a clock), and a mix of two runs would be a result of neither. Stock Dask keeps outputs
  until the end of a run and need not restart here. Where stock restarts too, because a worker left,
  existing results are kept as stock does.
- When a worker leaves, all its shuffles restart. Stock loops over a set of these shuffles, and a
  restart may change that set. Then stock misses some, and their outputs ask for a missing run.

| what | why | taken back by |
|---|---|---|
| `ShuffleSchedulerPlugin._restart_recommendations` | selects the tasks that a restart releases |
`Restarts.uninstall` |
| `ShuffleSchedulerPlugin._archived_by_stimulus` | gives a copy of each set that stock loops over |
`Restarts.uninstall` |
| `ShuffleSchedulerPlugin._restart_shuffle` | starts a new run for a barrier without one | |
| stream handler `reschedule` | stock ends the run of a barrier that runs again |
`Restarts.uninstall` |

Contract tests in `tests/plugins/patches/test_p2p_restart.py` fail when distributed changes any of
these names.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from distributed.shuffle._core import ShuffleId, barrier_key, id_from_key

from dask_gpurt.plugins.patches.p2p import TO_RUN

if TYPE_CHECKING:
    from collections.abc import Collection

    from distributed import Scheduler
    from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin


class _CopiedSets(defaultdict[str, set[Any]]):
    """Sets of shuffles. `get` returns a copy, because a loop over a set may change that set."""

    def get(self, key: str, default: Any = None) -> Any:
        return set(super().get(key, default or ()))


class Restarts:
    """The patch that restarts a scheduler's shuffles as above, until `uninstall`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._plugin: ShuffleSchedulerPlugin = scheduler.plugins["shuffle"]  # type: ignore[assignment]
        #: Shuffles with a released output that was wanted again.
        self._read_again: set[ShuffleId] = set()
        self._stock_reschedule = stock = scheduler.stream_handlers["reschedule"]

        def reschedule(key: Any, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
            shuffle_id = id_from_key(key)
            task = scheduler.tasks.get(key)
            if shuffle_id is not None and task is not None and _is_awaited_from(task, worker):
                self._run_barrier_again(shuffle_id, task, stimulus_id)
            else:
                stock(key=key, worker=worker, stimulus_id=stimulus_id, **kwargs)

        # Patch the instance, so that deleting the attribute restores stock.
        self._plugin._restart_recommendations = self._released_by  # type: ignore[method-assign]
        self._plugin._archived_by_stimulus = _CopiedSets(set, self._plugin._archived_by_stimulus)
        scheduler.stream_handlers["reschedule"] = reschedule

    def _released_by(self, id: ShuffleId) -> dict[Any, Any]:
        """Return the transitions that restart a shuffle, in place of stock's method."""
        barrier = self._scheduler.tasks.get(barrier_key(id))
        if barrier is None:
            return {}  # forgotten by the restart of another shuffle
        barriers = self._joined_with(barrier)
        # If a worker left, distributed has ended the run before it calls this.
        is_wanted_again = id in self._plugin.active_shuffles
        if is_wanted_again:
            self._read_again = {one for one in self._read_again if self._has(one)} | {id}
        rerun: set[Any] = set()
        while is_wanted_again:
            rerun = tasks_to_rerun(barriers)
            # Tasks between two shuffles: the second must not keep results of the first's old run.
            further = [task for task in rerun if self._is_active(task) and task not in barriers]
            if not further:
                break
            barriers = [*barriers, *(b for b in self._joined_with(*further) if b not in barriers)]
        released = {task.key: "released" for task in rerun if task.state == "memory"}
        for barrier in barriers:
            if barrier.state != "erred":
                tasks = [*barrier.dependents, barrier, *barrier.dependencies]
                released.update((one.key, "released") for one in tasks if one.state != "erred")
        return released

    def was_read_again(self, id: ShuffleId) -> bool:
        """Return whether a released output of a shuffle was wanted again.

        Another query may want that output once more, so the new run keeps outputs that were read.
        """
        return id in self._read_again

    def _has(self, id: ShuffleId) -> bool:
        return barrier_key(id) in self._scheduler.tasks

    def _is_active(self, task: Any) -> bool:
        """Return whether a task is the barrier of a shuffle that has a run."""
        return id_from_key(task.key) in self._plugin.active_shuffles

    def _joined_with(self, *barriers: Any) -> list[Any]:
        """Return these barriers, and those of active shuffles with outputs in the same tasks."""
        found = {barrier.key: barrier for barrier in barriers}
        left = [*barriers]
        while left:
            others = {o for task in left.pop().dependents for o in task.dependencies}
            for other in others:
                if other.key not in found and self._is_active(other):
                    found[other.key] = other
                    left.append(other)
        return list(found.values())

    def _run_barrier_again(self, shuffle_id: ShuffleId, barrier: Any, stimulus_id: str) -> None:
        # A barrier asks to run again when its run is over. Suppose a worker got the next run's
        # barrier while the old barrier was still in a thread. Its answer then counts for the new
        # barrier. Stock would end the new run for that. But that run is not over: tasks have sent
        # all their shards to it, and none would send them again.
        active = self._plugin.active_shuffles
        run = active.pop(shuffle_id, None)
        if run is None:
            self._plugin._restart_shuffle(shuffle_id, self._scheduler, stimulus_id=stimulus_id)
        else:
            self._scheduler.transitions({barrier.key: "released"}, stimulus_id=stimulus_id)
            active[shuffle_id] = run

    def uninstall(self) -> None:
        """Restore the stock method and handler."""
        vars(self._plugin).pop("_restart_recommendations", None)
        archived = self._plugin._archived_by_stimulus
        self._plugin._archived_by_stimulus = defaultdict(set, archived)
        self._scheduler.stream_handlers["reschedule"] = self._stock_reschedule


def tasks_to_rerun(barriers: Collection[Any]) -> set[Any]:
    """Return the tasks to compute from the outputs of these shuffles after a restart.

    These are the tasks that have yet to run, all other tasks of their collections, and existing
    results of outputs that these depend on. Other results stay: they are complete, from the run
    that is over.
    """
    outputs = {task for barrier in barriers for task in barrier.dependents}
    beyond: set[Any] = set()
    left = [task for output in outputs for task in output.dependents]
    to_run = [task for task in left if task.state in TO_RUN]
    while left:
        task = left.pop()
        if task not in beyond and task not in outputs:
            beyond.add(task)
            left += task.dependents
    names = {_collection(task) for task in beyond if task.state in TO_RUN} - {None}
    to_run += [task for task in beyond if task.state == "memory" and _collection(task) in names]
    rerun: set[Any] = set()
    while to_run:
        task = to_run.pop()
        if task in beyond and task not in rerun:
            rerun.add(task)
            to_run += task.dependencies
            to_run += [one for one in task.dependents if one.state in TO_RUN]
    return rerun


def _collection(task: Any) -> Any:
    """Return the name of the collection that a task belongs to, None for a single task."""
    return task.key[0] if isinstance(task.key, tuple) else None


def _is_awaited_from(task: Any, worker: str) -> bool:
    runs_there = task.processing_on is not None and task.processing_on.address == worker
    return runs_there and bool(task.waiters)

"""How shuffles start over, and what distributed has for that; the rest is in `plugins.patches.p2p`.

A shuffle starts over when a worker that took part leaves, when its inputs were not all of one run,
or when an output is wanted that was let go of. Stock releases all tasks of that shuffle, so that
they run again in a new run. Four things are different here:

- A task that failed for good is left as it is. Stock would not start over for its sake, and whoever
  waits for another output of the shuffle would ask for ever.
- Shuffles whose outputs go into the same tasks, the two sides of a join, start over together. The
  tasks read both again, and what one side has let go of since, it would ask for in turn.
- A barrier that asks to run again has its run kept, or a new one made where there is none.
- Where an output is wanted again, tasks that are still to run get all they are made of from the new
  run. Inputs may not be the same twice (random numbers, a clock): half of one run and half of the
  other would be a result that no run has. Stock has its outputs until the end of a run and need not
  start over here. Where it has to, because a worker left, what is made already is kept as there.

Contract tests in `tests/plugins/patches/test_p2p_restart.py` fail when distributed moves any of it.

| what | why | taken back by |
|---|---|---|
| `ShuffleSchedulerPlugin._restart_recommendations` | which tasks are released, see above
| `Restarts.remove` |
| stream handler `reschedule` | stock takes a barrier that runs again for the end of its run
| `Restarts.remove` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.shuffle._core import ShuffleId, barrier_key, id_from_key

from dask_gpurt.plugins.patches.p2p import TO_RUN

if TYPE_CHECKING:
    from collections.abc import Collection

    from distributed import Scheduler
    from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin


class Restarts:
    """Has the shuffles of one scheduler start over as above, until `remove`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._plugin: ShuffleSchedulerPlugin = scheduler.plugins["shuffle"]  # type: ignore[assignment]
        self._stock_reschedule = stock = scheduler.stream_handlers["reschedule"]

        def reschedule(key: Any, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
            shuffle_id = id_from_key(key)
            task = scheduler.tasks.get(key)
            if shuffle_id is not None and task is not None and _is_awaited_from(task, worker):
                self._run_barrier_again(shuffle_id, task, stimulus_id)
            else:
                stock(key=key, worker=worker, stimulus_id=stimulus_id, **kwargs)

        # On the instance, so that taking it back is deleting it.
        self._plugin._restart_recommendations = self._released_by  # type: ignore[method-assign]
        scheduler.stream_handlers["reschedule"] = reschedule

    def _released_by(self, id: ShuffleId) -> dict[Any, Any]:
        """What is released so that a shuffle starts over: in place of stock's of another name."""
        barriers = self._joined_with(self._scheduler.tasks[barrier_key(id)])
        # With a worker that leaves, the run has ended before this is asked.
        is_wanted_again = id in self._plugin.active_shuffles
        anew: set[Any] = set()
        while is_wanted_again:
            anew = made_anew(barriers)
            # Tasks between two shuffles: what the second has of the first run must not stay either.
            further = [task for task in anew if self._is_active(task) and task not in barriers]
            if not further:
                break
            barriers = [*barriers, *(b for b in self._joined_with(*further) if b not in barriers)]
        released = {task.key: "released" for task in anew if task.state == "memory"}
        for barrier in barriers:
            if barrier.state != "erred":
                tasks = [*barrier.dependents, barrier, *barrier.dependencies]
                released.update((one.key, "released") for one in tasks if one.state != "erred")
        return released

    def _is_active(self, task: Any) -> bool:
        """Whether it is the barrier of a shuffle that has a run."""
        return id_from_key(task.key) in self._plugin.active_shuffles

    def _joined_with(self, *barriers: Any) -> list[Any]:
        """Barriers, and those of active shuffles whose outputs go into tasks with their own."""
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
        # A barrier says so when its run is over. A worker that was told to run the next one's
        # while that thread was still busy takes this for the next one's word, and so would stock,
        # for which a barrier that is released ends the run. That one is not over: tasks have put
        # all their shards into it, and none would do so again.
        active = self._plugin.active_shuffles
        run = active.pop(shuffle_id, None)
        if run is None:
            self._plugin._restart_shuffle(shuffle_id, self._scheduler, stimulus_id=stimulus_id)
        else:
            self._scheduler.transitions({barrier.key: "released"}, stimulus_id=stimulus_id)
            active[shuffle_id] = run

    def remove(self) -> None:
        """Give the stock method and handler back."""
        vars(self._plugin).pop("_restart_recommendations", None)
        self._scheduler.stream_handlers["reschedule"] = self._stock_reschedule


def made_anew(barriers: Collection[Any]) -> set[Any]:
    """Tasks to be made of what these shuffles put out when they have started over.

    Those that are still to run, and for their sake what is made of outputs already and goes into
    them. What nobody waits for is not among them: it is whole, of the run that is over.
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
    anew: set[Any] = set()
    while to_run:
        task = to_run.pop()
        if task in beyond and task not in anew:
            anew.add(task)
            to_run += task.dependencies
            to_run += [one for one in task.dependents if one.state in TO_RUN]
    return anew


def _is_awaited_from(task: Any, worker: str) -> bool:
    runs_there = task.processing_on is not None and task.processing_on.address == worker
    return runs_there and bool(task.waiters)

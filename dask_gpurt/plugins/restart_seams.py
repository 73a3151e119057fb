"""How shuffles start over, and what distributed has for that; the rest is in `plugins.seams`.

A shuffle starts over when a worker that took part leaves, when its inputs were not all of one run,
or when an output is wanted that was let go of. Stock releases all tasks of that shuffle, so that
they run again in a new run. Three things are different here:

- A task that failed for good is left as it is. Stock would not start over for its sake, and whoever
  waits for another output of the shuffle would ask for ever.
- Shuffles whose outputs go into the same tasks, the two sides of a join, start over together. The
  tasks read both again, and what one side has let go of since, it would ask for in turn.
- A barrier that asks to run again has its run kept, or a new one made where there is none.

Contract tests in `tests/plugins/test_restart_seams.py` fail when distributed moves any of it.

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

if TYPE_CHECKING:
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
        released: dict[Any, Any] = {}
        for barrier in self._joined_with(self._scheduler.tasks[barrier_key(id)]):
            if barrier.state != "erred":
                tasks = [*barrier.dependents, barrier, *barrier.dependencies]
                released.update((one.key, "released") for one in tasks if one.state != "erred")
        return released

    def _joined_with(self, barrier: Any) -> list[Any]:
        """A barrier, and those of active shuffles whose outputs go into tasks with its own."""
        found = {barrier.key: barrier}
        left = [barrier]
        while left:
            others = {o for task in left.pop().dependents for o in task.dependencies}
            for other in others:
                if (
                    other.key not in found
                    and id_from_key(other.key) in self._plugin.active_shuffles
                ):
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


def _is_awaited_from(task: Any, worker: str) -> bool:
    runs_there = task.processing_on is not None and task.processing_on.address == worker
    return runs_there and bool(task.waiters)

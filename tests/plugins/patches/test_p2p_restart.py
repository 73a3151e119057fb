"""Contract tests of distributed's restarts of a shuffle, and tests of the tasks released here."""

from __future__ import annotations

import inspect
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from distributed import Scheduler
from distributed.shuffle._core import barrier_key
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin

from dask_gpurt.plugins.patches.p2p_restart import Restarts


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_distributed_has_the_replaced_functions() -> None:
    """Check the effect of a release on a run, and the message that a task runs again."""
    assert '"reschedule": self._reschedule' in inspect.getsource(Scheduler.__init__)
    assert parameters(Scheduler._reschedule) == ["self", "key", "worker", "stimulus_id"]
    transition = inspect.getsource(ShuffleSchedulerPlugin.transition)
    assert "self.active_shuffles.get(shuffle_id)" in transition
    assert parameters(ShuffleSchedulerPlugin._restart_recommendations) == ["self", "id"]
    restart = inspect.getsource(ShuffleSchedulerPlugin._restart_shuffle)
    assert "recs = self._restart_recommendations(id)" in restart
    assert parameters(ShuffleWorkerPlugin.barrier) == ["self", "shuffle_id", "run_ids"]
    loop = "for shuffle in self._archived_by_stimulus.get(stimulus_id, set()):"
    assert loop in inspect.getsource(ShuffleSchedulerPlugin.remove_worker)


class SimpleShuffle(SimpleNamespace):
    """A stand-in for a run on the scheduler; the loop needs only its id."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, id: str) -> None:
        super().__init__(id=id)


class Task(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def task(key: Any, state: str = "memory", needs: tuple[Task, ...] = ()) -> Task:
    made = Task(key=key, state=state, dependencies=set(needs), dependents=set())
    for one in needs:
        one.dependents.add(made)
    return made


def released(tasks: list[Task], active: set[str], id: str) -> set[Any]:
    plugin = SimpleNamespace(
        active_shuffles=dict.fromkeys(active), _archived_by_stimulus=defaultdict(set)
    )
    scheduler = SimpleNamespace(
        plugins={"shuffle": plugin},
        tasks={one.key: one for one in tasks},
        stream_handlers={"reschedule": None},
    )
    Restarts(scheduler)  # type: ignore[arg-type]
    found = plugin._restart_recommendations(id)
    assert set(found.values()) <= {"released"}
    return set(found)


def shuffle(id: str) -> list[Task]:
    transfers = [task(f"{id}-{n}") for n in range(2)]
    return [*transfers, task(barrier_key(id), needs=tuple(transfers))]  # type: ignore[arg-type]


def test_all_tasks_of_a_shuffle_are_released() -> None:
    tasks = shuffle("a")
    outputs = [task(f"out-{n}", needs=(tasks[-1],)) for n in range(2)]
    beyond = task("beyond", needs=(outputs[0],))
    expected = {one.key for one in [*tasks, *outputs]}
    assert released([*tasks, *outputs, beyond], {"a"}, "a") == expected


def test_tasks_that_failed_for_good_stay_failed() -> None:
    tasks = shuffle("a")
    outputs = [task("bad", "erred", (tasks[-1],)), task("good", needs=(tasks[-1],))]
    assert released([*tasks, *outputs], {"a"}, "a") == {one.key for one in [*tasks, outputs[1]]}


def test_a_failed_barrier_releases_nothing() -> None:
    tasks = shuffle("a")
    tasks[-1].state = "erred"
    assert released(tasks, {"a"}, "a") == set()


def test_both_sides_of_a_join_start_over() -> None:
    left, right, other = shuffle("a"), shuffle("b"), shuffle("c")
    outputs = [task(f"out-{n}", needs=(left[-1], right[-1])) for n in range(2)]
    elsewhere = task("elsewhere", needs=(other[-1],))
    tasks = [*left, *right, *other, *outputs, elsewhere]
    expected = {one.key for one in [*left, *right, *outputs]}
    assert released(tasks, {"a", "b", "c"}, "a") == expected
    assert released(tasks, {"a", "b", "c"}, "b") == expected
    # A side without a run has released nothing.
    assert released(tasks, {"a"}, "a") == {one.key for one in [*left, *outputs]}


def test_restarted_tasks_read_all_inputs_from_the_new_run() -> None:
    tasks = shuffle("a")
    outputs = [task(f"out-{n}", needs=(tasks[-1],)) for n in range(3)]
    whole = task("whole", needs=(outputs[0],))
    read = [task("read-0", needs=(outputs[0],)), task("read-1", "released", (outputs[1],))]
    between = task("between", needs=(read[1],))
    elsewhere = task("elsewhere")
    to_run = task("to-run", "waiting", (outputs[2], read[0], between, elsewhere))
    every = [*tasks, *outputs, whole, *read, between, elsewhere, to_run]
    expected = {one.key for one in [*tasks, *outputs]}
    assert released(every, {"a"}, "a") == {*expected, "read-0", "between"}
    # After a worker has left, Dask's own restart runs.
    assert released(every, set(), "a") == expected


def test_all_tasks_of_a_collection_come_from_one_run() -> None:
    tasks = shuffle("a")
    outputs = [task(f"out-{n}", needs=(tasks[-1],)) for n in range(4)]
    done = [task(("part", n), needs=(outputs[n],)) for n in range(2)]
    to_run = task(("part", 2), "waiting", (outputs[2],))
    whole = task("other", needs=(outputs[3],))
    every = [*tasks, *outputs, *done, to_run, whole]
    expected = {one.key for one in [*tasks, *outputs]}
    assert released(every, {"a"}, "a") == {*expected, ("part", 0), ("part", 1)}
    assert released(every, set(), "a") == expected


def test_shuffles_of_rerun_tasks_restart_too() -> None:
    first = shuffle("a")
    outputs = [task(f"out-{n}", needs=(first[-1],)) for n in range(2)]
    taken_in = [task("b-0", needs=(outputs[0],)), task("b-1", "waiting", (outputs[1],))]
    second = [*taken_in, task("b-2"), task(barrier_key("b"), "waiting")]  # type: ignore[arg-type]
    for transfer in second[:-1]:
        second[-1].dependencies.add(transfer)
        transfer.dependents.add(second[-1])
    beyond = task("beyond", "waiting", (second[-1],))
    through = shuffle("c")
    tasks = [*first, *outputs, *second, beyond, *through]
    expected = {one.key for one in [*first, *outputs, *second, beyond]}
    assert released(tasks, {"a", "b", "c"}, "a") == expected


def test_all_shuffles_of_a_worker_that_left_restart() -> None:
    """The restart of one shuffle forgets another, and the loop over all must continue."""
    archived = {"stimulus": {SimpleShuffle("a"), SimpleShuffle("b"), SimpleShuffle("c")}}
    restarted = []

    def restart(id: str, scheduler: Any, *, stimulus_id: str) -> None:
        restarted.append(id)
        plugin._archived_by_stimulus[stimulus_id].pop()

    plugin = SimpleNamespace(
        active_shuffles={},
        _archived_by_stimulus=defaultdict(set, archived),
        _restart_shuffle=restart,
    )
    scheduler = SimpleNamespace(plugins={"shuffle": plugin}, stream_handlers={"reschedule": None})
    restarts = Restarts(scheduler)  # type: ignore[arg-type]
    ShuffleSchedulerPlugin.remove_worker(plugin, scheduler, "tcp://gone", stimulus_id="stimulus")  # type: ignore[arg-type]
    assert sorted(restarted) == ["a", "b", "c"]
    restarts.uninstall()
    assert type(plugin._archived_by_stimulus) is defaultdict


def test_a_forgotten_shuffle_releases_nothing() -> None:
    assert released([], set(), "a") == set()

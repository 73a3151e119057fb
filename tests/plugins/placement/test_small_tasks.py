"""Dask places tasks with tiny inputs and outputs, unless they would have to queue."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import dask
import pytest

from dask_gpurt.placement.speeds import Speeds
from dask_gpurt.plugins.placement.join_partners import MIN_JOIN_NBYTES
from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.placement.scheduler_view import PlacementView
from dask_gpurt.plugins.simulation.simulated_run import simulate
from tests.simulate.flat import flat, task, workload

N = 4
KINDS = ("load", "use")
#: Known durations, because tasks of an unknown kind go to their inputs.
KNOWN = {"distributed.scheduler.default-task-durations": {"use": "1 s"}}


def simulated(model, machine):
    """Simulate a workload; return the run, and the number of tasks for each reason."""
    placed = []

    def install(scheduler):
        clock = asyncio.get_running_loop().time
        placed.append(Placement(scheduler, "data-aware", clock=clock))

    run = simulate(model, machine, install)
    return run, placed[0].summary()["decisions"]


@pytest.mark.parametrize(
    ("inputs", "output", "is_small"),
    [
        ([0, 0], 0, True),
        ([30_000, 30_000], 60_000, True),
        ([30_000, MIN_JOIN_NBYTES - 30_001], MIN_JOIN_NBYTES - 1, True),
        ([30_000, MIN_JOIN_NBYTES - 30_000], 0, False),
        ([30_000, 30_000], MIN_JOIN_NBYTES, False),
        # The size of an input is unknown.
        ([0, -1], 0, False),
    ],
)
def test_task_is_small_if_all_its_bytes_are(inputs, output, is_small):
    view = SimpleNamespace(sizes={"t": output}.__getitem__)
    needed = [SimpleNamespace(nbytes=nbytes) for nbytes in inputs]

    class Task(str):
        dependencies = needed

    assert PlacementView.is_small(view, Task("t")) is is_small


@pytest.mark.parametrize("nbytes", [8, MIN_JOIN_NBYTES])
def test_only_small_tasks_are_left_to_dask(nbytes):
    loads = [task(f"('load-0', {n})", s=0.1, nbytes=nbytes, source=True) for n in range(N)]
    users = [task(f"('use-0', {n})", n, s=1.0, nbytes=8) for n in range(N)]
    with dask.config.set(KNOWN):
        _, reasons = simulated(workload(*loads, *users, wanted=range(N, 2 * N)), flat(N))
    assert reasons["small"] == (N if nbytes == 8 else 0)


def test_small_task_that_would_queue_is_not_left_to_dask():
    """Stock Dask keeps all tasks at the input until other workers steal some."""
    load = task("('load-0', 0)", s=0.1, nbytes=8, source=True)
    users = [task(f"('use-0', {n})", 0, s=1.0, nbytes=8) for n in range(N)]
    with dask.config.set(KNOWN):
        run, reasons = simulated(workload(load, *users, wanted=range(1, N + 1)), flat(N))
    assert 0 < reasons["small"] < N
    assert run.steals == 0
    assert run.makespan_s < 1.5


def test_small_task_of_a_slow_worker_is_not_left_to_dask(monkeypatch):
    loads = [task(f"('load-0', {n})", s=0.1, nbytes=8, source=True) for n in range(N)]
    users = [task(f"('use-0', {n})", n, s=1.0, nbytes=8) for n in range(N)]
    model = workload(*loads, *users, wanted=range(N, 2 * N))
    # Root tasks are placed by stock Dask, regardless of slow workers.
    monkeypatch.setattr(Placement, "place_root", lambda self, ts, stock: stock)

    def ran_on():
        # There is one worker more than needed.
        run, _ = simulated(model, flat(N + 1))
        return [{one.worker for one in run.tasks if kind in str(one.key)} for kind in KINDS]

    with dask.config.set(KNOWN | {"distributed.scheduler.work-stealing": False}):
        loading, using = ran_on()
        assert loading == using
        slow = min(loading)
        monkeypatch.setattr(Speeds, "learned", lambda self, one: 4.0 if one == slow else 1.0)
        loading, using = ran_on()
    assert slow in loading - using

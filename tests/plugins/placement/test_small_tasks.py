"""Tasks that need and make next to nothing: stock places them, unless that keeps them waiting."""

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
#: What has never run goes where its inputs are.
KNOWN = {"distributed.scheduler.default-task-durations": {"use": "1 s"}}


def simulated(model, machine):
    """The run, and how many tasks were placed for which reason."""
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
        # Not known.
        ([0, -1], 0, False),
    ],
)
def test_it_is_all_of_a_task_that_weighs_nothing(inputs, output, is_small):
    view = SimpleNamespace(sizes={"t": output}.__getitem__)
    needed = [SimpleNamespace(nbytes=nbytes) for nbytes in inputs]

    class Task(str):
        dependencies = needed

    assert PlacementView.is_small(view, Task("t")) is is_small


@pytest.mark.parametrize("nbytes", [8, MIN_JOIN_NBYTES])
def test_only_what_weighs_nothing_is_left_to_stock(nbytes):
    loads = [task(f"('load-0', {n})", s=0.1, nbytes=nbytes, source=True) for n in range(N)]
    users = [task(f"('use-0', {n})", n, s=1.0, nbytes=8) for n in range(N)]
    with dask.config.set(KNOWN):
        _, reasons = simulated(workload(*loads, *users, wanted=range(N, 2 * N)), flat(N))
    assert reasons["small"] == (N if nbytes == 8 else 0)


def test_what_would_wait_while_others_have_nothing_to_do_is_not():
    """Stock keeps all of them where the input is, until others steal some."""
    load = task("('load-0', 0)", s=0.1, nbytes=8, source=True)
    users = [task(f"('use-0', {n})", 0, s=1.0, nbytes=8) for n in range(N)]
    with dask.config.set(KNOWN):
        run, reasons = simulated(workload(load, *users, wanted=range(1, N + 1)), flat(N))
    assert 0 < reasons["small"] < N
    assert run.steals == 0
    assert run.makespan_s < 1.5


def test_what_a_slow_worker_would_do_is_not(monkeypatch):
    loads = [task(f"('load-0', {n})", s=0.1, nbytes=8, source=True) for n in range(N)]
    users = [task(f"('use-0', {n})", n, s=1.0, nbytes=8) for n in range(N)]
    model = workload(*loads, *users, wanted=range(N, 2 * N))
    # Root tasks are dealt out whoever is slow.
    monkeypatch.setattr(Placement, "place_root", lambda self, ts, stock: stock)

    def ran_on():
        # One more than there is something to do for.
        run, _ = simulated(model, flat(N + 1))
        return [{one.worker for one in run.tasks if kind in str(one.key)} for kind in KINDS]

    with dask.config.set(KNOWN | {"distributed.scheduler.work-stealing": False}):
        loading, using = ran_on()
        assert loading == using
        slow = min(loading)
        monkeypatch.setattr(Speeds, "learned", lambda self, one: 4.0 if one == slow else 1.0)
        loading, using = ran_on()
    assert slow in loading - using

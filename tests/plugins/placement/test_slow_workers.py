"""A worker that becomes slow or is removed delays a simulated computation only briefly."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
from distributed import Event
from distributed.utils_test import async_poll_for, gen_cluster

from dask_gpurt.placement.speeds import PAUSE_S
from dask_gpurt.plugins.placement.early_stealing import INTERVAL_S, EarlyStealing
from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import ChangesSpeed, Dies
from dask_gpurt.simulate.example_clusters import pcie_gpus
from dask_gpurt.simulate.examples import Scale, merge_small
from tests.simulate.flat import address, flat, task, workload

MIB = 2**20
N_WORKERS = 8


def data_aware(scheduler, topology=None):
    Placement(scheduler, "data-aware", topology, clock=asyncio.get_running_loop().time)


def pairs(count: int, *, s: float, nbytes: int):
    """Return a workload of sources, a result of each, and results of pairs of these."""
    sources = [task(f"('load-0', {n})", s=s, nbytes=nbytes, source=True) for n in range(count)]
    made = [task(f"('make-0', {n})", n, s=s, nbytes=nbytes) for n in range(count)]
    joined = [
        task(f"('join-0', {n})", count + 2 * n, count + 2 * n + 1, s=s, nbytes=nbytes)
        for n in range(count // 2)
    ]
    return workload(*sources, *made, *joined, wanted=range(2 * count, 2 * count + count // 2))


MODEL = pairs(6 * N_WORKERS, s=0.25, nbytes=4 * MIB)
HEALTHY = flat(N_WORKERS)


@pytest.fixture(scope="module")
def healthy():
    return simulate(MODEL, HEALTHY, data_aware)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_slowed_worker_delays_the_run_only_briefly(healthy, share):
    bad = HEALTHY.with_incidents(ChangesSpeed(address(0), share * healthy.makespan_s, speed=0.1))
    ours, stock = simulate(MODEL, bad, data_aware), simulate(MODEL, bad)
    assert {run.key for run in ours.tasks} == {run.key for run in healthy.tasks}
    # The task that runs when the worker becomes slow cannot be stolen. It takes ten times 0.25 s.
    assert ours.makespan_s < 2 * healthy.makespan_s
    assert ours.makespan_s < stock.makespan_s


def test_removed_worker_delays_the_run_only_briefly(healthy):
    bad = HEALTHY.with_incidents(Dies(address(0), 0.4 * healthy.makespan_s))
    ours = simulate(MODEL, bad, data_aware)
    assert {run.key for run in ours.tasks} == {run.key for run in healthy.tasks}
    assert ours.makespan_s < 2 * healthy.makespan_s


def test_without_slow_workers_the_check_changes_nothing(healthy, monkeypatch):
    monkeypatch.setattr(Placement, "ended", lambda *args: None)
    monkeypatch.setattr("dask_gpurt.placement.speeds.Speeds.slowness", lambda *args: 1.0)
    assert simulate(MODEL, HEALTHY, data_aware) == healthy


def test_tasks_queued_on_a_slow_worker_are_stolen_at_once(monkeypatch):
    """Stock Dask looks for tasks to steal only once a second."""
    loads = [task(f"('load-0', {n})", s=0.2, nbytes=MIB) for n in range(7 * N_WORKERS)]
    model = workload(*loads, wanted=range(len(loads)))
    healthy = simulate(model, HEALTHY, data_aware).makespan_s
    assert 1.4 < healthy < 1.5
    bad = HEALTHY.with_incidents(ChangesSpeed(address(0), 0.85, speed=0.2))
    relieved = simulate(model, bad, data_aware)
    monkeypatch.setattr(EarlyStealing, "ended", lambda *args: None)
    left_alone = simulate(model, bad, data_aware)
    # Slow tasks take 1 s each. The first one is running, cannot be stolen, and ends after 1.6 s.
    assert relieved.makespan_s < 1.8 + PAUSE_S < 2.5 < left_alone.makespan_s


def test_known_slow_worker_gets_no_task_better_run_elsewhere():
    """After two tasks the worker is known as slow, so the last queued tasks wait for others."""
    machine = pcie_gpus()
    install = partial(data_aware, topology=machine.network.topology)
    model = merge_small(Scale(side=8, block_nbytes=500_000_000, load_rate=5e9, rate=100e9))
    healthy = simulate(model, machine, install)
    slow = machine.workers[0].address
    bad = machine.with_incidents(ChangesSpeed(slow, 0.4 * healthy.makespan_s, speed=0.2))
    ours = simulate(model, bad, install)
    # Another load task would take 0.5 s on the slow worker.
    assert ours.makespan_s < healthy.makespan_s + 0.25


class Timers:
    """A stand-in for an event loop."""

    def __init__(self):
        self.due = []
        self.now_s = 0.0

    def time(self):
        return self.now_s

    def call_soon(self, function):
        return self.call_later(0.0, function)

    def call_later(self, seconds, function):
        self.due.append((seconds, function))
        return SimpleNamespace(cancel=self.due.clear)

    def step(self):
        """Run the only timer; return the seconds after which it was due."""
        ((seconds, function),) = self.due
        self.due.clear()
        function()
        return seconds


def test_slow_workers_are_checked_only_beside_idle_ones(monkeypatch):
    loop, balanced, slowness = Timers(), [], [1.9]
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    stuck = SimpleNamespace(processing=[1, 2], nthreads=1)
    free = SimpleNamespace(processing=[], nthreads=1)
    state = SimpleNamespace(workers={1: stuck, 2: free}, queued=["t"], idle={2: free})
    stealing_soon = EarlyStealing(state, lambda ws: slowness[0], lambda: balanced.append(1))
    stealing_soon.ended(stuck)
    stealing_soon.ended(free)
    assert not loop.due
    state.queued.clear()
    stealing_soon.ended(free)
    stealing_soon.ended(free)
    assert loop.step() == 0
    assert loop.step() == INTERVAL_S
    assert not balanced
    # The slow worker's task has now run for longer.
    slowness[0] = 2.0
    loop.step()
    assert balanced == [1]
    stuck.processing.pop()
    loop.step()
    assert balanced == [1]
    # No task waits any more, so the next check comes only when another worker becomes free.
    stealing_soon.ended(free)
    loop.step()
    assert not loop.due
    stealing_soon.ended(free)
    stealing_soon.close()
    assert not loop.due


@pytest.mark.parametrize("ends_well", [True, False])
def test_expensive_checks_are_spaced_out(monkeypatch, ends_well):
    """Dask scans all tasks of a slow worker, even if none may move."""
    loop = Timers()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)

    def balance():
        loop.now_s += 3.0
        if not ends_well:
            raise ZeroDivisionError

    stuck = SimpleNamespace(processing=[1, 2], nthreads=1)
    free = SimpleNamespace(processing=[], nthreads=1)
    state = SimpleNamespace(workers={1: stuck, 2: free}, queued=[], idle={2: free})
    stealing_soon = EarlyStealing(state, lambda ws: 2.0, balance)
    stealing_soon.ended(free)
    with contextlib.nullcontext() if ends_well else pytest.raises(ZeroDivisionError):
        loop.step()
    ((seconds, _),) = loop.due
    assert seconds == pytest.approx(30.0)


@gen_cluster(client=True, nthreads=[("", 2)] * 2)
async def test_long_task_beside_a_free_thread_makes_no_worker_slow(c, s, a, b):
    now_s = [0.0]
    placement = Placement(s, "data-aware", clock=lambda: now_s[0])
    gate = Event()

    def wait_if(waits):
        if waits:
            gate.wait()

    keys = [("wait_if", n) for n in range(8)]
    on_b = [c.submit(wait_if, False, key=key, workers=[b.address]) for key in keys]
    await c.gather(on_b)
    only, other = s.workers[a.address], s.workers[b.address]
    held = []
    for n_threads in (1, 2):
        key = ("wait_if", 100 + n_threads)
        held.append(c.submit(wait_if, True, key=key, workers=[a.address]))
        await async_poll_for(lambda n=n_threads: len(only.processing) == n, timeout=60)
        now_s[0] += 1000.0
        assert (placement.slowness(only) > 1.0) == (n_threads == 2)
        assert placement.slowness(other) == 1.0
    await gate.set()
    await c.gather(held)

"""One worker that becomes slow, or is gone, in the middle of a simulated computation."""

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
    """Sources, what is made of each, and of each two of those: most of it is made near its data."""
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
def test_nobody_waits_for_long_for_one_that_became_slow(healthy, share):
    bad = HEALTHY.with_incidents(ChangesSpeed(address(0), share * healthy.makespan_s, speed=0.1))
    ours, stock = simulate(MODEL, bad, data_aware), simulate(MODEL, bad)
    assert {run.key for run in ours.tasks} == {run.key for run in healthy.tasks}
    # What it is at when it becomes slow nobody can take from it: ten times a quarter of a second.
    assert ours.makespan_s < 2 * healthy.makespan_s
    assert ours.makespan_s < stock.makespan_s


def test_nobody_waits_for_long_for_one_that_is_gone(healthy):
    bad = HEALTHY.with_incidents(Dies(address(0), 0.4 * healthy.makespan_s))
    ours = simulate(MODEL, bad, data_aware)
    assert {run.key for run in ours.tasks} == {run.key for run in healthy.tasks}
    assert ours.makespan_s < 2 * healthy.makespan_s


def test_where_nobody_is_slow_it_is_as_if_nobody_looked(healthy, monkeypatch):
    monkeypatch.setattr(Placement, "ended", lambda *args: None)
    monkeypatch.setattr("dask_gpurt.placement.speeds.Speeds.slowness", lambda *args: 1.0)
    assert simulate(MODEL, HEALTHY, data_aware) == healthy


def test_what_waits_behind_the_first_task_of_a_slow_worker_is_taken_from_it_at_once(monkeypatch):
    """Stock looks for tasks to steal after a second, and after another one."""
    loads = [task(f"('load-0', {n})", s=0.2, nbytes=MIB) for n in range(7 * N_WORKERS)]
    model = workload(*loads, wanted=range(len(loads)))
    healthy = simulate(model, HEALTHY, data_aware).makespan_s
    assert 1.4 < healthy < 1.5
    bad = HEALTHY.with_incidents(ChangesSpeed(address(0), 0.85, speed=0.2))
    relieved = simulate(model, bad, data_aware)
    monkeypatch.setattr(EarlyStealing, "ended", lambda *args: None)
    left_alone = simulate(model, bad, data_aware)
    # A second each, and the first of them, which ends after 1.6 s, is not for anybody to take.
    assert relieved.makespan_s < 1.8 + PAUSE_S < 2.5 < left_alone.makespan_s


def test_what_would_end_sooner_elsewhere_is_not_given_to_one_that_has_shown_to_be_slow():
    """Two tasks have told: the last ones in the queue wait for others, who have two ahead each."""
    machine = pcie_gpus()
    install = partial(data_aware, topology=machine.network.topology)
    model = merge_small(Scale(side=8, block_nbytes=500_000_000, load_rate=5e9, rate=100e9))
    healthy = simulate(model, machine, install)
    slow = machine.workers[0].address
    bad = machine.with_incidents(ChangesSpeed(slow, 0.4 * healthy.makespan_s, speed=0.2))
    ours = simulate(model, bad, install)
    # Another load would take it half a second.
    assert ours.makespan_s < healthy.makespan_s + 0.25


class Timers:
    """Stands in for an event loop."""

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
        """Seconds after which the only one was due."""
        ((seconds, function),) = self.due
        self.due.clear()
        function()
        return seconds


def test_workers_are_looked_through_while_somebody_waits_and_another_one_is_free(monkeypatch):
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
    # It has been silent for longer meanwhile.
    slowness[0] = 2.0
    loop.step()
    assert balanced == [1]
    stuck.processing.pop()
    loop.step()
    assert balanced == [1]
    # Nobody waits any more: it is looked again when somebody else is free, and not at once.
    stealing_soon.ended(free)
    loop.step()
    assert not loop.due
    stealing_soon.ended(free)
    stealing_soon.close()
    assert not loop.due


@pytest.mark.parametrize("ends_well", [True, False])
def test_looks_that_take_long_are_far_apart(monkeypatch, ends_well):
    """Stock goes through all that waits for a slow worker, also where none of it may be moved."""
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
async def test_a_worker_with_a_thread_to_spare_is_not_slow_for_one_task_that_takes_long(c, s, a, b):
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
        await async_poll_for(lambda n=n_threads: len(only.processing) == n, timeout=10)
        now_s[0] += 1000.0
        assert (placement.slowness(only) > 1.0) == (n_threads == 2)
        assert placement.slowness(other) == 1.0
    await gate.set()
    await c.gather(held)

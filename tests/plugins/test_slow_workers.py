"""One worker that becomes slow, or is gone, in the middle of a simulated computation."""

from __future__ import annotations

import asyncio

import pytest

from dask_gpurt.plugins.placement import Placement
from dask_gpurt.plugins.simulation import simulate
from dask_gpurt.simulate.machine import ChangesSpeed, Dies
from tests.simulate.flat import address, flat, task, workload

MIB = 2**20
N_WORKERS = 8


def data_aware(scheduler):
    Placement(scheduler, "data-aware", clock=asyncio.get_running_loop().time)


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

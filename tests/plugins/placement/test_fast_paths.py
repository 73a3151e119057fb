"""Fast paths choose the workers that a comparison of all candidates would choose."""

from __future__ import annotations

import asyncio

import dask
import pytest

from dask_gpurt.plugins.placement import rules
from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import cluster_of_topology
from dask_gpurt.simulate.example_clusters import gpu_hosts
from dask_gpurt.simulate.examples import Scale, add, transpose_add, uneven_tree_sum
from tests.simulate.flat import flat, task, workload

MB = 1_000_000
N_HOSTS = 12
TOPOLOGY = gpu_hosts(N_HOSTS, 1, nic_bandwidth=1e9, nvlink=False)


def tree():
    """Return a workload with blocks of few sizes, of which each three are summed."""
    n = N_HOSTS
    sizes = [(8, 8, 9)[i % 3] * MB for i in range(n)]
    loads = [task(f"('load-0', {i})", s=0.05, nbytes=sizes[i]) for i in range(n)]
    sums = [
        task(f"('sum-0', {i})", i, i + n // 3, i + 2 * n // 3, s=0.02, nbytes=8 * MB)
        for i in range(n // 3)
    ]
    return workload(*loads, *sums, wanted=range(n, n + n // 3))


def test_a_simulation_is_the_same_without_fast_paths(monkeypatch):
    machine = cluster_of_topology("boxes", TOPOLOGY)
    placed = []

    def install(scheduler):
        clock = asyncio.get_running_loop().time
        placed.append(Placement(scheduler, "data-aware", TOPOLOGY, clock=clock))

    # Tasks of a new kind take no fast path.
    known = {"distributed.scheduler.default-task-durations": {"sum": "20 ms"}}
    with dask.config.set(known):
        quick = simulate(tree(), machine, install)
        monkeypatch.setattr(rules.LargestInput, "choose", lambda *args: None)
        thorough = simulate(tree(), machine, install)
    assert quick == thorough
    quick_ones, none = (one.summary()["decisions"]["most"] for one in placed)
    assert quick_ones > 0 == none


def test_idle_holder_is_always_a_candidate():
    n_busy, n = 20, 28
    loads = [
        task(f"('load-{i}', 0)", s=1.0, nbytes=(64 if i < n_busy else 32) * MB) for i in range(n)
    ]
    first = [task(f"('train-0', {i})", i, s=20.0, nbytes=2 * MB) for i in range(n_busy)]
    second = [task(f"('train-1', {i})", n + i, s=20.0, nbytes=8) for i in range(n_busy)]
    # This task runs until the other workers have begun their second task.
    last = task("('last-0', 0)", n - 1, s=24.0, nbytes=8)
    total = task("('sum-0', 0)", *range(n), n + 2 * n_busy, s=0.001, nbytes=8)
    tasks = [*loads, *first, *second, last, total]
    model = workload(*tasks, wanted=range(len(tasks)))
    placed = []

    def install(scheduler):
        clock = asyncio.get_running_loop().time
        placed.append(Placement(scheduler, "data-aware", clock=clock))

    # With stealing, another worker would take the task.
    with dask.config.set({"distributed.scheduler.work-stealing": False}):
        runs = [simulate(model, flat(n), one) for one in (install, None)]
    ours, stock = (run for found in runs for run in found.tasks if run.key == total.key)
    assert ours.start_s <= stock.start_s < 30
    assert placed[0].summary()["decisions"]["cost"]


@pytest.mark.parametrize("example", [uneven_tree_sum, transpose_add, add])
@pytest.mark.parametrize("nvlink", [True, False])
def test_fast_paths_agree_on_a_saturated_cluster(example, nvlink, monkeypatch):
    """While root tasks are queued, busy workers take fast paths too."""
    machine = cluster_of_topology("boxes", gpu_hosts(3, 8, nic_bandwidth=12.5e9, nvlink=nvlink))
    model = example(Scale(side=12, block_nbytes=100 * MB, load_rate=1e9, rate=20e9))
    placed = []

    def install(scheduler):
        clock = asyncio.get_running_loop().time
        topology = machine.network.topology
        placed.append(Placement(scheduler, "data-aware", topology, clock=clock))

    weighed = []
    among_holders = rules.LeastCost._among_holders

    def counted(*args):
        weighed.append(among_holders(*args))
        return weighed[-1]

    monkeypatch.setattr(rules.LeastCost, "_among_holders", counted)
    quick = simulate(model, machine, install)
    assert any(weighed)
    monkeypatch.setattr(rules.LeastCost, "_among_holders", lambda *args: None)
    monkeypatch.setattr(rules.LargestInput, "choose", lambda *args: None)
    monkeypatch.setattr(rules, "holder_is_best", lambda *args: False)
    thorough = simulate(model, machine, install)
    assert quick == thorough
    quick_ones, fewer = (one.summary()["decisions"] for one in placed)
    assert quick_ones["cost"] < fewer["cost"]

"""Tasks of a new kind, whose duration is unknown, are placed well."""

from __future__ import annotations

import asyncio
from collections import Counter

import dask
import pytest

from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import cluster_of_topology
from dask_gpurt.simulate.example_clusters import gpu_hosts
from tests.simulate.flat import task, workload

MB = 1_000_000
#: Two hosts with two GPUs each.
MACHINE = cluster_of_topology("boxes", gpu_hosts(2, 2, nic_bandwidth=12e9, nvlink=False))

#: Number of tasks. With more than twice as many as threads, Dask would take them for root tasks.
FEW = 8


@pytest.fixture
def placed(monkeypatch):
    """A function that simulates a workload; it returns workers by key, and the placement."""

    def run(model):
        found = []

        def install(scheduler):
            clock = asyncio.get_running_loop().time
            topology = MACHINE.network.topology
            found.append(Placement(scheduler, "data-aware", topology, clock=clock))

        with dask.config.set({"distributed.scheduler.work-stealing": False}):
            result = simulate(model, MACHINE, install)
        return {run.key: run.worker for run in result.tasks}, found[0]

    return run


def test_tasks_that_need_the_same_two_blocks_are_spread(placed):
    """They are spread although further tasks would move nothing where both blocks already are."""
    blocks = [task(f"('load-0', {n})", s=0.1, nbytes=500 * MB, source=True) for n in range(2)]
    users = [task(f"('use-0', {n})", 0, 1, s=1.0, nbytes=MB) for n in range(FEW)]
    where, _ = placed(workload(*blocks, *users, wanted=range(2, 2 + FEW)))
    counts = Counter(worker for key, worker in where.items() if "use" in key)
    assert set(counts) == {worker for key, worker in where.items() if "load" in key}
    assert max(counts.values()) == FEW / 2


def test_tasks_with_a_thin_edge_stay_at_the_block(placed):
    """This holds for many tasks, too. They may be quick, and most of their bytes are the block."""
    block, edge = (
        task("('load-0', 0)", s=0.1, nbytes=500 * MB, source=True),
        task("('load-1', 0)", s=0.1, nbytes=MB, source=True),
    )
    users = [task(f"('use-0', {n})", 0, 1, s=0.001, nbytes=MB) for n in range(FEW)]
    where, placement = placed(workload(block, edge, *users, wanted=range(2, 2 + FEW)))
    assert where["('load-0', 0)"] != where["('load-1', 0)"]
    assert {worker for key, worker in where.items() if "use" in key} == {where["('load-0', 0)"]}
    said = placement.explain("('use-0', 0)")
    assert "no task of this kind has ended" in said["reason"]
    assert said["stock_worker"] is None
    assert placement.summary()["decisions"]["new"] == FEW

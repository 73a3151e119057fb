"""Where tasks go of whose kind none has ended: nobody knows what it is worth to move anything."""

from __future__ import annotations

import asyncio
from collections import Counter

import dask
import pytest

from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import machine_of
from dask_gpurt.simulate.example_clusters import gpu_hosts
from tests.simulate.flat import task, workload

MB = 1_000_000
#: Two GPUs of one host, and two of another.
MACHINE = machine_of("boxes", gpu_hosts(2, 2, nic_bandwidth=12e9, nvlink=False))

#: More than twice as many as there are threads, and Dask takes them for root tasks.
FEW = 8


@pytest.fixture
def placed(monkeypatch):
    """Runs a workload; workers by key, and placement, which remembers why."""

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


def test_those_that_need_two_blocks_alike_are_dealt_out(placed):
    """Where the blocks are brought together nothing would have to be sent for all the others."""
    blocks = [task(f"('load-0', {n})", s=0.1, nbytes=500 * MB, source=True) for n in range(2)]
    users = [task(f"('use-0', {n})", 0, 1, s=1.0, nbytes=MB) for n in range(FEW)]
    where, _ = placed(workload(*blocks, *users, wanted=range(2, 2 + FEW)))
    counts = Counter(worker for key, worker in where.items() if "use" in key)
    assert set(counts) == {worker for key, worker in where.items() if "load" in key}
    assert max(counts.values()) == FEW / 2


def test_what_is_needed_with_a_thin_edge_stays_where_the_block_is(placed):
    """Also if there are many; what they take may be nothing, and the block is all there is."""
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

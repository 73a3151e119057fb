"""Root tasks are spread where their results go to many hosts, and blocks stay where they are."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import cluster_of_topology
from dask_gpurt.simulate.example_clusters import gpu_hosts
from dask_gpurt.simulate.examples import Scale, joins, stencil

SCALE = Scale(side=8, block_nbytes=500_000_000, load_rate=5e9, rate=100e9)


def both(model, machine, *, is_discovered=True):
    """Return the simulated runs with stock Dask and with ours."""
    topology = machine.network.topology
    told = topology.as_reported() if is_discovered else topology

    def ours(scheduler):
        clock = asyncio.get_running_loop().time
        Placement(scheduler, "data-aware", told, clock=clock)

    return simulate(model, machine), simulate(model, machine, ours)


def host(address):
    return address.rpartition(":")[0]


def test_inputs_of_a_shuffle_are_spread_over_all_hosts():
    machine = cluster_of_topology("boxes", gpu_hosts(16, 8, nic_bandwidth=12e9, nvlink=True))
    runs = both(joins(SCALE), machine)
    stock, ours = (
        Counter(host(one.worker) for one in run.tasks if "frompandas" in one.key) for run in runs
    )
    assert len(ours) == len(stock) == 16
    assert max(ours.values()) == max(stock.values())


@pytest.mark.parametrize("is_discovered", [True, False])
def test_no_block_moves_for_the_edges_of_others(is_discovered):
    """A block of a stencil takes a second to send, and an edge of it less than a millisecond."""
    machine = cluster_of_topology("boxes", gpu_hosts(4, 4, nic_bandwidth=0.5e9, nvlink=True))
    stock, ours = both(stencil(SCALE), machine, is_discovered=is_discovered)
    crossing = [one for one in ours.transfers if host(one.source) != host(one.target)]
    assert max(one.nbytes for one in crossing) < SCALE.block_nbytes / 100
    assert ours.makespan_s <= 1.01 * stock.makespan_s

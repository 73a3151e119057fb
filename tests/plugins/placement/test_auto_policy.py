"""Policy `auto` decides while the links between all workers are described, else stock Dask does."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.example_clusters import pcie_gpus
from dask_gpurt.simulate.examples import Scale, transpose_add

MACHINE = pcie_gpus(2, 4)
TOPOLOGY = MACHINE.network.topology
MODEL = transpose_add(Scale(side=6, block_nbytes=500_000_000, load_rate=5e9, rate=100e9))

UNCABLED = replace(TOPOLOGY, links=tuple(one for one in TOPOLOGY.links if one.kind != "ethernet"))
ONE_HOST = replace(
    TOPOLOGY,
    hosts=TOPOLOGY.hosts[:1],
    links=tuple(one for one in TOPOLOGY.links if one.name.startswith("host0/")),
)


def run(policy, topology, later=None):
    """Return the simulated run and the placement, described as workers report.

    The description becomes `later` before the run, if that is given.
    """
    placed = []

    told = topology and topology.as_reported()

    def install(scheduler):
        clock = asyncio.get_running_loop().time
        placed.append(Placement(scheduler, policy, told, clock=clock))
        if later is not None:
            placed[0].set_topology(later.as_reported())

    return simulate(MODEL, MACHINE, install), placed[0]


@pytest.fixture(scope="module")
def stock():
    return simulate(MODEL, MACHINE)


@pytest.mark.parametrize("known", [None, UNCABLED, ONE_HOST], ids=["none", "uncabled", "one host"])
def test_stock_dask_decides_where_a_link_is_unknown(known, stock):
    found, placement = run("auto", known)
    assert found == stock
    assert placement.policy_now == placement.summary()["policy"] == "stock"


def test_described_machines_are_used(stock):
    found, placement = run("auto", TOPOLOGY)
    assert found == run("data-aware", TOPOLOGY)[0] != stock
    assert found.moved_nbytes < stock.moved_nbytes
    assert placement.policy_now == "data-aware"


def test_decisions_follow_a_new_description(stock):
    assert run("auto", None, TOPOLOGY)[0] == run("data-aware", TOPOLOGY)[0]
    assert run("auto", TOPOLOGY, UNCABLED)[0] == stock

"""Of idle GPUs, a task takes the one nearest to its input, on machines as workers report them.

The files in `tests/data/machines` imitate real machines: DGX-1, DGX A100 and H100, an instance with
eight A100, and a box without NVLink.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dask_gpurt.placement.cost import Input, Task, WorkerSnapshot
from dask_gpurt.placement.policy import DataAware, Snapshot
from dask_gpurt.plugins.placement.cluster_links import ClusterLinks
from dask_gpurt.topology.discovery import discover
from dask_gpurt.topology.host_draft import WorkerReport
from dask_gpurt.topology.machine import MachineReport
from dask_gpurt.topology.probing import Measured
from tests.topology.test_discovery import CARDS
from tests.topology.trees import machine

IPS = ("10.0.0.1", "10.0.0.2")
MEASURED = {IPS: Measured(10e9, 1e-4)}
INPUT_NBYTES = 4 << 30


def address(ip, gpu):
    return f"tcp://{ip}:{40000 + gpu}"


@pytest.fixture
def links_of(tmp_path):
    """Return links between two machines of a kind with a worker on each GPU, and their topology.

    `without_bonds` is a GPU of the first machine whose NVLinks are not reported.
    """

    def make(name, without_bonds=None):
        reports = []
        for ip in IPS:
            found = machine(name, tmp_path / ip, host=f"box-{ip}", addresses={CARDS[name]: [ip]})
            reports += [
                WorkerReport(address(ip, gpu), f"{ip}-{gpu}", ip, MachineReport(found, str(gpu)))
                for gpu in range(len(found.gpus))
            ]
        topology = discover(reports, MEASURED).topology
        if without_bonds is not None:
            cut = f"box-{IPS[0]}/gpu{without_bonds}"
            kept = (one for one in topology.links if one.kind != "nvlink" or cut not in one.ends)
            topology = replace(topology, links=tuple(kept))
        links = ClusterLinks(topology)
        for one in reports:
            links.add(SimpleNamespace(address=one.address, name=one.name, host=one.host))
        assert links.are_described()
        return links, topology

    return make


def chosen(links, candidates):
    """Return the worker for a task whose input is on a busy GPU, and which idle GPUs may run."""
    holder = address(IPS[0], 0)
    busy = WorkerSnapshot(holder, 1, occupancy_s=60.0, n_tasks=60)
    workers = {holder: busy, **{one: WorkerSnapshot(one, 1) for one in candidates}}
    task = Task("t", [Input("x", INPUT_NBYTES, (holder,))], duration_s=0.1)
    snapshot = Snapshot(
        task, lambda found: [workers[one] for one in found], links.places, idle=tuple(candidates)
    )
    return DataAware().decide(snapshot).worker


@pytest.mark.parametrize("name", CARDS)
def test_a_peer_on_the_host_comes_before_another_host(links_of, name):
    links, _ = links_of(name)
    near, far = address(IPS[0], 1), address(IPS[1], 0)
    assert chosen(links, [far, near]) == near


def test_a_peer_over_two_nvlinks_comes_before_one_over_one(links_of):
    links, topology = links_of("dgx-1-half")
    ways = {gpu: topology.path(f"box-{IPS[0]}/gpu0", f"box-{IPS[0]}/gpu{gpu}") for gpu in (1, 2, 3)}
    assert {one.kind for one in ways.values()} == {"nvlink"}
    widest = max(ways, key=lambda gpu: ways[gpu].bandwidth_nbytes_per_s)
    assert ways[widest].bandwidth_nbytes_per_s > 1.5 * ways[1].bandwidth_nbytes_per_s
    assert chosen(links, [address(IPS[0], gpu) for gpu in ways]) == address(IPS[0], widest)


def test_a_peer_over_nvlink_comes_before_one_over_pcie(links_of):
    links, _ = links_of("dgx-1-half", without_bonds=1)
    assert chosen(links, [address(IPS[0], 1), address(IPS[0], 2)]) == address(IPS[0], 2)

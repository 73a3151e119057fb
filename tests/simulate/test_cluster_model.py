"""Modelled clusters have workers and paths as in their topology."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest

from dask_gpurt.errors import SimulationError
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import (
    ChangesSpeed,
    Dies,
    TopologyNetwork,
    cluster_of_topology,
)
from dask_gpurt.simulate.example_clusters import nvlink_hosts, one_slow_nic, pcie_gpus
from dask_gpurt.topology.description import parse
from dask_gpurt.topology.model import Host, Link, Numa, Topology
from tests.simulate.flat import address, flat, task, workload

DESCRIBED = pathlib.Path(__file__).parents[1] / "data" / "topologies"


def test_a_described_machine_has_a_worker_on_each_device():
    topology = parse((DESCRIBED / "dgx-h100.yaml").read_text())
    cluster = cluster_of_topology("a DGX", topology, nthreads=2)
    assert len(cluster.workers) == 8
    assert cluster.workers[3].name == "dgx-3"
    assert cluster.workers[3].host == "10.0.0.1"
    assert cluster.workers[3].memory_nbytes == 80 * 2**30
    first, last = cluster.workers[0].address, cluster.workers[-1].address
    route = cluster.network.route(first, last)
    assert len(route.links) == 2
    assert {cluster.network.capacities[link] for link in route.links} == {450e9}


def test_worker_addresses_match_the_description_of_placement():
    for cluster in (nvlink_hosts(2, 2), pcie_gpus(2, 2), one_slow_nic(2, 2)):
        network = cluster.network
        assert isinstance(network, TopologyNetwork)
        for worker in cluster.workers:
            found = network.topology.node_of(
                address=worker.address, name=worker.name or worker.address, host=worker.host
            )
            # Without devices, the topology finds only the host of a worker.
            assert found is not None
            if network.topology.hosts[0].devices:
                assert found == network.nodes[worker.address]


def test_hosts_may_have_addresses_of_ipv6():
    hosts = tuple(Host(name, (Numa("n"),), addresses=(f"fd00::{name}",)) for name in ("a", "b"))
    cluster = cluster_of_topology(
        "two", Topology(hosts, (Link("l", ("a/n", "b/n"), "ethernet", 2.0**30),))
    )
    one, other = cluster.workers
    assert (one.address, one.host) == ("tcp://[fd00::a]:40000", "fd00::a")
    fetching = workload(task("x-0", nbytes=2**30), task("y-0", nbytes=2**30), task("z-0", 0, 1))
    result = simulate(fetching, cluster)
    (moved,) = result.transfers
    assert {moved.source, moved.target} == {one.address, other.address}


def test_links_have_two_directions():
    cluster = pcie_gpus(2, 2)
    one, other = cluster.workers[0].address, cluster.workers[-1].address
    there, back = cluster.network.route(one, other), cluster.network.route(other, one)
    assert there.latency_s == back.latency_s > 0
    assert len(there.links) == len(back.links) == 6
    assert not set(there.links) & set(back.links)
    assert {link.rpartition(" to ")[0] for link in there.links} == {
        link.rpartition(" to ")[0] for link in back.links
    }
    assert set(there.links) | set(back.links) <= set(cluster.network.capacities)


def test_nvlink_is_used_within_hosts_and_ethernet_between():
    cluster = nvlink_hosts(2, 2)
    narrowest = [
        min(
            cluster.network.capacities[link]
            for link in cluster.network.route(
                cluster.workers[0].address, cluster.workers[peer].address
            ).links
        )
        for peer in (1, 2)
    ]
    assert narrowest == [300e9, 12e9]


def test_slow_network_card_is_slow():
    cluster = one_slow_nic(3, 1)
    route = cluster.network.route(cluster.workers[0].address, cluster.workers[2].address)
    assert min(cluster.network.capacities[link] for link in route.links) == 0.12e9


def test_unconnected_hosts_have_no_path():
    hosts = tuple(Host(name, (Numa("numa0"),)) for name in ("a", "b"))
    cluster = cluster_of_topology("two islands", Topology(hosts, ()))
    assert cluster.network.route("tcp://a:40000", "tcp://a:40000").links == ()
    with pytest.raises(SimulationError, match="no link"):
        cluster.network.route("tcp://a:40000", "tcp://b:40000")


def test_incidents_make_another_machine():
    cluster = pcie_gpus(1, 2)
    bad = cluster.with_incidents(Dies(cluster.workers[0].address, 1.0))
    assert cluster.incidents == ()
    assert bad.workers == cluster.workers


def called(*names):
    cluster = flat(len(names))
    workers = (replace(one, name=name) for one, name in zip(cluster.workers, names, strict=True))
    return replace(cluster, workers=tuple(workers))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: flat(2).with_incidents(Dies(address(2), 1.0)), "has no worker tcp://10.0.0.2"),
        (lambda: flat(2).with_incidents(ChangesSpeed(address(0), 1.0, 0.0)), "above 0"),
        (lambda: flat(2, speeds=[-1.0]), "above 0"),
        (lambda: flat(2, nthreads=0), "nthreads must be 1"),
        (lambda: flat(2, nthreads=1.5), "nthreads must be 1"),
        (lambda: flat(0), "has no workers"),
        (lambda: replace(flat(1), workers=flat(1).workers * 2), "two workers at tcp://10.0.0.0"),
        (lambda: called("w", "w"), "two workers with the name w"),
        (lambda: called("", address(0)), "two workers with the name tcp://10.0.0.0"),
    ],
)
def test_impossible_machines_are_refused_before_the_run(make, said):
    with pytest.raises(SimulationError, match=said):
        make()

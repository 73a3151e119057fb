"""Paths between workers come from the description, or from measurements without one."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest

from dask_gpurt.plugins.placement import cluster_links
from dask_gpurt.plugins.placement.cluster_links import ClusterLinks
from dask_gpurt.simulate.example_clusters import gpu_hosts
from dask_gpurt.topology import learned
from dask_gpurt.topology.completion import completed
from dask_gpurt.topology.description import parse
from dask_gpurt.topology.model import LOCAL, Host, Link, Numa, Topology
from tests.topology.test_model import load


def worker(host, port, name=None):
    return SimpleNamespace(address=f"tcp://{host}:{port}", host=host, name=name or port)


LEFT0, LEFT1 = worker("10.0.0.1", 1, "left-0"), worker("10.0.0.1", 2, "left-1")
RIGHT0 = worker("10.0.0.2", 1, "right-0")
NO_GPU, NO_GPU_EITHER = worker("10.0.0.1", 3), worker("10.0.0.1", 4)
STRANGER = worker("10.0.0.9", 1)
EVERYBODY = [LEFT0, LEFT1, RIGHT0, NO_GPU, NO_GPU_EITHER, STRANGER]


@pytest.fixture
def described():
    links = ClusterLinks(load("two-hosts"))
    for one in EVERYBODY:
        links.add(one)
    return links


def test_described_links_are_used(described):
    assert described(LEFT0.address, LEFT1.address).kind == "nvlink"
    assert described(LEFT0.address, RIGHT0.address).bandwidth_nbytes_per_s == 12.5e9
    assert described(LEFT0.address, LEFT0.address) is LOCAL
    for _ in range(100):
        described.observe(RIGHT0.address, {LEFT0.address: (1e6, 1)})
    assert described(LEFT0.address, RIGHT0.address).bandwidth_nbytes_per_s == 12.5e9


# ---------------------------------------------------------------------- discovered


@pytest.fixture
def discovered():
    links = ClusterLinks(load("two-hosts").as_reported())
    for one in EVERYBODY[:-1]:
        links.add(one)
    return links


def test_discovered_links_are_scaled_to_what_is_measured(discovered):
    between = RIGHT0.address, LEFT0.address
    described = discovered(*between)
    assert described.bandwidth_nbytes_per_s == 12.5e9
    assert described.latency_s == learned.LATENCY_S
    assert discovered.uncertainty() > 100
    within = discovered(LEFT0.address, LEFT1.address)
    for _ in range(100):
        discovered.observe(LEFT0.address, {RIGHT0.address: (1.25e9, 1)})
    measured = discovered(*between)
    assert measured.bandwidth_nbytes_per_s == pytest.approx(1.25e9, rel=0.1)
    assert discovered(LEFT1.address, RIGHT0.address) == measured, "the same kind of path"
    assert discovered(LEFT0.address, LEFT1.address) == within, "another kind of path"
    assert discovered.uncertainty() < 2


def test_discovered_links_are_never_faster_than_reported(discovered):
    for _ in range(100):
        discovered.observe(LEFT0.address, {RIGHT0.address: (1e12, 1)})
    assert discovered(RIGHT0.address, LEFT0.address).bandwidth_nbytes_per_s == 12.5e9


def test_a_new_description_keeps_what_was_measured(discovered):
    for _ in range(100):
        discovered.observe(LEFT0.address, {RIGHT0.address: (1.25e9, 1)})
    before = discovered(RIGHT0.address, LEFT0.address)
    discovered.set_topology(parse("hosts: [" + ", ".join(map(_alone, "34")) + "]"), EVERYBODY)
    assert discovered.undescribed() == sorted(one.address for one in EVERYBODY)
    discovered.set_topology(load("two-hosts").as_reported(), EVERYBODY)
    assert discovered.undescribed() == [STRANGER.address]
    assert not discovered.are_described()
    discovered.remove(STRANGER.address)
    assert discovered(RIGHT0.address, LEFT0.address) == before
    discovered.set_topology(load("two-hosts").as_reported(), EVERYBODY[:-1])
    assert discovered.are_described()


def test_links_of_a_person_among_reported_ones_are_certain():
    """The host of the stranger is reported, and only its paths are scaled."""
    written = load("two-hosts")
    third = Host("third", (Numa("numa0"),), addresses=("10.0.0.9",))
    (switch,) = written.switches
    link = Link("to third", ("third/numa0", switch), "ethernet", 5e9)
    reported = Topology((third,), (link,), (switch,)).as_reported()
    links = ClusterLinks(completed(written, reported))
    for one in (LEFT0, RIGHT0):
        links.add(one)
    assert links.are_written() and links.uncertainty() == 1
    links.add(STRANGER)
    assert links.are_described() and not links.are_written()
    assert links.uncertainty() > 100
    for source in (LEFT0, STRANGER):
        for _ in range(100):
            links.observe(RIGHT0.address, {source.address: (0.5e9, 1)})
    assert links(LEFT0.address, RIGHT0.address).bandwidth_nbytes_per_s == 12.5e9
    scaled = links(STRANGER.address, RIGHT0.address)
    assert scaled.bandwidth_nbytes_per_s == pytest.approx(0.5e9, rel=0.1)
    links.remove(STRANGER.address)
    assert links.are_written()


def test_undescribed_workers_are_reachable(described):
    assert described.undescribed() == [STRANGER.address]
    described.remove(STRANGER.address)
    assert described.undescribed() == []


def test_links_of_undescribed_machines_are_learnt(described):
    there = STRANGER.address, LEFT0.address
    assert described(*there).bandwidth_nbytes_per_s == pytest.approx(
        learned.OTHER_HOST_NBYTES_PER_S
    )
    for _ in range(50):
        described.observe(LEFT0.address, {STRANGER.address: (2e9, 2)})
    assert described(*there).bandwidth_nbytes_per_s == pytest.approx(1e9, rel=0.1)


def test_workers_on_one_node_still_pay_for_transfers(described):
    path = described(NO_GPU.address, NO_GPU_EITHER.address)
    assert path.kind == "same host"
    assert path.bandwidth_nbytes_per_s < float("inf")


def test_devices_follow_the_description(described):
    assert described.device_kind(LEFT0.address) == "gpu"
    assert described.device_kind(NO_GPU.address) is None
    assert ClusterLinks(None).device_kind(LEFT0.address) is None


def test_a_worker_that_left_is_forgotten(described):
    described.remove(LEFT0.address)
    assert described.device_kind(LEFT0.address) is None
    described.observe(LEFT0.address, {RIGHT0.address: (1e9, 1)})
    # A decision that began earlier may still ask for the removed worker.
    assert described(RIGHT0.address, LEFT0.address).kind == "network"


def test_doubt_is_one_only_where_links_of_hosts_are_described():
    links = ClusterLinks(load("two-hosts"))
    for one in (LEFT0, LEFT1, RIGHT0):
        links.add(one)
    assert links.uncertainty() == 1
    links.add(STRANGER)
    assert links.uncertainty() > 1
    apart = ClusterLinks(parse("hosts: [" + ", ".join(map(_alone, "12")) + "]"))
    apart.add(LEFT0)
    assert apart.uncertainty() == 1
    apart.add(RIGHT0)
    assert apart.uncertainty() > 1


def _alone(number):
    return f"{{name: h{number}, addresses: [10.0.0.{number}], numa: [{{name: numa0}}]}}"


NVLINK = gpu_hosts(3, 2, nic_bandwidth=1e9, nvlink=True)
SLOW_NIC = gpu_hosts(3, 2, nic_bandwidth=1e9, nvlink=False, slow_nics={2: 1e8})


def workers_of(topology):
    """Yield one worker for each device, with the device's node."""
    for host in topology.hosts:
        for number, device in enumerate(host.devices):
            yield worker(host.addresses[0], number, device.workers[0]), host.node(device.name)


@pytest.mark.parametrize("topology", [NVLINK, SLOW_NIC], ids=["nvlink", "slow"])
def test_shared_paths_of_equal_hosts_are_the_described_ones(topology):
    links = ClusterLinks(topology)
    ends = list(workers_of(topology))
    for one, _ in ends:
        links.add(one)
    assert len({links.places[one.address].kind for one, _ in ends}) < len(ends)
    for (one, node), (other, other_node) in itertools.permutations(ends, 2):
        described = topology.path(node, other_node)
        found = links(one.address, other.address)
        assert found.latency_s == described.latency_s
        assert found.bandwidth_nbytes_per_s == described.bandwidth_nbytes_per_s


def test_equal_hosts_share_their_inner_paths():
    links = ClusterLinks(SLOW_NIC)
    ends = [one.address for one, _ in workers_of(SLOW_NIC)]
    for one, _ in workers_of(SLOW_NIC):
        links.add(one)
    first, second, slow = (links(*ends[n : n + 2]) for n in (0, 2, 4))
    assert first is second
    assert first is not slow


def test_path_to_a_kind_is_renewed_when_another_host_joins():
    (first, _), _, (second, _), *_ = workers_of(NVLINK)
    links = ClusterLinks(NVLINK)
    links.add(first)
    far = links.places[first.address].far
    assert far[first.address].kind == "network"
    links.add(second)
    assert far[first.address].kind == "ethernet"
    assert links(first.address, second.address).kind == "ethernet"


def test_undescribed_worker_makes_all_places_distinct():
    links = ClusterLinks(load("two-hosts"))
    for one in (LEFT0, LEFT1, RIGHT0):
        links.add(one)
    assert links.places[LEFT0.address].kind == links.places[LEFT1.address].kind
    links.add(STRANGER)
    assert links.places[LEFT0.address].kind != links.places[LEFT1.address].kind
    links.remove(STRANGER.address)
    assert links.places[LEFT0.address].kind == links.places[LEFT1.address].kind


def test_remembered_paths_are_bounded(monkeypatch):
    monkeypatch.setattr(cluster_links, "_MAX_PATHS", 3)
    links = ClusterLinks(None)
    for i in range(20):
        links(f"tcp://a:{i}", "tcp://b:1")
    assert len(links.places) <= 3
    assert sum(len(one.near) for one in links.places.values()) <= 3


def test_paths_from_equal_hosts_are_computed_on_arrival():
    """The paths of a first host are unknown until a second one joins."""
    links = ClusterLinks(gpu_hosts(3, 0, nic_bandwidth=12e9, nvlink=False))
    addresses = []
    for host in range(3):
        one = worker(f"10.0.0.{host}", 4000)
        links.add(one)
        addresses.append(one.address)
    far = links.places[addresses[0]].far
    # A lookup would compute the entries now, so this checks the keys.
    assert far.keys() >= set(addresses[1:])
    assert far[addresses[0]] is far[addresses[1]] is far[addresses[2]]


TWO_CARDS = """
hosts:
  - name: left
    addresses: [10.0.0.1]
    numa: [{name: numa0}]
    devices:
      - {name: gpu0, kind: gpu, numa: numa0, workers: [left-0]}
      - {name: gpu1, kind: gpu, numa: numa0, workers: [left-1]}
      - {name: gpu2, kind: gpu, numa: numa0, workers: ["3"]}
    nics: [{name: eth0, numa: numa0}, {name: eth1, numa: numa0}]
    links:
      - {between: [gpu0, eth0], kind: pcie, bandwidth: 25 GB/s}
      - {between: [gpu1, eth1], kind: pcie, bandwidth: 25 GB/s}
      - {between: [gpu2, eth1], kind: pcie, bandwidth: 25 GB/s}
  - name: right
    addresses: [10.0.0.2]
    numa: [{name: numa0}]
    nics: [{name: eth0, numa: numa0}]
    links: [{between: [numa0, eth0], kind: pcie, bandwidth: 25 GB/s}]
switches: [fabric]
links:
  - {between: ["left/eth*", fabric], kind: ethernet, bandwidth: 10 GB/s}
  - {between: [right/eth0, fabric], kind: ethernet, bandwidth: 5 GB/s}
"""


def test_workers_behind_one_network_card_share_it():
    links = ClusterLinks(parse(TWO_CARDS))
    for one in (LEFT0, LEFT1, RIGHT0, NO_GPU):
        links.add(one)
    first, second, third = (links.uplink(one.address) for one in (LEFT0, LEFT1, NO_GPU))
    assert first != second == third
    # The result is that of its own network card, not of the sender's slower one.
    assert second.nbytes_per_s == 10e9
    assert links.uplink(RIGHT0.address).nbytes_per_s == 5e9


def test_workers_of_an_undescribed_host_share_its_link():
    links = ClusterLinks(None)
    for one in (LEFT0, LEFT1, RIGHT0):
        links.add(one)
    assert links.uplink(LEFT0.address) == links.uplink(LEFT1.address)
    assert links.uplink(LEFT0.address) != links.uplink(RIGHT0.address)
    assert links.uplink(LEFT0.address).nbytes_per_s == math.inf
    links.remove(RIGHT0.address)
    assert links.uplink(RIGHT0.address).name == RIGHT0.address


def test_card_of_a_single_worker_counts_once_others_join():
    links = ClusterLinks(parse(TWO_CARDS))
    links.add(LEFT0)
    assert links.uplink(LEFT0.address).nbytes_per_s == math.inf
    links.add(RIGHT0)
    assert links.uplink(LEFT0.address).nbytes_per_s == 10e9


def test_widest_path_is_known_only_where_all_are_described():
    links = ClusterLinks(load("two-hosts"))
    for one in (LEFT0, LEFT1, RIGHT0, NO_GPU):
        links.add(one)
    ends = [one.address for one in (LEFT0, LEFT1, RIGHT0, NO_GPU)]
    widest = {one: links.widest_nbytes_per_s(one) for one in ends}
    for one, other in itertools.permutations(ends, 2):
        assert links(one, other).bandwidth_nbytes_per_s <= widest[one] < math.inf
    # The path between two workers on one node is learnt, so it has no limit.
    links.add(NO_GPU_EITHER)
    assert links.widest_nbytes_per_s(NO_GPU.address) == math.inf
    assert links.widest_nbytes_per_s(LEFT0.address) == widest[LEFT0.address]
    links.remove(NO_GPU_EITHER.address)
    assert links.widest_nbytes_per_s(NO_GPU.address) == widest[NO_GPU.address]
    # The same worker is added again.
    links.add(NO_GPU)
    assert links.widest_nbytes_per_s(NO_GPU.address) == widest[NO_GPU.address]
    links.add(STRANGER)
    assert links.widest_nbytes_per_s(LEFT0.address) == math.inf
    assert ClusterLinks(None).widest_nbytes_per_s(LEFT0.address) == math.inf

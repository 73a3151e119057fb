"""The model finds the best paths between places on described real machines."""

from __future__ import annotations

import itertools
import math
import pathlib

import pytest

from dask_gpurt.topology import description
from dask_gpurt.topology.model import LOCAL, DeviceNode, Host, Link, Numa, Topology

DATA = pathlib.Path(__file__).parents[1] / "data" / "topologies"


def load(name):
    return description.parse((DATA / f"{name}.yaml").read_text(), name)


def test_nvlink_is_used_where_it_exists():
    path = load("dgx-h100").path("dgx/gpu0", "dgx/gpu7")
    assert path.kind == "nvlink"
    assert path.bandwidth_nbytes_per_s == 450e9
    assert path.latency_s == pytest.approx(4e-6)
    assert path.links == ("dgx/gpu0 - dgx/nvswitch", "dgx/gpu7 - dgx/nvswitch")


def test_path_has_the_narrowest_bandwidth_and_summed_latency():
    box = load("pcie-box")
    near, far = box.path("box/gpu0", "box/gpu1"), box.path("box/gpu0", "box/gpu3")
    assert (near.bandwidth_nbytes_per_s, near.kind) == (25e9, "pcie")
    assert (far.bandwidth_nbytes_per_s, far.kind) == (20e9, "upi")
    assert far.latency_s == pytest.approx(6.5e-6)
    assert near.transfer_s(25e9) == pytest.approx(1, rel=1e-4)


def test_a_link_may_be_on_the_paths_of_several_pairs():
    box = load("pcie-box")
    assert "upi" in box.path("box/gpu0", "box/gpu2").links
    assert "upi" in box.path("box/gpu1", "box/numa1").links


def test_paths_do_not_pass_through_a_device():
    """A path through a neighbour GPU would be as wide, but that GPU is for computing."""
    path = load("two-hosts").path("left/gpu0", "right/gpu0")
    assert path.bandwidth_nbytes_per_s == 12.5e9
    assert path.kind == "ethernet"
    assert not any("gpu1" in link for link in path.links)
    assert len(path.links) == 6


def test_slow_card_slows_both_directions():
    hosts = load("slow-nic")
    assert hosts.path("a/numa0", "b/numa0").bandwidth_nbytes_per_s == 25e9 / 8
    for pair in [("a/numa0", "d/numa0"), ("d/numa0", "a/numa0")]:
        assert hosts.path(*pair).bandwidth_nbytes_per_s == 1e9 / 8


def test_path_to_itself_is_local_and_islands_have_none():
    islands = Topology((Host("a", (Numa("n"),)), Host("b", (Numa("n"),))), ())
    assert islands.path("a/n", "a/n") is LOCAL
    assert LOCAL.transfer_s(1e12) == 0
    assert islands.path("a/n", "b/n") is None


@pytest.mark.parametrize("name", ["dgx-h100", "pcie-box", "two-hosts", "slow-nic"])
def test_no_path_is_wider_than_the_widest_link_at_an_end(name):
    topology = load(name)
    for one, other in itertools.permutations(topology.nodes, 2):
        path = topology.path(one, other)
        if path is not None:
            ends = map(topology.widest_nbytes_per_s, (one, other))
            assert path.bandwidth_nbytes_per_s <= min(ends)
    assert topology.widest_nbytes_per_s("nowhere") == 0


def test_lowest_latency_decides_between_equally_wide_paths():
    ends = [("h/a", "h/x"), ("h/x", "h/b"), ("h/a", "h/y"), ("h/y", "h/b")]
    latencies = [3e-6, 3e-6, 1e-6, 4e-6]
    links = [
        Link(f"{a}{b}", (a, b), "k", 10.0, latency)
        for (a, b), latency in zip(ends, latencies, strict=True)
    ]
    host = Host("h", (Numa("a"), Numa("b")), switches=("x", "y"))
    path = Topology((host,), tuple(links)).path("h/a", "h/b")
    assert path.links == ("h/ah/y", "h/yh/b")
    assert path.bandwidth_nbytes_per_s < math.inf


def test_workers_are_found_by_device_then_by_host():
    two = load("two-hosts")
    worker = {"address": "tcp://10.0.0.2:4000", "host": "10.0.0.2"}
    assert two.node_of(name="right-1", **worker) == "right/gpu1"
    assert two.node_of(name=7, **worker) == "right/numa0"
    assert two.node_of(name=7, address="tcp://10.0.0.9:1", host="10.0.0.9") is None
    gpu = DeviceNode("gpu0", "gpu", workers=("tcp://10.0.0.2:*",))
    pattern = Topology((Host("h", (Numa("n"),), (gpu,)),), ())
    assert pattern.node_of(name=7, **worker) == "h/gpu0"
    assert pattern.device("h/gpu0") is gpu
    assert pattern.device("h/n") is None


@pytest.mark.parametrize(
    ("users", "device"),
    [
        ((["w*"], ["w1"]), "gpu0"),
        ((["w1"], ["w*"]), "gpu0"),
        ((["x"], ["w?", "w1"]), "gpu1"),
        ((["tcp://10.0.0.1:1"], ["w1"]), "gpu0"),
        ((["w1"], ["tcp://10.0.0.1:1"]), "gpu0"),
        (([], ["[vw]1"]), "gpu1"),
        ((["W1"], []), "numa0"),
    ],
)
def test_a_worker_is_on_the_first_device_that_fits(users, device):
    devices = tuple(
        DeviceNode(f"gpu{i}", "gpu", workers=tuple(patterns)) for i, patterns in enumerate(users)
    )
    topology = Topology((Host("h", (Numa("numa0"),), devices),), ())
    assert topology.node_of(address="tcp://10.0.0.1:1", name="w1", host="h") == f"h/{device}"


@pytest.mark.parametrize(
    ("word", "port"),
    [
        ("tcp://[fd00::1]:1", 1),
        ("tcp://[[]fd00::1]:2", 2),
        ("tcp://[[]fd00::1]:*", 3),
        ("w[1]?", 4),
        ("w[[]1][?]", 4),
    ],
)
def test_exact_spelling_matches_with_pattern_characters(word, port):
    users = ("tcp://[fd00::1]:7", "w1?"), (word,)
    devices = tuple(DeviceNode(f"gpu{i}", "gpu", workers=one) for i, one in enumerate(users))
    topology = Topology((Host("h", (Numa("numa0"),), devices),), ())
    worker = {"address": f"tcp://[fd00::1]:{port}", "name": "w[1]?" if port == 4 else port}
    assert topology.node_of(**worker, host="h") == "h/gpu1"

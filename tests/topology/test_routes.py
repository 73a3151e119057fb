"""Paths composed of halves equal those of an exhaustive search."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from dask_gpurt.simulate.example_clusters import gpu_hosts
from dask_gpurt.topology.completion import completed
from dask_gpurt.topology.description import parse
from dask_gpurt.topology.model import Host, Link, Numa, Topology
from tests.topology.test_model import load


def every_way(topology, source, target):
    """Return all paths without a loop, by width, then latency, links and names."""
    neighbours = {}
    for link in topology.links:
        for here, there in (link.ends, link.ends[::-1]):
            neighbours.setdefault(here, []).append((there, link))
    stack = [(source, (source,), ())]
    while stack:
        node, seen, links = stack.pop()
        if node == target:
            names = tuple(link.name for link in links)
            width = min(link.bandwidth_nbytes_per_s for link in links)
            yield -width, sum(link.latency_s for link in links), len(links), names
        elif node == source or topology.device(node) is None:
            for there, link in neighbours.get(node, ()):
                if there not in seen:
                    stack.append((there, (*seen, there), (*links, link)))


CABLED = """
hosts:
  - name: a
    numa: [{name: m}]
    nics: [{name: fast}, {name: slow}]
    links: [{between: [m, fast], bandwidth: 50 GB/s}, {between: [m, slow], bandwidth: 50 GB/s}]
  - name: b
    numa: [{name: m}]
    nics: [{name: fast}, {name: slow}]
    links: [{between: [m, fast], bandwidth: 50 GB/s}, {between: [m, slow], bandwidth: 50 GB/s}]
switches: [lan]
links:
  - {between: [a/fast, b/fast], bandwidth: 25 GB/s}
  - {between: [a/slow, lan], bandwidth: 1 Gb/s}
  - {between: [b/slow, lan], bandwidth: 1 Gb/s}
"""

# The target's own link is as narrow as the quick link, so a wider link gains nothing.
NARROWER_AND_QUICKER = Topology(
    (Host("a", (Numa("m"),)), Host("b", (Numa("m"),))),
    (
        Link("wide", ("a/m", "lan"), "ethernet", 8e9, 3e-6),
        Link("quick", ("a/m", "lan"), "ethernet", 4e9, 1e-6),
        Link("other", ("b/m", "lan"), "ethernet", 4e9, 1e-6),
    ),
    ("lan",),
)

BOXES = gpu_hosts(4, 2, nic_bandwidth=12e9, nvlink=True)


def partly_written(n_hosts, more="", without=()):
    """Return the boxes as their workers report them, and the first ones also in a file."""
    links = tuple(link for link in BOXES.links if link.name not in without)
    hosts = "".join(f"- {{name: host{i}, numa: [{{name: numa0}}]}}\n" for i in range(n_hosts))
    return completed(parse(f"hosts:\n{hosts}{more}"), replace(BOXES, links=links).as_reported())


SLOW_CABLE = "links: [{between: [host0/numa0, host1/numa0], bandwidth: 2 MB/s}]"
SLOW_UPLINK = """
switches: [fabric]
links: [{between: [host0/numa0, fabric], bandwidth: 2 MB/s}]
"""
# Some links are written by a person, and some reported.
MIXED = {
    "one slow cable": partly_written(3, SLOW_CABLE),
    "one slow uplink": partly_written(2, SLOW_UPLINK, ["host0/ethernet"]),
}

TOPOLOGIES = {
    "a narrower and quicker link": NARROWER_AND_QUICKER,
    "a cable beside a switch": parse(CABLED),
    "two hosts": load("two-hosts"),
    "one slow NIC": load("slow-nic"),
    "NVLink": gpu_hosts(3, 2, nic_bandwidth=12e9, nvlink=True, slow_nics={1: 1e9}),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_each_path_is_the_best_of_all_paths(name):
    topology = TOPOLOGIES[name]
    for source, target in itertools.permutations(topology.nodes, 2):
        best = min(every_way(topology, source, target), default=None)
        found = topology.path(source, target)
        if best is None:
            assert found is None
            continue
        assert (found.bandwidth_nbytes_per_s, found.links) == (-best[0], best[3])
        assert math.isclose(found.latency_s, best[1])


HOST = "{{name: {name}, numa: [{{name: m}}], nics: [{{name: n}}], links: [{links}]}}"
INSIDE = "{between: [m, n], bandwidth: 10 GB/s}"


def test_other_hosts_are_crossed_only_where_necessary():
    hosts = ", ".join(HOST.format(name=name, links=INSIDE) for name in "abc")
    links = [
        "{between: [a/n, b/n], bandwidth: 5 GB/s}",
        "{between: [b/n, c/n], bandwidth: 5 GB/s}",
    ]
    chain = parse(f"hosts: [{hosts}]\nlinks: [{', '.join(links)}]")
    assert len(chain.path("a/m", "c/m").links) == 4
    links.append("{between: [a/n, fabric], bandwidth: 1 GB/s}")
    links.append("{between: [c/n, fabric], bandwidth: 1 GB/s}")
    switched = parse(f"hosts: [{hosts}]\nswitches: [fabric]\nlinks: [{', '.join(links)}]")
    assert switched.path("a/m", "c/m").bandwidth_nbytes_per_s == 1e9


@pytest.mark.parametrize("name", TOPOLOGIES | MIXED)
def test_equal_nodes_reach_a_host_by_equal_paths(name):
    """So the width and latency of one path hold for many."""
    topology = (TOPOLOGIES | MIXED)[name]
    found = {}
    for source, target in itertools.permutations(topology.nodes, 2):
        if "/" in source and "/" in target and source.split("/")[0] != target.split("/")[0]:
            path = topology.path(source, target)
            seen = path and (
                path.bandwidth_nbytes_per_s,
                pytest.approx(path.latency_s),
                path.is_reported,
            )
            alike = topology.outside(source), topology.outside(target)
            assert found.setdefault(alike, seen) == seen
    assert 1 < len(found) < len(list(itertools.permutations(topology.nodes, 2)))


def test_nodes_with_links_of_their_own_are_unique():
    host = Host("a", (Numa("n"), Numa("m")))
    other = Host("b", (Numa("n"),))
    cable = Link("cable", ("a/n", "b/n"), "cable", 1e9)
    bus = Link("bus", ("a/n", "a/m"), "bus", 1e9)
    topology = Topology((host, other), (cable, bus))
    assert len({topology.outside(node) for node in topology.nodes}) == 3


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_equal_hosts_have_equal_inner_paths(name):
    topology = TOPOLOGIES[name]
    found = {}
    for source, target in itertools.permutations(topology.nodes, 2):
        (host, _, one), (others_host, _, other) = source.partition("/"), target.partition("/")
        if one and other and host == others_host:
            path = topology.path(source, target)
            seen = path and (path.bandwidth_nbytes_per_s, pytest.approx(path.latency_s))
            assert found.setdefault((topology.inside(host), one, other), seen) == seen


def test_hosts_that_differ_beyond_names_are_not_equal():
    spread = TOPOLOGIES["NVLink"]
    names = [host.name for host in spread.hosts]
    # The second one's network card is slower.
    assert [spread.inside(name) for name in names] == [0, 1, 0]
    one, other = Host("a", (Numa("n"), Numa("m"))), Host("b", (Numa("n"), Numa("m")))

    def buses(names, rates, cables=()):
        pairs = enumerate(zip(names, rates, strict=True))
        own = [Link(f"bus-{n}", (f"{a}/n", f"{a}/m"), "bus", rate) for n, (a, rate) in pairs]
        return Topology((one, other), (*own, *cables))

    def alike(topology):
        return topology.inside("a") == topology.inside("b")

    assert alike(buses("ab", [1e9, 1e9]))
    assert alike(buses("abab", [1e9, 2e9, 2e9, 1e9]))
    assert not alike(buses("ab", [1e9, 2e9]))
    assert not alike(buses("aab", [1e9, 1e9, 1e9]))
    assert not alike(buses("ab", [1e9, 1e9], [Link("cable", ("a/n", "b/n"), "cable", 1e9)]))

"""Machines and the links between them, and which way bytes take from one place to another.

A topology is a graph. Its *nodes* are where bytes can be (NUMA nodes, devices), what they pass
through (switches, network cards), and its edges are links, each with a bandwidth in each
direction and a latency. A node of a host is named `host/node`; a switch between hosts has a name
without a slash. Nothing here measures, reads files or knows Dask: a worker is put on a node by its
name, address or host (`Topology.node_of`), and that is all there is to workers.

Descriptions of machines are in `dask_gpurt.topology.description`; what transfers were measured to
take, where nobody described the machines, in `dask_gpurt.topology.learned`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from dask_gpurt.topology.routes import Routes

#: Kinds of devices a worker may compute on.
DEVICE_KINDS = ("gpu",)


@dataclass(frozen=True)
class Link:
    """One edge of the graph. Several pairs of nodes may have it on their paths, and then share it.

    Attributes
    ----------
    name
        Unique in a topology.
    ends
        The two nodes it joins.
    kind
        Such as `nvlink`, `pcie`, `ethernet`; not interpreted.
    bandwidth_nbytes_per_s
        In each direction.
    latency_s
        Of one message.
    """

    name: str
    ends: tuple[str, str]
    kind: str
    bandwidth_nbytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Numa:
    """Processors and the memory next to them: where workers without a device are.

    Attributes
    ----------
    memory_nbytes
        0 where it was not said.
    """

    name: str
    memory_nbytes: int = 0


@dataclass(frozen=True)
class Device:
    """An accelerator with memory of its own.

    Attributes
    ----------
    workers
        Names or addresses of the workers that compute on it, or patterns (`*`, `?`) of them.
    """

    name: str
    kind: str
    numa: str | None = None
    memory_nbytes: int = 0
    workers: tuple[str, ...] = ()


def is_pattern(word: str) -> bool:
    """Whether several workers may fit a word of a device's; IPv6 addresses are in brackets, too."""
    return any(char in word.replace("://[", "") for char in "*?[")


@dataclass(frozen=True)
class Nic:
    """A network card."""

    name: str
    numa: str | None = None


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes
    ----------
    addresses
        Names and IP addresses it has in Dask's worker addresses, besides its own name.
    switches
        Nodes that bytes only pass through: PCIe switches and root complexes, NVSwitch.
    """

    name: str
    numa: tuple[Numa, ...]
    devices: tuple[Device, ...] = ()
    nics: tuple[Nic, ...] = ()
    switches: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    def node(self, name: str) -> str:
        """Name of one of its nodes in the whole topology."""
        return f"{self.name}/{name}"


@dataclass(frozen=True)
class Path:
    """The way bytes take between two nodes.

    Attributes
    ----------
    latency_s
        Sum over its links.
    bandwidth_nbytes_per_s
        Of its narrowest link; infinite between a node and itself.
    kind
        Kind of the narrowest link, or `local`.
    links
        Names of its links, from the source on.
    """

    latency_s: float
    bandwidth_nbytes_per_s: float
    kind: str
    links: tuple[str, ...] = ()

    def transfer_s(self, nbytes: float) -> float:
        """Seconds that so many bytes take, with the path to themselves."""
        return self.latency_s + nbytes / self.bandwidth_nbytes_per_s


#: Between a place and itself.
LOCAL = Path(0.0, math.inf, "local")


@dataclass(frozen=True)
class Topology:
    """Hosts, the switches between them, and all links.

    Whoever makes one checks the names; `dask_gpurt.topology.description` does.
    """

    hosts: tuple[Host, ...]
    links: tuple[Link, ...]
    switches: tuple[str, ...] = ()

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes, hosts' in the order of the hosts."""
        found = []
        for host in self.hosts:
            for parts in (host.numa, host.devices, host.nics):
                found += [host.node(part.name) for part in parts]
            found += [host.node(name) for name in host.switches]
        return (*found, *self.switches)

    def node_of(self, *, address: str, name: object, host: str) -> str | None:
        """Where a worker is.

        Parameters
        ----------
        address
            Of the worker.
        name
            Its name, of any type.
        host
            Name or IP address of the machine in `address`.

        Returns
        -------
        str or None
            The first device of which a pattern has its name or address, else the first NUMA node
            of its machine; None if the machine is not described.
        """
        words, patterns = self._workers
        found = [words[one] for one in (str(name), address) if one in words]
        for number, pattern, node in patterns:
            if fnmatchcase(str(name), pattern) or fnmatchcase(address, pattern):
                found.append((number, node))
                break
        return min(found)[1] if found else self._homes.get(host)

    @cached_property
    def _workers(self) -> tuple[dict[str, tuple[int, str]], list[tuple[int, str, str]]]:
        """Devices, numbered, by the words that workers are called; and those that are patterns.

        A description that a cluster wrote has a word for each worker, which would be a million
        comparisons for a thousand of them.
        """
        words: dict[str, tuple[int, str]] = {}
        patterns = []
        users = (
            (one.node(device.name), device.workers) for one in self.hosts for device in one.devices
        )
        for number, (node, workers) in enumerate(users):
            for word in workers:
                # An IPv6 address is one that looks like a pattern, and would not fit itself.
                words.setdefault(word, (number, node))
                if any(char in word for char in "*?["):
                    patterns.append((number, word, node))
        return words, patterns

    @cached_property
    def _homes(self) -> dict[str, str]:
        """The first NUMA node of each host, by its name and addresses."""
        found: dict[str, str] = {}
        for one in self.hosts:
            for called in (one.name, *one.addresses):
                found.setdefault(called, one.node(one.numa[0].name))
        return found

    def device(self, node: str) -> Device | None:
        """The device at a node, None if something else is there."""
        return self._devices.get(node)

    @cached_property
    def _devices(self) -> dict[str, Device]:
        return {host.node(one.name): one for host in self.hosts for one in host.devices}

    def path(self, source: str, target: str) -> Path | None:
        """The widest way from a node to another, the fastest of those; None if there is none.

        Widest and not the quickest for some size: large transfers are what placement is about.
        Ways that are equally wide are told apart by latency, then by the number of links, then
        by name, so that the answer is always the same.
        """
        if source == target:
            return LOCAL
        way = self._routes.way(source, target)
        if way is None:
            return None
        narrowest = min(
            (self._links[name] for name in way.links), key=lambda one: one.bandwidth_nbytes_per_s
        )
        return Path(way.latency_s, narrowest.bandwidth_nbytes_per_s, narrowest.kind, way.links)

    def widest_nbytes_per_s(self, node: str) -> float:
        """What no way from or to a node exceeds: its widest link; 0 if it has none."""
        return self._widest.get(node, 0.0)

    @cached_property
    def _widest(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for link in self.links:
            for end in link.ends:
                found[end] = max(found.get(end, 0.0), link.bandwidth_nbytes_per_s)
        return found

    def entrance(self, source: str, target: str) -> Link | None:
        """The narrowest link of a node's host on the way from a node of another host.

        Whatever comes from outside through the same one shares what it carries. None if there is no
        way, or it has no link of that host.
        """
        path = self.path(source, target)
        host = target.partition("/")[0] + "/"
        own = [
            link
            for link in (self._links[name] for name in (path.links if path else ()))
            if any(end.startswith(host) for end in link.ends)
        ]
        return min(own, key=lambda one: one.bandwidth_nbytes_per_s, default=None)

    def outside(self, node: str) -> int:
        """A number, the same for nodes of whatever host from which others are reached alike.

        Paths between such nodes of different hosts have the same bandwidth and latency.
        """
        return self._routes.outside(node)

    def inside(self, host: str) -> int:
        """A number, the same for hosts that differ in their name only.

        Nodes that are called alike there have the same links, to one another and to switches.
        """
        return self._insides.get(host, -1)

    @cached_property
    def _insides(self) -> dict[str, int]:
        links: dict[str, list[tuple[Hashable, ...]]] = {}
        for link in self.links:
            names = [end.partition("/") for end in link.ends]
            for host in {host for host, slash, _ in names if slash}:
                ends = sorted(
                    (True, node, end in self._devices) if own == host else (False, end, False)
                    for (own, _, node), end in zip(names, link.ends, strict=True)
                )
                alike = *ends, link.bandwidth_nbytes_per_s, link.latency_s, link.kind
                links.setdefault(host, []).append(alike)
        numbers: dict[Hashable, int] = {}
        return {
            host: numbers.setdefault(frozenset(Counter(found).items()), len(numbers))
            for host, found in links.items()
        }

    @cached_property
    def _routes(self) -> Routes:
        neighbours: dict[str, list[tuple[str, Link]]] = {node: [] for node in self.nodes}
        for link in self.links:
            one, other = link.ends
            neighbours[one].append((other, link))
            neighbours[other].append((one, link))
        hosts: dict[str, str | None] = {
            node: node.partition("/")[0] if "/" in node else None for node in self.nodes
        }
        return Routes(neighbours, hosts, self._devices.__contains__)

    @cached_property
    def _links(self) -> dict[str, Link]:
        return {link.name: link for link in self.links}

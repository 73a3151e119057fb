"""Machines, the links between them, and the paths of bytes from one place to another.

A topology is a graph. Its *nodes* are places that hold bytes (NUMA nodes, devices) or pass them on
(switches, network cards). Its edges are links, each with a bandwidth in each direction and a
latency. A node of a host is named `host/node`; a switch between hosts has a name without a slash.
`Topology.node_of` assigns a worker to a node by its name, address or host. This module measures
nothing, reads no files and knows nothing of Dask.

Each host, device and link is either written by a person or reported by workers. That is no part of
what it is: equal ones may differ in it. A path that is written between two hosts is preferred to
wider ones over reported links, because a person had a reason to write it.

`dask_gpurt.topology.description` parses descriptions of machines. `dask_gpurt.topology.learned` has
the measured links of machines that are not described.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property

from dask_gpurt.topology.routes import Routes

#: Kinds of devices that a worker may compute on.
DEVICE_KINDS = ("gpu",)


@dataclass(frozen=True)
class Link:
    """An edge of the graph. Paths between several pairs of nodes may share it.

    Attributes
    ----------
    name
        Unique in a topology.
    ends
        The two nodes that it connects.
    kind
        Such as `nvlink`, `pcie`, `ethernet`; not interpreted.
    bandwidth_nbytes_per_s
        Bandwidth in each direction.
    latency_s
        Latency of one message.
    is_reported
        Whether no person wrote it.
    """

    name: str
    ends: tuple[str, str]
    kind: str
    bandwidth_nbytes_per_s: float
    latency_s: float = 0.0
    is_reported: bool = field(default=False, compare=False)

    @property
    def host(self) -> str | None:
        """The host that the link is inside of; None if it leads out of a host."""
        one, other = (end.partition("/") for end in self.ends)
        return one[0] if one[1] and one[:2] == other[:2] else None


@dataclass(frozen=True)
class Numa:
    """Processors and the memory next to them. Workers without a device are on such a node.

    Attributes
    ----------
    memory_nbytes
        0 if unknown.
    """

    name: str
    memory_nbytes: int = 0


@dataclass(frozen=True)
class DeviceNode:
    """An accelerator with its own memory.

    Attributes
    ----------
    workers
        Names or addresses of the workers that compute on it, or patterns (`*`, `?`).
    is_reported
        Whether no person wrote it.
    """

    name: str
    kind: str
    numa: str | None = None
    memory_nbytes: int = 0
    workers: tuple[str, ...] = ()
    is_reported: bool = field(default=False, compare=False)


def is_pattern(word: str) -> bool:
    """Return whether a word for workers is a pattern. IPv6 addresses have brackets too."""
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
        Names and IP addresses of the host in Dask's worker addresses, besides its own name.
    switches
        Nodes that only pass bytes on: PCIe switches and root complexes, NVSwitch.
    is_reported
        Whether no person wrote it.
    """

    name: str
    numa: tuple[Numa, ...]
    devices: tuple[DeviceNode, ...] = ()
    nics: tuple[Nic, ...] = ()
    switches: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    is_reported: bool = field(default=False, compare=False)

    def node(self, name: str) -> str:
        """Return the name of one of the host's nodes in the whole topology."""
        return f"{self.name}/{name}"


@dataclass(frozen=True)
class Path:
    """The path of bytes between two nodes.

    Attributes
    ----------
    latency_s
        Sum over its links.
    bandwidth_nbytes_per_s
        Bandwidth of its narrowest link; infinite between a node and itself.
    kind
        Kind of the narrowest link, or `local`.
    links
        Names of its links, starting at the source.
    is_reported
        Whether no person wrote the narrowest link.
    """

    latency_s: float
    bandwidth_nbytes_per_s: float
    kind: str
    links: tuple[str, ...] = ()
    is_reported: bool = False

    def transfer_s(self, nbytes: float) -> float:
        """Return the seconds of a transfer that has the path to itself."""
        return self.latency_s + nbytes / self.bandwidth_nbytes_per_s


#: The path between a place and itself.
LOCAL = Path(0.0, math.inf, "local")


@dataclass(frozen=True)
class Topology:
    """Hosts, the switches between them, and all links.

    The creator validates the names, as `dask_gpurt.topology.description` does.
    """

    hosts: tuple[Host, ...]
    links: tuple[Link, ...]
    switches: tuple[str, ...] = ()

    def as_reported(self) -> Topology:
        """Return an equal topology of which no person wrote anything."""
        hosts = (
            replace(
                host,
                devices=tuple(replace(one, is_reported=True) for one in host.devices),
                is_reported=True,
            )
            for host in self.hosts
        )
        links = (replace(link, is_reported=True) for link in self.links)
        return Topology(tuple(hosts), tuple(links), self.switches)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes, those of hosts in the order of the hosts."""
        found = []
        for host in self.hosts:
            for parts in (host.numa, host.devices, host.nics):
                found += [host.node(part.name) for part in parts]
            found += [host.node(name) for name in host.switches]
        return (*found, *self.switches)

    def node_of(self, *, address: str, name: object, host: str) -> str | None:
        """Return the node of a worker.

        Parameters
        ----------
        address
            Address of the worker.
        name
            Name of the worker, of any type.
        host
            Name or IP address of the machine in `address`.

        Returns
        -------
        str or None
            The first device with a pattern that matches the worker's name or address. If there is
            none, the first NUMA node of the worker's machine. None if the machine is not described.
        """
        words, patterns = self._workers
        found = [words[one] for one in (str(name), address) if one in words]
        for number, pattern, node in patterns:
            if fnmatchcase(str(name), pattern) or fnmatchcase(address, pattern):
                found.append((number, node))
                break
        return min(found)[1] if found else self._first_numa.get(host)

    @cached_property
    def _workers(self) -> tuple[dict[str, tuple[int, str]], list[tuple[int, str, str]]]:
        """Numbered devices by exact word for a worker, and those with patterns.

        A description written by a cluster has a word for each worker. Comparing each word with each
        of a thousand workers would take a million comparisons.
        """
        words: dict[str, tuple[int, str]] = {}
        patterns = []
        users = (
            (one.node(device.name), device.workers) for one in self.hosts for device in one.devices
        )
        for number, (node, workers) in enumerate(users):
            for word in workers:
                words.setdefault(word, (number, node))
                if is_pattern(word):
                    patterns.append((number, word, node))
        return words, patterns

    @cached_property
    def _first_numa(self) -> dict[str, str]:
        """The first NUMA node of each host, by the host's name and addresses."""
        found: dict[str, str] = {}
        for one in self.hosts:
            for called in (one.name, *one.addresses):
                found.setdefault(called, one.node(one.numa[0].name))
        return found

    def device(self, node: str) -> DeviceNode | None:
        """Return the device at a node, or None if the node is not a device."""
        return self._devices.get(node)

    def is_reported(self, node: str) -> bool:
        """Return whether no person wrote the host of a node, or the device that the node is."""
        device = self._devices.get(node)
        return node.partition("/")[0] in self._reported_hosts or (
            device is not None and device.is_reported
        )

    @cached_property
    def _reported_hosts(self) -> frozenset[str]:
        return frozenset(host.name for host in self.hosts if host.is_reported)

    @cached_property
    def _devices(self) -> dict[str, DeviceNode]:
        return {host.node(one.name): one for host in self.hosts for one in host.devices}

    def path(self, source: str, target: str) -> Path | None:
        """Return the widest path between two nodes, or None if there is none.

        Between hosts, it uses links that a person wrote, if these connect the nodes. Among equally
        wide paths, the one with the lowest latency wins, then the fewest links, then the first by
        names, so the result is deterministic. Rejected: the fastest path for some size, since
        placement is about large transfers.
        """
        if source == target:
            return LOCAL
        if self._written is not None:
            written = self._written.path(source, target)
            if written is not None:
                return written
        route = self._routes.path(source, target)
        if route is None:
            return None
        narrowest = self._narrowest(route.links)
        return Path(
            route.latency_s,
            narrowest.bandwidth_nbytes_per_s,
            narrowest.kind,
            route.links,
            narrowest.is_reported,
        )

    @cached_property
    def _written(self) -> Topology | None:
        """The topology without reported links between hosts; None if all or none are reported."""
        between = [link.is_reported for link in self.links if link.host is None]
        if all(between) or not any(between):
            return None
        links = (link for link in self.links if link.host is not None or not link.is_reported)
        return Topology(self.hosts, tuple(links), self.switches)

    def widest_nbytes_per_s(self, node: str) -> float:
        """Return the bandwidth of a node's widest link, which no path exceeds; 0 without links."""
        return self._widest.get(node, 0.0)

    @cached_property
    def _widest(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for link in self.links:
            for end in link.ends:
                found[end] = max(found.get(end, 0.0), link.bandwidth_nbytes_per_s)
        return found

    def entrance(self, source: str, target: str) -> Link | None:
        """Return the narrowest link of the target's host on the path from a node of another host.

        All transfers into the host through this link share its bandwidth. None if there is no path,
        or no link of that host on it.
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
        """Return a class number, equal for nodes that are reached alike from other hosts.

        Paths from such nodes to nodes of another host have the same bandwidth and latency. A person
        wrote the narrowest link of all these paths, or of none.
        """
        if self._is_all_alike:
            return self._routes.outside(node)
        alike = (
            self._routes.outside(node),
            self._written and self._written.outside(node),
            frozenset(
                (switch, self._narrowest(route.links).is_reported)
                for switch, route in self._routes.uplinks(node).items()
            ),
        )
        return self._outsides.setdefault(alike, len(self._outsides))

    @cached_property
    def _outsides(self) -> dict[Hashable, int]:
        return {}

    @cached_property
    def _is_all_alike(self) -> bool:
        """Whether all links are written, or all are reported."""
        return len({link.is_reported for link in self.links}) < 2

    def _narrowest(self, names: Iterable[str]) -> Link:
        links = (self._links[name] for name in names)
        return min(links, key=lambda one: one.bandwidth_nbytes_per_s)

    def inside(self, host: str) -> int:
        """Return a class number, equal for hosts that differ only in their names.

        Nodes with the same name on such hosts have the same links, to each other and to switches.
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
                alike = (
                    *ends,
                    link.bandwidth_nbytes_per_s,
                    link.latency_s,
                    link.kind,
                    link.is_reported,
                )
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

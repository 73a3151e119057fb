"""A machine as a simulation sees it: workers, and what lies between them.

A worker has an address as Dask would give it one, threads, memory and a speed. Between two workers
lies a `Route`: a latency and the links that a transfer fills, each shared with whatever else takes
it. What a network looks like inside is its own affair: anything with `route` and `capacities` will
do, and `TopologyNetwork` does it for a described topology.

Incidents are what goes wrong with a machine while it works. Ready-made machines are in
`dask_gpurt.simulate.example_clusters`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from dask_gpurt.errors import SimulationError
from dask_gpurt.topology.model import Device, Numa, Topology, is_pattern


@dataclass(frozen=True)
class Route:
    """The way from one worker to another.

    Attributes
    ----------
    latency_s
        Seconds until the first byte arrives.
    links
        Names of the links that every byte goes through; none if the bytes stay where they are.
    """

    latency_s: float
    links: tuple[str, ...]


class Network(Protocol):
    """What lies between workers."""

    @property
    def capacities(self) -> Mapping[str, float]:
        """Bytes per second of each link, by its name. A link has one direction."""
        ...

    def route(self, source: str, target: str) -> Route:
        """The way of bytes from one address to another."""
        ...


class TopologyNetwork:
    """The network of a described topology: each of its links is one either way.

    Parameters
    ----------
    topology
        Nodes and links.
    nodes
        On which node the worker of each address is.
    """

    def __init__(self, topology: Topology, nodes: Mapping[str, str]) -> None:
        self.topology = topology
        self.nodes = nodes
        self._links = {link.name: link for link in topology.links}
        self._routes: dict[tuple[str, str], Route] = {}

    @cached_property
    def capacities(self) -> Mapping[str, float]:
        """Bytes per second by `<link> to <end>`."""
        return {
            f"{link.name} to {end}": link.bandwidth_nbytes_per_s
            for link in self.topology.links
            for end in link.ends
        }

    def route(self, source: str, target: str) -> Route:
        """The way that the topology's own paths take.

        Raises
        ------
        SimulationError
            If there is none.
        """
        ends = self.nodes[source], self.nodes[target]
        found = self._routes.get(ends)
        if found is None:
            found = self._routes[ends] = self._find(*ends)
        return found

    def _find(self, source: str, target: str) -> Route:
        path = self.topology.path(source, target)
        if path is None:
            raise SimulationError(f"no link leads from {source} to {target}")
        links, node = [], source
        for name in path.links:
            one, other = self._links[name].ends
            node = other if node == one else one
            links.append(f"{name} to {node}")
        return Route(path.latency_s, tuple(links))


@dataclass(frozen=True)
class WorkerModel:
    """A worker process.

    Attributes
    ----------
    address
        Unique, in the form `tcp://<host>:<port>`, an IPv6 host in brackets; workers with equal
        hosts are on one host.
    nthreads
        Tasks that run at a time.
    memory_nbytes
        What Dask is told of its memory.
    speed
        How many seconds of a task's duration pass in one second here.
    name
        What Dask calls it; its address if empty.
    """

    address: str
    nthreads: int = 1
    memory_nbytes: int = 64 * 2**30
    speed: float = 1.0
    name: str = ""

    @property
    def host(self) -> str:
        """The host in the address."""
        return self.address.rpartition("/")[2].rpartition(":")[0].strip("[]")


@dataclass(frozen=True)
class Dies:
    """A worker is gone from one moment to the next; what it held is lost."""

    address: str
    at_s: float


@dataclass(frozen=True)
class ChangesSpeed:
    """A worker goes on at another speed, also with the tasks it is at."""

    address: str
    at_s: float
    speed: float


Incident = Dies | ChangesSpeed


@dataclass(frozen=True)
class Machine:
    """Workers, the network between them, and the scheduler's distance from them.

    Attributes
    ----------
    control_latency_s
        Seconds a message between the scheduler and a worker takes.
    incidents
        What goes wrong, and when.

    Raises
    ------
    SimulationError
        There is no worker, or there are two of one address or name; one stands still; something
        happens to a worker that there is not.
    """

    name: str
    workers: tuple[WorkerModel, ...]
    network: Network
    control_latency_s: float = 0.0005
    incidents: tuple[Incident, ...] = ()

    def __post_init__(self) -> None:
        if not self.workers:
            raise SimulationError(f"{self.name} has no workers")
        addresses: set[str] = set()
        for worker in self.workers:
            if worker.address in addresses:
                raise SimulationError(f"{self.name} has two workers at {worker.address}")
            addresses.add(worker.address)
        for name, times in Counter(one.name or one.address for one in self.workers).items():
            if times > 1:
                raise SimulationError(f"{self.name} has two workers that are called {name}")
        for incident in self.incidents:
            if incident.address not in addresses:
                raise SimulationError(f"{self.name} has no worker {incident.address}: {incident}")
        for one in (*self.workers, *self.incidents):
            if not getattr(one, "speed", 1.0) > 0:
                raise SimulationError(f"speeds are more than 0: {one}")

    def with_incidents(self, *incidents: Incident) -> Machine:
        """The same machine on a bad day."""
        return replace(self, incidents=incidents)


def machine_of(
    name: str, topology: Topology, *, nthreads: int = 1, memory_nbytes: int = 64 * 2**30
) -> Machine:
    """A worker on each device of a topology, and on each NUMA node of hosts that have no device.

    Parameters
    ----------
    nthreads
        Of each worker.
    memory_nbytes
        Of each worker whose device or NUMA node does not say.
    """
    workers: list[WorkerModel] = []
    nodes: dict[str, str] = {}
    for host in topology.hosts:
        address = host.addresses[0] if host.addresses else host.name
        in_url = f"[{address}]" if ":" in address else address
        places: tuple[Device | Numa, ...] = host.devices or host.numa
        for number, place in enumerate(places):
            # Placement finds a worker's device by these patterns, so they name the worker.
            patterns = host.devices[number].workers if host.devices else ()
            worker = WorkerModel(
                f"tcp://{in_url}:{40000 + number}",
                nthreads=nthreads,
                memory_nbytes=place.memory_nbytes or memory_nbytes,
                name=next((one for one in patterns if not is_pattern(one)), ""),
            )
            workers.append(worker)
            nodes[worker.address] = host.node(place.name)
    return Machine(name, tuple(workers), TopologyNetwork(topology, nodes))

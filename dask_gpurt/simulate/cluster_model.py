"""Models of clusters for simulations: workers, and the network between them.

A worker has an address in Dask's form, threads, memory and a speed. Between two workers there is a
`Route`: a latency, and the links that a transfer uses, which it shares with other transfers. A
network is any object with `route` and `capacities`. `TopologyNetwork` implements it for a described
topology.

Incidents are failures during a simulation. Ready-made clusters are in
`dask_gpurt.simulate.example_clusters`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from dask_gpurt.errors import SimulationError
from dask_gpurt.topology.model import DeviceNode, Numa, Topology, is_pattern


@dataclass(frozen=True)
class Route:
    """The route from one worker to another.

    Attributes
    ----------
    latency_s
        Seconds until the first byte arrives.
    links
        Names of the links that every byte passes; empty if the bytes stay in place.
    """

    latency_s: float
    links: tuple[str, ...]


class Network(Protocol):
    """The network between workers."""

    @property
    def capacities(self) -> Mapping[str, float]:
        """Bytes per second of each link, by its name. A link has one direction."""
        ...

    def route(self, source: str, target: str) -> Route:
        """Return the route of bytes from one address to another."""
        ...


class TopologyNetwork:
    """The network of a described topology. Each of its links becomes one link per direction.

    Parameters
    ----------
    topology
        Nodes and links.
    nodes
        Node of the worker at each address.
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
        """Return the route along the topology's own path.

        Raises
        ------
        SimulationError
            There is no path.
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
        Unique, in the form `tcp://<host>:<port>`, an IPv6 host in brackets. Workers with equal
        hosts share a host.
    nthreads
        Tasks that run at the same time.
    memory_nbytes
        Memory limit that Dask sees.
    speed
        Seconds of a task's duration that pass in one second.
    name
        Dask's name for the worker; its address if empty.
    startup_s
        Seconds at full speed from its first task until it runs any, to import libraries.
    """

    address: str
    nthreads: int = 1
    memory_nbytes: int = 64 * 2**30
    speed: float = 1.0
    name: str = ""
    startup_s: float = 0.0

    @property
    def host(self) -> str:
        """The host in the address."""
        return self.address.rpartition("/")[2].rpartition(":")[0].strip("[]")


@dataclass(frozen=True)
class Dies:
    """A worker disappears without warning, and its data is lost."""

    address: str
    at_s: float


@dataclass(frozen=True)
class ChangesSpeed:
    """A worker continues at another speed, including its running tasks."""

    address: str
    at_s: float
    speed: float


Incident = Dies | ChangesSpeed


@dataclass(frozen=True)
class ClusterModel:
    """Workers, the network between them, and the latency to the scheduler.

    Attributes
    ----------
    control_latency_s
        Seconds that a message between the scheduler and a worker takes.
    incidents
        Failures, with their times.
    disk_nbytes_per_s
        Bytes per second that the disk of each host reads and writes together. Workers that hold
        more than their target then write results; without disks, memory is only counted.

    Raises
    ------
    SimulationError
        There is no worker, or two share an address or name. A worker has no thread, a speed is not
        positive, or an incident names a worker that does not exist.
    """

    name: str
    workers: tuple[WorkerModel, ...]
    network: Network
    control_latency_s: float = 0.0005
    incidents: tuple[Incident, ...] = ()
    disk_nbytes_per_s: float | None = None

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
                raise SimulationError(f"{self.name} has two workers with the name {name}")
        for incident in self.incidents:
            if incident.address not in addresses:
                raise SimulationError(f"{self.name} has no worker {incident.address}: {incident}")
        for worker in self.workers:
            if not isinstance(worker.nthreads, int) or worker.nthreads < 1:
                raise SimulationError(f"nthreads must be 1 or a larger integer: {worker}")
        for one in (*self.workers, *self.incidents):
            if not getattr(one, "speed", 1.0) > 0:
                raise SimulationError(f"a speed must be above 0: {one}")

    @staticmethod
    def disk_of(host: str) -> str:
        """Return the name of the link to the disk of a host."""
        return f"disk of {host}"

    @property
    def capacities(self) -> Mapping[str, float]:
        """Bytes per second of each link, and of each disk."""
        rate = self.disk_nbytes_per_s
        disks = {self.disk_of(one.host): rate for one in self.workers} if rate else {}
        return {**self.network.capacities, **disks}

    def with_incidents(self, *incidents: Incident) -> ClusterModel:
        """Return the same cluster with these incidents."""
        return replace(self, incidents=incidents)


def cluster_of_topology(
    name: str, topology: Topology, *, nthreads: int = 1, memory_nbytes: int = 64 * 2**30
) -> ClusterModel:
    """Return a cluster with a worker on each device of a topology.

    Hosts without devices get a worker on each NUMA node.

    Parameters
    ----------
    nthreads
        Threads of each worker.
    memory_nbytes
        Memory of each worker whose device or NUMA node does not specify it.
    """
    workers: list[WorkerModel] = []
    nodes: dict[str, str] = {}
    for host in topology.hosts:
        address = host.addresses[0] if host.addresses else host.name
        in_url = f"[{address}]" if ":" in address else address
        places: tuple[DeviceNode | Numa, ...] = host.devices or host.numa
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
    return ClusterModel(name, tuple(workers), TopologyNetwork(topology, nodes))

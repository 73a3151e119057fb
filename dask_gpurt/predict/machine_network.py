"""The cluster of equal machines, for the simulator.

Workers are as large as those of the trace: threads behave differently in larger workers. Each
machine has a link to a network that never is the limit itself. Its workers share that link. Bytes
between them do not use it, and move at least as fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_gpurt.errors import PredictionError
from dask_gpurt.predict.catalogue import MachineGroup
from dask_gpurt.predict.recorded_cluster import RecordedCluster
from dask_gpurt.simulate.cluster_model import ClusterModel, TopologyNetwork, WorkerModel
from dask_gpurt.simulate.example_clusters import host_address
from dask_gpurt.topology.model import Host, Link, Nic, Numa, Topology

#: Seconds of a message until its first byte arrives: within a host, and between hosts.
LOCAL_LATENCY_S, NETWORK_LATENCY_S = 50e-6, 200e-6
#: Share of a network's nominal bandwidth that carries data.
NET_OF_OVERHEAD = 0.95
#: Inside of a host, only the links of workers limit.
_UNLIMITED = 1e15
#: Most workers of a cluster. A simulation takes minutes for so many.
MAX_WORKERS = 2_000
#: Memory of a worker of which nothing is known.
_PLENTY_NBYTES = 2**50


def cluster_of(
    group: MachineGroup,
    recorded: RecordedCluster,
    *,
    speed: float = 1.0,
    network: float = 1.0,
    disk: float = 1.0,
    memory: float = 1.0,
) -> ClusterModel:
    """Return the cluster of some machines. Its network is a `TopologyNetwork`.

    Parameters
    ----------
    group
        The machines.
    recorded
        The cluster of the trace, for the size of a worker.
    speed
        Speed of a thread, as a multiple of a recorded one.
    network, disk, memory
        Factors for the machines' own: for questions such as "with twice the network?".

    Raises
    ------
    PredictionError
        They would have more than `MAX_WORKERS` workers.
    """
    machine = group.machine
    nthreads = min(recorded.nthreads, machine.threads)
    each = max(machine.threads // nthreads, 1)
    if each * group.count > MAX_WORKERS:
        raise PredictionError(
            f"{group.name} would be {each * group.count:,} workers; a prediction takes at most"
            f" {MAX_WORKERS:,}"
        )
    return _cluster(
        group.name,
        [[nthreads] * each] * group.count,
        max(int(machine.memory_nbytes * memory) // each, 1) if machine.memory_nbytes else 0,
        recorded,
        speed=speed,
        network_nbytes_per_s=machine.network_nbytes_per_s * network,
        local_nbytes_per_s=recorded.local_nbytes_per_s,
        disk_nbytes_per_s=machine.disk_nbytes_per_s * disk,
    )


def traced_cluster(recorded: RecordedCluster) -> ClusterModel:
    """Return the cluster of the trace itself, whose machines may differ."""
    return _cluster(
        "the machines of the trace",
        list(recorded.workers.values()),
        recorded.memory_nbytes,
        recorded,
        speed=1.0,
        network_nbytes_per_s=recorded.network_nbytes_per_s,
        local_nbytes_per_s=recorded.local_nbytes_per_s,
        disk_nbytes_per_s=recorded.disk_nbytes_per_s,
    )


def _cluster(
    name: str,
    threads: Sequence[Sequence[int]],
    memory_nbytes: int,
    recorded: RecordedCluster,
    *,
    speed: float,
    network_nbytes_per_s: float,
    local_nbytes_per_s: float,
    disk_nbytes_per_s: float,
) -> ClusterModel:
    """Return a cluster, given the threads of each worker of each host."""
    addresses = [host_address(number) for number in range(len(threads))]
    workers = tuple(
        WorkerModel(
            f"tcp://{address}:{40000 + number}",
            nthreads,
            memory_nbytes or _PLENTY_NBYTES,
            speed,
            startup_s=recorded.startup_s,
        )
        for address, of_host in zip(addresses, threads, strict=True)
        for number, nthreads in enumerate(of_host)
    )
    topology = _topology(
        dict(zip(addresses, map(len, threads), strict=True)),
        network_nbytes_per_s * NET_OF_OVERHEAD,
        local_nbytes_per_s,
    )
    places = (host.node(numa.name) for host in topology.hosts for numa in host.numa)
    nodes = {worker.address: place for worker, place in zip(workers, places, strict=True)}
    return ClusterModel(
        name,
        workers,
        TopologyNetwork(topology, nodes),
        control_latency_s=recorded.control_s,
        disk_nbytes_per_s=disk_nbytes_per_s,
    )


def _topology(
    workers: Mapping[str, int], network_nbytes_per_s: float, local_nbytes_per_s: float
) -> Topology:
    """Return hosts with a node for each worker, as workers would report them.

    Parameters
    ----------
    workers
        Number of workers by the address of each host.
    """
    hosts, links = [], []
    for address, count in workers.items():
        numa = tuple(Numa(f"worker{number}") for number in range(count))
        host = Host(address, numa, nics=(Nic("nic"),), switches=("bus",), addresses=(address,))
        hosts.append(host)
        bus, nic = host.node("bus"), host.node("nic")
        # Bytes for other hosts use the link of a worker too, which must not limit a faster network.
        worker_rate = max(local_nbytes_per_s, network_nbytes_per_s)
        links += [
            Link(f"inside {end}", (end, bus), "bus", worker_rate, LOCAL_LATENCY_S / 2)
            for end in (host.node(one.name) for one in numa)
        ]
        links.append(Link(f"inside {nic}", (nic, bus), "bus", _UNLIMITED))
        latency_s = (NETWORK_LATENCY_S - LOCAL_LATENCY_S) / 2
        network = Link(
            f"network {address}", (nic, "network"), "ethernet", network_nbytes_per_s, latency_s
        )
        links.append(network)
    return Topology(tuple(hosts), tuple(links), ("network",)).as_reported()

"""The cluster and the network of equal machines, for the simulator.

Workers are as large as those of the trace: threads behave differently in larger workers. Each
machine has a link in and a link out, which its workers share. Bytes inside use neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from dask_gpurt.predict.catalogue import MachineGroup
from dask_gpurt.predict.recorded_cluster import RecordedCluster
from dask_gpurt.simulate.cluster_model import ClusterModel, Route, WorkerModel

#: Seconds until the first byte of a message: within a host, and between hosts of one network.
LOCAL_LATENCY_S, NETWORK_LATENCY_S = 50e-6, 200e-6
#: Share of a network's nominal bandwidth that carries data.
NET_OF_OVERHEAD = 0.95
#: Memory of a worker of which nothing is known.
_PLENTY_NBYTES = 2**50


class MachineNetwork:
    """The network between equal machines, and between the workers of each.

    Parameters
    ----------
    workers
        Addresses of all workers. Those of one machine have the same host.
    network_nbytes_per_s
        To and from each machine.
    local_nbytes_per_s
        To and from each worker, for bytes that stay on the machine.
    """

    def __init__(
        self, workers: Sequence[str], network_nbytes_per_s: float, local_nbytes_per_s: float
    ) -> None:
        hosts = dict.fromkeys(map(_host, workers))
        self.capacities: dict[str, float] = {
            f"{way} {place}": rate
            for places, rate in (
                (hosts, network_nbytes_per_s * NET_OF_OVERHEAD),
                (workers, local_nbytes_per_s),
            )
            for place in places
            for way in (_INTO, _OUT_OF)
        }

    def route(self, source: str, target: str) -> Route:
        """Return the links between two workers."""
        if source == target:
            return Route(0.0, ())
        one, other = _host(source), _host(target)
        if one == other:
            return Route(LOCAL_LATENCY_S, (f"{_OUT_OF} {source}", f"{_INTO} {target}"))
        return Route(NETWORK_LATENCY_S, (f"{_OUT_OF} {one}", f"{_INTO} {other}"))


_INTO, _OUT_OF = "into", "out of"


def _host(address: str) -> str:
    return address.rpartition("/")[2].rpartition(":")[0]


def cluster_of(
    group: MachineGroup,
    recorded: RecordedCluster,
    *,
    speed: float = 1.0,
    network: float = 1.0,
    disk: float = 1.0,
    memory: float = 1.0,
) -> ClusterModel:
    """Return the cluster of some machines.

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
    """
    machine = group.machine
    nthreads = min(recorded.nthreads, machine.threads)
    each = max(machine.threads // nthreads, 1)
    limit = int(machine.memory_nbytes * memory) // each or _PLENTY_NBYTES
    hosts = [f"10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}" for n in range(group.count)]
    workers = tuple(
        WorkerModel(
            f"tcp://{host}:{40000 + number}", nthreads, limit, speed, startup_s=recorded.startup_s
        )
        for host in hosts
        for number in range(each)
    )
    return ClusterModel(
        group.name,
        workers,
        MachineNetwork(
            [worker.address for worker in workers],
            machine.network_nbytes_per_s * network,
            machine.local_nbytes_per_s or recorded.local_nbytes_per_s,
        ),
        control_latency_s=recorded.control_s,
        disk_nbytes_per_s=machine.disk_nbytes_per_s * disk,
    )

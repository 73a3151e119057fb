"""Example clusters for simulations.

Bandwidths are net of overhead: 100 Gb/s Ethernet carries about 12 GB/s of data. They are not
measured on any particular machine. For real predictions, describe your machine in a file and use
`dask_gpurt.simulate.cluster_model.cluster_of_topology`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_gpurt.simulate.cluster_model import ClusterModel, cluster_of_topology
from dask_gpurt.topology.model import DeviceNode, Host, Link, Nic, Numa, Topology

ETHERNET_100G = 12e9
ETHERNET_10G = 1.2e9
NVLINK_PORT = 300e9
PCIE_PORT = 24e9


def host_address(number: int) -> str:
    """Return the address of a modelled host by its number."""
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


def gpu_hosts(
    hosts: int,
    gpus_per_host: int,
    *,
    nic_bandwidth: float,
    nvlink: bool,
    slow_nics: Mapping[int, float] | None = None,
) -> Topology:
    """Return hosts with GPUs on PCIe, each with one NIC to a switch of unlimited capacity.

    Parameters
    ----------
    nic_bandwidth
        Bytes per second of each host's NIC, in each direction.
    nvlink
        Whether the GPUs of a host also share NVLink.
    slow_nics
        Bytes per second of deviating NICs, by number of the host.
    """
    models: list[Host] = []
    links: list[Link] = []
    for number in range(hosts):
        name = f"host{number}"
        gpus = [f"gpu{device}" for device in range(gpus_per_host)]
        nic = (slow_nics or {}).get(number, nic_bandwidth)
        models.append(
            Host(
                name,
                numa=(Numa("numa0"),),
                devices=tuple(
                    DeviceNode(gpu, "gpu", numa="numa0", workers=(f"{name}-{gpu}",)) for gpu in gpus
                ),
                nics=(Nic("nic"),),
                switches=("nvswitch", "pcie") if nvlink else ("pcie",),
                addresses=(host_address(number),),
            )
        )
        for end in (*gpus, "nic", "numa0"):
            ends = f"{name}/{end}", f"{name}/pcie"
            links.append(Link(f"{name}/pcie-{end}", ends, "pcie", PCIE_PORT, 2e-6))
        if nvlink:
            for gpu in gpus:
                ends = f"{name}/{gpu}", f"{name}/nvswitch"
                links.append(Link(f"{name}/nvlink-{gpu}", ends, "nvlink", NVLINK_PORT, 1e-6))
        links.append(Link(f"{name}/ethernet", (f"{name}/nic", "fabric"), "ethernet", nic, 10e-6))
    return Topology(tuple(models), tuple(links), ("fabric",))


def nvlink_hosts(hosts: int = 8, gpus_per_host: int = 8) -> ClusterModel:
    """Return GPU hosts with NVLink inside and 100 Gb Ethernet between them."""
    return cluster_of_topology(
        f"{hosts * gpus_per_host} GPUs on {hosts} NVLink hosts over 100 Gb Ethernet",
        gpu_hosts(hosts, gpus_per_host, nic_bandwidth=ETHERNET_100G, nvlink=True),
    )


def pcie_gpus(hosts: int = 2, gpus_per_host: int = 8) -> ClusterModel:
    """Return GPU hosts without NVLink, on 100 Gb Ethernet."""
    return cluster_of_topology(
        f"{hosts * gpus_per_host} PCIe GPUs on {hosts} hosts over 100 Gb Ethernet",
        gpu_hosts(hosts, gpus_per_host, nic_bandwidth=ETHERNET_100G, nvlink=False),
    )


def cpu_hosts(hosts: int, workers_per_host: int, *, nthreads: int = 1) -> ClusterModel:
    """Return CPU workers on 10 Gb Ethernet."""
    topology = _hosts_without_gpus(workers_per_host, [ETHERNET_10G] * hosts)
    name = f"{hosts} hosts of {workers_per_host} workers of {nthreads} threads on 10 Gb Ethernet"
    return cluster_of_topology(name, topology, nthreads=nthreads)


def one_slow_nic(hosts: int = 8, workers_per_host: int = 4) -> ClusterModel:
    """Return CPU workers on 10 Gb Ethernet, where one host's NIC runs at a tenth of that."""
    nics = [*[ETHERNET_10G] * (hosts - 1), ETHERNET_10G / 10]
    return cluster_of_topology(
        f"{hosts} hosts of {workers_per_host} workers on 10 Gb Ethernet, one NIC at 1 Gb",
        _hosts_without_gpus(workers_per_host, nics),
    )


def _hosts_without_gpus(workers_per_host: int, nics: Sequence[float]) -> Topology:
    """Return hosts with a NUMA node for each worker, given the bandwidth of each host's NIC."""
    models: list[Host] = []
    links: list[Link] = []
    for number, nic in enumerate(nics):
        name = f"host{number}"
        numa = tuple(Numa(f"numa{node}") for node in range(workers_per_host))
        models.append(
            Host(
                name, numa, nics=(Nic("nic"),), switches=("bus",), addresses=(host_address(number),)
            )
        )
        for end in (*(node.name for node in numa), "nic"):
            links.append(Link(f"{name}/{end}", (f"{name}/{end}", f"{name}/bus"), "bus", 10e9, 1e-6))
        links.append(Link(f"{name}/ethernet", (f"{name}/nic", "fabric"), "ethernet", nic, 50e-6))
    return Topology(tuple(models), tuple(links), ("fabric",))

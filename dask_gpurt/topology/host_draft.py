"""One host of a discovered topology, derived from the report of a machine. Pure.

Missing facts are assumed, or left out if a wrong figure would do harm. Each assumption is a note.
`discovery` combines hosts to a topology.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from dask_gpurt.topology.machine import Card, Gpu, MachinePlace, MachineReport
from dask_gpurt.topology.model import DeviceNode, Host, Link, Nic, Numa, Topology
from dask_gpurt.topology.probing import Measured

#: Share of a link's nominal bandwidth that copies reach in measurements, over PCIe and NVLink.
EFFICIENCY = 0.88
#: Bandwidth of a device whose link is unknown: PCIe generation 4, eight lanes.
PCIE_NBYTES_PER_S = 14e9
#: Bandwidth between NUMA nodes, in each direction. No machine reports it; older ones have a little
#: more.
NUMA_NBYTES_PER_S = 20e9
#: Latency of one link, by its kind.
_LATENCY_S = {"nvlink": 2e-6, "pcie": 1e-6, "numa": 5e-7, "ethernet": 2e-5, "infiniband": 5e-6}
_NVSWITCH = "nvswitch"


class WorkerReport(NamedTuple):
    """A worker and its report. `host` is the host in its address."""

    address: str
    name: object
    host: str
    report: MachineReport

    def node_in(self, topology: Topology) -> str | None:
        """Return the node of the worker."""
        return topology.node_of(address=self.address, name=self.name, host=self.host)


class HostDraft:
    """One host of the topology, under construction.

    Parameters
    ----------
    given
        The host as a person wrote it, if one did.
    nodes
        The node of each worker as a person wrote it, by address.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[WorkerReport],
        given: Host | None,
        nodes: Mapping[str, str | None],
    ) -> None:
        self.name = name
        self._given = given
        self._nodes = nodes
        self.links: dict[str, Link] = {}
        self.notes: list[str] = []
        self._workers = workers
        #: The hosts in the addresses of its workers.
        self.addresses = {one.host for one in workers}
        self._machine = workers[0].report.machine
        self._numa = [
            Numa(f"numa{one.number}", one.memory_nbytes >> 20 << 20) for one in self._machine.numa
        ] or [Numa("numa0")]
        places = [one.place for one in self._machine.gpus]
        places += [one.place for one in self._machine.cards]
        switches = sorted({address for place in places for address in _switches(place)})
        #: Names of nodes, by PCI address and by the card's own name.
        self._switches = {address: f"pcie{i}" for i, address in enumerate(switches)}
        self._gpus = self._named_gpus()
        self._taken = {one.name for one in self._numa} | {_NVSWITCH}
        self._taken.update(self._switches.values(), self._gpus.values())
        self._cards = {one.name: unique(word(one.name), self._taken) for one in self._machine.cards}
        self._nics = [
            Nic(self._cards[one.name], self._near(one.place)) for one in self._machine.cards
        ]

    def _named_gpus(self) -> dict[str, str]:
        """Return the name of each GPU: that of the device on which a person put its workers.

        Other GPUs are numbered, and a person may have numbered devices in the same way.
        """
        gpus = self._machine.gpus
        listed = () if self._given is None else self._given.devices
        devices = {f"{self.name}/{one.name}": one.name for one in listed}
        of_device: dict[str, str] = {}
        for i, gpu in enumerate(gpus):
            for seen in self._workers:
                node = self._nodes[seen.address]
                if node in devices and _names(seen.report.gpu, i, gpu):
                    # A second GPU with workers on this device cannot be the device, too.
                    of_device.setdefault(devices[node], gpu.place.address)
        found = {address: name for name, address in of_device.items()}
        taken = set(found.values())
        for i, gpu in enumerate(gpus):
            if gpu.place.address not in found:
                found[gpu.place.address] = unique(f"gpu{i}", taken)
        return found

    def note_stranger(self, host: str) -> None:
        """Note that a host of the file has the name of this machine, but not its addresses."""
        addresses = ", ".join(sorted(self.addresses))
        self._note(f"`addresses` of {host} in the file lacks {addresses}, so this is another host")

    def networks(self) -> set[str]:
        """Return the kinds of the networks that its workers listen on."""
        return {self._network_at(address)[1] for address in self.addresses}

    def _network_at(self, address: str) -> tuple[Card | None, str]:
        card = next((one for one in self._machine.cards if address in one.addresses), None)
        return card, card.kind if card is not None else "ethernet"

    def read(self) -> None:
        """Add the links within the host."""
        is_known = True
        for gpu in self._machine.gpus:
            is_known &= self._connect_device(self._gpus[gpu.place.address], gpu.place)
        for card in self._machine.cards:
            is_known &= self._connect_device(self._cards[card.name], card.place)
        if not is_known:
            assumed = f"{PCIE_NBYTES_PER_S / 1e9:g} GB/s"
            self._note(f"PCIe links whose speed is not known are assumed to carry {assumed}")
        self._add_nvlinks()
        for one, other in combinations(self._numa, 2):
            self._link(one.name, other.name, "numa", NUMA_NBYTES_PER_S)
        if len(self._numa) > 1:
            assumed = f"{NUMA_NBYTES_PER_S / 1e9:g} GB/s"
            self._note(f"links between NUMA nodes are assumed to carry {assumed}")
        if any(not gpu.uuid for gpu in self._machine.gpus):
            self._note(
                "NVML could not be asked (pip install nvidia-ml-py): this description lacks the"
                " memory of GPUs, their NVLinks, and the GPU of each worker"
            )

    def host(self, taken_names: set[str], users: set[str]) -> Host:
        """Return the host. Its links are in `links`.

        Parameters
        ----------
        taken_names
            Names of all hosts, and addresses of other hosts. This host's addresses are added.
        users
            Likewise, words for workers on devices.
        """
        devices = tuple(
            DeviceNode(
                self._gpus[gpu.place.address],
                "gpu",
                self._near(gpu.place),
                gpu.memory_nbytes >> 20 << 20,
                self._patterns(i, gpu, users),
            )
            for i, gpu in enumerate(self._machine.gpus)
        )
        switches = list(self._switches.values())
        if any(bond.peer is None for gpu in self._machine.gpus for bond in gpu.bonds):
            switches.insert(0, _NVSWITCH)
        own = self.addresses - {self.name}
        if self._given is not None:
            own -= set(self._given.addresses)
        for address in sorted(own & taken_names):
            self._note(
                f"another host has the name or address {address} too; that host gets its workers"
            )
        addresses = sorted(own - taken_names)
        taken_names.update(addresses)
        return Host(
            self.name,
            tuple(self._numa),
            devices,
            tuple(self._nics),
            tuple(switches),
            tuple(addresses),
        )

    def join_network(
        self, measured: Mapping[tuple[str, str], Measured], usual: Measured | None
    ) -> set[str]:
        """Connect the host to the networks with known speed; return their names.

        Parameters
        ----------
        measured
            Measurements between addresses of different machines.
        usual
            The median of all measurements, for networks of which nothing else is known.
        """
        joined = set()
        for address in sorted(self.addresses):
            rates = [found for pair, found in measured.items() if address in pair]
            if kind := self._join_at(address, rates, usual):
                joined.add(kind)
        return joined

    def _join_at(
        self, address: str, rates: Sequence[Measured], usual: Measured | None
    ) -> str | None:
        """Connect one address to a network, and return the network; None if its speed is unknown.

        Parameters
        ----------
        rates
            Measurements between this address and other machines.
        """
        card, kind = self._network_at(address)
        if rates:
            self._note(f"the network at {address} is described as it was measured")
            rate = max(one.nbytes_per_s for one in rates)
            # Each path crosses the links of both hosts.
            latency_s = min(one.latency_s for one in rates) / 2
        elif card is not None and card.nbytes_per_s:
            rate, latency_s = card.nbytes_per_s, _LATENCY_S[kind]
        elif usual is not None:
            self._note(f"the network at {address} is assumed to be like those that were measured")
            rate, latency_s = usual.nbytes_per_s, usual.latency_s / 2
        else:
            self._note(
                f"the speed of the network at {address} is not known and was not measured; its"
                " link is left out"
            )
            return None
        nic = self._cards[card.name] if card is not None else self._nameless_card()
        self._link(nic, None, kind, rate, latency_s)
        return kind

    def _nameless_card(self) -> str:
        """Add a card for an address that belongs to no visible hardware of this machine."""
        name = unique("net0", self._taken)
        self._nics.append(Nic(name, self._numa[0].name))
        self._link(self._numa[0].name, name, "pcie", PCIE_NBYTES_PER_S)
        return name

    # ------------------------------------------------------------------ parts

    def _near(self, place: MachinePlace) -> str:
        numbers = [one.number for one in self._machine.numa]
        at = numbers.index(place.numa) if place.numa in numbers else 0
        return self._numa[at].name

    def _patterns(self, index: int, gpu: Gpu, taken: set[str]) -> tuple[str, ...]:
        """Return patterns for the workers on a GPU, without those that are taken."""
        found = [
            str(seen.name) if str(seen.name).strip() and seen.name != seen.address else seen.address
            for seen in self._workers
            if _names(seen.report.gpu, index, gpu)
            # The file may put a worker on a device.
            and self._nodes[seen.address] in self._own_memory()
        ]
        escaped = dict.fromkeys(re.sub(r"([*?\[])", r"[\1]", name) for name in found)
        own = tuple(user for user in escaped if user not in taken)
        taken.update(own)
        return own

    def _own_memory(self) -> tuple[str | None, ...]:
        """Return where the file puts a worker whose device it does not say."""
        return (
            (None,) if self._given is None else (None, self._given.node(self._given.numa[0].name))
        )

    def _connect_device(self, name: str, place: MachinePlace) -> bool:
        """Link a device with its processor, and return whether all speeds are known."""
        nodes = [
            self._near(place),
            *(self._switches[address] for address in _switches(place)),
            name,
        ]
        is_known = True
        for (one, other), rate in zip(pairwise(nodes), _rates(place), strict=True):
            is_known &= rate > 0
            self._link(one, other, "pcie", EFFICIENCY * rate or PCIE_NBYTES_PER_S)
        return is_known

    def _add_nvlinks(self) -> None:
        """Add the NVLinks."""
        for gpu in self._machine.gpus:
            one = self._gpus[gpu.place.address]
            for bond in gpu.bonds:
                peer = _NVSWITCH if bond.peer is None else self._gpus.get(bond.peer)
                if peer is not None and bond.nbytes_per_s > 0 and one != peer:
                    self._link(one, peer, "nvlink", EFFICIENCY * bond.nbytes_per_s)

    def _link(
        self,
        one: str,
        other: str | None,
        kind: str,
        nbytes_per_s: float,
        latency_s: float | None = None,
    ) -> None:
        """Add a link. Without `other`, it leads to the network of its kind."""
        ends = f"{self.name}/{one}", kind if other is None else f"{self.name}/{other}"
        # Both GPUs of a pair report their link.
        ends = (min(ends), max(ends)) if kind == "nvlink" else ends
        name = " - ".join(ends)
        if latency_s is None:
            latency_s = _LATENCY_S[kind]
        link = Link(name, ends, kind, _rounded(nbytes_per_s), _rounded(latency_s))
        self.links.setdefault(name, link)

    def _note(self, text: str) -> None:
        self.notes.append(f"{self.name}: {text}")


def _names(visible: str | None, index: int, gpu: Gpu) -> bool:
    """Return whether `CUDA_VISIBLE_DEVICES` names a GPU, by number or by the start of its UUID."""
    if not visible:
        return False
    return visible == str(index) or (visible.startswith("GPU-") and gpu.uuid.startswith(visible))


def _switches(place: MachinePlace) -> Iterator[str]:
    """Yield the switches above a device, the uppermost first.

    The bridges above a device are a root port, and then two ports for each switch: one upstream,
    one downstream.
    """
    for hop in place.hops[1:-1:2]:
        yield hop.address


def _rates(place: MachinePlace) -> Iterator[float]:
    """Yield the bandwidth of each link from the processor to a device; 0 if unknown.

    A link is as fast as its slower end.
    """
    *bridges, device = place.hops
    downward = bridges[0::2]
    for i, hop in enumerate([*bridges[1::2], device]):
        ends = [hop.nbytes_per_s, downward[i].nbytes_per_s if i < len(downward) else 0.0]
        yield min((rate for rate in ends if rate > 0), default=0.0)


def _rounded(amount: float) -> float:
    """Round to three digits, for readers: the inputs are no more precise."""
    return float(f"{amount:.3g}")


def word(text: str) -> str:
    """Return a text as a name of a host or a part."""
    return re.sub(r"[/*?\[\]\s]", "-", text) or "nameless"


def unique(name: str, taken: set[str]) -> str:
    """Return a name that is not taken yet, and add it to those."""
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    taken.add(found)
    return found

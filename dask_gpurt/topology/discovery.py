"""Discovery of a topology from workers' reports on their machines and from measurements. Pure.

Missing facts are assumed, or left out if a wrong figure would do harm. Where no network speed is
reported or measured, hosts are described without a network. Each assumption is a note in the
description.

Only interfaces that workers listen on connect hosts. A machine may have faster cards, but Dask's
traffic does not use them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median_high
from typing import NamedTuple

from dask_gpurt.topology.description import dump
from dask_gpurt.topology.machine import Gpu, MachinePlace, MachineReport
from dask_gpurt.topology.model import DeviceNode, Host, Link, Nic, Numa, Topology

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


class Measured(NamedTuple):
    """Rate and latency that a probe measured between two hosts."""

    nbytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Discovery:
    """A topology, and notes for its reader, each a sentence."""

    topology: Topology
    notes: tuple[str, ...]

    def as_text(self) -> str:
        """Return the notes and the description as a file that `description.parse` reads."""
        return "".join(f"# {note}\n" for note in self.notes) + dump(self.topology)


def discover(
    workers: Iterable[WorkerReport], measured: Mapping[tuple[str, str], Measured] | None = None
) -> Discovery:
    """Return the topology of the machines that workers are on.

    Parameters
    ----------
    measured
        Measurements from the first to the second of two hosts, named as in workers' addresses.
    """
    by_machine: dict[tuple[str, str], list[WorkerReport]] = {}
    for seen in sorted(workers, key=lambda one: one.address):
        by_machine.setdefault((seen.report.machine.name, seen.report.machine.boot), []).append(seen)
    parts = []
    taken: set[str] = set()
    for key in sorted(by_machine):
        part = _ClusterPart(_unique(_word(key[0]), taken), by_machine[key])
        part.read()
        parts.append(part)
    switches: set[str] = set()
    if len(parts) > 1:
        between = _between_machines(parts, measured or {})
        usual = median_high(between.values()) if between else None
        for part in parts:
            switches |= part.join_network(between, usual)
    users: set[str] = set()
    topology = Topology(
        tuple(part.host(taken, users) for part in parts),
        tuple(link for part in parts for link in part.links.values()),
        tuple(sorted(switches)),
    )
    return Discovery(topology, tuple(note for part in parts for note in part.notes))


class _ClusterPart:
    """One host of the topology, under construction."""

    def __init__(self, name: str, workers: Sequence[WorkerReport]) -> None:
        self.name = name
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
        self._gpus = {one.place.address: f"gpu{i}" for i, one in enumerate(self._machine.gpus)}
        self._taken = {one.name for one in self._numa} | {_NVSWITCH}
        self._taken.update(self._switches.values(), self._gpus.values())
        self._cards = {
            one.name: _unique(_word(one.name), self._taken) for one in self._machine.cards
        }
        self._nics = [
            Nic(self._cards[one.name], self._near(one.place)) for one in self._machine.cards
        ]

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
        card = next((one for one in self._machine.cards if address in one.addresses), None)
        kind = card.kind if card is not None else "ethernet"
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
        name = _unique("net0", self._taken)
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
        ]
        escaped = dict.fromkeys(re.sub(r"([*?\[])", r"[\1]", name) for name in found)
        own = tuple(word for word in escaped if word not in taken)
        taken.update(own)
        return own

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


def _between_machines(
    parts: Iterable[_ClusterPart], measured: Mapping[tuple[str, str], Measured]
) -> dict[tuple[str, str], Measured]:
    """Return the measurements that crossed a network: workers of one machine do without."""
    machine_of = {address: part for part in parts for address in part.addresses}
    return {
        pair: found
        for pair, found in measured.items()
        if machine_of.get(pair[0]) is not machine_of.get(pair[1])
    }


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


def _word(text: str) -> str:
    return re.sub(r"[/*?\[\]\s]", "-", text) or "nameless"


def _unique(name: str, taken: set[str]) -> str:
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    taken.add(found)
    return found

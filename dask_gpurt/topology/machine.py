"""Facts about one machine: its NUMA nodes, GPUs and network cards, and their places.

`topology.sysfs` reads them from `/sys`, and `topology.nvml` from NVML, on a worker. They travel to
the scheduler as plain values and are validated there, so that a faulty report does not become a
machine. `topology.discovery` derives a topology from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from dask_gpurt.errors import ProtocolError

#: Most parts of one kind on one machine. The largest machines have a few dozen.
MAX_PARTS = 256
#: Most bridges between a processor and a device. Three levels of switches have seven.
MAX_HOPS = 32
#: Most characters in a name or an address.
MAX_NCHARS = 256
#: Above any real memory size or bandwidth.
MAX_AMOUNT = 1e18

#: A PCI device in the kernel's notation: domain, bus, device, function.
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

T = TypeVar("T")


@dataclass(frozen=True)
class NumaNode:
    """One node of a machine's memory.

    Attributes
    ----------
    number
        The kernel's number.
    memory_nbytes
        0 if unknown.
    """

    number: int
    memory_nbytes: int


@dataclass(frozen=True)
class Hop:
    """A bridge or a device on the path from a processor.

    Attributes
    ----------
    address
        PCI address, such as `0000:07:00.0`.
    nbytes_per_s
        Bandwidth of its own link in each direction; 0 if unknown. The link of a root port, or of a
        switch's downstream port, leads down. All others lead up.
    """

    address: str
    nbytes_per_s: float


@dataclass(frozen=True)
class MachinePlace:
    """The position of a device on the PCI bus.

    Attributes
    ----------
    hops
        From the root port to the device itself.
    numa
        NUMA node of the processor; None if there is only one, or it is unknown.
    """

    hops: tuple[Hop, ...]
    numa: int | None

    @property
    def address(self) -> str:
        """PCI address of the device."""
        return self.hops[-1].address


@dataclass(frozen=True)
class Bond:
    """The NVLinks between a GPU and one peer.

    Attributes
    ----------
    peer
        PCI address of a GPU; None for all NVSwitches together.
    nbytes_per_s
        Bandwidth in each direction.
    """

    peer: str | None
    nbytes_per_s: float


@dataclass(frozen=True)
class Gpu:
    """A GPU. Without NVML, `uuid` is empty and `memory_nbytes` is 0."""

    place: MachinePlace
    uuid: str
    memory_nbytes: int
    bonds: tuple[Bond, ...]


@dataclass(frozen=True)
class Card:
    """A network interface that is up and has hardware behind it.

    Attributes
    ----------
    kind
        `ethernet` or `infiniband`.
    nbytes_per_s
        Bandwidth in each direction; 0 if the driver does not report it.
    addresses
        IP addresses.
    place
        Position of its hardware; for a bond, that of the first part.
    """

    name: str
    kind: str
    nbytes_per_s: float
    addresses: tuple[str, ...]
    place: MachinePlace


@dataclass(frozen=True)
class Machine:
    """One machine, or the part that a container sees.

    Attributes
    ----------
    name
        Host name.
    boot
        Random id of the kernel's boot, and the number of the network namespace. Machines of one
        name differ in it, and so do containers of one machine with networks of their own.
    gpus
        In NVML's order.
    """

    name: str
    boot: str
    numa: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class MachineReport:
    """A worker's report on its machine.

    Attributes
    ----------
    gpu
        The first device that CUDA shows to the worker, as in `CUDA_VISIBLE_DEVICES`: a number or
        the start of a UUID. None if the variable is not set.
    """

    machine: Machine
    gpu: str | None

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, for a message."""
        return asdict(self)

    @staticmethod
    def from_plain(plain: Any) -> MachineReport:
        """Return the report in a message, after validating all of it.

        Raises
        ------
        ProtocolError
            The message is not a valid report.
        """
        fields = _fields(plain, MachineReport)
        gpu = None if fields["gpu"] is None else _text(fields["gpu"])
        return MachineReport(_machine(fields["machine"]), gpu)


# ---------------------------------------------------------------------- checks


def _machine(plain: Any) -> Machine:
    fields = _fields(plain, Machine)
    found = Machine(
        _text(fields["name"]),
        _text(fields["boot"]),
        _list_of(fields["numa"], _numa),
        _list_of(fields["gpus"], _gpu),
        _list_of(fields["cards"], _card),
    )
    _check_unique([one.number for one in found.numa])
    _check_unique([one.place.address for one in found.gpus])
    _check_unique([one.name for one in found.cards])
    return found


def _numa(plain: Any) -> NumaNode:
    fields = _fields(plain, NumaNode)
    return NumaNode(_count(fields["number"]), _count(fields["memory_nbytes"]))


def _gpu(plain: Any) -> Gpu:
    fields = _fields(plain, Gpu)
    return Gpu(
        _place(fields["place"]),
        _text(fields["uuid"]),
        _count(fields["memory_nbytes"]),
        _list_of(fields["bonds"], _bond),
    )


def _bond(plain: Any) -> Bond:
    fields = _fields(plain, Bond)
    peer = None if fields["peer"] is None else _pci(fields["peer"])
    return Bond(peer, _rate(fields["nbytes_per_s"]))


def _card(plain: Any) -> Card:
    fields = _fields(plain, Card)
    kind = _text(fields["kind"])
    if kind not in ("ethernet", "infiniband"):
        raise ProtocolError(f"unknown kind of network: {kind!r}")
    return Card(
        _text(fields["name"]),
        kind,
        _rate(fields["nbytes_per_s"]),
        _list_of(fields["addresses"], _text),
        _place(fields["place"]),
    )


def _place(plain: Any) -> MachinePlace:
    fields = _fields(plain, MachinePlace)
    hops = _list_of(fields["hops"], _hop)
    if not 1 <= len(hops) <= MAX_HOPS:
        raise ProtocolError(f"a device behind {len(hops) - 1} bridges")
    numa = None if fields["numa"] is None else _count(fields["numa"])
    return MachinePlace(hops, numa)


def _hop(plain: Any) -> Hop:
    fields = _fields(plain, Hop)
    return Hop(_pci(fields["address"]), _rate(fields["nbytes_per_s"]))


def _fields(plain: Any, kind: Any) -> Mapping[str, Any]:
    names = set(kind.__dataclass_fields__)
    if not isinstance(plain, Mapping) or set(plain) != names:
        raise ProtocolError(f"{kind.__name__} must have the fields {', '.join(sorted(names))}")
    return plain


def _list_of(plain: Any, one: Callable[[Any], T]) -> tuple[T, ...]:
    if not isinstance(plain, list | tuple) or len(plain) > MAX_PARTS:
        raise ProtocolError(f"not a list of at most {MAX_PARTS}: {type(plain).__name__}")
    return tuple(map(one, plain))


def _check_unique(names: list[Any]) -> None:
    if len(set(names)) < len(names):
        raise ProtocolError("a number, an address or a name occurs twice")


def _text(plain: Any) -> str:
    if not isinstance(plain, str) or len(plain) > MAX_NCHARS or not plain.isprintable():
        raise ProtocolError(f"not a text of at most {MAX_NCHARS} characters")
    return plain


def _pci(plain: Any) -> str:
    if not isinstance(plain, str) or not PCI_ADDRESS.fullmatch(plain):
        raise ProtocolError("not a PCI address")
    return plain


def _count(plain: Any) -> int:
    if not isinstance(plain, int) or isinstance(plain, bool) or not 0 <= plain <= MAX_AMOUNT:
        raise ProtocolError(f"not a count: {type(plain).__name__}")
    return plain


def _rate(plain: Any) -> float:
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise ProtocolError(f"not a rate: {type(plain).__name__}")
    if not (math.isfinite(plain) and 0 <= plain <= MAX_AMOUNT):
        raise ProtocolError("not a plausible rate")
    return float(plain)

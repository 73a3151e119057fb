"""What one machine says of itself: its NUMA nodes, GPUs and network cards, and where each is.

Facts only, nothing concluded: `topology.discovery` makes a topology of them. Read from `/sys` by
`topology.sysfs` and from NVML by `topology.nvml`, on a worker; they travel to the scheduler as
plain values and are checked there, since a machine that reports nonsense must not become one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from dask_gpurt.errors import ProtocolError

#: Of one kind on one machine. The largest there are have a few dozen.
MAX_PARTS = 256
#: Bridges between a processor and a device: three levels of switches are seven.
MAX_HOPS = 32
#: Characters of a name or an address.
MAX_NCHARS = 256
#: No memory and no link of this decade is larger.
MAX_AMOUNT = 1e18

#: How the kernel names a device of PCI: domain, bus, device, function.
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

T = TypeVar("T")


@dataclass(frozen=True)
class NumaNode:
    """One node of a machine's memory.

    Attributes
    ----------
    number
        As the kernel counts.
    memory_nbytes
        0 if not known.
    """

    number: int
    memory_nbytes: int


@dataclass(frozen=True)
class Hop:
    """A bridge or a device on the way from a processor.

    Attributes
    ----------
    address
        Of PCI, such as `0000:07:00.0`.
    nbytes_per_s
        What its own link carries in each direction; 0 if not known. That of a root port, and of a
        port of a switch that devices are below, leads down; all others lead up.
    """

    address: str
    nbytes_per_s: float


@dataclass(frozen=True)
class Place:
    """Where a device is plugged in.

    Attributes
    ----------
    hops
        From the root port on; the device itself is the last.
    numa
        Of the processor there; None if there is only one, or it was not said.
    """

    hops: tuple[Hop, ...]
    numa: int | None

    @property
    def address(self) -> str:
        """Of the device."""
        return self.hops[-1].address


@dataclass(frozen=True)
class Bond:
    """The NVLinks between a GPU and one peer.

    Attributes
    ----------
    peer
        PCI address of a GPU; None for the NVSwitches, all together.
    nbytes_per_s
        In each direction.
    """

    peer: str | None
    nbytes_per_s: float


@dataclass(frozen=True)
class Gpu:
    """A GPU. `uuid` is empty and `memory_nbytes` is 0 where NVML could not be asked."""

    place: Place
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
        What it carries in each direction; 0 if the driver does not say.
    addresses
        IP addresses.
    place
        Where its hardware is plugged in; of a bond, that of the first part.
    """

    name: str
    kind: str
    nbytes_per_s: float
    addresses: tuple[str, ...]
    place: Place


@dataclass(frozen=True)
class Machine:
    """One machine, or what a container sees of it.

    Attributes
    ----------
    name
        Host name.
    boot
        Drawn by the kernel when it started; containers on one machine have the same.
    gpus
        In NVML's order.
    """

    name: str
    boot: str
    numa: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class Report:
    """What a worker says of where it is.

    Attributes
    ----------
    gpu
        The first device that CUDA shows to it, as `CUDA_VISIBLE_DEVICES` names it: a number or the
        beginning of a UUID. None if that is not set.
    """

    machine: Machine
    gpu: str | None

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for a message."""
        return asdict(self)

    @staticmethod
    def from_plain(plain: Any) -> Report:
        """Of a message; everything in it is checked.

        Raises
        ------
        ProtocolError
            It is not a report. Says what is wrong with it.
        """
        fields = _fields(plain, Report)
        gpu = None if fields["gpu"] is None else _text(fields["gpu"])
        return Report(_machine(fields["machine"]), gpu)


# ---------------------------------------------------------------------- checks


def _machine(plain: Any) -> Machine:
    fields = _fields(plain, Machine)
    found = Machine(
        _text(fields["name"]),
        _text(fields["boot"]),
        _many(fields["numa"], _numa),
        _many(fields["gpus"], _gpu),
        _many(fields["cards"], _card),
    )
    _different([one.number for one in found.numa])
    _different([one.place.address for one in found.gpus])
    _different([one.name for one in found.cards])
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
        _many(fields["bonds"], _bond),
    )


def _bond(plain: Any) -> Bond:
    fields = _fields(plain, Bond)
    peer = None if fields["peer"] is None else _pci(fields["peer"])
    return Bond(peer, _rate(fields["nbytes_per_s"]))


def _card(plain: Any) -> Card:
    fields = _fields(plain, Card)
    kind = _text(fields["kind"])
    if kind not in ("ethernet", "infiniband"):
        raise ProtocolError(f"no kind of network: {kind!r}")
    return Card(
        _text(fields["name"]),
        kind,
        _rate(fields["nbytes_per_s"]),
        _many(fields["addresses"], _text),
        _place(fields["place"]),
    )


def _place(plain: Any) -> Place:
    fields = _fields(plain, Place)
    hops = _many(fields["hops"], _hop)
    if not 1 <= len(hops) <= MAX_HOPS:
        raise ProtocolError(f"a device behind {len(hops) - 1} bridges")
    numa = None if fields["numa"] is None else _count(fields["numa"])
    return Place(hops, numa)


def _hop(plain: Any) -> Hop:
    fields = _fields(plain, Hop)
    return Hop(_pci(fields["address"]), _rate(fields["nbytes_per_s"]))


def _fields(plain: Any, kind: Any) -> Mapping[str, Any]:
    names = set(kind.__dataclass_fields__)
    if not isinstance(plain, Mapping) or set(plain) != names:
        raise ProtocolError(f"{kind.__name__} has to have {', '.join(sorted(names))}")
    return plain


def _many(plain: Any, one: Callable[[Any], T]) -> tuple[T, ...]:
    if not isinstance(plain, list | tuple) or len(plain) > MAX_PARTS:
        raise ProtocolError(f"not a list of at most {MAX_PARTS}: {type(plain).__name__}")
    return tuple(map(one, plain))


def _different(names: list[Any]) -> None:
    if len(set(names)) < len(names):
        raise ProtocolError("something is there twice")


def _text(plain: Any) -> str:
    if not isinstance(plain, str) or len(plain) > MAX_NCHARS or not plain.isprintable():
        raise ProtocolError(f"not a text of at most {MAX_NCHARS} characters")
    return plain


def _pci(plain: Any) -> str:
    if not isinstance(plain, str) or not PCI_ADDRESS.fullmatch(plain):
        raise ProtocolError("not an address of PCI")
    return plain


def _count(plain: Any) -> int:
    if not isinstance(plain, int) or isinstance(plain, bool) or not 0 <= plain <= MAX_AMOUNT:
        raise ProtocolError(f"not a count: {type(plain).__name__}")
    return plain


def _rate(plain: Any) -> float:
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise ProtocolError(f"not a rate: {type(plain).__name__}")
    if not (math.isfinite(plain) and 0 <= plain <= MAX_AMOUNT):
        raise ProtocolError("a rate that no link has")
    return float(plain)

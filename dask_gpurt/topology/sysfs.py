"""Reader of a machine's NUMA nodes, PCI devices and network interfaces from `/sys`.

Tests pass trees that imitate real machines. Missing or invalid entries are left out: containers see
little of `/sys`. Momentary values are ignored. For example, a link's bandwidth is the maximum of
its ends, because idle GPUs slow their links down.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dask_gpurt.topology.machine import (
    MAX_HOPS,
    MAX_PARTS,
    PCI_ADDRESS,
    Card,
    Gpu,
    Hop,
    Machine,
    MachinePlace,
    NumaNode,
)
from dask_gpurt.topology.nvml import NvmlGpu

#: Longer files of `/sys` have nothing that is needed here.
_MAX_NBYTES = 4096
#: Most entries of a directory that are read.
_MAX_ENTRIES = 4096
#: Deepest stack of interfaces: a VLAN on a bond of cards.
_MAX_LOWER = 3

#: Bytes per second of a lane in each direction, by its transfers per second, net of encoding.
_LANE_NBYTES_PER_S = {
    2.5: 0.25e9,
    5.0: 0.5e9,
    8.0: 0.985e9,
    16.0: 1.969e9,
    32.0: 3.938e9,
    64.0: 7.563e9,
}
_NVIDIA = "0x10de"
_AMD = "0x1002"
#: PCI classes of each vendor's GPUs: VGA and 3D controllers, other display controllers, and
#: processing accelerators.
_GPU_CLASSES = {
    _NVIDIA: ("0x0300", "0x0302"),
    _AMD: ("0x0300", "0x0302", "0x0380", "0x1200"),
}
#: Interface kinds by the number in `net/*/type`.
_KINDS = {"1": "ethernet", "32": "infiniband"}


def read(
    root: Path,
    *,
    name: str,
    boot: str,
    addresses: Mapping[str, Sequence[str]],
    gpus: Sequence[NvmlGpu] | None,
) -> Machine:
    """Return the machine under a directory with the structure of `/sys`.

    Parameters
    ----------
    name, boot
        Of the machine; see `Machine`.
    addresses
        IP addresses by interface, which `/sys` lacks.
    gpus
        GPUs of NVIDIA from NVML; None if NVML is unavailable.
    """
    places = _gpu_places(root, _NVIDIA)
    if gpus is None:
        found = tuple(Gpu(place, "", 0, ()) for place in places.values())
    else:
        found = tuple(
            Gpu(
                places.get(one.address, MachinePlace((Hop(one.address, 0.0),), None)),
                one.uuid,
                one.memory_nbytes,
                one.bonds,
            )
            for one in gpus
        )
    # The driver of AMD's GPUs writes their memory to `/sys`.
    found += tuple(
        Gpu(place, "", _number(root / "bus/pci/devices" / address / "mem_info_vram_total") or 0, ())
        for address, place in _gpu_places(root, _AMD).items()
    )
    return Machine(name, boot, _numa(root), found[:MAX_PARTS], _cards(root, addresses))


def _numa(root: Path) -> tuple[NumaNode, ...]:
    found = []
    for path in _entries(root / "devices/system/node"):
        if number := re.fullmatch(r"node(\d+)", path.name):
            total = re.search(r"MemTotal:\s*(\d+) kB", _text(path / "meminfo"))
            memory_nbytes = int(total[1]) * 1024 if total else 0
            # Nodes without processors are memory of devices. No worker is there.
            if _text(path / "cpulist"):
                found.append(NumaNode(int(number[1]), memory_nbytes))
    return tuple(sorted(found, key=lambda one: one.number))[:MAX_PARTS]


def _gpu_places(root: Path, vendor: str) -> dict[str, MachinePlace]:
    found = {}
    for path in _entries(root / "bus/pci/devices"):
        if _text(path / "vendor") == vendor and _text(path / "class")[:6] in _GPU_CLASSES[vendor]:
            place = _place(path)
            if place is not None:
                found[place.address] = place
    return dict(sorted(found.items()))


def _place(device: Path) -> MachinePlace | None:
    """Return the position of a device, from its path: the kernel nests directories like bridges."""
    try:
        real = device.resolve()
    except (OSError, RuntimeError):
        return None
    chain = [real, *real.parents][:MAX_HOPS]
    hops = [Hop(at.name, _link_nbytes_per_s(at)) for at in chain if PCI_ADDRESS.fullmatch(at.name)]
    if not hops:
        return None
    numa = _number(real / "numa_node")
    return MachinePlace(tuple(reversed(hops)), numa if numa is not None and numa >= 0 else None)


def _link_nbytes_per_s(device: Path) -> float:
    speed = re.match(r"(\d+(?:\.\d+)?) GT/s", _text(device / "max_link_speed"))
    lanes = _number(device / "max_link_width")
    if speed is None or not lanes or not 0 < lanes <= 32:
        return 0.0
    return _LANE_NBYTES_PER_S.get(float(speed[1]), 0.0) * lanes


def _cards(root: Path, addresses: Mapping[str, Sequence[str]]) -> tuple[Card, ...]:
    found = []
    for path in _entries(root / "class/net"):
        kind = _KINDS.get(_text(path / "type"))
        place = _place_of_interface(path, _MAX_LOWER)
        if kind is None or place is None or _text(path / "operstate") not in ("up", "unknown"):
            continue
        mbps = _number(path / "speed")
        rate = mbps * 1e6 / 8 if mbps is not None and mbps > 0 else 0.0
        own = tuple(addresses.get(path.name, ()))[:MAX_PARTS]
        found.append(Card(path.name, kind, rate, own, place))
    return tuple(sorted(found, key=lambda one: one.name))[:MAX_PARTS]


def _place_of_interface(interface: Path, depth: int) -> MachinePlace | None:
    """Return the position of an interface's hardware.

    A virtual interface, such as a container's, has none, and its reported speed is meaningless.
    """
    place = _place(interface / "device")
    if place is None and depth:
        for lower in sorted(_entries(interface), key=lambda one: one.name):
            if lower.name.startswith("lower_"):
                place = place or _place_of_interface(lower, depth - 1)
    return place


# ---------------------------------------------------------------------- files


def _entries(directory: Path) -> list[Path]:
    try:
        found = []
        for path in directory.iterdir():
            found.append(path)
            if len(found) >= _MAX_ENTRIES:
                break
        return found
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_NBYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None

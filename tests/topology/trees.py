"""Helpers that imitate `/sys` and NVML of real machines, from facts in `tests/data/machines`."""

from __future__ import annotations

import itertools
import pathlib
from types import SimpleNamespace

import yaml

from dask_gpurt.topology import nvml, sysfs

DATA = pathlib.Path(__file__).parents[1] / "data" / "machines"
NAMES = sorted(path.stem for path in DATA.glob("*.yaml"))
TYPES = {"ethernet": "1", "infiniband": "32"}


def facts_of(name):
    return yaml.safe_load((DATA / f"{name}.yaml").read_text())


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def make_tree(name, root):
    """Write the relevant files of a machine's `/sys` to a directory."""
    facts = facts_of(name)
    for number, memory in enumerate(facts["numa"]):
        node = root / "devices/system/node" / f"node{number}"
        write(node / "meminfo", f"Node {number} MemTotal:       {memory * 2**20} kB")
        write(node / "cpulist", "0-15")
    numbers = itertools.count()
    ports: dict[tuple[str, ...], pathlib.Path] = {}

    def plug(directory, address, one):
        device = directory / address
        if not device.exists():
            write(device / "max_link_speed", one.get("speed", facts["pcie"]["speed"]))
            write(device / "max_link_width", one.get("width", facts["pcie"]["width"]))
            write(device / "numa_node", one["numa"])
            link = root / "bus/pci/devices" / address
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(device)
        return device

    def port(directory, one):
        return plug(directory, f"0000:ff:{next(numbers):02x}.0", one)

    def switch(path, one):
        """Return the directory above a device: that of the switch's port that leads to it."""
        if not path:
            return root / "devices/pci0000:00"
        if path not in ports:
            above = switch(path[:-1], one)
            ports[path] = plug(port(above, one), path[-1], one)
        return ports[path]

    for one in facts["pci"]:
        above = switch(tuple(one.get("under", ())), one)
        if not one.get("at_root"):
            above = port(above, one)
        device = plug(above, one["address"], one)
        write(device / "vendor", "0x10de" if one.get("gpu") else "0x15b3")
        write(device / "class", "0x030200" if one.get("gpu") else "0x020000")
        if "net" in one:
            (kind,) = TYPES.keys() & one.keys()
            make_interface(root, one["net"], device, kind, one[kind])
    make_interface(root, "lo", None, "ethernet", None, type_="772")
    make_interface(root, "veth0", None, "ethernet", 10000)
    return root


def make_interface(root, name, device, kind, speed, *, type_=None, lower=()):
    """Write the files of a network interface; without a device, it is a virtual one."""
    path = root / "class/net" / name
    write(path / "type", type_ or TYPES[kind])
    write(path / "operstate", "up")
    if speed is not None:
        write(path / "speed", speed)
    if device is not None:
        (path / "device").symlink_to(device)
    for one in lower:
        (path / f"lower_{one}").symlink_to(root / "class/net" / one)


class RecordedError(Exception):
    """A stand-in for NVML's error."""


class RecordedNvml:
    """A stand-in for NVML: the functions of `pynvml` on recorded facts of a machine."""

    NVMLError = RecordedError

    def __init__(self, name):
        facts = facts_of(name)
        self._facts = facts["nvml"]
        self._gpus = [one["address"] for one in facts["pci"] if one.get("gpu")]

    def _links(self, address):
        """Return the address and kind of the far end, by link."""
        found = []
        for peer, count in self._facts.get("switches", {}).items():
            found += [(peer, 2 if peer else 0xFF)] * count
        for one, other, count in self._facts.get("peers", ()):
            if address in (one, other):
                found += [(other if address == one else one, 0)] * count
        return found

    def _link(self, address, link):
        links = self._links(address)
        if link >= len(links):
            raise RecordedError("Invalid Argument" if links else "Not Supported")
        return links[link]

    def nvmlDeviceGetCount(self):
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._gpus[index]

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=f"0000{handle.upper()}".encode())

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=self._facts["memory"] * 2**30)

    def nvmlDeviceGetNvLinkState(self, device, link):
        self._link(device, link)
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return self._link(handle, link)[1]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device, link):
        address = self._link(device, link)[0]
        if not address:
            raise RecordedError("Not Supported")
        return SimpleNamespace(busId=f"0000{address.upper()}")

    def nvmlDeviceGetFieldValues(self, handle, fieldIds):
        assert fieldIds == [90]
        value = SimpleNamespace(uiVal=self._facts["speed"])
        return [SimpleNamespace(nvmlReturn=0, value=value)]


def machine(name, root, *, host="box", addresses=None, with_nvml=True):
    """Return a machine as a worker on it would report it."""
    return sysfs.read(
        make_tree(name, root),
        name=host,
        boot=f"boot of {host}",
        addresses=addresses or {},
        gpus=nvml.gpus(RecordedNvml(name)) if with_nvml else None,
    )

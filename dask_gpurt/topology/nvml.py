"""GPUs and their NVLinks, as NVIDIA's management library (NVML) reports them.

The functions here query any object with the interface of `Nvml`, such as the module `pynvml`. The
caller loads and starts the library. Facts that a driver does not report are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple, Protocol

from dask_gpurt.topology.machine import Bond

#: Above the number of links of any GPU.
_MAX_LINKS = 36
#: Bandwidth of one NVLink in each direction if the driver does not report it: versions 2 to 4.
_LINK_NBYTES_PER_S = 25e9
#: NVML's constants for "common speed of the active links", and for kinds of remote devices.
_SPEED_MBPS = 90
_TO_GPU, _UNKNOWN = 0x00, 0xFF

_BUS_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")


class Nvml(Protocol):
    """The functions of `pynvml` used here, under their names there."""

    NVMLError: type[Exception]

    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetNvLinkState(self, device: Any, link: int) -> int: ...
    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: Any, link: int) -> Any: ...
    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int: ...
    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: list[int]) -> Any: ...


class NvmlGpu(NamedTuple):
    """NVML's facts about a GPU. `/sys` has its position on the PCI bus."""

    address: str
    uuid: str
    memory_nbytes: int
    bonds: tuple[Bond, ...]


def gpus(nvml: Nvml) -> tuple[NvmlGpu, ...]:
    """Return all GPUs in NVML's order, which is the order of their PCI addresses."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    addresses = [pci_address(nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    found = []
    for handle, address in zip(handles, addresses, strict=True):
        try:
            memory_nbytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        except nvml.NVMLError:
            memory_nbytes = 0  # a chip that shares the host's memory
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        found.append(NvmlGpu(address, uuid, memory_nbytes, _bonds(nvml, handle, set(addresses))))
    return tuple(found)


def pci_address(bus_id: str | bytes) -> str:
    """Return an NVML bus id in the notation of `/sys`: `00000000:07:00.0` is `0000:07:00.0`."""
    text = _text(bus_id).lower()
    found = _BUS_ID.fullmatch(text)
    return f"{int(found[1], 16):04x}:{found[2]}" if found else text


def _bonds(nvml: Nvml, handle: Any, known: set[str]) -> tuple[Bond, ...]:
    counts: Counter[str | None] = Counter()
    for link in range(_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
        except nvml.NVMLError:
            break  # the GPU has no more links, or none at all
        kind, peer = _end(nvml, handle, link)
        if peer in known:
            counts[peer] += 1
        elif kind != _TO_GPU:
            # In a virtual machine, a link leads to an invisible device: a switch of the host. An
            # invisible GPU belongs to another container.
            counts[None] += 1
    if not counts:
        return ()
    rate = _link_nbytes_per_s(nvml, handle)
    return tuple(Bond(peer, n * rate) for peer, n in sorted(counts.items(), key=str))


def _end(nvml: Nvml, handle: Any, link: int) -> tuple[int, str]:
    """Return the kind of a link's remote device, and its PCI address if it has one."""
    try:
        kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
    except nvml.NVMLError:
        kind = _UNKNOWN
    try:
        return kind, pci_address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
    except nvml.NVMLError:
        return kind, ""


def _link_nbytes_per_s(nvml: Nvml, handle: Any) -> float:
    try:
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [_SPEED_MBPS])
    except nvml.NVMLError:
        return _LINK_NBYTES_PER_S
    mbps = float(field.value.uiVal) if field.nvmlReturn == 0 else 0.0
    return mbps * 1e6 or _LINK_NBYTES_PER_S


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value

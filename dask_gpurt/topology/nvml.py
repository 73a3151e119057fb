"""GPUs and their NVLinks, as NVIDIA's management library (NVML) knows them.

Asks whatever has the functions of `Nvml`, of which the module `pynvml` is one. Loading and
starting the library is its caller's. What a driver does not answer is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple, Protocol

from dask_gpurt.topology.machine import Bond

#: More than any GPU has.
_MAX_LINKS = 36
#: Of one NVLink in each direction, where the driver does not say: that of versions 2 to 4.
_LINK_NBYTES_PER_S = 25e9
#: NVML's names for these: "common speed of the active links", and kinds of what a link leads to.
_SPEED_MBPS = 90
_TO_GPU, _UNKNOWN = 0x00, 0xFF

_BUS_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")


class Nvml(Protocol):
    """The functions of `pynvml` that are called here, by their names there."""

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
    """What NVML says of a GPU; where it is plugged in, `/sys` says."""

    address: str
    uuid: str
    memory_nbytes: int
    bonds: tuple[Bond, ...]


def gpus(nvml: Nvml) -> tuple[NvmlGpu, ...]:
    """All GPUs, in NVML's order, which is that of their PCI addresses."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    addresses = [pci_address(nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    found = []
    for handle, address in zip(handles, addresses, strict=True):
        try:
            memory_nbytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        except nvml.NVMLError:
            memory_nbytes = 0  # of a chip whose memory is the host's
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        found.append(NvmlGpu(address, uuid, memory_nbytes, _bonds(nvml, handle, set(addresses))))
    return tuple(found)


def pci_address(bus_id: str | bytes) -> str:
    """NVML's bus id as `/sys` writes it: `00000000:07:00.0` is `0000:07:00.0`."""
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
            break  # it has no more links, or none at all
        kind, peer = _end(nvml, handle, link)
        if peer in known:
            counts[peer] += 1
        elif kind != _TO_GPU:
            # In a virtual machine a link leads to something that is not in view: a switch of the
            # host's. A GPU that is not in view is another container's.
            counts[None] += 1
    if not counts:
        return ()
    rate = _link_nbytes_per_s(nvml, handle)
    return tuple(Bond(peer, n * rate) for peer, n in sorted(counts.items(), key=str))


def _end(nvml: Nvml, handle: Any, link: int) -> tuple[int, str]:
    """What a link leads to: its kind, and its PCI address if it has one."""
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

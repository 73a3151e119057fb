"""The makers of GPUs whose devices CuPy runs on, and the traces that their drivers leave.

CuPy is built for one platform: CUDA, or AMD's ROCm. Its names are the same in both builds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Vendor:
    """A maker of GPUs.

    Attributes
    ----------
    platform
        What CuPy has to be built for.
    driver_files
        Device files of its drivers. One of them exists where there is a driver.
    visible
        Environment variables that select GPUs, from the strongest to the weakest.
    hiding
        Values of these variables that hide all GPUs.
    """

    name: str
    platform: str
    driver_files: tuple[str, ...]
    visible: tuple[str, ...]
    hiding: tuple[str, ...]

    def hidden_by(self, environment: Mapping[str, str]) -> str | None:
        """Return the variable that hides all GPUs from a process, if there is one."""
        for name in self.visible:
            if environment.get(name, "?").strip().lower() in self.hiding:
                return name
        return None


#: The second file is that of Windows' subsystem for Linux.
NVIDIA = Vendor(
    "NVIDIA",
    "CUDA",
    ("/dev/nvidiactl", "/dev/dxg"),
    ("CUDA_VISIBLE_DEVICES",),
    ("", "-1", "nodevfiles", "none", "void"),
)
#: HIP takes an empty variable for one that is not set.
AMD = Vendor(
    "AMD",
    "ROCm",
    ("/dev/kfd",),
    ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    ("-1",),
)
VENDORS = (NVIDIA, AMD)


def with_driver(exists: Callable[[str], bool] = os.path.exists) -> tuple[Vendor, ...]:
    """Return the vendors whose driver this machine has."""
    return tuple(one for one in VENDORS if any(map(exists, one.driver_files)))


def mismatch(platform: str, vendors: tuple[Vendor, ...]) -> str | None:
    """Return that CuPy is built for the GPUs of another vendor, or None.

    Parameters
    ----------
    platform
        What CuPy is built for.
    vendors
        Those with a driver on this machine.
    """
    if not vendors or any(one.platform == platform for one in vendors):
        return None
    (other, *_) = vendors
    return (
        f"CuPy is built for {platform}, and this machine has an {other.name} GPU: "
        f"install a CuPy for {other.platform}"
    )

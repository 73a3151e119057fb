"""A preload of workers: they shuffle pandas frames as a device's, in memory of the stand-in."""

from __future__ import annotations

from functools import partial
from typing import Any

from dask_gpurt.devices.device_budget import DeviceBudget
from dask_gpurt.frames.device.device_frames import DeviceFrames
from dask_gpurt.plugins.shuffle.frame_run import ADAPTERS
from tests.frames.emulated_device import EmulatedMemory, EmulatedTables
from tests.standins import cuda_memory

_DEVICE_NBYTES = 64 << 20


def _adapter(spec: Any) -> DeviceFrames:
    allocate = partial(DeviceBudget(_DEVICE_NBYTES).take, EmulatedMemory)
    return DeviceFrames(EmulatedTables(), spec.meta, spec.column, spec.drop_column, allocate)


def dask_setup(worker: Any) -> None:
    # Workers of one process share it.
    EmulatedMemory.provide = staticmethod(cuda_memory.allocate)
    for name in ("pandas.DataFrame", "pandas.core.frame.DataFrame"):
        ADAPTERS[name] = _adapter

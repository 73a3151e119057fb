"""Dask's size of a value on a device."""

from __future__ import annotations

import numpy as np
from dask.sizeof import sizeof

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.emulated.emulated_device import HostDevice
from dask_gpurt.plugins.memory import gpu_sizeof


def test_sizeof_counts_bytes_on_the_device():
    gpu_sizeof.register()
    device = HostDevice(1 << 20, choose=lambda n: 0)
    array = DeviceArray.from_host(np.zeros((100, 1000)), device, device.stream("one"))
    assert sizeof(array) == 800_000
    assert sizeof([array]) >= 800_000

"""What Dask takes a value of a device for."""

from __future__ import annotations

import numpy as np
from dask.sizeof import sizeof

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.emulated.emulated_device import EmulatedDevice
from dask_gpurt.plugins.memory import gpu_sizeof


def test_dask_counts_what_an_array_takes_on_its_device():
    gpu_sizeof.register()
    device = EmulatedDevice(1 << 20, choose=lambda n: 0)
    array = DeviceArray.from_host(np.zeros((100, 1000)), device, device.stream("one"))
    assert sizeof(array) == 800_000
    assert sizeof([array]) >= 800_000

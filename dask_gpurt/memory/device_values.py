"""How arrays of a device are taken apart and put together: copied to the host, and back.

The copies go on streams of their own, one for each direction, so that neither waits for what
computes nor for the other. Whoever asks waits for its own copy, never for the device. From there
on an array is a value like any of the host (`frames.values`).
"""

from __future__ import annotations

from typing import Any

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.port import Device, Priority
from dask_gpurt.frames.values import Flat, flatten, restore
from dask_gpurt.memory.port import Packing


def is_on_device(value: Any) -> bool:
    """Whether a value's home is the device."""
    return isinstance(value, DeviceArray)


def device_packing(device: Device) -> Packing:
    """Packs values of a device; opens streams on it.

    `flatten` raises what a kernel raised that was to fill the array; `restore` raises MemoryError
    if the device has no room, whatever left it.
    """
    out = device.stream("values out", Priority.HIGH)
    back = device.stream("values back", Priority.HIGH)
    # Memory is freed after all its uses, by kernels as well: copies must not wait for that.
    frees = device.stream("values freed")

    def flattened(array: DeviceArray) -> Flat:
        # The stream itself must not wait for a kernel: one that fails would stop it for good.
        array.ready.synchronize()
        host, copied = array.to_host(out)
        copied.synchronize()
        return flatten(host)

    def restored(header: bytes, buffers: Any) -> DeviceArray:
        host = restore(header, buffers)
        array = DeviceArray.from_host(host, device, back, frees)
        # The host's memory belongs to the copy until then, and is let go of on return.
        array.ready.synchronize()
        return array

    return Packing(lambda array: array.nbytes, flattened, restored)

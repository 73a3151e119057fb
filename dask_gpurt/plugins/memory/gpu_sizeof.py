"""Tells Dask how large a value of a device is: what it takes there, not its handle on the host.

Dask counts, places and steals by these sizes. No value of anybody else is concerned, so nothing is
taken back.
"""

from __future__ import annotations

from dask.sizeof import sizeof

from dask_gpurt.devices.array import DeviceArray


def register() -> None:
    """From here on, `dask.sizeof.sizeof` knows arrays of a device."""
    sizeof.register(DeviceArray, _device_nbytes)


def _device_nbytes(array: DeviceArray) -> int:
    return array.nbytes

"""The steps a device takes when an allocation finds no room: wait, ask the callback, or fail.

All devices share them. Each device itself knows its used memory and its queued frees.
"""

from __future__ import annotations

from collections.abc import Callable

from dask_gpurt.devices.device import Device, OnFull


def wait_or_make_room(
    device: Device,
    nbytes: int,
    used_nbytes: int,
    wait: Callable[[], object] | None,
    callback: OnFull | None,
    problem: MemoryError | None = None,
) -> None:
    """Return when the allocation is worth a retry. The caller must not hold the device's lock.

    Parameters
    ----------
    nbytes
        Size of the allocation.
    wait
        Waits for a queued free. None if waiting would not make enough room.
    problem
        The error of the memory pool, if the device asked it.

    Raises
    ------
    MemoryError
        The callback makes no room, or there is no callback.
    """
    if wait is not None:
        wait()
    # An allocation that exceeds the whole device is no reason to evict anything.
    elif nbytes > device.capacity_nbytes or callback is None or not callback(nbytes):
        raise MemoryError(
            f"no room for {nbytes} bytes on device {device.name!r}: "
            f"{used_nbytes} of {device.capacity_nbytes} are used"
        ) from problem

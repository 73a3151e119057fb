"""What a device does when an allocation finds no room: wait, ask for some, or give up.

The same for every `Device`; how much is used, and what is being freed, is theirs.
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
    """Return when it is worth trying again. Called without the device's lock.

    Parameters
    ----------
    nbytes
        What was asked for.
    wait
        Waits for memory whose freeing is queued; None where that would not do.
    problem
        What the memory's own pool said, if it was asked.

    Raises
    ------
    MemoryError
        Nobody makes room.
    """
    if wait is not None:
        wait()
    # What could not fit into an empty device is no reason to empty it.
    elif nbytes > device.capacity_nbytes or callback is None or not callback(nbytes):
        raise MemoryError(
            f"no room for {nbytes} bytes on device {device.name!r}: "
            f"{used_nbytes} of {device.capacity_nbytes} are used"
        ) from problem

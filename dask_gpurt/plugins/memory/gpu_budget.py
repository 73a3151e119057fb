"""The room that shards have on the device of this process, whatever library they are of."""

from __future__ import annotations

from functools import cache

from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.devices.device_budget import DeviceBudget

#: Share of a device's memory that shards may take: as much as they may of the host's by default.
DEVICE_SHARE = 0.3


@cache
def device_room() -> DeviceBudget:
    """Of all shuffles of this process together. Asks the device, so it needs one."""
    return DeviceBudget(int(DEVICE_SHARE * CupyDriver().total_nbytes))


def shards_on_device_nbytes() -> int:
    """What shards take there now. Does not ask for a device where no shard was on one."""
    return device_room().used_nbytes if device_room.cache_info().currsize else 0

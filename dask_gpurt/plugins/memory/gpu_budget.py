"""The budget of shards on this process's device, shared by all GPU libraries."""

from __future__ import annotations

from functools import cache

from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.devices.device_budget import DeviceBudget

#: Share of a device's memory that shards may take: the same as their default share of the host's.
DEVICE_SHARE = 0.3


@cache
def shard_budget() -> DeviceBudget:
    """Return the budget that all shuffles of this process share. This needs a device."""
    return DeviceBudget(int(DEVICE_SHARE * CupyDriver().total_nbytes))


def shards_on_device_nbytes() -> int:
    """Return the device memory that shards take; 0, without a device, if no shard was on one."""
    return shard_budget().used_nbytes if shard_budget.cache_info().currsize else 0

"""The budget of shards on this process's device, shared by all GPU libraries."""

from __future__ import annotations

from functools import cache

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.devices.device_budget import DeviceBudget


def shard_budget(settings: ShuffleSettings) -> DeviceBudget:
    """Return the budget that all shuffles of this process share. This needs a device.

    The settings of the latest shuffle hold for all.
    """
    budget = _budget()
    budget.limit_nbytes = settings.device_nbytes(CupyDriver().total_nbytes)
    return budget


def shards_limit_nbytes() -> int:
    """Return the device memory for shards; 0, without a device, if no shuffle has used one."""
    return _budget().limit_nbytes if _budget.cache_info().currsize else 0


def shards_on_device_nbytes() -> int:
    """Return the device memory that shards take; 0, without a device, if no shard was on one."""
    return _budget().used_nbytes if _budget.cache_info().currsize else 0


@cache
def _budget() -> DeviceBudget:
    return DeviceBudget(0)

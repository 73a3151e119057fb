"""Start of a scheduler with the flag in its own configuration.

The runtime is then on before the first client connects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dask_gpurt
from dask_gpurt import config
from dask_gpurt.plugins.bootstrap import NAME
from dask_gpurt.plugins.scheduler.gpurt_scheduler import GpurtScheduler

if TYPE_CHECKING:
    from distributed import Scheduler


async def on_start(scheduler: Scheduler) -> None:
    """Register the plugin on this scheduler. A client with the flag may change the settings."""
    plugin = GpurtScheduler(config.read(), dask_gpurt.__version__)
    await scheduler.register_scheduler_plugin(plugin, name=NAME, idempotent=True)

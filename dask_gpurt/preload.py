"""What Dask runs when a client or scheduler starts: reads the flag, and no more than that.

Listed under `distributed.*.preload` by `gpurt.yaml`. With the flag off it returns at once and has
imported nothing; this module is what every Dask program on an environment with the package pays.
Workers need no preload: their part comes from the scheduler, and one without the package stays up.
"""

from __future__ import annotations

import logging
from typing import Any

import dask.config

_said: set[str] = set()


def _flag_is_set() -> bool:
    """Whether it says anything but off: of what it cannot mean, the settings' reader complains."""
    flag = dask.config.get("gpurt.enabled", None)
    return flag is not None and str(flag).strip().lower() not in ("false", "no", "off", "0")


async def dask_setup(node: Any) -> None:
    """Switch the runtime on if the flag is set where this client or scheduler runs."""
    if not _flag_is_set():
        return
    # By name: importing the classes to compare with would cost every worker a scheduler.
    role = {base.__name__ for base in type(node).__mro__}
    try:
        if "Client" in role:
            from dask_gpurt.plugins import activation

            await activation.on_connect(node)
        elif "Scheduler" in role:
            from dask_gpurt.plugins import scheduler_start

            await scheduler_start.on_start(node)
    except Exception as error:
        from dask_gpurt.errors import ConfigError

        if not isinstance(error, (ConfigError, ImportError)):
            raise
        # A scheduler and a client in one process would say the same twice.
        if str(error) not in _said:
            _said.add(str(error))
            logging.getLogger("dask_gpurt").error("dask_gpurt is not active: %s", error)

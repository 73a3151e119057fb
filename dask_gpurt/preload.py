"""Preload that switches the runtime on when a client or scheduler starts with the flag set.

`gpurt.yaml` lists this module under `distributed.*.preload`, so every Dask program in an
environment with this package imports it. With the flag off, it returns at once and imports nothing.
Workers need no preload: the scheduler sends them a plugin. A worker without this package keeps
running.
"""

from __future__ import annotations

import logging
from typing import Any

import dask.config

#: What was logged. A scheduler and a client in one process would log the same twice.
_said: set[str] = set()
_UNKNOWN = "unknown settings"

#: Settings and sections of settings. A test compares them with the defaults.
KNOWN = {
    "collectives",
    "enabled",
    "memory",
    "placement",
    "shuffle",
    "strict",
    "topology",
    "trace",
}


def _flag_is_set() -> bool:
    """Return whether the flag is anything but off. `config.read` rejects invalid values."""
    flag = dask.config.get("gpurt.enabled", None)
    return flag is not None and str(flag).strip().lower() not in ("false", "no", "off", "0")


def _warn_of_unknown() -> None:
    """Name misspelt settings: one of them may be meant for the flag."""
    given = dask.config.get("gpurt", None)
    if isinstance(given, dict) and not given.keys() <= KNOWN and _UNKNOWN not in _said:
        _said.add(_UNKNOWN)
        from dask_gpurt import config

        config.warn_of_unknown()


async def dask_setup(node: Any) -> None:
    """Switch the runtime on if the flag is set in the process of this client or scheduler."""
    if not _flag_is_set():
        _warn_of_unknown()
        return
    # Compare names: importing the classes would load the scheduler into every worker.
    role = {base.__name__ for base in type(node).__mro__}
    try:
        if "Client" in role:
            from dask_gpurt.plugins import activation

            await activation.on_connect(node)
        elif "Scheduler" in role:
            from dask_gpurt.plugins.scheduler import scheduler_start

            await scheduler_start.on_start(node)
    except Exception as error:
        from dask_gpurt.errors import ConfigError

        if not isinstance(error, (ConfigError, ImportError)):
            raise
        if str(error) not in _said:
            _said.add(str(error))
            logging.getLogger("dask_gpurt").error("dask_gpurt is not active: %s", error)

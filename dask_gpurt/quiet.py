"""A log filter that hides distributed's messages about this package's preload.

distributed logs several lines about each preload, the first one before the import. A program that
never asked for this package should not see them. Dask imports this module at start because its
entry point claims to register object sizes. The module imports nothing of ours or Dask's: any
failure here would break Dask itself.
"""

from __future__ import annotations

import logging

PRELOAD = "dask_gpurt.preload"


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or PRELOAD not in record.getMessage()


logging.getLogger("distributed.preloading").addFilter(_is_worth_a_line)


def register(sizeof: object) -> None:
    """Do nothing. Entry point of the group `dask.sizeof`."""

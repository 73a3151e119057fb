"""What Dask loads as it is imported, wherever this package is installed: keeps our preload quiet.

distributed logs several lines about each preload, the first one before it imports it. A program
that never asked for this package should not read about it. So Dask has this module loaded as one
that could register sizes of objects. It imports nothing, since a failure here would be Dask's.
"""

from __future__ import annotations

import logging

PRELOAD = "dask_gpurt.preload"


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or PRELOAD not in record.getMessage()


logging.getLogger("distributed.preloading").addFilter(_is_worth_a_line)


def register(sizeof: object) -> None:
    """Entry point of the group `dask.sizeof`. There is nothing to register."""

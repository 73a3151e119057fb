"""A sketch of a shuffle: the sizes of output partitions in the first input partition of a worker.

The scheduler assigns output partitions by it (`shuffle.balance`), so that hot keys do not load one
worker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dask_gpurt.frames.partition_sizes import partition_sizes
from dask_gpurt.plugins.patches.p2p import sync

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt")

#: Smallest input partition, in rows, that justifies a sketch message to the scheduler.
SKETCHED_ROWS = 10_000


def sketch(worker: Worker, shuffle_id: str, data: Any) -> None:
    """Send the scheduler the sizes of output partitions, before it assigns them to workers.

    Runs in a task thread, for the first input partition in memory on this worker. Without a sketch,
    partitions are assigned as stock Dask does.
    """
    try:
        if len(data) < SKETCHED_ROWS:
            return
        column = sync(worker.loop, worker.scheduler.gpurt_sketch, shuffle_id=shuffle_id)
        if column is None:
            return
        rows = partition_sizes(data[column])
        if rows is not None:
            sync(worker.loop, worker.scheduler.gpurt_sketch, shuffle_id=shuffle_id, rows=rows)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        logger.debug("no sketch of shuffle %s: %r", shuffle_id, error)

"""Spills shards of a worker that is short of memory while Dask's own store holds its values.

Dask's store spills values, but it does not know of shards. A worker that Dask paused would keep its
shards in memory, and would stay paused for ever. Where our store holds the values, `manager` does
this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from dask_gpurt.devices.host_memory import malloc

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.plugins.worker.worker_runtime import WorkerRuntime

logger = logging.getLogger("dask_gpurt.memory")

#: Interval at which the process memory is read.
POLL_INTERVAL_S = 0.5


def _process_limits_nbytes(worker: Worker) -> tuple[int, int] | None:
    """Return the process memory below which a worker has room, and above which it is short.

    None if Dask neither spills for the process memory of this worker nor pauses it.
    """
    manager = worker.memory_manager
    limit, pause = manager.memory_limit, manager.memory_pause_fraction
    if not limit or not (short := manager.memory_spill_fraction or pause):
        return None
    room = manager.memory_target_fraction or 0.9 * short
    return int(limit * room), int(limit * short)


class ShardRelief:
    """Watches the process memory of one worker until `close`.

    It does nothing for a worker that Dask neither pauses nor lets spill.
    """

    def __init__(self, worker: Worker, runtime: WorkerRuntime) -> None:
        self._worker, self._runtime = worker, runtime
        self._limits = _process_limits_nbytes(worker)
        self._watching: asyncio.Task[None] | None = None
        if self._limits is not None:
            self._watching = asyncio.create_task(self._watch(*self._limits), name="gpurt-relief")

    async def _watch(self, relaxed_nbytes: int, limit_nbytes: int) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            process_nbytes = self._worker.monitor.get_process_memory()
            try:
                if process_nbytes > limit_nbytes:
                    await asyncio.to_thread(self._release, process_nbytes - limit_nbytes)
                elif process_nbytes < relaxed_nbytes:
                    self._runtime.relax_budget()
            except Exception:
                logger.exception("%s: cannot spill shards", self._worker.name)

    def _release(self, over_nbytes: int) -> None:
        self._runtime.release_memory(over_nbytes)
        malloc.trim()

    async def close(self) -> None:
        """End the watch. Repeated calls do nothing."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

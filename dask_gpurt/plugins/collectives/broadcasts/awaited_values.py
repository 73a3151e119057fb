"""Large values that tasks on several workers need: the worker's side.

Before a worker fetches a large value for a task, it asks the scheduler whether a broadcast brings
it (`wide_values`). If so, it waits for the broadcast. If the scheduler is slow to answer, or the
broadcast fails, the worker fetches the value as with stock Dask.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dask_gpurt.plugins.collectives.broadcasts.wide_values import LEAST_WIDE_NBYTES

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt")

#: A worker waits this long for the scheduler's answer, and longer for larger values: as long as a
#: transfer at this rate would take. So a busy scheduler does not hold up values for long.
_LEAST_PATIENCE_S, _PATIENCE_RATE = 0.02, 2e9


class AwaitedValues:
    """The large values that this worker needs and does not have yet. On the event loop.

    Parameters
    ----------
    is_on
        Whether there are broadcasts on this cluster.
    """

    def __init__(self, worker: Worker, *, is_on: bool) -> None:
        self._worker, self._is_on = worker, is_on
        #: By key, the values that fetches wait for.
        self._arrived: dict[Any, asyncio.Future[Any]] = {}
        #: Questions to the scheduler, which may outlive the fetch that asked.
        self._asking: set[asyncio.Task[None]] = set()

    def arrived(self, key: Any, value: Any) -> bool:
        """Hand a value of a broadcast to the fetch that waits for it; return whether one does."""
        fetch = self._arrived.get(key)
        if fetch is None or fetch.done():
            return False
        fetch.set_result(value)
        return True

    async def get_all(self, sizes: Mapping[Any, int]) -> dict[Any, Any]:
        """Return the values that broadcasts bring. The worker must fetch the others.

        Parameters
        ----------
        sizes
            By key, the bytes of each value that the worker needs.
        """
        large = [key for key, nbytes in sizes.items() if nbytes >= LEAST_WIDE_NBYTES]
        if not large or not self._is_on:
            return {}
        found = await asyncio.gather(*(self._get(key, sizes[key]) for key in large))
        return {key: value for key, one in zip(large, found, strict=True) for value in one}

    async def _get(self, key: Any, nbytes: int) -> tuple[Any, ...]:
        """Return the value that a broadcast brings in a tuple, or an empty one."""
        arrived = self._arrived[key] = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(self._until_it_is_over(key, nbytes))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            # The value may be here long before the broadcast ends on all workers.
            await asyncio.wait({arrived, asking}, return_when=asyncio.FIRST_COMPLETED)
            return (arrived.result(),) if arrived.done() else ()
        finally:
            del self._arrived[key]

    async def _until_it_is_over(self, key: Any, nbytes: int) -> None:
        """Return once no broadcast brings a value, or the scheduler takes too long to say so."""
        scheduler: Any = self._worker.scheduler
        try:
            async with asyncio.timeout(max(_LEAST_PATIENCE_S, nbytes / _PATIENCE_RATE)):
                comes = await scheduler.gpurt_wanted(key=key, worker=self._worker.address)
            if comes:
                await scheduler.gpurt_brought(key=key)
        except TimeoutError:
            pass
        except Exception as error:  # the runtime is off there, or the scheduler is gone
            logger.debug("nobody knows of a broadcast of %r: %r", key, error)

"""Large values that tasks on several workers need: the worker's side.

Before a worker fetches a large value for a task, it asks the scheduler whether a broadcast brings
it (`wide_values`). If so, it waits for the broadcast. If the scheduler is slow to answer, or the
broadcast fails or takes too long, the worker fetches the value as with stock Dask. It asks nothing
more until the late answer has come.

A key may be used anew for another value while the old one is still under way. So the scheduler
says which version of the key it means, and a broadcast which one it brings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask_gpurt.plugins.collectives.broadcasts.broadcast_run import longest_s
from dask_gpurt.plugins.collectives.broadcasts.wide_values import LEAST_WIDE_NBYTES

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt")

#: A worker waits this long for the scheduler's answer, and longer for larger values: as long as a
#: transfer at this rate would take. So a busy scheduler does not hold up values for long.
_LEAST_PATIENCE_S, _PATIENCE_RATE = 0.02, 2e9


@dataclass(eq=False)
class _AwaitingFetch:
    """A fetch that waits for a broadcast."""

    #: The values that have arrived, by version.
    arrived: dict[int, Any] = field(default_factory=dict)
    #: The version that the scheduler has promised.
    version: int | None = None
    #: Set when the promised value is here, or does not come.
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def value(self) -> tuple[Any, ...]:
        """Return the promised value in a tuple, or an empty one."""
        if self.version is None or self.version not in self.arrived:
            return ()
        return (self.arrived[self.version],)


class AwaitedValues:
    """The large values that this worker needs and does not have yet. On the event loop.

    Parameters
    ----------
    is_on
        Whether there are broadcasts on this cluster.
    """

    def __init__(self, worker: Worker, *, is_on: bool) -> None:
        self._worker, self._is_on = worker, is_on
        self._fetches: dict[Any, _AwaitingFetch] = {}
        #: Tasks that wait for the scheduler. They may outlive the fetch that asked.
        self._asking: set[asyncio.Task[None]] = set()
        #: Questions that the scheduler was too slow to answer.
        self._unanswered: set[asyncio.Task[Any]] = set()

    async def offer(self, key: Any, version: int, value: Any) -> bool:
        """Offer a value of a broadcast to the fetch of its key; return whether it is taken."""
        fetch = self._fetches.get(key)
        if fetch is None:
            return False
        fetch.arrived[version] = value
        if fetch.value():
            fetch.is_over.set()
        await fetch.is_over.wait()
        return fetch.version == version

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
        fetch = self._fetches[key] = _AwaitingFetch()
        asking = asyncio.create_task(self._until_it_is_over(key, nbytes, fetch))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            # The value may be here long before the broadcast ends on all workers.
            await fetch.is_over.wait()
            return fetch.value()
        finally:
            del self._fetches[key]

    async def _until_it_is_over(self, key: Any, nbytes: int, fetch: _AwaitingFetch) -> None:
        """Return once no broadcast brings a value, or one takes too long, or the answer does."""
        scheduler: Any = self._worker.scheduler
        try:
            version = None if self._unanswered else await self._version(key, nbytes)
            if version is not None:
                fetch.version = version
                if not fetch.value():
                    async with asyncio.timeout(longest_s(nbytes)):
                        await scheduler.gpurt_brought(key=key)
        except TimeoutError:
            pass
        except Exception as error:  # the runtime is off there, or the scheduler is gone
            logger.debug("nobody knows of a broadcast of %r: %r", key, error)
        finally:
            fetch.is_over.set()

    async def _version(self, key: Any, nbytes: int) -> Any:
        """Return which version of a value a broadcast brings; None if none does, or not soon."""
        scheduler: Any = self._worker.scheduler
        question = asyncio.create_task(scheduler.gpurt_wanted(key=key, worker=self._worker.address))
        patience_s = max(_LEAST_PATIENCE_S, nbytes / _PATIENCE_RATE)
        done, _ = await asyncio.wait([question], timeout=patience_s)
        if done:
            return question.result()
        # Not cancelled: that would close the connection, and each question would open a new one.
        self._unanswered.add(question)
        question.add_done_callback(self._answered_late)
        return None

    def _answered_late(self, question: asyncio.Task[Any]) -> None:
        self._unanswered.discard(question)
        if not question.cancelled() and (error := question.exception()) is not None:
            logger.debug("a late answer on broadcasts is an error: %r", error)

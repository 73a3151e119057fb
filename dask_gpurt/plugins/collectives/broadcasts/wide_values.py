"""Large values that tasks on several workers need: the scheduler's side.

Such a value may be the weights of a model, a table to look things up in, or the mean in
`x - x.mean(0)`. With stock Dask, each of these workers fetches it as a whole from one that has it.
All of them pull at one network card, ten at a time.

A worker asks here before it fetches a large value (`awaited_values`). If tasks on several workers
need it, all of these workers get it in one broadcast. Otherwise the worker fetches it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any

from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.weak_handlers import remove_handlers, weak_handlers

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

#: Workers ask about values of this size or more. To ask takes about a millisecond.
LEAST_WIDE_NBYTES = 16 << 20
#: Fewer workers fetch the value: one card serves them well.
LEAST_WORKERS = 3


class WideValues:
    """The handlers that workers ask about large values, until `close`.

    From `uninstall` on, they answer that no broadcast will come: workers may still ask.

    Parameters
    ----------
    broadcast
        Copies a value to workers, as far as it can.
    version_of
        Returns the number of a task, which differs from that of an earlier task with its key.
    ready
        Addresses of workers that run the runtime.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        broadcast: Callable[[TaskState, Collection[WorkerState]], Awaitable[None]],
        version_of: Callable[[TaskState], int],
        ready: Collection[str],
    ) -> None:
        self._scheduler = scheduler
        self._broadcast = broadcast
        self._version_of = version_of
        self._ready = ready
        #: By number of the task, the broadcast under way and the workers that it is for.
        self._under_way: dict[int, tuple[asyncio.Task[None], set[str]]] = {}
        self._is_on = True
        self._handlers = weak_handlers(self.wanted, self.brought, prefix="gpurt_")
        scheduler.handlers.update(self._handlers)

    def uninstall(self) -> None:
        """Begin no more broadcasts: workers fetch all values themselves."""
        self._is_on = False

    def close(self) -> None:
        """Remove the handlers: no worker asks any more."""
        remove_handlers(self._scheduler.handlers, self._handlers)

    async def wanted(self, key: Any, worker: str) -> int | None:
        """Handler: return the version that a broadcast brings to a worker, or None for none."""
        request_checks.key(key)
        request_checks.name("worker", worker)
        ts = self._scheduler.tasks.get(key)
        if ts is None:
            return None
        version = self._version_of(ts)
        if version not in self._under_way:
            self._begin(ts, version)
        _, targets = self._under_way.get(version, (None, ()))
        return version if worker in targets else None

    async def brought(self, key: Any) -> None:
        """Handler: answer when no broadcast of a value is under way any more."""
        ts = self._scheduler.tasks.get(request_checks.key(key))
        if ts is not None and (under_way := self._under_way.get(self._version_of(ts))):
            await asyncio.wait({under_way[0]})

    def _begin(self, ts: TaskState, version: int) -> None:
        """Begin a broadcast of a value if tasks on enough workers need it."""
        if not self._is_on or ts.state != "memory" or ts.get_nbytes() < LEAST_WIDE_NBYTES:
            return
        holders = ts.who_has or set()
        needing = {
            ws
            for waiter in ts.waiters or ()
            if (ws := waiter.processing_on) is not None
            and ws not in holders
            and ws.address in self._ready
        }
        # With many holders, no single network card is the bottleneck.
        if len(needing) < max(LEAST_WORKERS, len(holders) + 1):
            return
        task = asyncio.ensure_future(self._broadcast(ts, needing))
        self._under_way[version] = task, {ws.address for ws in needing}
        task.add_done_callback(lambda _: self._under_way.pop(version, None))

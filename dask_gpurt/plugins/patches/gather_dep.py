"""Transfers of values for tasks: large ones may come by broadcast, failed ones are tried again.

*Broadcasts.* A worker first looks whether broadcasts bring large values that it needs
(`plugins.collectives.broadcasts.awaited_values`). It fetches the others.

*Retries.* A worker may have no memory to deserialize the values that it has fetched. Stock Dask
treats this as an error of the values and keeps it to itself: tasks that need them wait for ever
(dask/distributed#6705). The peer waits for ever too: for an acknowledgement, on a connection that
is reused for the next message.

Memory comes and goes with tasks, most of all GPU memory. So the worker requests the values again
when a task has ended. If no running task could free memory, the tasks that need the values fail
with an explanation. On the scheduler, `failed_moves` handles values that fail for another reason.

| what | why | taken back by |
|---|---|---|
| `Worker.gather_dep` | waits for a broadcast; treats a lack of memory like a busy peer |
`ValueTransfers.uninstall` |
| `Worker.rpc.reuse` | closes a connection whose peer still waits for an acknowledgement |
`ValueTransfers.uninstall` |
| `GatherDepSuccessEvent`, `GatherDepFailureEvent`, `GatherDepBusyEvent`, `FreeKeysEvent`,
`WorkerState.executing`, `TaskState.run_id` | the outcome of a transfer, whether a task may end, and
the tasks that fail | |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes
from distributed.core import error_message
from distributed.metrics import time
from distributed.protocol.pickle import loads
from distributed.worker_state_machine import (
    FreeKeysEvent,
    GatherDepBusyEvent,
    GatherDepFailureEvent,
    GatherDepSuccessEvent,
)

from dask_gpurt.devices.ledger import Ledger, LedgerEntry
from dask_gpurt.tracing.lane_names import FETCH

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt.memory")

#: If no task has ended for this long and none runs, nothing will free memory.
PATIENCE_S = 10.0
#: Time until a busy peer is asked again. Stock Dask waits as long.
_BUSY_S = 0.15
#: Attribute of an error that says that memory was short at the peer, not here.
_OF_PEER = "gpurt_of_peer"


class ValueTransfers:
    """The patch of one worker's transfers, until `uninstall`.

    Parameters
    ----------
    broadcasts
        Returns the values that broadcasts bring, by key. Called with the size of each value that
        is to be fetched.
    least_nbytes
        No broadcast brings a smaller value.
    ledger
        While a trace records it, gets an entry for each transfer.
    """

    def __init__(
        self,
        worker: Worker,
        broadcasts: Callable[[Mapping[Any, int]], Awaitable[dict[Any, Any]]],
        least_nbytes: int,
        ledger: Ledger | None = None,
    ) -> None:
        self._worker, self._broadcasts, self._ledger = worker, broadcasts, ledger
        self._least_nbytes = least_nbytes
        self._n_ended = 0
        self._ended = asyncio.Event()
        self._is_short = False
        #: Values that are to be fetched without a broadcast.
        self._unshared: set[Any] = set()
        self._stock_gather_dep, self._stock_reuse = worker.gather_dep, worker.rpc.reuse
        worker.gather_dep = self._gather_dep  # type: ignore[method-assign]
        worker.rpc.reuse = self._reuse  # type: ignore[method-assign]

    async def _gather_dep(
        self, worker: str, to_gather: Collection[Any], total_nbytes: int, *, stimulus_id: str
    ) -> Any:
        arrived: dict[Any, Any] = {}
        is_retry = not self._unshared.isdisjoint(to_gather)
        self._unshared.difference_update(to_gather)
        tasks = self._worker.state.tasks
        if total_nbytes >= self._least_nbytes and not is_retry:
            sizes = {key: tasks[key].get_nbytes() for key in to_gather if key in tasks}
            arrived = await self._broadcasts(sizes)
        if not arrived:
            return await self._fetch(worker, to_gather, total_nbytes, stimulus_id)
        rest = [key for key in to_gather if key not in arrived]
        if not rest:
            return GatherDepSuccessEvent(
                worker=worker,
                total_nbytes=total_nbytes,
                data=arrived,
                stimulus_id=f"gpurt-broadcast-{time()}",
            )
        event = await self._fetch(worker, rest, total_nbytes, stimulus_id)
        # For a busy peer, the worker would fetch all values later, also those that arrived.
        while isinstance(event, GatherDepBusyEvent) and self._are_needed(rest):
            await asyncio.sleep(_BUSY_S)
            event = await self._fetch(worker, rest, total_nbytes, stimulus_id)
        if isinstance(event, GatherDepSuccessEvent):
            event.data.update(arrived)
        if not isinstance(event, (GatherDepFailureEvent, GatherDepBusyEvent)):
            return event
        # If this event failed, the values that have arrived would fail too. So the worker fetches
        # all of them again, as with stock Dask.
        self._unshared = {key for key in (*self._unshared, *to_gather) if key in tasks}
        return GatherDepBusyEvent(
            worker=worker, total_nbytes=total_nbytes, stimulus_id=f"gpurt-again-{time()}"
        )

    async def _fetch(self, peer: str, keys: Collection[Any], nbytes: int, stimulus_id: str) -> Any:
        """Fetch values as stock does, but ask again later if there is no memory for them."""
        n_ended, ledger = self._n_ended, self._ledger
        start_s = ledger.clock() if ledger is not None else 0.0
        event = await self._stock_gather_dep(
            peer, keys, total_nbytes=nbytes, stimulus_id=stimulus_id
        )
        if ledger is not None and (record := ledger.recorder) is not None:
            record(self._fetch_entry(ledger, peer, event, start_s))
        error = _memory_error(event)
        if error is None:
            self._is_short = False
            return event
        if _OF_PEER in error.__dict__:
            # The peer has waited for room already.
            self._fail_users(keys, error)
        else:
            self._warn_once(peer, keys, nbytes, error)
            if n_ended == self._n_ended:
                await self._wait_for_room(keys, nbytes, error)
        return GatherDepBusyEvent(
            worker=peer, total_nbytes=nbytes, stimulus_id=f"gpurt-no-room-{time()}"
        )

    def _reuse(self, addr: str, comm: Any) -> None:
        # Stock calls this while an error propagates, too: values could not be unpickled. The peer
        # still waits. It would take the next message of the connection for the answer.
        if sys.exception() is not None:
            comm.abort()
        self._stock_reuse(addr, comm)

    def _fetch_entry(self, ledger: Ledger, peer: str, event: Any, start_s: float) -> LedgerEntry:
        """Return the entry of a transfer. It names a task here that waits for one of the values."""
        data = event.data if isinstance(event, GatherDepSuccessEvent) else {}
        tasks = self._worker.state.tasks
        known = [tasks[key] for key in data if key in tasks]
        user = next((user.key for one in known for user in one.waiters), None)
        nbytes = event.total_nbytes if data else 0
        path = "fetch" if data else type(event).__name__
        return LedgerEntry(FETCH, path, nbytes, start_s, ledger.clock(), peer, key=user)

    def _are_needed(self, keys: Collection[Any]) -> bool:
        tasks = self._worker.state.tasks
        return any(key in tasks and tasks[key].waiters for key in keys)

    def task_ended(self) -> None:
        """Note that a task of this worker ended, or a value left it: there may be memory now."""
        self._n_ended += 1
        self._ended.set()

    def uninstall(self) -> None:
        """Restore the stock methods, and let waiting transfers proceed."""
        vars(self._worker).pop("gather_dep", None)
        vars(self._worker.rpc).pop("reuse", None)
        self.task_ended()

    def _warn_once(self, peer: str, keys: Collection[Any], nbytes: int, error: MemoryError) -> None:
        if not self._is_short:
            self._is_short = True
            logger.warning(
                "no memory for %d values of %s from %s; they are requested again: %s",
                len(keys),
                format_bytes(nbytes),
                peer,
                error,
            )

    async def _wait_for_room(self, keys: Collection[Any], nbytes: int, error: MemoryError) -> None:
        self._ended.clear()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._ended.wait()
                    return
            # Tasks that seceded do not count: they may wait for these very values.
            if not self._worker.state.executing:
                explained = MemoryError(
                    f"worker {self._worker.address} has no memory for {len(keys)} inputs of "
                    f"{format_bytes(nbytes)}, and no running task that could free some. Use "
                    "smaller partitions, fewer threads, or fewer workers to a device"
                )
                explained.__cause__ = error
                return self._fail_users(keys, explained)

    def _fail_users(self, keys: Collection[Any], error: MemoryError) -> None:
        """Fail the tasks that need these values with an error."""
        tasks = self._worker.state.tasks
        users = {
            user
            for key in keys
            if key in tasks
            for user in tasks[key].dependents
            if user.state == "waiting"
        }
        told = error_message(error)
        stimulus_id = f"gpurt-no-room-{time()}"
        for user in users:
            self._worker.batched_send(
                {
                    **told,
                    "op": "task-erred",
                    "key": user.key,
                    "run_id": user.run_id,
                    "thread": None,
                    "startstops": [],
                    "stimulus_id": stimulus_id,
                }
            )
        # The scheduler assumes that a failed task is no longer on this worker.
        failed = [user.key for user in users]
        self._worker.handle_stimulus(FreeKeysEvent(keys=failed, stimulus_id=stimulus_id))


def of_peer(reason: str) -> MemoryError:
    """Return the error of a worker that has no memory to read a value for its peer."""
    error = MemoryError(reason)
    # No class of ours: a peer or a client without this package reads the error, too.
    error.__dict__[_OF_PEER] = True
    return error


def _memory_error(event: Any) -> MemoryError | None:
    """Return the error of a failed transfer if it is a lack of memory, else None."""
    if not isinstance(event, GatherDepFailureEvent):
        return None
    error = loads(event.exception.data)
    return error if isinstance(error, MemoryError) else None

"""Patches and private names of distributed that managed memory uses on a worker.

| what | why | taken back by |
|---|---|---|
| `Worker.memory_manager.data`, `Worker.state.data` | the worker and its state machine use our
store | `StoreSwap.uninstall` |
| `SpillBuffer.n`, `._slow_uncached.max_weight`, `._slow_uncached.d.directory` | tell Dask's own
store from one that a user made with other settings, which is kept | |
| `SpillBuffer.fast`, `.slow`, `._slow_uncached` | the values that a worker has at the start are
taken over in place; spilled values are written back there at the end | |
| `Worker.execute` | begins a task once its inputs are in memory and its output has room, instead
of reading from disk on the event loop | `StoreSwap.uninstall` |
| handler `get_data` | reads values for a peer off the event loop | `StoreSwap.uninstall` |
| `Worker.transfer_outgoing_count`, `.transfer_outgoing_count_limit` | avoid a read for a message
that stock then answers with `busy` | |
| `Worker._get_client`, `distributed.worker.thread_state` | a task with a client may wait for other
tasks, which must not wait for it | `StoreSwap.uninstall` |
| `WorkerMemoryManager._maybe_spill` | shrinks the store's room by memory outside of the store;
stock would write on the event loop | `StoreSwap.uninstall` |
| `Worker.periodic_callbacks["memory_monitor"]` | whether `_maybe_spill` is called at all | |
| `WorkerState.tasks`, `.ready`, `TaskState.dependents` | which value is needed next | |
| `FreeKeysEvent`, `ReleaseWorkerDataMsg` | a value that cannot be read back is computed again | |
| `TaskState.waiters`, `.waiting_on`, `.priority`, `.state`, `.processing_on` and
`WorkerState.processing` of the scheduler | the next use of a value that no task here waits for | |

Contract tests in `tests/plugins/patches/test_worker_memory.py` fail when distributed changes any of
these names.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from bisect import bisect_left
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from dask.utils import format_bytes
from distributed.comm.addressing import get_address_host
from distributed.core import Status
from distributed.metrics import time
from distributed.spill import SpillBuffer
from distributed.worker import thread_state
from distributed.worker_state_machine import ExecuteSuccessEvent, FreeKeysEvent, RescheduleEvent

from dask_gpurt.memory.decisions.foresight import Outlook
from dask_gpurt.plugins.patches.values.value_bytes import whole_nbytes

if TYPE_CHECKING:
    from distributed import Scheduler, Worker

__all__ = [
    "FirstUsers",
    "SpillBuffer",
    "StoreSwap",
    "inputs",
    "is_made_by_dask",
    "cannot_begin",
    "is_closing",
    "is_monitored",
    "next_uses",
    "on_disk",
    "put_on_disk",
    "queued",
    "result_of",
    "recompute",
    "reschedule",
    "would_answer_busy",
    "spill_limits_nbytes",
    "take_over",
    "warn_of_unmanaged",
]

#: States of a task on a worker that will still use its inputs.
_WILL_USE = frozenset({"waiting", "ready", "constrained"})

#: Most queued tasks that are sorted for one query: 8 ms on the scheduler's event loop. On further
#: workers, each task counts as the next one.
_MAX_QUEUED = 10_000
#: The share at which Dask pauses workers by default (`distributed.worker.memory.pause`).
DEFAULT_PAUSE = 0.8


class StoreSwap:
    """The patch that replaces the store of a worker, until `uninstall`.

    Parameters
    ----------
    worker
        A live worker.
    store
        The new store. It must already have the worker's values.
    execute
        Called in place of `Worker.execute`, with the stock method as its first argument.
    get_data
        Called in place of the handler, with the stock handler as its first argument.
    asks_for_client
        Called with a task's key, in the task's thread, when the task gets a client.
    monitor
        Awaited with the process memory in bytes, every
        `distributed.worker.memory.monitor-interval`.
    """

    def __init__(
        self,
        worker: Worker,
        store: MutableMapping[Any, Any],
        *,
        execute: Callable[..., Awaitable[Any]],
        get_data: Callable[..., Awaitable[Any]],
        asks_for_client: Callable[[Any], None],
        monitor: Callable[[int], Awaitable[None]],
    ) -> None:
        self._worker = worker
        self._stock_get_data = stock_get_data = worker.handlers["get_data"]
        stock_execute, stock_get_client = worker.execute, worker._get_client

        async def gpurt_execute(key: Any, *, stimulus_id: str) -> Any:
            return await execute(stock_execute, key, stimulus_id=stimulus_id)

        async def gpurt_get_data(comm: Any, keys: Any, **kwargs: Any) -> Any:
            return await get_data(stock_get_data, comm, keys, **kwargs)

        def gpurt_get_client(timeout: float | None = None) -> Any:
            key = getattr(thread_state, "key", None)
            if key is not None:
                asks_for_client(key)
            return stock_get_client(timeout)

        async def maybe_spill(worker: Worker, memory: int) -> None:
            await monitor(memory)

        # Dask inspects the names of a handler's parameters.
        gpurt_get_data.__signature__ = inspect.signature(stock_get_data)  # type: ignore[attr-defined]
        self._put(store)
        worker.execute = gpurt_execute  # type: ignore[method-assign]
        worker.get_data = gpurt_get_data  # type: ignore[method-assign, assignment]
        worker.handlers["get_data"] = gpurt_get_data
        worker._get_client = gpurt_get_client  # type: ignore[method-assign]
        worker.memory_manager._maybe_spill = maybe_spill  # type: ignore[method-assign]

    def _put(self, store: MutableMapping[Any, Any]) -> None:
        self._worker.memory_manager.data = store
        self._worker.state.data = store

    def uninstall(self, stock: MutableMapping[Any, Any]) -> None:
        """Restore the stock methods, and give the worker a store that has our store's values."""
        self._put(stock)
        for name in ("execute", "get_data", "_get_client"):
            vars(self._worker).pop(name, None)
        vars(self._worker.memory_manager).pop("_maybe_spill", None)
        self._worker.handlers["get_data"] = self._stock_get_data


def is_made_by_dask(worker: Worker) -> bool:
    """Return whether Dask made a worker's store from its configuration, not from `data=`.

    A user's buffer has another folder, target or limit than the configuration.
    """
    stock: Any = worker.data
    manager = worker.memory_manager
    limit, target = manager.memory_limit, manager.memory_target_fraction
    if type(stock) is not SpillBuffer or not limit:
        return False
    disk: Any = stock._slow_uncached
    return (
        stock.n == (int(limit * target) if target else sys.maxsize)
        and disk.max_weight == manager.max_spill
        and disk.d.directory == os.path.join(worker.local_directory, "storage")
    )


def take_over(stock: Any) -> tuple[dict[Any, Any], dict[Any, int]]:
    """Return the objects of a store, and the sizes of its values on disk, by key.

    The objects are removed from the store. Only Dask's own store tells which values are on disk.
    All values of any other store are read.
    """
    if isinstance(stock, SpillBuffer):
        objects = dict(stock.fast)
        weights = stock._slow_uncached.weight_by_key
        spilled = {key: weight.memory for key, weight in weights.items()}
    else:
        objects, spilled = dict(stock), {}
    for key in objects:
        del stock[key]
    return objects, spilled


def on_disk(stock: Any) -> Any:
    """Return the part of a store that `take_over` left in it."""
    return stock.slow if isinstance(stock, SpillBuffer) else {}


def put_on_disk(stock: Any, key: Any, value: Any) -> None:
    """Put a value into a store: on disk if that store is Dask's own."""
    if isinstance(stock, SpillBuffer):
        try:
            if key in stock.slow:  # the previous value
                del stock.slow[key]
            stock.slow[key] = value
            return
        except Exception:
            pass  # there may be room in memory, and Dask logs what is wrong with value or disk
    stock[key] = value


def would_answer_busy(worker: Worker, comm: Any, n_more: int) -> bool:
    """Return whether stock would answer `busy` to a peer that asks for values now.

    Parameters
    ----------
    comm
        Connection to the peer.
    n_more
        Messages in flight that the worker does not count.
    """
    limit = worker.transfer_outgoing_count_limit
    if get_address_host(comm.peer_address) == get_address_host(worker.address):
        limit = limit * 2
    if is_paused(worker):
        limit = 1
    return limit is not False and worker.transfer_outgoing_count + n_more >= limit


def spill_limits_nbytes(worker: Worker) -> tuple[int, int | None] | None:
    """Return the limits of managed memory and of process memory above which a worker spills.

    The second is None if only managed memory counts. The result is None if the worker never spills.

    Stock Dask notices too late that the process is over `spill`, and then spills far below it. With
    room reserved beforehand, less slack is needed: the limit is two thirds of the way to `pause`.
    A worker that never pauses has the limit of one that pauses where Dask's default says: only the
    nanny would stop it above.
    """
    manager = worker.memory_manager
    limit, target = manager.memory_limit, manager.memory_target_fraction
    spill, pause = manager.memory_spill_fraction, manager.memory_pause_fraction
    if not limit or not (target or spill):
        return None
    mark = spill + 2 / 3 * max(0.0, (pause or DEFAULT_PAUSE) - spill) if spill else None
    return int(limit * (target or spill)), int(limit * mark) if mark else None


def is_closing(worker: Worker) -> bool:
    """Return whether a worker closes, and does not only lose the runtime."""
    return worker.status in (Status.closing, Status.closed, Status.failed)


def is_paused(worker: Worker) -> bool:
    """Return whether a worker begins no task, because its process takes too much memory."""
    return bool(worker.status == Status.paused)


def is_monitored(worker: Worker) -> bool:
    """Return whether Dask monitors the process memory of a worker, and so calls `monitor`."""
    return "memory_monitor" in worker.periodic_callbacks


def warn_of_unmanaged(process_nbytes: int) -> None:
    """Log a warning where Dask's own monitor does: users and dashboards look for it there."""
    # Dask's filter on this logger limits the rate of messages that begin with these words.
    logging.getLogger("distributed.worker.memory").warning(
        "Unmanaged memory use is high: no value is in memory any more, and the process takes %s",
        format_bytes(process_nbytes),
    )


class FirstUsers:
    """The first task on a worker that will use each value.

    A value may have thousands of users, also those that have ended and are still held. So its
    first user is remembered while that one waits and none is added or removed.

    Parameters
    ----------
    dequeued
        Keys of tasks that have left the worker's queue but not begun.
    """

    def __init__(self, worker: Worker, dequeued: Collection[Hashable] = frozenset()) -> None:
        self._tasks: Mapping[Any, Any] = worker.state.tasks
        self._dequeued = dequeued
        #: By value: how many users it had, and the first one. One that comes while another goes is
        #: missed, which costs an eviction at most. A task refers to its inputs, so a strong
        #: reference to it would keep the value for ever.
        self._known: WeakKeyDictionary[Any, tuple[int, ref[Any]]] = WeakKeyDictionary()

    def of(self, key: Hashable) -> Any:
        """Return the task that will use a value first; None if no task here will."""
        value = self._tasks.get(key)
        if value is None:
            return None
        if (known := self._known.get(value)) is not None:
            n_users, first = known[0], known[1]()
            if first is not None and n_users == len(value.dependents) and self._will_use(first):
                return first
        # A copy: the event loop may add users while another thread makes room for an allocation.
        users = list(value.dependents)
        first = min(filter(self._will_use, users), key=lambda user: user.priority, default=None)
        if first is not None:
            self._known[value] = len(users), ref(first)
        return first

    def _will_use(self, user: Any) -> bool:
        return user.state in _WILL_USE or user.key in self._dequeued


def queued(worker: Worker, n_tasks: int) -> list[Any]:
    """Return the keys of the tasks that this worker begins next, in that order."""
    return [task.key for task in islice(worker.state.ready.peekn(n_tasks), n_tasks)]


def inputs(worker: Worker, keys: Iterable[Any]) -> Iterator[Any]:
    """Yield the inputs of some tasks, without the tasks that have begun."""
    for key in keys:
        task = worker.state.tasks.get(key)
        if task is not None and task.state in _WILL_USE:
            for dependency in task.dependencies:
                yield dependency.key


def result_of(event: Any) -> tuple[Any, int, float] | None:
    """Return a result, its bytes and its task's seconds; None if the task did not succeed."""
    if not isinstance(event, ExecuteSuccessEvent):
        return None
    return event.value, whole_nbytes(event.nbytes), event.stop - event.start


def cannot_begin(worker: Worker, key: Any) -> bool:
    """Return whether a task that was about to begin has been cancelled, or has lost inputs.

    If a cancelled task is wanted again, it goes on where it was, and nobody fetches its inputs
    again. In stock Dask, such a task already holds its inputs.
    """
    task = worker.state.tasks.get(key)
    if task is None or task.state == "cancelled":
        return True
    return any(_missing_inputs(worker, task))


def _missing_inputs(worker: Worker, task: Any) -> Iterator[Any]:
    for one in task.dependencies:
        if one.key not in worker.state.actors and one.key not in worker.data:
            yield one


def reschedule(worker: Worker, key: Any) -> Any:
    """Return the event for a task that cannot run now: the scheduler reschedules it.

    An input that the worker counts as its own but does not have, since a program deleted it from
    `Worker.data`, is computed again. Otherwise the scheduler would send the task back for ever.
    """
    task = worker.state.tasks.get(key)
    if task is not None:
        for one in list(_missing_inputs(worker, task)):  # `recompute` changes the inputs
            if one.state == "memory":
                recompute(worker, one.key)
    return RescheduleEvent(key=key, stimulus_id=f"gpurt-lost-input-{time()}")


def recompute(worker: Worker, key: Any) -> None:
    """Have a lost value computed again, here or elsewhere.

    This does nothing if the task is gone, or if the worker's present store has the value.
    """
    if key in worker.state.tasks and key not in worker.data:
        worker.handle_stimulus(FreeKeysEvent(keys=[key], stimulus_id=f"gpurt-lost-value-{time()}"))


def next_uses(scheduler: Scheduler, keys: list[Any], address: str) -> list[Any]:
    """Return the next use of each value on any worker; None if none is known.

    Parameters
    ----------
    address
        Address of the worker that has the values.
    """
    here = scheduler.workers.get(address)
    queues: dict[Any, list[Any]] = {}
    n_left = _MAX_QUEUED

    def queue(worker: Any) -> list[Any]:
        nonlocal n_left
        found = queues.get(worker)
        if found is None:
            found = []
            if len(worker.processing) <= n_left:
                n_left -= len(worker.processing)
                found = sorted(task.priority for task in worker.processing)
            queues[worker] = found
        return found

    def turn_at_peer(task: Any) -> int | None:
        worker = task.processing_on
        if worker is None or worker is here:
            return None
        return bisect_left(queue(worker), task.priority)

    outlook: Outlook[Any] = Outlook(
        priority=lambda task: task.priority,
        waits_for=lambda task: task.waiting_on or (),
        is_unassigned=lambda task: task.state in ("queued", "no-worker"),
        turn_at_peer=turn_at_peer,
        queue=queue(here) if here is not None else (),
    )
    uses = []
    for key in keys:
        task = scheduler.tasks.get(key)
        waiters = task.waiters if task is not None else None
        uses.append(outlook.next_use(waiters) if waiters else None)
    return uses

"""Private names of distributed that managed memory touches; the rest is in `plugins.patches.p2p`.

Contract tests in `tests/plugins/patches/test_worker_memory.py` fail when distributed moves any of
it.

| what | why | taken back by |
|---|---|---|
| `Worker.memory_manager.data`, `Worker.state.data` | our store is the one that the worker and its
state machine use | `StoreSwap.remove` |
| `SpillBuffer.n`, `._slow_uncached.max_weight`, `._slow_uncached.d.directory` | a store that the
user made with settings of their own stays | |
| `SpillBuffer.fast`, `.slow`, `._slow_uncached` | what a worker has when the runtime comes is taken
over where it is, and what is on disk when it goes is written there | |
| `Worker.execute` | a task begins once its inputs are at home and its output has room, and not by
reading from disk on the event loop | `StoreSwap.remove` |
| handler `get_data` | values that are sent are read off the event loop | `StoreSwap.remove` |
| `Worker.transfer_outgoing_count`, `.transfer_outgoing_count_limit` | nothing is read for a message
that stock then answers with `busy` | |
| `Worker._get_client`, `distributed.worker.thread_state` | a task that has a client may wait for
others, which must not wait for it | `StoreSwap.remove` |
| `WorkerMemoryManager._maybe_spill` | memory that the store does not know of shrinks its room;
stock would write on the event loop | `StoreSwap.remove` |
| `Worker.periodic_callbacks["memory_monitor"]` | whether that is called at all | |
| `WorkerState.tasks`, `.ready`, `TaskState.dependents` | which value is needed next | |
| `distributed.protocol.cuda` | which values are on a GPU, and what memory they consist of: what
libraries register there to be sent from one GPU to another | |
| `distributed.protocol.serialize` | values whose type has a serializer that was registered with
Dask are taken apart by that, as they are where stock spills them | |
| `FreeKeysEvent`, `ReleaseWorkerDataMsg` | a value that cannot be read back is computed again | |
| `TaskState.waiters`, `.waiting_on`, `.priority`, `.state`, `.processing_on` and
`WorkerState.processing` of the scheduler | the next use of a value that no task here waits for | |
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
    MutableMapping,
)
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgpack
from dask.utils import format_bytes
from distributed.comm.addressing import get_address_host
from distributed.core import Status
from distributed.metrics import time
from distributed.protocol.compression import decompress
from distributed.protocol.cuda import cuda_dumps as take_apart_on_device
from distributed.protocol.cuda import cuda_loads as put_together_on_device
from distributed.protocol.cuda import cuda_serialize
from distributed.protocol.pickle import dumps, loads
from distributed.protocol.serialize import (
    check_dask_serializable,
    dask_serialize,
    merge_and_deserialize,
    serialize_and_split,
)
from distributed.sizeof import safe_sizeof
from distributed.spill import SpillBuffer
from distributed.utils import ensure_memoryview
from distributed.worker import thread_state
from distributed.worker_state_machine import ExecuteSuccessEvent, FreeKeysEvent, RescheduleEvent

from dask_gpurt.memory.decisions.foresight import Outlook

if TYPE_CHECKING:
    from distributed import Scheduler, Worker

__all__ = [
    "SpillBuffer",
    "StoreSwap",
    "dumps",
    "inputs",
    "is_made_by_dask",
    "is_cancelled",
    "is_closing",
    "is_monitored",
    "is_on_device",
    "loads",
    "local_users",
    "next_uses",
    "on_disk",
    "put_on_disk",
    "put_together_on_device",
    "queued",
    "ran",
    "rebuild",
    "recompute",
    "reschedule",
    "safe_sizeof",
    "sends_no_more",
    "spill_marks_nbytes",
    "take_apart",
    "take_apart_on_device",
    "take_over",
    "warn_of_unmanaged",
]

#: States of a task on a worker that will still take its inputs.
_WILL_USE = frozenset({"waiting", "ready", "constrained"})

#: Tasks in workers' queues that are put in order for one question: 8 ms on the scheduler's event
#: loop. Workers beyond are taken to be at the beginning of theirs.
_MAX_QUEUED = 10_000

Execute = Callable[..., Awaitable[Any]]


class StoreSwap:
    """Puts a store in place of the one that a worker has.

    Parameters
    ----------
    worker
        A live worker.
    store
        Takes over; what the worker has already must be in it.
    execute
        Called in place of `Worker.execute`, with that as its first argument.
    get_data
        Called in place of the handler, with that as its first argument.
    asks_for_client
        Called in the thread of a task that gets itself a client, with its key.
    monitor
        Awaited with the process' memory in bytes, every
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

        # Dask looks at the names of a handler's parameters.
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

    def remove(self, stock: MutableMapping[Any, Any]) -> None:
        """Give the stock methods back, and the worker a store that has what ours had."""
        self._put(stock)
        for name in ("execute", "get_data", "_get_client"):
            vars(self._worker).pop(name, None)
        vars(self._worker.memory_manager).pop("_maybe_spill", None)
        self._worker.handlers["get_data"] = self._stock_get_data


def is_made_by_dask(worker: Worker) -> bool:
    """Whether Dask made the store of a worker by its configuration; `data=` may have made another.

    A buffer of the user has a folder, a target or a limit that the configuration does not ask for.
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
    """What a store has: objects, which are taken out of it, and bytes of those on disk.

    Only of Dask's own store is it known what is on disk; everything of another is read.
    """
    if isinstance(stock, SpillBuffer):
        objects = dict(stock.fast)
        weights = stock._slow_uncached.weight_by_key
        cold = {key: weight.memory for key, weight in weights.items()}
    else:
        objects, cold = dict(stock), {}
    for key in objects:
        del stock[key]
    return objects, cold


def on_disk(stock: Any) -> Any:
    """The part of a store that `take_over` left in it."""
    return stock.slow if isinstance(stock, SpillBuffer) else {}


def put_on_disk(stock: Any, key: Any, value: Any) -> None:
    """Give a value to a store without it taking memory, where that can be said."""
    if isinstance(stock, SpillBuffer):
        try:
            if key in stock.slow:  # the value before
                del stock.slow[key]
            stock.slow[key] = value
            return
        except Exception:
            pass  # in memory it may have a place, and Dask says what is wrong with it or the disk
    stock[key] = value


def sends_no_more(worker: Worker, comm: Any, n_more: int) -> bool:
    """Whether a peer that asks for values now is told that the worker is busy.

    Parameters
    ----------
    comm
        Connection to the peer.
    n_more
        Messages under way besides those that the worker counts.
    """
    limit = worker.transfer_outgoing_count_limit
    if get_address_host(comm.peer_address) == get_address_host(worker.address):
        limit = limit * 2
    if worker.status == Status.paused:
        limit = 1
    return limit is not False and worker.transfer_outgoing_count + n_more >= limit


def spill_marks_nbytes(worker: Worker) -> tuple[int, int | None] | None:
    """Above which managed memory, and which memory of the process, a worker spills, in bytes.

    The second is None where only managed memory counts; all of it if the worker never spills.

    Stock finds out that the process is over `spill` after the fact, and then spills far below it.
    With room reserved beforehand that much slack is not needed: the mark is two thirds of the way
    to `pause`.
    """
    manager = worker.memory_manager
    limit, target = manager.memory_limit, manager.memory_target_fraction
    spill, pause = manager.memory_spill_fraction, manager.memory_pause_fraction
    if not limit or not (target or spill):
        return None
    mark = spill + 2 / 3 * max(0.0, (pause or 1.0) - spill) if spill else None
    return int(limit * (target or spill)), int(limit * mark) if mark else None


def is_closing(worker: Worker) -> bool:
    """Whether a worker closes, rather than losing only the runtime."""
    return worker.status in (Status.closing, Status.closed, Status.failed)


def is_monitored(worker: Worker) -> bool:
    """Whether Dask looks at the memory of the worker's process, and calls `monitor` then."""
    return "memory_monitor" in worker.periodic_callbacks


def warn_of_unmanaged(process_nbytes: int) -> None:
    """Tell where Dask's own monitor tells, which is where users and dashboards look for it."""
    # Dask's filter on this logger lets messages with this beginning through now and then only.
    logging.getLogger("distributed.worker.memory").warning(
        "Unmanaged memory use is high: no value is in memory any more, and the process takes %s",
        format_bytes(process_nbytes),
    )


def local_users(
    worker: Worker, key: Hashable, leaving: Collection[Hashable] = frozenset()
) -> list[Any]:
    """Tasks on this worker that will take a value.

    Parameters
    ----------
    leaving
        Keys of tasks that have left the worker's queue but not begun.
    """
    task = worker.state.tasks.get(key)  # type: ignore[call-overload]
    if task is None:
        return []
    # A list first: the event loop may add to it while an allocation makes room in another thread.
    users = list(task.dependents)
    return [user for user in users if user.state in _WILL_USE or user.key in leaving]


def queued(worker: Worker, n_tasks: int) -> list[Any]:
    """Keys of the tasks that this worker will begin next, in that order."""
    return [task.key for task in islice(worker.state.ready.peekn(n_tasks), n_tasks)]


def inputs(worker: Worker, keys: Iterable[Any]) -> Iterator[Any]:
    """What those of some tasks take that have not begun."""
    for key in keys:
        task = worker.state.tasks.get(key)
        if task is not None and task.state in _WILL_USE:
            for dependency in task.dependencies:
                yield dependency.key


def ran(event: Any) -> tuple[Any, int, float] | None:
    """A result, its size in bytes, and how long its task took; None if it has none."""
    if not isinstance(event, ExecuteSuccessEvent):
        return None
    return event.value, event.nbytes, event.stop - event.start


def is_on_device(value: Any) -> bool:
    """Whether Dask would send a value from the memory of a GPU as it is there.

    Nothing is imported but what the value's own library registers with Dask. Of what that cannot
    import, nothing is known.
    """
    try:
        cuda_serialize.dispatch(type(value))
    except (TypeError, ImportError):
        return False
    return True


#: Types of these have layouts of ours, or are left to pickle, which keeps all of them.
_NOT_FOR_SERIALIZERS = frozenset({"builtins", "array", "numpy", "pandas", "pyarrow"})
#: Frames are not split.
_NO_SPLIT_NBYTES = 1 << 62
#: A container may hold itself.
_DEEPEST = 32


def take_apart(value: Any) -> tuple[bytes, list[memoryview]] | None:
    """Take a value apart as stock does where a serializer was registered for its type.

    Returns
    -------
    A header and memory, for `rebuild`. None if pickle is to do it.

    Raises
    ------
    TypeError
        The serializer failed.
    """
    if not _has_serializer(value):
        return None
    try:
        header, frames = serialize_and_split(value, on_error="raise", size=_NO_SPLIT_NBYTES)
    except TypeError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        # Dask's own text has all of the value in it.
        raise TypeError(
            f"the serializer that Dask has for {type(value).__qualname__} failed: "
            f"{error.__cause__ or error.args[0]!r}"
        ) from error
    return msgpack.dumps(header, use_bin_type=True), [ensure_memoryview(one) for one in frames]


def _has_serializer(value: Any) -> bool:
    """Whether a serializer was registered for a value, or for what a container begins with."""
    inner = value
    for _ in range(_DEEPEST):
        if type(inner) not in (list, tuple, set, dict) or not inner:
            break
        # Dask looks at the first item alone, too.
        inner = next(iter(inner.values() if type(inner) is dict else inner))
    if type(inner).__module__.partition(".")[0] in _NOT_FOR_SERIALIZERS:
        return False
    try:
        dask_serialize.dispatch(type(inner))
    except (TypeError, ImportError):
        return False
    return inner is value or check_dask_serializable(value)


def rebuild(header: bytes, frames: Collection[memoryview]) -> Any:
    """Put together what `take_apart` made."""
    read = msgpack.loads(header, raw=False, use_list=False)
    return merge_and_deserialize(read, decompress(read, list(frames)))


def is_cancelled(worker: Worker, key: Any) -> bool:
    """Whether nobody wants a task any more that was told to begin."""
    task = worker.state.tasks.get(key)
    return task is None or task.state == "cancelled"


def reschedule(key: Any) -> Any:
    """A task cannot run now: the scheduler will say when."""
    return RescheduleEvent(key=key, stimulus_id=f"gpurt-lost-input-{time()}")


def recompute(worker: Worker, key: Any) -> None:
    """A value that the worker had is gone: have it computed again, here or elsewhere.

    Unless there is one again, or the store that the worker has by now has it.
    """
    if key in worker.state.tasks and key not in worker.data:
        worker.handle_stimulus(FreeKeysEvent(keys=[key], stimulus_id=f"gpurt-lost-value-{time()}"))


def next_uses(scheduler: Scheduler, keys: list[Any], address: str) -> list[Any]:
    """When each value is taken next, anywhere; None where nobody is known to.

    Parameters
    ----------
    address
        Of the worker that has the values.
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

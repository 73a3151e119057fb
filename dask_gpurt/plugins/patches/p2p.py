"""The version gate of distributed, and the patches of its P2P shuffle.

| what | why | taken back by |
|---|---|---|
| `ShuffleSchedulerPlugin._retrieve_spec` | our spec replaces the stock one when a run is created;
distributed keeps the control plane | `SpecSwap.uninstall` |
| handler `shuffle_get_or_create` | waits for joining workers, and restricts output tasks to the
owners of their partitions before they run (`ShuffleSchedulerPlugin._set_restriction`); stock runs
each once in the wrong place to find out | `SpecSwap.uninstall` |
| handler `shuffle_get` | waits likewise, and restarts a shuffle if a worker that must not take part
asks for its spec (`_fail_on_workers`, `_clean_on_scheduler`, `_restart_shuffle`, as on a loss);
the task that asked runs again | `SpecSwap.uninstall` |
| handler `shuffle_restrict_task` | restricts a task to the owner of its partition even if it has a
restriction from before, which stock would keep | `SpecSwap.uninstall` |
| `P2PBarrierTask.spec` | describes the shuffle before there is a run | |
| `dask.array.core.concatenate3` | joins chunks that are not plain memory, as stock does | |
| `Task.func`, `Task.args`, `TaskState.priority` | tell which partition an output task reads, fused
or not, and when | |
| `TaskState.waiting_on`, `.waiters`, `.dependencies`, `.dependents` of the barrier |
tell how far a shuffle is | |
| `ShuffleWorkerPlugin.add_partition` | samples the data before a run is requested |
`RunLookup.uninstall` |
| `ShuffleWorkerPlugin.get_or_create_shuffle`, `.get_shuffle_run`, `_ShuffleRunManager._active_runs`
| a task finds a live run of ours without asking the event loop, which may be busy |
`RunLookup.uninstall` |
| `ShuffleWorkerPlugin.barrier` | a late barrier of a run that is over answers "again" instead of an
error | `RunLookup.uninstall` |
| handler `shuffle_inputs_done` | a closing worker reports neither success nor failure |
`RunLookup.uninstall` |
| handler `shuffle_receive` | a worker that has to ask again says so without an error in its log |
`RunLookup.uninstall` |
| `TCP.stream` | reaches the sockets whose bandwidth the kernel reports | |
| `Client._graph_to_futures` | `gpurt.strict` refuses work when activation failed | `allow_work` |

Other modules import distributed's private names from here. Contract tests in
`tests/plugins/patches/test_p2p.py` fail when distributed changes any of these names.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import distributed
from dask._task_spec import Task
from distributed.core import Status, clean_exception, error_message
from distributed.exceptions import Reschedule
from distributed.metrics import context_meter, thread_time, time
from distributed.protocol import to_serialize
from distributed.shuffle._core import (
    ShuffleId,
    ShuffleSpec,
    barrier_key,
)
from distributed.shuffle._exceptions import (
    P2PConsistencyError,
    P2POutOfDiskError,
    ShuffleClosedError,
)
from distributed.shuffle._merge import merge_unpack
from distributed.shuffle._rechunk import ArrayRechunkSpec, rechunk_unpack
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin
from distributed.shuffle._shuffle import DataFrameShuffleSpec, shuffle_unpack
from distributed.utils import sync
from distributed.utils_comm import retry

from dask_gpurt.plugins.bootstrap import untested
from dask_gpurt.plugins.patches.graphs import foreign_shuffles
from dask_gpurt.transport.rate import TCP_INFO_NBYTES, delivery_rate

if TYPE_CHECKING:
    from distributed import Client, Scheduler, Worker
    from distributed.comm import Comm
    from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin as ShuffleWorkerPlugin

__all__ = [
    "ArrayRechunkSpec",
    "DataFrameShuffleSpec",
    "P2PConsistencyError",
    "P2POutOfDiskError",
    "Reschedule",
    "RunLookup",
    "ShuffleClosedError",
    "ShuffleId",
    "ShuffleSchedulerPlugin",
    "ShuffleSpec",
    "SpecSwap",
    "active_shuffles",
    "allow_work",
    "clean_exception",
    "delivered",
    "event_loop",
    "context_meter",
    "how_far",
    "join_arrays",
    "read_order",
    "refuse_work",
    "requires_encryption",
    "retry",
    "stock_spec",
    "sync",
    "thread_time",
    "to_serialize",
    "unsupported_reason",
]

#: Tested versions of distributed: from the first, up to but not including the second.
TESTED = ("2026.7.1", "2026.9.0")


def unsupported_reason(version: str | None = None) -> str | None:
    """Return why this version of distributed is not supported, or None if it is."""
    return untested(version or distributed.__version__, TESTED)


def lacks_shuffles(scheduler: Scheduler) -> str | None:
    """Return why this scheduler has no shuffles, or None if it has."""
    if "shuffle" in scheduler.plugins:
        return None
    return "the scheduler was started without distributed's shuffle extension"


#: States of a scheduler's task that is wanted and has no result.
TO_RUN = frozenset({"waiting", "queued", "no-worker", "processing"})


class SpecSwap:
    """The patch that replaces the stock spec whenever a scheduler creates a shuffle run.

    Parameters
    ----------
    scheduler
        A live scheduler.
    replace
        Maps the stock spec to the one to use, which may be the same.
    ready
        Awaited before a run is created or given up.
    takes_part
        Whether a worker may take part in a run whose spec is not stock's. If another worker asks
        for such a run, the shuffle restarts.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        replace: Callable[[ShuffleSpec[Any]], ShuffleSpec[Any]],
        ready: Callable[[], Awaitable[None]],
        takes_part: Callable[[str], bool],
    ) -> None:
        self._scheduler = scheduler
        self._plugin: ShuffleSchedulerPlugin = scheduler.plugins["shuffle"]  # type: ignore[assignment]
        self._stock_handler = scheduler.handlers["shuffle_get_or_create"]
        self._stock_get = stock_get = scheduler.handlers["shuffle_get"]
        self._stock_restrict = scheduler.handlers["shuffle_restrict_task"]
        self._ready, self._takes_part = ready, takes_part
        foreign_shuffles.hold(self)
        retrieve = type(self._plugin)._retrieve_spec
        plugin, stock_handler = self._plugin, self._stock_handler

        def retrieve_spec(shuffle_id: ShuffleId) -> ShuffleSpec[Any]:
            return replace(retrieve(plugin, shuffle_id))

        async def get(id: ShuffleId, worker: str) -> Any:
            await self._start_over_without(worker, id)
            return self._error_as_retry(stock_get(id=id, worker=worker), worker, id, Reschedule())

        async def get_or_create(shuffle_id: ShuffleId, worker: str, **kwargs: Any) -> Any:
            await ready()
            await self._start_over_without(worker, shuffle_id)
            is_new = shuffle_id not in plugin.active_shuffles
            answer = stock_handler(shuffle_id=shuffle_id, worker=worker, **kwargs)
            if inspect.isawaitable(answer):
                answer = await answer
            if is_new and shuffle_id in plugin.active_shuffles:
                self._place_outputs(shuffle_id)
            closed = ShuffleClosedError(f"{shuffle_id} is over, or has yet to begin")
            return self._error_as_retry(answer, worker, shuffle_id, closed)

        def restrict_task(key: Any, worker: str, **kwargs: Any) -> Any:
            # Output tasks are restricted before they run, and stock restricts no task twice. If the
            # user has restricted the task to another worker since, it would stay there and ask for
            # its owner for ever.
            task = scheduler.tasks.get(key)
            if task is not None and task.annotations and task.worker_restrictions != {worker}:
                task.annotations.pop("shuffle_original_restrictions", None)
            return self._stock_restrict(key=key, worker=worker, **kwargs)

        # Patch the instance, so that deleting the attribute restores stock.
        self._plugin._retrieve_spec = retrieve_spec  # type: ignore[method-assign]
        scheduler.handlers["shuffle_get"] = get
        scheduler.handlers["shuffle_get_or_create"] = get_or_create
        scheduler.handlers["shuffle_restrict_task"] = restrict_task

    async def _start_over_without(self, worker: str, shuffle_id: ShuffleId) -> None:
        """Give up a run that a worker would need but must not join.

        Keeping the run's tasks from that worker would not help: it may be the only one left.
        """
        if self._refused(worker, shuffle_id) is None:
            return
        # The worker may be just joining.
        await self._ready()
        run = self._refused(worker, shuffle_id)
        if run is not None:
            stimulus_id = f"gpurt-cannot-take-part-{time()}"
            self._plugin._fail_on_workers(run, f"{worker} cannot take part in {run}")
            self._plugin._clean_on_scheduler(shuffle_id, stimulus_id)
            self._plugin._restart_shuffle(shuffle_id, self._scheduler, stimulus_id=stimulus_id)

    def _refused(self, worker: str, shuffle_id: ShuffleId) -> Any:
        """Return the run of a shuffle if a worker must not join it, else None."""
        run = self._plugin.active_shuffles.get(shuffle_id)
        if run is None or worker not in self._scheduler.workers or self._takes_part(worker):
            return None
        has_stock_spec = run.run_spec.spec is stock_spec(self._scheduler, shuffle_id)
        return None if has_stock_spec else run

    def _error_as_retry(
        self, answer: Any, worker: str, shuffle_id: ShuffleId, error: Exception
    ) -> Any:
        """Return stock's answer, but turn an error into "run again" while the shuffle restarts.

        A task that asked for a given-up run may return to the same worker before the answer
        arrives. A late error would then end the next attempt. A barrier that is not in memory
        shows that the shuffle restarts. A worker without the runtime gets no error at all: it may
        have asked for a run that it must not join. A worker that the scheduler does not know gets
        the error, or it would ask for ever: its address may be a name, not a number.
        """
        barrier = self._scheduler.tasks.get(barrier_key(shuffle_id))
        is_known = worker in self._scheduler.workers
        if answer["status"] == "OK" or barrier is None or not is_known:
            return answer
        if barrier.state == "memory" and self._takes_part(worker):
            return answer
        return error_message(error)

    def _place_outputs(self, shuffle_id: ShuffleId) -> None:
        run_spec = self._plugin.active_shuffles[shuffle_id].run_spec
        barrier = self._scheduler.tasks[barrier_key(shuffle_id)]
        for task in barrier.dependents:
            partitions = partitions_read(task.run_spec, shuffle_id)
            owners = {run_spec.worker_for.get(partition) for partition in partitions}
            owner = owners.pop() if len(owners) == 1 else None
            stated = task.worker_restrictions
            # A task that the user wants elsewhere runs there first, as in stock.
            if owner is not None and (not stated or owner in stated or task.loose_restrictions):
                self._plugin._set_restriction(task, owner)

    def uninstall(self) -> None:
        """Restore the stock method and handlers."""
        foreign_shuffles.release(self)
        vars(self._plugin).pop("_retrieve_spec", None)
        self._scheduler.handlers["shuffle_get"] = self._stock_get
        self._scheduler.handlers["shuffle_get_or_create"] = self._stock_handler
        self._scheduler.handlers["shuffle_restrict_task"] = self._stock_restrict


def active_shuffles(scheduler: Scheduler) -> Collection[str]:
    """Return the ids of the shuffles that have a run."""
    plugin: ShuffleSchedulerPlugin = scheduler.plugins["shuffle"]  # type: ignore[assignment]
    return plugin.active_shuffles.keys()


def how_far(scheduler: Scheduler) -> dict[str, dict[str, Any]]:
    """Return how many inputs and outputs each shuffle with a run has, and how many are done.

    An output that is computed and forgotten counts neither as an output nor as done.
    """
    # Imported here: workers import this module, too.
    from dask_gpurt.plugins.patches.graphs.transfer_tasks import n_inputs

    found = {}
    for shuffle_id in active_shuffles(scheduler):
        barrier = scheduler.tasks.get(barrier_key(ShuffleId(shuffle_id)))
        if barrier is not None:
            inputs = {task: n_inputs(task.run_spec) for task in barrier.dependencies}
            left, n_outputs = barrier.waiting_on or (), len(barrier.dependents)
            found[shuffle_id] = {
                "inputs": sum(inputs.values()),
                "inputs_done": sum(n for task, n in inputs.items() if task not in left),
                "is_delivered": barrier.state == "memory",
                "outputs": n_outputs,
                "outputs_done": n_outputs - len(barrier.waiters or ()),
            }
    return found


def stock_spec(scheduler: Scheduler, shuffle_id: Any) -> ShuffleSpec[Any] | None:
    """Return the spec of a shuffle as its graph has it, None if there is no such shuffle."""
    barrier = scheduler.tasks.get(barrier_key(shuffle_id))
    return getattr(barrier.run_spec, "spec", None) if barrier is not None else None


def read_order(scheduler: Scheduler, shuffle_id: ShuffleId) -> list[Any]:
    """Return the output partitions of a shuffle in the order in which workers will read them.

    A partition appears once for every task that reads it and has yet to run. Several graphs, as
    those of two computations over one collection, may read one shuffle with tasks of their own.
    """
    barrier = scheduler.tasks.get(barrier_key(shuffle_id))
    readers = [task for task in barrier.dependents if task.state in TO_RUN] if barrier else []
    readers.sort(key=lambda task: task.priority or ())
    return [
        partition for task in readers for partition in partitions_read(task.run_spec, shuffle_id)
    ]


def partitions_read(task: Any, shuffle_id: ShuffleId) -> set[Any]:
    """Return the output partitions that a task reads, itself or in a task fused into it."""
    found: set[Any] = set()
    stack = [task]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            stack.extend(one.values())
        elif isinstance(one, Task):
            if one.func in (shuffle_unpack, rechunk_unpack) and one.args[0] == shuffle_id:
                found.add(one.args[1])
            elif one.func is merge_unpack and shuffle_id in one.args[:2]:
                found.add(one.args[2])
            else:
                stack.extend(arg for arg in one.args if isinstance(arg, (dict, Task)))
    return found


def join_arrays(nested: Any) -> Any:
    """Return one array made of nested lists of arrays of any kind, as stock's rechunk does."""
    # Imported here: most processes that import this module never see an array.
    from dask.array.core import concatenate3

    return concatenate3(nested)


class RunLookup:
    """The patch that lets task threads find a live run without the event loop.

    For any other run they ask the loop, as in stock.

    Parameters
    ----------
    worker
        A live worker.
    is_ours
        Whether a run may be found this way.
    on_first_partition
        Called with the id of a shuffle that has no run here yet, and the input partition that is
        about to request one.
    """

    def __init__(
        self,
        worker: Worker,
        is_ours: Callable[[Any], bool],
        on_first_partition: Callable[[ShuffleId, Any], None],
    ) -> None:
        self._plugin: ShuffleWorkerPlugin = worker.plugins["shuffle"]  # type: ignore[assignment]
        plugin, kind = self._plugin, type(self._plugin)

        def live_run(shuffle_id: ShuffleId) -> Any:
            manager = plugin.shuffle_runs
            run = manager._active_runs.get(shuffle_id)
            if run is None or manager.closed or run.closed or run._exception or not is_ours(run):
                return None
            return run

        def get_or_create_shuffle(shuffle_id: ShuffleId) -> Any:
            return live_run(shuffle_id) or kind.get_or_create_shuffle(plugin, shuffle_id)

        def get_shuffle_run(shuffle_id: ShuffleId, run_id: int) -> Any:
            run = live_run(shuffle_id)
            if run is not None and run.run_id == run_id:
                return run
            return kind.get_shuffle_run(plugin, shuffle_id, run_id)

        def add_partition(data: Any, partition_id: Any, id: ShuffleId, **kwargs: Any) -> int:
            if plugin.shuffle_runs._active_runs.get(id) is None:
                on_first_partition(id, data)
            return kind.add_partition(plugin, data, partition_id, id, **kwargs)

        def barrier(shuffle_id: ShuffleId, run_ids: Sequence[int]) -> int:
            try:
                return kind.barrier(plugin, shuffle_id, run_ids)
            except P2PConsistencyError as error:
                # The run is over, or there is a newer one. A task that still waits for this barrier
                # waits for a run that this worker does not know.
                raise Reschedule() from error

        names = ("shuffle_inputs_done", "shuffle_receive")
        self._worker, self._stock = worker, {name: worker.handlers[name] for name in names}
        stock_inputs_done, stock_receive = self._stock.values()

        async def inputs_done(shuffle_id: ShuffleId, run_id: int) -> Any:
            try:
                return await stock_inputs_done(shuffle_id=shuffle_id, run_id=run_id)
            except RuntimeError as error:
                if worker.status == Status.closing:
                    # The run is closed, or the connections on which to ask for it are. The worker
                    # is about to leave, which restarts the shuffle. An answer before that would
                    # end the computation.
                    await worker.finished()
                if isinstance(error, ShuffleClosedError):
                    # The shuffle restarts. The scheduler gets the same error as from stock, but
                    # no traceback is logged here.
                    return error_message(error, status="uncaught-error")
                raise
            except P2POutOfDiskError as error:
                # Stock's scheduler takes errors of the system for lost connections. It would ask
                # again, and then say that workers are overloaded.
                raise RuntimeError(str(error)) from error

        async def receive(shuffle_id: ShuffleId, run_id: int, data: Any) -> Any:
            try:
                return await stock_receive(shuffle_id=shuffle_id, run_id=run_id, data=data)
            except (Reschedule, P2POutOfDiskError) as error:
                # The shuffle restarts, or gives up. Dask would log an error of a handler with its
                # traceback, and the sender would take a full disk for a lost connection.
                return error_message(error)
            except RuntimeError as error:
                if worker.status != Status.closing:
                    raise
                # As in `inputs_done`. The sender waits until this worker has left.
                closed = error if isinstance(error, ShuffleClosedError) else ShuffleClosedError()
                return error_message(closed)

        worker.handlers["shuffle_inputs_done"] = inputs_done
        worker.handlers["shuffle_receive"] = receive
        plugin.add_partition = add_partition  # type: ignore[method-assign]
        plugin.barrier = barrier  # type: ignore[method-assign]
        plugin.get_or_create_shuffle = get_or_create_shuffle  # type: ignore[method-assign]
        plugin.get_shuffle_run = get_shuffle_run  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Restore the stock methods."""
        for name in ("add_partition", "barrier", "get_or_create_shuffle", "get_shuffle_run"):
            vars(self._plugin).pop(name, None)
        if self._worker.status != Status.closing:
            self._worker.handlers.update(self._stock)


def event_loop(worker: Worker) -> asyncio.AbstractEventLoop:
    """Return the asyncio loop that a worker runs on."""
    loop: asyncio.AbstractEventLoop = worker.loop.asyncio_loop  # type: ignore[attr-defined]
    return loop


def requires_encryption(worker: Worker) -> bool:
    """Return whether this worker's connections are, or must be, encrypted."""
    return worker.address.startswith(("tls://", "wss://")) or bool(
        worker.security.require_encryption
    )


def delivered(comms: Iterable[Comm]) -> int | None:
    """Return the highest delivery rate, in bytes a second, of connections.

    Return None if the kernel reports none: no TCP, another system, or nothing sent yet.
    """
    rates = [0]
    for comm in comms:
        sock = getattr(getattr(comm, "stream", None), "socket", None)
        if sock is not None and sys.platform == "linux":
            with contextlib.suppress(OSError):
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_NBYTES)
                rates.append(delivery_rate(info) or 0)
    return max(rates) or None


def refuse_work(client: Client, error: Exception) -> None:
    """Make every computation of this client raise `error`."""

    def raise_error(*args: Any, **kwargs: Any) -> Any:
        raise error

    client._graph_to_futures = raise_error  # type: ignore[method-assign]


def allow_work(client: Client) -> None:
    """Undo `refuse_work`."""
    vars(client).pop("_graph_to_futures", None)

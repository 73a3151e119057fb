"""A scheduler and worker state machines without a network, in virtual time.

| what | why | taken back by |
|---|---|---|
| `time`, `monotonic` of distributed's modules | show virtual time to code in a virtual loop, and
real time to everything else in the process | `virtual_time` |
| `worker_state_machine.TaskState` | stock hashes by memory address, so the order of sets differs
between runs; here the key is hashed | `virtual_time` |
| `asyncio._get_running_loop` | finds the current loop without an error if there is none | |
| `dask._task_spec.Task`, `TaskRef` | tasks that have dependencies and do nothing | |
| `WorkerState`, `.ready`, events and instructions | a worker's decisions, without a worker | |
| `Scheduler.start_http_server`, `.handle_worker` | overridden: no sockets, and a simulated channel
to each worker | |
| `Scheduler.stream_comms`, `.client_comms`, `.stream_handlers` | messages in both directions | |
| `Scheduler._updated_sys_path` | a scheduler that is not closed leaves its folder in `sys.path` |
`SimulatedScheduler.stop_simulated` |
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from dask._task_spec import Task, TaskRef
from distributed import Scheduler, worker_state_machine
from distributed.core import Status
from distributed.protocol import Serialized, deserialize, serialize, to_serialize
from distributed.protocol.pickle import loads
from distributed.worker_state_machine import (
    AcquireReplicasEvent,
    CancelComputeEvent,
    ComputeTaskEvent,
    Execute,
    ExecuteSuccessEvent,
    FindMissingEvent,
    FreeKeysEvent,
    GatherDep,
    GatherDepBusyEvent,
    GatherDepNetworkFailureEvent,
    GatherDepSuccessEvent,
    Instruction,
    RefreshWhoHasEvent,
    RemoveReplicasEvent,
    RemoveWorkerEvent,
    RetryBusyWorkerEvent,
    RetryBusyWorkerLater,
    SendMessageToScheduler,
    StateMachineEvent,
    StealRequestEvent,
    TaskState,
    UpdateDataEvent,
    WorkerState,
)

from dask_gpurt.errors import SimulationError, TooLargeError
from dask_gpurt.plugins.simulation.virtual_loop import VirtualLoop
from dask_gpurt.simulate.workload import StableStr, Workload

__all__ = [
    "EVENTS",
    "Execute",
    "ExecuteSuccessEvent",
    "FindMissingEvent",
    "GatherDep",
    "GatherDepBusyEvent",
    "GatherDepNetworkFailureEvent",
    "GatherDepSuccessEvent",
    "Instruction",
    "RetryBusyWorkerEvent",
    "RetryBusyWorkerLater",
    "SendMessageToScheduler",
    "SimulatedScheduler",
    "StateMachineEvent",
    "WorkerState",
    "failure",
    "give_value",
    "graph_message",
    "upcoming",
    "virtual_time",
]

#: Messages from the scheduler that map to events of a worker's state machine.
EVENTS: Mapping[str, type[StateMachineEvent]] = {
    "acquire-replicas": AcquireReplicasEvent,
    "cancel-compute": CancelComputeEvent,
    "compute-task": ComputeTaskEvent,
    "free-keys": FreeKeysEvent,
    "refresh-who-has": RefreshWhoHasEvent,
    "remove-replicas": RemoveReplicasEvent,
    "remove-worker": RemoveWorkerEvent,
    "steal-request": StealRequestEvent,
}

#: Modules of distributed that read a clock of their own, and the names they use for it.
CLOCKS = {
    "distributed.active_memory_manager": ("time",),
    "distributed.broker": ("time",),
    "distributed.core": ("time",),
    "distributed.scheduler": ("time", "monotonic"),
    "distributed.semaphore": ("time",),
    "distributed.shuffle._scheduler_plugin": ("time",),
    "distributed.spans": ("time",),
    "distributed.stealing": ("time",),
    "distributed.worker_state_machine": ("time", "monotonic"),
}

#: Loggers that report each worker that joins or dies. In a simulation there are thousands of these
#: lines, and nothing is lost.
TALKATIVE = (
    "distributed.core",
    "distributed.http.proxy",
    "distributed.preloading",
    "distributed.scheduler",
)

#: In the error of a task whose inputs are larger than the memory of its worker.
_TOO_LARGE = "worth of input dependencies"

_RUNNING = threading.Lock()


class _OrderedTaskState(TaskState):
    """A worker's task with a hash that is the same in every process."""

    __slots__ = ("_hash",)
    _hash: int

    def __new__(cls, key: StableStr, *args: Any, **kwargs: Any) -> _OrderedTaskState:
        self: _OrderedTaskState = super().__new__(cls)
        self._hash = hash(key)
        return self

    def __hash__(self) -> int:
        return self._hash


def _worth_telling(record: logging.LogRecord) -> bool:
    if not _is_virtual():
        return True
    # The error of the simulation says that a task does not fit.
    return record.levelno > logging.WARNING and _TOO_LARGE not in record.getMessage()


def _is_virtual() -> bool:
    return isinstance(asyncio._get_running_loop(), VirtualLoop)


def _clock(real: Callable[[], float]) -> Callable[[], float]:
    def now() -> float:
        loop = asyncio._get_running_loop()
        return loop.wall_time() if isinstance(loop, VirtualLoop) else real()

    return now


@contextlib.contextmanager
def virtual_time() -> Iterator[None]:
    """Let distributed read virtual time wherever a virtual loop runs.

    Other threads, and other parts of distributed in this process, read real time.

    Raises
    ------
    SimulationError
        A simulation runs in this process already: its patches could not be restored.
    """
    if not _RUNNING.acquire(blocking=False):
        raise SimulationError("a process runs one simulation at a time")
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        for module_name, names in CLOCKS.items():
            module = importlib.import_module(module_name)
            for name in names:
                replace(module, name, _clock(getattr(module, name)))
        replace(worker_state_machine, "TaskState", _OrderedTaskState)
        for name in TALKATIVE:
            logging.getLogger(name).addFilter(_worth_telling)
        yield
    finally:
        for name in TALKATIVE:
            logging.getLogger(name).removeFilter(_worth_telling)
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)
        _RUNNING.release()


class Channel(Protocol):
    """The scheduler's end of a connection, as far as distributed uses it."""

    def send(self, *messages: dict[str, Any]) -> None:
        """Send messages, in this order."""
        ...


class SimulatedScheduler(Scheduler):
    """A distributed scheduler without a network.

    Parameters
    ----------
    channels
        Makes the scheduler's end of the connection to a joining worker, given its address.
    """

    def __init__(self, channels: Callable[[str], Channel], **options: Any) -> None:
        self._channels = channels
        super().__init__(dashboard=False, needs_workdir=False, **options)
        self.status = Status.running

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Serve nothing."""

    async def handle_worker(self, comm: Any, worker: str) -> None:
        """Replace the stream that `add_worker` opened with a channel, and forward its buffer."""
        opened = self.stream_comms[worker]
        channel = self._channels(worker)
        self.stream_comms[worker] = channel  # type: ignore[assignment]
        channel.send(*opened.buffer)

    async def start_plugins(self) -> None:
        """Start the same plugins as a scheduler on the network, without its network monitoring."""
        for plugin in list(self.plugins.values()):
            await plugin.start(self)

    def coerce_address(self, addr: Any, resolve: bool = True) -> str:
        """Resolve worker names, but never host names."""
        return super().coerce_address(addr, resolve=False)

    def add_simulated_client(self, client: str, channel: Channel) -> None:
        """Let a client submit graphs; answers go through the channel."""
        self.client_comms[client] = channel  # type: ignore[assignment]

    async def take_graph(self, message: dict[str, Any], client: str) -> None:
        """Submit a client's graph."""
        handler = self.stream_handlers[message.pop("op")]
        # Stock's validation refuses keys whose type is not exactly `str`.
        validate, self.validate = self.validate, False
        await handler(client=client, **message)
        self.validate = validate

    def restrict(self, key: str, worker: str) -> None:
        """Let only one worker run a task, as the owner of an output of a shuffle."""
        self.tasks[key].worker_restrictions = {worker}

    def receive(self, message: dict[str, Any], worker: str) -> None:
        """Handle a message from a worker, as from a connection."""
        self.stream_handlers[message.pop("op")](worker=worker, **message)

    def stop_simulated(self) -> None:
        """Stop periodic callbacks and free resources."""
        for callback in self.periodic_callbacks.values():
            callback.stop()
        self.monitor.close()
        if self._updated_sys_path:
            sys.path.remove(self.local_directory)
        self.status = Status.closed


def failure(message: Mapping[str, Any]) -> SimulationError:
    """Return the error in the message that the scheduler gave up a task."""
    error = message.get("exception")
    # The scheduler made it in this process.
    if isinstance(error, bytes):
        error = loads(error)
    elif isinstance(error, Serialized):
        error = deserialize(error.header, error.frames)
    if _TOO_LARGE in str(error):
        return TooLargeError(f"the inputs of one task do not fit into a worker: {error!s:.400}")
    return SimulationError(f"the scheduler gave up {message.get('key')}: {error!s:.400}")


def give_value(state: WorkerState, key: StableStr, nbytes: int) -> None:
    """Add a value that nobody sent to a worker's memory."""
    state.handle_stimulus(UpdateDataEvent(data={key: nbytes}, stimulus_id="update-data-simulated"))
    # The state machine took the size of the number that stands for the value.
    ts = state.tasks[key]
    state.nbytes += nbytes - ts.get_nbytes()
    ts.nbytes = nbytes


def upcoming(state: WorkerState, count: int) -> list[TaskState]:
    """Return the next tasks that a worker runs, of those whose inputs are there."""
    return list(state.ready.peekn(count))


class _Graph:
    """The tasks of a workload, as the expression that a client sends."""

    def __init__(self, rows: dict[StableStr, tuple[list[StableStr], bool]]) -> None:
        self._rows = rows

    def __dask_graph__(self) -> dict[StableStr, Task]:
        return {
            key: Task(key, nothing, *map(TaskRef, dependencies), _data_producer=produces_data)
            for key, (dependencies, produces_data) in self._rows.items()
        }

    def __dask_annotations__(self) -> dict[str, Any]:
        return {}


def nothing(*inputs: object) -> None:
    """Do nothing; the function of every modelled task."""


def graph_message(
    workload: Workload, positions: Sequence[int], wanted: Sequence[StableStr]
) -> dict[str, Any]:
    """Return the message with which a client submits some tasks of a workload."""
    models = workload.tasks
    graph = _Graph(
        {
            models[rank].key: (
                [models[position].key for position in models[rank].dependencies],
                models[rank].produces_data,
            )
            for rank in positions
        }
    )
    return {
        "op": "update-graph",
        "expr_ser": Serialized(*serialize(to_serialize(graph), on_error="raise")),
        "keys": set(wanted),
        "internal_priority": {models[rank].key: rank for rank in positions},
        "submitting_task": None,
        "span_metadata": {"collections": [{"type": "simulated"}]},
        "stimulus_id": "update-graph-simulated",
    }

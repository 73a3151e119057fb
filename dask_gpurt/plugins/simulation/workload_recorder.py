"""Recorder of a live cluster's computation, for replay in a simulation.

A scheduler plugin records each task when its result first comes into memory: dependencies,
duration, size. It changes nothing and keeps no data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed import SchedulerPlugin

from dask_gpurt.errors import ActivationError, WorkloadError
from dask_gpurt.plugins import activation
from dask_gpurt.simulate.workload import StableStr, TaskModel, Workload

if TYPE_CHECKING:
    from distributed import Client, Scheduler
    from distributed.scheduler import TaskState

NAME = "gpurt-recorder"
#: Most tasks in a recording, each of some hundreds of bytes on the scheduler.
MAX_TASKS = 1_000_000


class WorkloadRecorder(SchedulerPlugin):
    """A scheduler plugin that records tasks."""

    name = NAME

    def __init__(self, max_tasks: int = MAX_TASKS) -> None:
        self._max_tasks = max_tasks
        self._scheduler: Scheduler | None = None
        #: By key: priority, keys of its dependencies, seconds, bytes, whether it produces data.
        self._rows: dict[str, tuple[Any, tuple[str, ...], float, int, bool]] = {}
        self._wanted: dict[str, None] = {}
        self._is_full = False

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def update_graph(self, scheduler: Scheduler, *, keys: set[Key], **kwargs: Any) -> None:
        self._wanted.update(dict.fromkeys(sorted(map(str, keys))))

    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if start != "processing" or finish != "memory" or self._scheduler is None:
            return
        ts = self._scheduler.tasks[key]
        seconds = sum(
            one["stop"] - one["start"]
            for one in kwargs.get("startstops", ())
            if one["action"] == "compute"
        )
        for dependency in ts.dependencies:
            # A result that was in memory before the recording counts as present from the start.
            if str(dependency.key) not in self._rows:
                self._write(dependency, 0.0, ())
        self._write(ts, seconds, sorted(str(one.key) for one in ts.dependencies))

    def _write(self, ts: TaskState, seconds: float, needed: Sequence[str]) -> None:
        key = str(ts.key)
        if key in self._rows or self._is_full:
            return
        if len(self._rows) >= self._max_tasks:
            self._is_full = True
            return
        self._rows[key] = (
            ts.priority or (),
            tuple(needed),
            max(seconds, 0.0),
            max(ts.get_nbytes(), 0),
            ts.run_spec is None or bool(ts.run_spec.data_producer),
        )

    def workload(self, name: str) -> Workload:
        """Return the workload recorded so far.

        Raises
        ------
        WorkloadError
            Nothing was recorded, or more than `max_tasks` tasks ran.
        """
        if self._is_full:
            raise WorkloadError(f"{name}: more than {self._max_tasks} tasks ran")
        keys = sorted(self._rows, key=lambda key: (self._rows[key][0], key))
        position = {key: number for number, key in enumerate(keys)}
        tasks = []
        for key in keys:
            _, needed, seconds, nbytes, produces_data = self._rows[key]
            dependencies = tuple(position[one] for one in needed)
            tasks.append(TaskModel(StableStr(key), dependencies, seconds, nbytes, produces_data))
        wanted = tuple(position[key] for key in self._wanted if key in position)
        return Workload(name, tuple(tasks), wanted)


class Recording:
    """A recording in progress on a client's cluster."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def workload(self, name: str) -> Workload:
        """Return the workload since the recording began.

        Raises
        ------
        WorkloadError
            Nothing was recorded, or more than `MAX_TASKS` tasks ran.
        """
        text = self._client.run_on_scheduler(  # type: ignore[no-untyped-call]
            recorded_json, name
        )
        return Workload.from_json(text)


def recorded_json(name: str, dask_scheduler: Scheduler) -> str:
    """Return the recorded trace on a scheduler. Runs there; only a reference to it is sent."""
    recorder: Any = dask_scheduler.plugins[NAME]
    text: str = recorder.workload(name).to_json()
    return text


@contextlib.contextmanager
def recorded(client: Client) -> Iterator[Recording]:
    """Record a cluster's computation in a `with` block. Get the workload inside the block.

    The scheduler needs this package too.

    Raises
    ------
    ActivationError
        The scheduler has another version of Python, Dask or dask_gpurt, or lacks dask_gpurt.
    """
    if problem := client.sync(activation.scheduler_differs, client):
        raise ActivationError(problem)
    client.register_plugin(WorkloadRecorder())
    try:
        yield Recording(client)
    finally:
        client.unregister_scheduler_plugin(NAME)

"""Root tasks that need no GPU, in a cluster where only some workers have one.

Such a task goes to a worker without a GPU, if one has a free thread. So a thread beside a GPU stays
free for a task that needs the GPU. Later tasks find their inputs in host memory on a worker without
a GPU. If all those workers are busy, the task goes where it would have gone: no
worker stays idle for it. This module looks at one task; `root_tasks` asks it last.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from dask_gpurt.placement.siblings import MAX_DEPENDENTS
from dask_gpurt.plugins.placement.scheduler_view import (
    PlacementView,
    is_gpu_type,
    tasks_per_thread,
)

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState


class HostTasks:
    """Placement of root tasks that need no GPU, on one scheduler."""

    def __init__(self, scheduler: Scheduler, view: PlacementView) -> None:
        self._scheduler = scheduler
        self._view = view

    def instead(self, ts: TaskState, chosen: WorkerState) -> WorkerState:
        """Return the worker for a root task that was about to go to `chosen`."""
        with_gpu = self._view.with_gpu
        if chosen.address not in with_gpu or not _needs_no_gpu(ts):
            return chosen
        free = (
            ws
            for ws in self._scheduler.idle_task_count
            if ws.address not in with_gpu and tasks_per_thread(ws) < 1
        )
        return min(free, key=_load, default=chosen)


def _needs_no_gpu(ts: TaskState) -> bool:
    """Return whether results of this kind are in host memory, and no GPU is known to need them.

    It is False until a task of the kind has ended.
    """
    types = ts.prefix.types
    if not types or any(map(is_gpu_type, types)):
        return False
    return not any(
        later.resource_restrictions
        or later.worker_restrictions
        or later.host_restrictions
        or any(map(is_gpu_type, later.prefix.types))
        for later in islice(ts.dependents, MAX_DEPENDENTS)
    )


def _load(ws: WorkerState) -> tuple[float, int, str]:
    return tasks_per_thread(ws), ws.nbytes, ws.address

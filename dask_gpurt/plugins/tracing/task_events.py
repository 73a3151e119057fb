"""Tasks in a trace as the scheduler sees them: when each was ready, assigned and known, and what it
needed. Runs for every step of every task, so encoding is left to the recorder's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from distributed.metrics import time

from dask_gpurt.plugins.tracing.event_recorder import EventRecorder
from dask_gpurt.tracing.records import RecordEncoder, key_hash

if TYPE_CHECKING:
    from distributed import Scheduler

_BARRIER = "shuffle-barrier-"
#: Longer than any task waits.
_LONG_S = 1e7
#: Most barriers that are remembered, to notice those that run again.
_MOST_BARRIERS = 10_000


class TaskEvents:
    """Records the tasks of a scheduler. On its event loop."""

    def __init__(self, scheduler: Scheduler, recorder: EventRecorder) -> None:
        self._scheduler, self._recorder = scheduler, recorder
        #: By key: when all inputs were in memory; when a worker was told, and its address.
        self._ready: dict[Any, float] = {}
        self._assigned: dict[Any, tuple[float, str]] = {}
        #: By key: when its graph came.
        self._submitted: dict[Any, float] = {}
        #: By key: number of the newest run.
        self._numbers: dict[Any, int] = {}
        self._n = 0
        self._barriers: set[str] = set()
        # Workers have these already, and may have begun: nobody knows since when.
        now_s = perf_counter() - _LONG_S
        for worker in scheduler.workers.values():
            for task in worker.processing:
                self._assigned[task.key] = now_s, worker.address

    def instant(self, name: str, detail: str = "", at_s: float | None = None) -> None:
        """Record that something happened, by default now."""
        now_s = perf_counter() if at_s is None else at_s
        self._recorder.add(lambda encoder: encoder.instant(name, now_s, detail))

    def submitted(self, keys: Iterable[Any]) -> None:
        """Note that a graph with these tasks came. Those under way are of an earlier graph."""
        now_s, tasks = perf_counter(), self._scheduler.tasks
        self._submitted |= dict.fromkeys((k for k in keys if tasks[k].state == "released"), now_s)

    def transition(self, key: Any, start: str, finish: str, facts: dict[str, Any]) -> None:
        """Note a step of a task."""
        if finish == "processing":
            now_s = perf_counter()
            worker = self._scheduler.tasks[key].processing_on
            self._assigned[key] = now_s, worker.address if worker is not None else ""
            if start == "waiting":
                self._ready[key] = now_s
        elif start == "waiting" and finish in ("queued", "no-worker"):
            self._ready[key] = perf_counter()
        elif finish == "memory" and start == "processing":
            self._finished(key, facts)
        elif finish == "waiting":
            if isinstance(key, str) and key.startswith(_BARRIER):
                self._barrier_waits(key)
        elif finish in ("released", "erred", "forgotten"):
            if start == "processing" and key in self._assigned:
                self._ended_unseen(key)
            self._ready.pop(key, None)
            self._assigned.pop(key, None)
            if finish == "forgotten":
                self._numbers.pop(key, None)
                self._submitted.pop(key, None)
                # A program may compute the same shuffle again.
                self._barriers.discard(key)

    def _barrier_waits(self, key: str) -> None:
        if key in self._barriers:
            self.instant("shuffle restarts", key.removeprefix(_BARRIER))
        elif len(self._barriers) < _MOST_BARRIERS:
            self._barriers.add(key)

    def running(self) -> dict[Any, str]:
        """Return the workers of the tasks that have begun and not finished, by key."""
        tasks = ((key, self._scheduler.tasks.get(key)) for key in self._assigned)
        # Another worker may have taken a task over.
        return {
            key: task.processing_on.address
            for key, task in tasks
            if task is not None and task.processing_on is not None
        }

    def note_running(self, running: Mapping[Any, str]) -> None:
        """Record tasks that were `running` when the trace ended. They may have finished since."""
        for key, worker in running.items():
            self._assigned[key] = self._assigned[key][0], worker
            self._ended_unseen(key)

    def _ended_unseen(self, key: Any) -> None:
        """Record a run of which only its worker may know when it began and ended."""
        known_s = perf_counter()
        assigned_s, worker = self._assigned[key]
        ready_s, submitted_s = self._ready.get(key, assigned_s), self._submitted.get(key)
        needed = self._needed(key)
        self._n += 1
        number, recorder = self._n, self._recorder

        def encode(encoder: RecordEncoder) -> None:
            run = number, recorder.shown(key), worker, ready_s, assigned_s, known_s, 0
            encoder.assigned(*run, submitted_s=submitted_s, is_seen=False)
            encoder.times(number, key_hash(key), known_s, known_s, known_s, 0)
            encoder.needs(number, needed)

        recorder.add(encode)

    def _needed(self, key: Any) -> list[int]:
        task, numbers = self._scheduler.tasks.get(key), self._numbers
        return [numbers[one.key] for one in task.dependencies if one.key in numbers] if task else []

    def _finished(self, key: Any, facts: dict[str, Any]) -> None:
        known_s = perf_counter()
        assigned_s, _ = self._assigned.pop(key, (known_s, ""))
        ready_s, submitted_s = self._ready.pop(key, assigned_s), self._submitted.get(key)
        task = self._scheduler.tasks.get(key)
        needed = self._needed(key)
        self._n += 1
        number = self._numbers[key] = self._n
        nbytes = task.get_nbytes() if task is not None else 0
        worker = facts.get("worker") or ""
        # Dask has its times on its own clock.
        to_here_s = known_s - time()
        steps, thread = facts.get("startstops") or (), facts.get("thread") or 0
        recorder = self._recorder

        def encode(encoder: RecordEncoder) -> None:
            computed = [one for one in steps if one["action"] == "compute"]
            if not computed:
                return
            start_s, end_s = (float(computed[-1][one]) + to_here_s for one in ("start", "stop"))
            fetches = (one for one in steps if one["action"] == "transfer")
            fetched = [float(one["stop"]) + to_here_s for one in fetches]
            here_s = max(fetched, default=min(assigned_s, start_s))
            here_s = min(here_s, start_s)
            run = number, recorder.shown(key), worker, ready_s, assigned_s, known_s, nbytes
            encoder.assigned(*run, submitted_s=submitted_s)
            encoder.times(number, key_hash(key), here_s, start_s, end_s, int(thread))
            encoder.needs(number, needed)

        recorder.add(encode)

"""Tasks in a trace as the scheduler sees them: when each was ready, assigned and known, and what it
needed. Runs for every step of every task, so encoding is left to the recorder's thread.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from distributed.metrics import time

from dask_gpurt.plugins.tracing.event_recorder import EventRecorder
from dask_gpurt.tracing.records import RecordEncoder, key_hash

if TYPE_CHECKING:
    from distributed import Scheduler

_BARRIER = "shuffle-barrier-"
#: Most barriers that are remembered, to notice those that run again.
_MOST_BARRIERS = 10_000


class TaskEvents:
    """Records the tasks of a scheduler. On its event loop."""

    def __init__(self, scheduler: Scheduler, recorder: EventRecorder) -> None:
        self._scheduler, self._recorder = scheduler, recorder
        #: By key: when all inputs were in memory, and when a worker was told.
        self._ready: dict[Any, float] = {}
        self._assigned: dict[Any, float] = {}
        #: By key: number of the newest run.
        self._numbers: dict[Any, int] = {}
        self._n = 0
        self._barriers: set[str] = set()

    def instant(self, name: str, detail: str = "", at_s: float | None = None) -> None:
        """Record that something happened, by default now."""
        now_s = perf_counter() if at_s is None else at_s
        self._recorder.add(lambda encoder: encoder.instant(name, now_s, detail))

    def transition(self, key: Any, start: str, finish: str, facts: dict[str, Any]) -> None:
        """Note a step of a task."""
        if finish == "processing":
            now_s = perf_counter()
            self._assigned[key] = now_s
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
            self._ready.pop(key, None)
            self._assigned.pop(key, None)
            if finish == "forgotten":
                self._numbers.pop(key, None)

    def _barrier_waits(self, key: str) -> None:
        if key in self._barriers:
            self.instant("shuffle restarts", key.removeprefix(_BARRIER))
        elif len(self._barriers) < _MOST_BARRIERS:
            self._barriers.add(key)

    def _finished(self, key: Any, facts: dict[str, Any]) -> None:
        known_s = perf_counter()
        assigned_s = self._assigned.pop(key, known_s)
        ready_s = self._ready.pop(key, assigned_s)
        task = self._scheduler.tasks.get(key)
        numbers = self._numbers
        needed = (
            [numbers[one.key] for one in task.dependencies if one.key in numbers] if task else []
        )
        self._n += 1
        number = numbers[key] = self._n
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
            shown = recorder.shown(key)
            encoder.assigned(number, shown, worker, ready_s, assigned_s, known_s, nbytes)
            encoder.times(number, key_hash(key), here_s, start_s, end_s, int(thread))
            encoder.needs(number, needed)

        recorder.add(encode)

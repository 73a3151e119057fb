"""Times of tasks are right although Dask adds a delay that changes while a task runs."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from dask_gpurt.plugins.tracing.traced_worker import TracedWorker
from dask_gpurt.tracing.records import RUN, RecordEncoder, decode


class RunsOfTasks(TracedWorker):
    """A trace on a worker that has one task, and nothing else."""

    def __init__(self, delay_s):
        self._task = SimpleNamespace(startstops=[])
        tasks = {"x": self._task}
        self._worker = SimpleNamespace(scheduler_delay=delay_s, state=SimpleNamespace(tasks=tasks))
        self._here, self._begun, self._is_over = {}, {}, False
        self.encoder = RecordEncoder()
        self.recorder = SimpleNamespace(
            add=lambda encode: encode(self.encoder), key_number=lambda key: 1
        )

    def run(self, delay_s):
        """Run the task for a moment, with this delay in Dask's times; return its times."""
        began, began_s = time.time(), time.perf_counter()
        ended, ended_s = time.time(), time.perf_counter()
        times = {"start": began + delay_s, "stop": ended + delay_s}
        self._task.startstops.append({"action": "compute", **times})
        return began_s, ended_s


@pytest.mark.parametrize("used", ["before", "after"])
@pytest.mark.parametrize("change_s", [-0.3, 0.3, 10.0])
def test_a_delay_that_changes_moves_no_task(used, change_s):
    traced = RunsOfTasks(delay_s=0.1)
    traced.transition("x", "waiting", "ready")
    traced.transition("x", "ready", "executing")
    # A heartbeat sets the delay before or after Dask has read it.
    expected = traced.run(0.1 if used == "before" else 0.1 + change_s)
    traced._worker.scheduler_delay = 0.1 + change_s
    traced.transition("x", "executing", "memory")
    (row,) = decode(traced.encoder.block()).records
    assert row["kind"] == RUN
    assert (row["start_s"], row["end_s"]) == pytest.approx(expected, abs=1e-2)

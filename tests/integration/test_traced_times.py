"""Times of tasks are right although Dask adds a delay that changes at each heartbeat."""

from __future__ import annotations

import time
from itertools import cycle

import pytest
from distributed import WorkerPlugin
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt.plugins.patches.p2p import event_loop


class DelayChanges(WorkerPlugin):
    """Sets another delay after a task has become `executing`, but before Dask reads the delay."""

    DELAYS_S = (5e-3, -5e-3, 10.0)

    def setup(self, worker):
        self._worker, self._delays = worker, cycle(self.DELAYS_S)

    def transition(self, key, start, finish, **more):
        if finish == "executing":
            event_loop(self._worker).call_soon(self._change)

    def _change(self):
        time.sleep(0.02)  # a busy event loop: times that are wrong by less look possible
        self._worker.scheduler_delay = next(self._delays)


class DelayIsSet(DelayChanges):
    """Sets another delay while the task runs, as heartbeats do."""

    def transition(self, key, start, finish, **more):
        if start == "executing":
            time.sleep(0.02)
            self._worker.scheduler_delay = next(self._delays)


def perf_counters(_number):
    return time.perf_counter(), time.perf_counter()


@pytest.mark.parametrize("change", [DelayChanges, DelayIsSet])
def test_a_delay_that_changes_moves_no_task(tmp_path, change):
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config={"gpurt.enabled": True})
    async def test(c, s, a):
        await c.register_plugin(change())
        async with dask_gpurt.trace(c, tmp_path / "x.json", keys="full") as traced:
            futures = c.map(perf_counters, range(10), pure=False)
            times = dict(zip([one.key for one in futures], await c.gather(futures), strict=True))
        # The begin of the trace is not known here, so only differences count.
        later_s = [one.start_s - times[one.key][0] for one in traced.trace.tasks]
        assert len(later_s) == 10 and max(later_s) - min(later_s) < 2e-3

    test()

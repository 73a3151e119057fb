"""Times of tasks are right although Dask's delay changes, and of tasks that outlast the trace."""

from __future__ import annotations

import asyncio
import tempfile
import time
from itertools import cycle
from statistics import median

import pytest
from distributed import Event, WorkerPlugin, wait, worker_client
from distributed.utils_test import async_poll_for, gen_cluster

import dask_gpurt
from dask_gpurt.plugins.patches.p2p import event_loop
from dask_gpurt.tracing.report.task_stories import COMPUTING
from dask_gpurt.tracing.report.trace_report import report_of


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
        # The begin of the trace is not known here, so only differences count. A thread may lose its
        # core between Dask's clock and its own: then it starts earlier, or ends later.
        tasks = traced.trace.tasks
        starts_s = [one.start_s - times[one.key][0] for one in tasks]
        ends_s = [one.end_s - times[one.key][1] for one in tasks]
        assert len(tasks) == 10
        assert max(starts_s) < median(starts_s) + 2e-3
        assert min(ends_s) > median(ends_s) - 2e-3

    test()


ONE = [("127.0.0.1", 1)]


def waits(name):
    Event(f"begun-{name}").set()
    Event(f"may-end-{name}").wait()


def one_fails(_number, _failed=[]):  # noqa: B006  -- it fails once in the process
    if not _failed:
        _failed.append(True)
        raise OSError("once")


@gen_cluster(client=True, nthreads=ONE, config={"gpurt.enabled": True})
async def test_tasks_that_run_before_or_after_count_in_part(c, s, a):
    first = c.submit(waits, 1, key="first")
    await Event("begun-1").wait()
    queued = [
        c.submit(waits, n, key=f"queued-{n}", workers=[a.address], priority=-n) for n in (2, 3)
    ]
    while len(a.state.tasks) < 3:
        await asyncio.sleep(0)
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/x.json", keys="full") as traced:
            for number in range(50):  # longer than the clocks of the two are apart
                await c.run(perf_counters, number)
            await Event("may-end-1").set()
            await first
            await Event("may-end-2").set()
            await queued[0]
            await Event("begun-3").wait()
        await Event("may-end-3").set()
        await wait(queued)
    trace = traced.trace
    tasks = {one.key: one for one in trace.tasks}
    assert list(tasks) == ["first", "queued-2", "queued-3"]
    # One thread ran them one after the other, from the begin to the end.
    assert tasks["first"].start_s == 0.0 and tasks["queued-3"].end_s == trace.wall_s
    ran_s = sum(one.end_s - one.start_s for one in trace.tasks)
    between_s = trace.wall_s - ran_s
    assert 0 <= between_s < trace.wall_s and min(one.end_s - one.start_s for one in trace.tasks) > 0
    assert len({one.thread for one in trace.tasks}) == 1
    assert report_of(trace).path.seconds(COMPUTING) == pytest.approx(ran_s)


@gen_cluster(client=True, nthreads=ONE, config={"gpurt.enabled": True})
async def test_attempts_that_failed_count(c, s, a):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/x.json", keys="full") as traced:
            await c.submit(one_fails, 1, key="once", retries=1)
            await wait(c.submit(lambda: 1 / 0, key="never"))
    assert [one.key for one in traced.trace.tasks] == ["once", "once", "never"]
    assert all(one.end_s > one.start_s for one in traced.trace.tasks)
    assert len({one.thread for one in traced.trace.tasks}) == 1


def waits_away(name):
    with worker_client() as client:
        Event(name, client=client).wait()
    return time.perf_counter()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config={"gpurt.enabled": True})
async def test_the_time_away_from_a_thread_is_known(c, s, a, b):
    """Tasks that outlast the trace have it, too."""
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/x.json", keys="full") as traced:
            ends = c.submit(waits_away, "soon", key="ends", workers=[a.address])
            stays = c.submit(waits_away, "late", key="stays", workers=[b.address])
            await async_poll_for(lambda: a.state.long_running and b.state.long_running, timeout=60)
            here = c.submit(time.sleep, 0.2, key="here", workers=[a.address])
            await here
            await Event("soon").set()
            await ends
        await Event("late").set()
        await stays
    tasks = {one.key: one for one in traced.trace.tasks}
    assert tasks["here"].away_s == 0
    assert tasks["ends"].end_s - tasks["ends"].away_s <= tasks["here"].start_s + 0.05
    assert 0.2 <= tasks["ends"].away_s <= tasks["ends"].end_s - tasks["ends"].start_s
    assert tasks["stays"].away_s >= 0.2
    report = report_of(traced.trace)
    assert all(row.busy_share <= 1 for row in report.workers)

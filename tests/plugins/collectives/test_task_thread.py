"""A rank's thread works for the event loop until its operation ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dask_gpurt.errors import CollectiveError
from dask_gpurt.plugins.collectives.groups.task_thread import TaskThread
from tests.limits import HANG_S


def in_a_loop(scenario):
    """Run a scenario with a thread that serves, and the future of its end."""

    async def run():
        thread = TaskThread(asyncio.get_running_loop())
        served = asyncio.create_task(asyncio.to_thread(thread.serve))
        await scenario(thread, served)

    asyncio.run(run())


def test_jobs_run_in_the_thread_and_return_results_and_errors():
    async def scenario(thread, served):
        assert await thread.run(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0)
        thread.end(None)
        await served

    in_a_loop(scenario)


def test_the_error_of_an_operation_is_raised_in_the_thread():
    async def scenario(thread, served):
        thread.end(CollectiveError("rank 3 is lost"))
        with pytest.raises(CollectiveError, match="rank 3 is lost"):
            await served

    in_a_loop(scenario)


def test_a_job_after_the_end_is_refused_at_once():
    """No thread would ever do it: the message that asks would wait for ever."""

    async def scenario(thread, served):
        thread.end(None)
        await served
        jobs = []
        late = asyncio.create_task(thread.run(lambda: jobs.append("late")))
        await asyncio.wait({late}, timeout=5)
        assert late.cancelled()
        assert not jobs

    in_a_loop(scenario)


def test_the_end_drops_jobs_that_have_not_begun():
    async def scenario(thread, served):
        is_busy, may_go = threading.Event(), threading.Event()

        def first():
            is_busy.set()
            may_go.wait(HANG_S)

        running = asyncio.create_task(thread.run(first))
        await asyncio.to_thread(is_busy.wait, HANG_S)
        waiting = asyncio.create_task(thread.run(lambda: None))
        await asyncio.sleep(0)
        thread.end(None)
        for job in (running, waiting):
            with pytest.raises(asyncio.CancelledError):
                await job
        may_go.set()
        await served

    in_a_loop(scenario)

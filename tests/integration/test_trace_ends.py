"""Workers that close, and tasks that finish, while a trace is being stopped."""

from __future__ import annotations

import asyncio
import tempfile
import threading

from distributed import Client, Event, wait
from distributed.utils_test import async_poll_for, gen_cluster

import dask_gpurt
from dask_gpurt.plugins.tracing.ledger_hook import TRACE
from tests.integration.traced import trace_files

ON = {"gpurt.enabled": True, "gpurt.strict": True}
TWO = [("127.0.0.1", 2)] * 2


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=ON)
async def test_a_worker_may_close_while_its_trace_ends(c, s, worker):
    """A trace leaves the extensions of a worker alone that goes through them."""
    may_stop, left = threading.Event(), []

    class First:
        """An extension whose close waits for the end of the trace."""

        async def close(self):
            may_stop.set()
            await detaching
            left.extend(worker.extensions)

    async with Client(s.address, asynchronous=True) as other:
        await dask_gpurt.trace(other, "x.json").__aenter__()
        traced = worker.extensions[TRACE]
        stop = traced.recorder.stop
        traced.recorder.stop = lambda: (may_stop.wait(60), stop())
        detaching = asyncio.create_task(traced.detach())
        found = {"first": First(), **worker.extensions}
        worker.extensions.clear()
        worker.extensions.update(found)
        await asyncio.sleep(0)
        await worker.close()
    assert worker.status.name == "closed" and TRACE in left
    assert not list(trace_files(worker.local_directory))


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_tasks_that_finish_while_the_trace_ends_are_in_it(c, s, *workers):
    """A worker whose event loop is busy holds up the end."""
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced:
            ends = workers[0].handlers["gpurt_trace_end"]

            async def late(trace):
                await Event("go", client=c).set()
                await wait(running)
                return await ends(trace=trace)

            def pause():
                Event("go").wait()

            workers[0].handlers["gpurt_trace_end"] = late
            running = [
                c.submit(
                    lambda: Event("go").wait(), key=f"waits-{number}", workers=[worker.address]
                )
                for number, worker in enumerate(workers)
            ]
            await async_poll_for(
                lambda: all(worker.state.executing_count for worker in workers), timeout=60
            )
    assert [task.key for task in traced.trace.tasks] == ["waits"] * len(workers)

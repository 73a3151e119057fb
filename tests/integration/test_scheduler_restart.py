"""A client that finds its scheduler started anew switches the runtime on again."""

from __future__ import annotations

import asyncio
import contextlib
from unittest import mock

import dask
import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import async_poll_for, gen_test

import dask_gpurt
from dask_gpurt.plugins import activation
from tests.integration.flagged_programs import shuffled
from tests.limits import HANG_S


@contextlib.asynccontextmanager
async def scheduler_and_worker(port=0):
    """Start both without the flag: only the client has it."""
    async with (
        Scheduler(port=port, dashboard_address=":0") as scheduler,
        Worker(scheduler.address, nthreads=1) as worker,
    ):
        yield scheduler, worker


@pytest.mark.parametrize("is_disabled", [False, True])
@gen_test(timeout=2 * HANG_S)
async def test_the_runtime_is_on_after_a_restart_of_the_scheduler(is_disabled):
    async with contextlib.AsyncExitStack() as stack:
        scheduler, _ = await stack.enter_async_context(scheduler_and_worker())
        port = scheduler.port
        with dask.config.set({"gpurt.enabled": True}):
            client = Client(scheduler.address, asynchronous=True, timeout=HANG_S)
            await client
        assert (await dask_gpurt.status(client))["active"]
        if is_disabled:
            await dask_gpurt.disable(client)
        await stack.aclose()
        async with scheduler_and_worker(port) as (again, _), client:
            await async_poll_for(lambda: client.id in again.clients, timeout=HANG_S)
            assert len(await client.compute(shuffled())) > 0
            if is_disabled:
                assert not (await dask_gpurt.status(client))["active"]
            else:
                await async_poll_for(lambda: "gpurt" in again.plugins, timeout=HANG_S)


def reconnecting():
    return [one for one in asyncio.all_tasks() if one.get_name() == "gpurt-reconnect"]


@gen_test()
async def test_a_client_that_lost_its_connection_changes_nothing():
    """Another client switched the runtime off meanwhile."""
    async with scheduler_and_worker() as (scheduler, _):
        with dask.config.set({"gpurt.enabled": True}):
            async with Client(scheduler.address, asynchronous=True) as client:
                async with Client(scheduler.address, asynchronous=True) as other:
                    await dask_gpurt.disable(other)
                with mock.patch.object(
                    activation, "read_status", wraps=activation.read_status
                ) as asked:
                    client.scheduler_comm.comm.abort()
                    await async_poll_for(lambda: asked.called and not reconnecting(), HANG_S)
                status = await dask_gpurt.status(client)
                assert not status["active"] and status["reason"] == "disabled by a client"

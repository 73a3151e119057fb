"""The runtime can be switched on and off while clients and workers come, go or do not answer."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from unittest.mock import patch

import dask
import dask.array as da
import pandas as pd
import pytest
from distributed import Client, LocalCluster, Worker
from distributed.utils import open_port
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster

import dask_gpurt
from dask_gpurt import config
from dask_gpurt.errors import ActivationError, ConfigError
from dask_gpurt.plugins.collectives.groups.group_messages import GroupFailure
from dask_gpurt.plugins.scheduler.gpurt_scheduler import GpurtScheduler, activation_lock
from dask_gpurt.plugins.tracing.ledger_hook import TRACE
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from tests.conftest import stock_client
from tests.integration.comparing import collection
from tests.integration.flagged_programs import flagged

#: For tests in which nothing may wait for a silent worker: such a wait exceeds the test's time.
waits_do_not_end = patch("dask_gpurt.plugins.scheduler.readiness.JOIN_TIMEOUT_S", 1_000.0)


@pytest.mark.parametrize("owns_loop", [False, True])
def test_closed_client_is_refused(owns_loop):
    """Its event loop may be closed, too, so it cannot ask the cluster."""
    with stock_client(1) as connected:
        client = Client(connected.cluster.scheduler_address) if owns_loop else connected
        client.close()
        for ask in (dask_gpurt.enable, dask_gpurt.disable, dask_gpurt.status):
            with pytest.raises(ActivationError, match="not connected to a scheduler"):
                ask(client)
        with pytest.raises(ActivationError, match="not connected to a scheduler"):
            dask_gpurt.explain(client, "key")


def test_connecting_client_does_not_ask_every_worker():
    options = {"n_workers": 2, "processes": False, "dashboard_address": ":0"}
    with flagged(), LocalCluster(silence_logs=False, **options) as in_process:
        with Client(in_process, set_as_default=False) as first:
            assert dask_gpurt.status(first)["active"]
            asked = []

            async def report(most):
                asked.append(True)
                return {}

            for worker in in_process.workers.values():
                worker.handlers["gpurt_report"] = report
            with Client(in_process, set_as_default=False) as second:
                assert not asked
                dask_gpurt.enable(second)
                assert not asked


def held_up(worker):
    """Make a worker accept no plugin until the returned event is set."""
    comes_to, plugin_add = asyncio.Event(), worker.handlers["plugin-add"]

    async def add_later(**message):
        await comes_to.wait()
        return await plugin_add(**message)

    worker.handlers["plugin-add"] = add_later
    return comes_to


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_silent_worker_does_not_delay_enabling(c, s, a, b, monkeypatch):
    """Its event loop may be blocked for minutes; it takes part once it responds."""
    monkeypatch.setattr("dask_gpurt.plugins.scheduler.readiness.JOIN_TIMEOUT_S", 0.05)
    comes_to = held_up(b)
    await dask_gpurt.enable(c)
    plugin = s.plugins["gpurt"]
    assert plugin.readiness.ready == {a.address}
    frames = [pd.DataFrame({"a": range(20)}), pd.DataFrame({"a": range(20, 40)})]
    shuffled = collection(frames).shuffle("a", npartitions=2).a.sum()
    assert await c.compute(shuffled) == sum(range(40))
    assert (plugin.data_plane_choice.runs["gpurt"], plugin.data_plane_choice.runs["stock"]) == (
        0,
        1,
    )
    assert (await dask_gpurt.status(c))["not_ready"].keys() == {b.address}
    comes_to.set()
    await async_poll_for(lambda: plugin.readiness.ready == {a.address, b.address}, timeout=60)
    assert not plugin.readiness.not_ready


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_message_queued_on_a_worker_is_not_left_behind(c, s, a, b, monkeypatch):
    monkeypatch.setattr("dask_gpurt.plugins.scheduler.readiness.JOIN_TIMEOUT_S", 0.05)
    comes_to = held_up(b)
    await dask_gpurt.enable(c)
    disabled = asyncio.ensure_future(dask_gpurt.disable(c))
    await async_poll_for(lambda: "gpurt" not in s.plugins, timeout=60)
    comes_to.set()
    await disabled
    assert "gpurt" not in a.plugins and "gpurt" not in b.plugins


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_client_of_another_version_does_not_block_others(c, s, a, b, monkeypatch):
    class OfAnotherVersion(GpurtScheduler):
        def __init__(self, settings, version):
            super().__init__(settings, "0.0.9")

    with monkeypatch.context() as other:
        other.setattr(
            "dask_gpurt.plugins.scheduler.gpurt_scheduler.GpurtScheduler", OfAnotherVersion
        )
        with pytest.raises(ActivationError, match=r"dask-gpurt==0\.0\.9"):
            await dask_gpurt.enable(c)
    assert "gpurt_status" not in s.handlers and "gpurt" not in s.plugins
    await dask_gpurt.enable(c)
    assert (await dask_gpurt.status(c))["active"]


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
@waits_do_not_end
async def test_departed_worker_does_not_delay_enabling(c, s, a, b):
    """Enabling takes less time than the wait for a silent worker."""
    comes_to = held_up(b)
    enabled = asyncio.ensure_future(dask_gpurt.enable(c))
    await async_poll_for(lambda: "gpurt_status" in s.handlers, timeout=60)
    plugin = s.extensions["gpurt"]
    await async_poll_for(lambda: plugin.readiness.ready == {a.address}, timeout=60)
    waits = asyncio.ensure_future(plugin.readiness.wait())
    await async_poll_for(lambda: plugin.readiness._reported._waiters, timeout=60)
    await b.close()
    await waits
    assert not plugin.readiness.not_ready
    comes_to.set()
    await enabled


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
@waits_do_not_end
async def test_disable_moves_a_shuffle_awaiting_a_worker_to_dask(c, s, a, b):
    """Disabling takes less time than the wait for a silent worker."""
    await dask_gpurt.enable(c)
    plugin = s.plugins["gpurt"]
    # The worker looks like one that is joining and has not reported yet.
    plugin.readiness.ready.discard(b.address)
    frames = [pd.DataFrame({"a": range(20)}), pd.DataFrame({"a": range(20, 40)})]
    total = c.compute(collection(frames).shuffle("a", npartitions=2).a.sum())
    await async_poll_for(lambda: plugin.readiness._reported._waiters, timeout=60)
    await dask_gpurt.disable(c)
    assert await total == sum(range(40))
    assert (
        not plugin.data_plane_choice.runs
        and not plugin.data_plane_choice.fallbacks
        and not plugin.readiness.not_ready
    )


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_worker_that_joins_during_disable_is_answered(c, s, a, b):
    """Without an answer, scheduler and worker would log an error."""
    await dask_gpurt.enable(c)
    plugin, heard, plugin_remove = s.plugins["gpurt"], [], b.handlers["plugin-remove"]

    async def report_first(**message):
        plugin.readiness.ready.discard(b.address)
        await b.scheduler.gpurt_worker_ready(worker=b.address, problem=None)
        heard.append(b.address in plugin.readiness.ready)
        return await plugin_remove(**message)

    b.handlers["plugin-remove"] = report_first
    await dask_gpurt.disable(c)
    assert heard == [False]
    assert handlers(s) == {"gpurt_status"}


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_a_worker_may_die_during_disable(c, s, a, b):
    await dask_gpurt.enable(c)

    async def dies(comm, **message):
        comm.abort()

    b.handlers["plugin-remove"] = dies
    await dask_gpurt.disable(c)
    assert "gpurt" not in a.plugins
    assert handlers(s) == {"gpurt_status"}


@gen_cluster(
    client=True,
    nthreads=[("", 1)],
    scheduler_kwargs={"extensions": {}},
    worker_kwargs={"extensions": {}},
)
@waits_do_not_end
async def test_scheduler_without_extensions_runs_dask(c, s, a):
    """No call waits for a runtime that cannot start."""
    for _ in range(2):
        with pytest.raises(ActivationError, match="without distributed's shuffle extension"):
            await dask_gpurt.enable(c)
    assert not (await dask_gpurt.status(c))["active"]
    assert await c.submit(sum, [1, 2]) == 3


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_scheduler_that_failed_to_start_is_not_asked(c, s, a):
    """Calling a handler that it no longer has would cause a traceback in its log."""
    broken = patch(
        "dask_gpurt.plugins.topology.cluster_machines.parse", side_effect=ConfigError("line 1")
    )
    with broken, dask.config.set({"gpurt.enabled": True}):
        settings = dataclasses.replace(
            config.read(), topology=config.TopologySettings("box.yaml", "hosts: {}", "off")
        )
        with pytest.raises(ConfigError, match="line 1"):
            await s.register_scheduler_plugin(
                GpurtScheduler(settings, dask_gpurt.__version__), idempotent=True
            )
    with captured_logger("distributed.core") as logged:
        assert not (await dask_gpurt.status(c))["active"]
    assert not logged.getvalue()
    await dask_gpurt.enable(c)
    assert (await dask_gpurt.status(c))["active"]
    # A restart forgets tasks, but the runtime stays active.
    await c.restart(wait_for_workers=False)
    assert (await dask_gpurt.status(c))["active"]


@gen_cluster(client=True, nthreads=[("", 1)])
@waits_do_not_end
async def test_nothing_waits_for_a_runtime_that_failed_to_start(c, s, a):
    with patch("dask_gpurt.plugins.patches.p2p.SpecSwap", side_effect=KeyError("moved")):
        with pytest.raises(KeyError, match="moved"):
            await dask_gpurt.enable(c)
    assert not (await dask_gpurt.status(c))["active"]
    assert await c.submit(sum, [1, 2]) == 3


def handlers(server):
    return {name for name in server.handlers if name.startswith("gpurt_")}


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_only_one_of_concurrent_clients_enables_the_runtime(c, s, a, b):
    """Two runtimes would take each other's hooks for those of stock Dask."""
    retrieve, stock_handlers = vars(s.plugins["shuffle"]).copy(), dict(s.handlers)
    async with Client(s.address, asynchronous=True, set_as_default=False) as d:
        await asyncio.gather(dask_gpurt.enable(c), dask_gpurt.enable(d))
        plugin = s.plugins["gpurt"]
        assert plugin.is_active
        assert s.extensions["gpurt"] is plugin
        assert {name: s.handlers[name] for name in plugin._handlers} == plugin._handlers
        assert "gpurt" in a.plugins and "gpurt" in b.plugins
        await dask_gpurt.disable(d)
    assert vars(s.plugins["shuffle"]) == retrieve
    assert handlers(s) == {"gpurt_status"}
    assert s.handlers == {**stock_handlers, "gpurt_status": s.handlers["gpurt_status"]}
    assert "gpurt" not in {*s.plugins, *a.plugins, *b.plugins}


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_runtime_can_be_enabled_during_disable(c, s, a, b):
    """A worker may take long to disable the runtime."""
    lets_go, plugin_remove = asyncio.Event(), b.handlers["plugin-remove"]

    async def remove_later(**message):
        await lets_go.wait()
        return await plugin_remove(**message)

    b.handlers["plugin-remove"] = remove_later
    await dask_gpurt.enable(c)
    async with Client(s.address, asynchronous=True, set_as_default=False) as d:
        off = asyncio.ensure_future(dask_gpurt.disable(c))
        await async_poll_for(lambda: "gpurt" not in s.worker_plugins, timeout=60)
        on = asyncio.ensure_future(dask_gpurt.enable(d))
        # The second client now waits for the lock.
        await async_poll_for(lambda: activation_lock(s)._waiters, timeout=60)
        lets_go.set()
        await asyncio.gather(off, on)
        assert (await dask_gpurt.status(d))["active"]
    assert s.plugins["gpurt"].is_active
    assert "gpurt" in s.worker_plugins
    assert {"gpurt_next_uses", "gpurt_disable"} <= handlers(s)
    assert "gpurt" in a.plugins and "gpurt" in b.plugins


@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"memory_limit": "16 GiB"})
async def test_new_workers_use_the_latest_memory_settings(c, s, a, tmp_path):
    await dask_gpurt.enable(c)
    with (
        dask.config.set({"gpurt.memory.directory": str(tmp_path)}),
        captured_logger("dask_gpurt") as logged,
    ):
        await dask_gpurt.enable(c)
        # This changes nothing.
        await dask_gpurt.enable(c)
    assert logged.getvalue().count("the 1 that run keep theirs") == 1
    async with Worker(s.address, nthreads=1, memory_limit="16 GiB") as b:
        await async_poll_for(lambda: b.address in s.plugins["gpurt"].readiness.ready, timeout=60)
        reports = (await dask_gpurt.status(c))["workers"]
        said = {one: report["memory"]["disk"]["directory"] for one, report in reports.items()}
    assert said[b.address].startswith(str(tmp_path))
    assert not said[a.address].startswith(str(tmp_path))


@gen_cluster(client=True, nthreads=[])
async def test_a_worker_named_after_its_host_gets_stocks_error(c, s):
    """Stock's shuffles refuse an address that the scheduler does not have."""
    port = open_port()
    at = {"port": port, "contact_address": f"tcp://localhost:{port}"}
    async with Worker(s.address, **at) as worker:
        await dask_gpurt.enable(c)
        await async_poll_for(lambda: s.plugins["gpurt"].readiness.ready, timeout=60)
        assert s.plugins["gpurt"].readiness.ready == set(s.workers) != {worker.address}
        x = da.ones((40, 40), chunks=(10, 40)).rechunk((40, 10), method="p2p")
        with pytest.raises(Exception, match="unaware"):
            await c.compute(x.sum())


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_new_workers_use_the_latest_transport(c, s, a):
    await dask_gpurt.enable(c)
    with dask.config.set({"gpurt.shuffle.transport": "comm"}):
        await dask_gpurt.enable(c)
    async with Worker(s.address) as b:
        await async_poll_for(lambda: b.address in s.plugins["gpurt"].readiness.ready, timeout=60)
        assert runtime_of(b).links.transport == "comm"


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_collectives_stay_on_or_off_until_disable(c, s, a):
    await dask_gpurt.enable(c)
    off = {"gpurt.collectives.enabled": False, "gpurt.collectives.order": "any"}
    with dask.config.set(off), captured_logger("dask_gpurt") as logged:
        await dask_gpurt.enable(c)
    assert "gpurt.collectives.enabled stays" in logged.getvalue()
    assert (await dask_gpurt.status(c))["broadcasts"] is not None
    settings = s.plugins["gpurt"].settings.collectives
    assert (settings.enabled, settings.order) == (True, "any")
    await dask_gpurt.disable(c)
    with dask.config.set(off):
        await dask_gpurt.enable(c)
    assert (await dask_gpurt.status(c))["broadcasts"] is None


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_ended_traces_and_plugins_are_not_kept_alive(c, s, a, tmp_path):
    """A scheduler may live for months, and a trace has the keys of all its tasks."""
    ended = []
    for _ in range(2):
        await dask_gpurt.enable(c)
        ended.append(weakref.ref(s.plugins["gpurt"]))
        async with dask_gpurt.trace(c, tmp_path / "trace.json.gz"):
            ended.append(weakref.ref(s.extensions[TRACE]))
            await c.submit(sum, [1, 2])
        await dask_gpurt.disable(c)
        # It answers after its end, until the next one does.
        assert (await dask_gpurt.status(c))["reason"] == "disabled by a client"
    await dask_gpurt.enable(c)
    gc.collect()
    assert [one() for one in ended] == [None] * 4


@gen_cluster(nthreads=[], config={"gpurt.enabled": True})
async def test_closed_worker_is_not_kept_alive(s):
    """A process may start many workers in turn, and each has memory and an open file."""
    arguments = {
        "gpurt_report": {"most": 1},
        "gpurt_explain": {"key": "x"},
        "gpurt_glance": {"most_links": 1},
        "gpurt_machine": {},
        "gpurt_probe": {},
        "gpurt_probe_data": {"nbytes": 1},
        "gpurt_broadcast": {"key": "x", "workers": [], "n_slices": 1, "version": 1},
        "gpurt_broadcast_join": {
            "name": "one",
            "key": "x",
            "header": {},
            "lengths": [1],
            "n_slices": 1,
        },
        "gpurt_broadcast_slice": {"name": "one", "offers": {"unknown": {}}},
        "gpurt_broadcast_leave": {"name": "one"},
        "gpurt_broadcast_end": {"name": "one"},
        "gpurt_collective": {"name": "one", "sender": "x", "offers": {"unknown": {}}},
        "gpurt_collective_abort": {"name": "one", "failure": GroupFailure("failed").plain()},
    }
    async with Worker(s.address) as worker:
        await async_poll_for(lambda: s.plugins["gpurt"].readiness.ready, timeout=60)
        arguments["gpurt_probe"]["source"] = worker.address
        arguments["gpurt_broadcast_join"]["workers"] = ["tcp://127.0.0.9:1", worker.address]
        assert arguments.keys() == handlers(worker)
        for name, said in arguments.items():
            # An error would be raised here.
            await getattr(s.rpc(worker.address), name)(**said)
        kept = weakref.ref(worker)
    del worker

    def is_gone():
        gc.collect()
        return kept() is None

    await async_poll_for(is_gone, timeout=60)
    assert kept() is None

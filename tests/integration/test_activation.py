"""One flag, on real clusters: who sees it, when, and what happens where it cannot work."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import weakref
from unittest.mock import patch

import dask
import pandas as pd
import pytest
from distributed import Client, LocalCluster, Worker
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster

import dask_gpurt
from dask_gpurt import config, preload
from dask_gpurt.errors import ActivationError, ConfigError, StrictFallbackError
from dask_gpurt.plugins.scheduler import GpurtScheduler, activation_lock
from tests.conftest import stock_client
from tests.failure.gates import until
from tests.integration.comparing import collection, partitions, runs
from tests.integration.processes import (
    FUTURE_DISTRIBUTED,
    WITHOUT_HEARTBEATS,
    WITHOUT_PACKAGE,
    command_line_cluster,
    environment,
    run_program,
)

PROGRAM = """
import dask, pandas as pd, dask.dataframe as dd
from distributed import Client, LocalCluster

def main():
    {before}
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            frame = dd.from_pandas(pd.DataFrame({{"a": range(1000)}}), npartitions=4)
            print("SUM", frame.shuffle("a").a.sum().compute())
            import dask_gpurt
            status = dask_gpurt.status(client)
            print("RUNS", status["runs"]["gpurt"], status["runs"]["stock"], status["active"])

if __name__ == "__main__":
    main()
"""
ON = "DASK_GPURT__ENABLED"


def shuffled():
    frames = [pd.DataFrame({"a": range(i, 100 + i), "b": 1.5}) for i in range(4)]
    return collection(frames).shuffle("a", npartitions=3)


def flagged():
    return dask.config.set({"gpurt.enabled": True})


@pytest.fixture
def cluster(tmp_path):
    with command_line_cluster(tmp_path) as started:
        yield started


@pytest.mark.parametrize("value", [False, None, "no", "Off", 0, " false "])
def test_words_that_leave_it_off(value):
    with dask.config.set({"gpurt.enabled": value}):
        assert not preload._flag_is_set()


@pytest.mark.cluster
class TestFlag:
    def test_environment(self, tmp_path):
        done = run_program(PROGRAM.format(before=""), directory=tmp_path, **{ON: "true"})
        assert "SUM 499500\nRUNS 1 0 True" in done.stdout, done.stderr

    def test_yaml(self, tmp_path):
        folder = tmp_path / "config"
        folder.mkdir()
        (folder / "mine.yaml").write_text("gpurt:\n  enabled: true\n")
        done = run_program(PROGRAM.format(before=""), directory=tmp_path, DASK_CONFIG=str(folder))
        assert "RUNS 1 0 True" in done.stdout, done.stderr

    def test_config_set(self, tmp_path):
        before = 'dask.config.set({"gpurt.enabled": True})'
        done = run_program(PROGRAM.format(before=before), directory=tmp_path)
        assert "RUNS 1 0 True" in done.stdout, done.stderr

    def test_off(self, tmp_path):
        done = run_program(PROGRAM.format(before=""), directory=tmp_path)
        assert "SUM 499500\nRUNS 0 0 False" in done.stdout, done.stderr

    def test_wrong_setting_is_one_line_and_stock_runs(self, tmp_path):
        env = {ON: "true", "DASK_GPURT__SHUFFLE__IN_FLIGHT": "plenty", **WITHOUT_HEARTBEATS}
        done = run_program(PROGRAM.format(before=""), directory=tmp_path, **env)
        assert "RUNS 0 0 False" in done.stdout, done.stderr
        assert done.stderr.count("gpurt.shuffle.in-flight") == 1
        assert "Traceback" not in done.stderr

    def test_wrong_flag_is_one_line_and_stock_runs(self, tmp_path):
        env = {ON: "ture", **WITHOUT_HEARTBEATS}
        done = run_program(PROGRAM.format(before=""), directory=tmp_path, **env)
        assert "RUNS 0 0 False" in done.stdout, done.stderr
        assert done.stderr.count("gpurt.enabled is 'ture'; it may be true or false") == 1
        assert "Traceback" not in done.stderr

    def test_wrong_flag_refuses_work_if_strict(self, tmp_path):
        env = {ON: "ture", "DASK_GPURT__STRICT": "true"}
        done = run_program(PROGRAM.format(before=""), directory=tmp_path, **env)
        assert "SUM" not in done.stdout
        assert "StrictFallbackError: gpurt.enabled is 'ture'" in done.stderr

    def test_scheduler_s_own_configuration(self, cluster):
        cluster.scheduler(**{ON: "true"})
        cluster.worker("--no-nanny")
        with cluster.client() as client:
            client.wait_for_workers(1)
            assert len(partitions(client, shuffled())) == 3
            assert runs(client) == {"gpurt": 1, "stock": 0}
            # A client with the flag on top changes nothing, and nobody complains.
            with flagged(), cluster.client():
                assert dask_gpurt.status(client)["active"]
        assert "already contains a plugin" not in cluster.log_text()


@pytest.mark.cluster
class TestRunningCluster:
    def test_life_of_a_cluster(self, cluster):
        """A cluster that was running, workers that join, one that dies, and a restart."""
        cluster.scheduler()
        cluster.worker("--name", "first")
        with cluster.client() as stock:
            stock.wait_for_workers(1)
            expected = partitions(stock, shuffled())
            assert not dask_gpurt.status(stock)["active"]
            with flagged(), cluster.client() as client:

                def check(n_workers):
                    before = runs(client)
                    client.wait_for_workers(n_workers)
                    for got, want in zip(partitions(client, shuffled()), expected, strict=True):
                        pd.testing.assert_frame_equal(got, want)
                    after = runs(client)
                    assert after == {"gpurt": before["gpurt"] + 1, "stock": before["stock"]}

                check(1)
                cluster.worker("--name", "second")
                check(2)
                # The nanny starts a worker that was killed again.
                victim, pid = next(iter(client.run(os.getpid).items()))
                os.kill(pid, signal.SIGKILL)
                client.sync(_until, client, lambda workers: victim not in workers)
                check(2)
                client.restart()
                check(2)
                # The other client never saw the flag; the runtime is the cluster's.
                before = runs(client)
                partitions(stock, shuffled())
                assert runs(client)["gpurt"] == before["gpurt"] + 1

                dask_gpurt.disable(client)
                for got, want in zip(partitions(client, shuffled()), expected, strict=True):
                    pd.testing.assert_frame_equal(got, want)
                status = dask_gpurt.status(stock)
                assert (status["active"], status["reason"]) == (False, "disabled by a client")
                assert status["runs"]["gpurt"] == before["gpurt"] + 1
                assert _leftovers(client) == {"scheduler": [], "worker": []}
                dask_gpurt.disable(client)

                dask_gpurt.enable(client)
                dask_gpurt.enable(client)
                assert len(partitions(client, shuffled())) == 3
                assert runs(client)["gpurt"] == 1

    def test_asynchronous_client(self):
        async def main():
            options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
            async with (
                LocalCluster(asynchronous=True, **options) as local,
                Client(local, asynchronous=True, set_as_default=False) as client,
            ):
                assert (await dask_gpurt.status(client))["active"]
                with dask.config.set({"dataframe.shuffle.method": "p2p"}):
                    parts = await client.gather(client.compute(shuffled().to_delayed()))
                assert (await dask_gpurt.status(client))["runs"] == {"gpurt": 1, "stock": 0}
                await dask_gpurt.disable(client)
                assert not (await dask_gpurt.status(client))["active"]
                await dask_gpurt.enable(client)
                assert (await dask_gpurt.status(client))["active"]
                return sum(map(len, parts))

        import asyncio

        with flagged():
            assert asyncio.run(main()) == 400


@pytest.mark.cluster
class Labelled(pd.DataFrame):
    """A kind of frame without an adapter."""

    @property
    def _constructor(self):
        return Labelled


class TestWhereItCannotWork:
    def test_scheduler_that_cannot_import_the_package(self, cluster, caplog):
        cluster.scheduler(before=WITHOUT_PACKAGE)
        cluster.worker("--no-nanny")
        with flagged(), cluster.client() as client:
            (record,) = [r for r in caplog.records if r.name == "dask_gpurt"]
            assert "dask-gpurt cannot be imported there" in record.message
            assert f"pip install dask-gpurt=={dask_gpurt.__version__}" in record.message
            assert client.scheduler.address in record.message
            client.wait_for_workers(1)
            assert len(partitions(client, shuffled())) == 3
            assert not dask_gpurt.status(client)["active"]

    def test_strict_refuses_work_instead(self, cluster):
        cluster.scheduler(before=WITHOUT_PACKAGE)
        cluster.worker("--no-nanny")
        with dask.config.set({"gpurt.enabled": True, "gpurt.strict": True}):
            with cluster.client() as client:
                client.wait_for_workers(1)
                with pytest.raises(StrictFallbackError, match="pip install dask-gpurt"):
                    client.submit(sum, [1, 2])
                dask_gpurt.disable(client)
                assert client.submit(sum, [1, 2]).result() == 3

    def test_worker_without_the_package(self, cluster):
        cluster.scheduler()
        cluster.worker("--no-nanny", "--name", "with")
        cluster.worker("--no-nanny", "--name", "without", before=WITHOUT_PACKAGE)
        with cluster.client() as client:
            client.wait_for_workers(2)
            dask_gpurt.enable(client)
            assert len(partitions(client, shuffled())) == 3
            status = dask_gpurt.status(client)
            assert status["runs"] == {"gpurt": 0, "stock": 1}
            ((address, problem),) = status["not_ready"].items()
            assert address in problem and "pip install dask-gpurt" in problem
            # One that joins now is not kept from joining either.
            cluster.worker("--no-nanny", "--name", "late", before=WITHOUT_PACKAGE)
            client.wait_for_workers(3)
            assert len(dask_gpurt.status(client)["not_ready"]) == 2
            # With the last of them gone, everybody who is left can.
            for worker in status["workers"]:
                if worker == address:
                    client.retire_workers([worker])
            client.retire_workers(list(dask_gpurt.status(client)["not_ready"]))
            assert len(partitions(client, shuffled())) == 3
            assert runs(client) == {"gpurt": 1, "stock": 1}

    @pytest.mark.parametrize("waits", ["shuffle-transfer", "shuffle-barrier"])
    def test_worker_without_the_package_that_joins_a_run(self, cluster, waits):
        """The shuffle starts over, as stock's, once it cannot do without it."""
        cluster.scheduler()
        cluster.worker("--no-nanny")
        with cluster.client() as client:
            client.wait_for_workers(1)
            dask_gpurt.enable(client)

            def only_there(key):
                name, number = key if isinstance(key, tuple) else (key, 3)
                return {"late": 1} if name.startswith(waits) and number == 3 else {}

            with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
                lazy = shuffled().to_delayed()
            with dask.annotate(resources=only_there):
                outputs = client.compute(lazy)
            until(lambda: runs(client) == {"gpurt": 1, "stock": 0}, "the shuffle does not begin")
            late = ["--resources", "late=1"]
            cluster.worker("--no-nanny", *late, before=WITHOUT_PACKAGE)
            assert sum(len(output) for output in client.gather(outputs)) == 400
            status = dask_gpurt.status(client)
            assert status["runs"] == {"gpurt": 1, "stock": 1}
            assert len(status["not_ready"]) == 1

    def test_unsupported_distributed(self, cluster):
        cluster.scheduler(before=FUTURE_DISTRIBUTED, **{ON: "true"})
        cluster.worker("--no-nanny")
        with cluster.client() as client:
            client.wait_for_workers(1)
            assert len(partitions(client, shuffled())) == 3
            status = dask_gpurt.status(client)
            assert not status["active"]
            assert "2031.1.0" in status["reason"]
            with pytest.raises(ActivationError, match="2031"):
                dask_gpurt.enable(client)
        assert cluster.log_text().count("dask_gpurt is off") <= 2

    def test_unsupported_kind_is_an_error_when_strict(self):
        with (
            LocalCluster(
                n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
            ) as local,
            dask.config.set({"gpurt.enabled": True, "gpurt.strict": True}),
        ):
            with Client(local, set_as_default=False) as client, client.as_current():
                lazy = collection([Labelled({"a": [1, 2]}), Labelled({"a": [3, 4]})])
                with pytest.raises(RuntimeError) as caught:
                    partitions(client, lazy.shuffle("a"))
        assert isinstance(caught.value.__cause__, StrictFallbackError)

    @pytest.mark.parametrize(
        ("key", "value"),
        [("gpurt.shuffle.compression", "gzip"), ("gpurt.topology.file", "/no/such/file.yaml")],
    )
    def test_a_setting_that_cannot_be_used_is_an_error_when_strict(self, key, value):
        with (
            LocalCluster(
                n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
            ) as local,
            dask.config.set({"gpurt.enabled": True, "gpurt.strict": True, key: value}),
            Client(local, set_as_default=False) as client,
        ):
            with pytest.raises(StrictFallbackError, match=value):
                client.submit(sum, [1, 2])
            dask_gpurt.disable(client)
            assert client.submit(sum, [1, 2]).result() == 3


class TestCostWhenOff:
    def test_nothing_of_ours_is_imported(self):
        source = """
import sys
from distributed import Client, LocalCluster
with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as c, Client(c):
    print(sorted(m for m in sys.modules if m.startswith("dask_gpurt")))
"""
        done = subprocess.run(
            [sys.executable, "-c", source],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == (
            "['dask_gpurt', 'dask_gpurt.preload', 'dask_gpurt.quiet']"
        ), done.stderr

    def test_under_20_ms(self):
        """Reading our YAML and importing the preload, in a fresh interpreter that has dask."""
        source = """
import time, pathlib, dask.config, yaml, sys
path = next(p for p in pathlib.Path(sys.prefix, "etc/dask").glob("gpurt.yaml"))
began = time.perf_counter()
yaml.safe_load(path.read_text())
import dask_gpurt.preload
dask_gpurt.preload._flag_is_set()
print(time.perf_counter() - began)
"""
        times = [
            float(
                subprocess.run(
                    [sys.executable, "-c", source],
                    env=environment(),
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=True,
                ).stdout
            )
            for _ in range(3)
        ]
        assert min(times) < 0.020

    def test_importing_the_package_loads_nothing_heavy(self):
        source = "import sys, os; e = dict(os.environ); import dask_gpurt; "
        source += "assert e == dict(os.environ); "
        source += "print([m for m in ('dask', 'distributed', 'pandas', 'numpy', 'pyarrow', 'cupy') "
        source += "if m in sys.modules])"
        done = subprocess.run(
            [sys.executable, "-c", source],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == "[]"


async def _until(client, condition):
    """Wait for the scheduler's workers to fulfil a condition; it is asked, nobody sleeps."""
    while not condition((await client.scheduler.identity(n_workers=-1))["workers"]):
        pass


def _leftovers(client):
    """What a disabled runtime left on the live objects it had changed."""

    def on_scheduler(dask_scheduler):
        plugin = dask_scheduler.plugins["shuffle"]
        handler = dask_scheduler.handlers["shuffle_get_or_create"]
        left = [name for name in ("_retrieve_spec",) if name in vars(plugin)]
        left += [] if handler == plugin.get_or_create else ["handler"]
        return left + [name for name in dask_scheduler.plugins if name == "gpurt"]

    def on_worker(dask_worker):
        plugin = dask_worker.plugins["shuffle"]
        names = ("get_or_create_shuffle", "get_shuffle_run")
        left = [name for name in names if name in vars(plugin)]
        return left + [name for name in dask_worker.plugins if name == "gpurt"]

    workers = client.run(on_worker)
    return {
        "scheduler": client.run_on_scheduler(on_scheduler),
        "worker": sorted({name for names in workers.values() for name in names}),
    }


@pytest.mark.parametrize("owns_loop", [False, True])
def test_a_client_that_is_closed_is_told_so(owns_loop):
    """Its loop may have been closed with it, and nothing can be asked there."""
    with stock_client(1) as connected:
        client = Client(connected.cluster.scheduler_address) if owns_loop else connected
        client.close()
        for ask in (dask_gpurt.enable, dask_gpurt.disable, dask_gpurt.status):
            with pytest.raises(ActivationError, match="not connected to a scheduler"):
                ask(client)
        with pytest.raises(ActivationError, match="not connected to a scheduler"):
            dask_gpurt.explain(client, "key")


def test_a_client_that_connects_does_not_ask_every_worker():
    options = {"n_workers": 2, "processes": False, "dashboard_address": ":0"}
    with flagged(), LocalCluster(silence_logs=False, **options) as in_process:
        with Client(in_process, set_as_default=False) as first:
            assert dask_gpurt.status(first)["active"]
            asked = []

            async def report():
                asked.append(True)
                return {}

            for worker in in_process.workers.values():
                worker.handlers["gpurt_report"] = report
            with Client(in_process, set_as_default=False) as second:
                assert not asked
                dask_gpurt.enable(second)
                assert not asked


def held_up(worker):
    """A worker that takes no plugin in until the event that is returned is set."""
    comes_to, plugin_add = asyncio.Event(), worker.handlers["plugin-add"]

    async def add_later(**message):
        await comes_to.wait()
        return await plugin_add(**message)

    worker.handlers["plugin-add"] = add_later
    return comes_to


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_a_worker_that_does_not_answer_holds_nobody_up(c, s, a, b, monkeypatch):
    """Its event loop may be held up for minutes; it takes part when it comes to."""
    monkeypatch.setattr("dask_gpurt.plugins.scheduler.JOIN_TIMEOUT_S", 0.05)
    comes_to = held_up(b)
    await dask_gpurt.enable(c)
    plugin = s.plugins["gpurt"]
    assert plugin.ready == {a.address}
    frames = [pd.DataFrame({"a": range(20)}), pd.DataFrame({"a": range(20, 40)})]
    shuffled = collection(frames).shuffle("a", npartitions=2).a.sum()
    assert await c.compute(shuffled) == sum(range(40))
    assert (plugin.runs["gpurt"], plugin.runs["stock"]) == (0, 1)
    assert (await dask_gpurt.status(c))["not_ready"].keys() == {b.address}
    comes_to.set()
    await async_poll_for(lambda: plugin.ready == {a.address, b.address}, timeout=10)
    assert not plugin.not_ready


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_what_a_worker_has_yet_to_take_in_is_not_left_there(c, s, a, b, monkeypatch):
    monkeypatch.setattr("dask_gpurt.plugins.scheduler.JOIN_TIMEOUT_S", 0.05)
    comes_to = held_up(b)
    await dask_gpurt.enable(c)
    disabled = asyncio.ensure_future(dask_gpurt.disable(c))
    await async_poll_for(lambda: "gpurt" not in s.plugins, timeout=10)
    comes_to.set()
    await disabled
    assert "gpurt" not in a.plugins and "gpurt" not in b.plugins


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_a_client_of_another_version_keeps_nobody_out(c, s, a, b, monkeypatch):
    class OfAnotherVersion(GpurtScheduler):
        def __init__(self, settings, version):
            super().__init__(settings, "0.0.9")

    with monkeypatch.context() as other:
        other.setattr("dask_gpurt.plugins.scheduler.GpurtScheduler", OfAnotherVersion)
        with pytest.raises(ActivationError, match=r"dask-gpurt==0\.0\.9"):
            await dask_gpurt.enable(c)
    assert "gpurt_status" not in s.handlers and "gpurt" not in s.plugins
    await dask_gpurt.enable(c)
    assert (await dask_gpurt.status(c))["active"]


@gen_cluster(client=True, nthreads=[("", 1)] * 2, timeout=8)
async def test_a_worker_that_left_before_it_reported_holds_nobody_up(c, s, a, b):
    """In less time than anybody would be waited for."""
    comes_to = held_up(b)
    enabled = asyncio.ensure_future(dask_gpurt.enable(c))
    await async_poll_for(lambda: "gpurt_status" in s.handlers, timeout=5)
    plugin = s.handlers["gpurt_status"].__self__
    await async_poll_for(lambda: plugin.ready == {a.address}, timeout=5)
    waits = asyncio.ensure_future(plugin._wait_for_reports())
    await async_poll_for(lambda: plugin._reported._waiters, timeout=5)
    await b.close()
    await waits
    assert not plugin.not_ready
    comes_to.set()
    await enabled


@gen_cluster(client=True, nthreads=[("", 1)] * 2, timeout=8)
async def test_a_shuffle_that_waits_for_who_joins_is_stock_s_when_it_is_switched_off(c, s, a, b):
    """In less time than anybody would be waited for."""
    await dask_gpurt.enable(c)
    plugin = s.plugins["gpurt"]
    # As one that is joining, and has not said so yet.
    plugin.ready.discard(b.address)
    frames = [pd.DataFrame({"a": range(20)}), pd.DataFrame({"a": range(20, 40)})]
    total = c.compute(collection(frames).shuffle("a", npartitions=2).a.sum())
    await async_poll_for(lambda: plugin._reported._waiters, timeout=5)
    await dask_gpurt.disable(c)
    assert await total == sum(range(40))
    assert not plugin.runs and not plugin.fallbacks and not plugin.not_ready


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_who_joins_while_it_is_switched_off_is_heard(c, s, a, b):
    """Or it would be an error in the scheduler's log, and the worker's."""
    await dask_gpurt.enable(c)
    plugin, heard, plugin_remove = s.plugins["gpurt"], [], b.handlers["plugin-remove"]

    async def report_first(**message):
        plugin.ready.discard(b.address)
        await b.scheduler.gpurt_worker_ready(worker=b.address, problem=None)
        heard.append(b.address in plugin.ready)
        return await plugin_remove(**message)

    b.handlers["plugin-remove"] = report_first
    await dask_gpurt.disable(c)
    assert heard == [False]
    assert handlers(s) == {"gpurt_status"}


@gen_cluster(
    client=True,
    nthreads=[("", 1)],
    scheduler_kwargs={"extensions": {}},
    worker_kwargs={"extensions": {}},
    timeout=8,
)
async def test_a_scheduler_without_extensions_is_left_to_stock(c, s, a):
    """Nobody waits for a runtime that cannot come."""
    for _ in range(2):
        with pytest.raises(ActivationError, match="without distributed's shuffle extension"):
            await dask_gpurt.enable(c)
    assert not (await dask_gpurt.status(c))["active"]
    assert await c.submit(sum, [1, 2]) == 3


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_scheduler_that_could_not_read_the_machines_is_not_asked(c, s, a):
    """For a handler that it no longer has, which would be a traceback in its log."""
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
    # A restart forgets tasks and what goes with them, and not that.
    await c.restart(wait_for_workers=False)
    assert (await dask_gpurt.status(c))["active"]


@gen_cluster(client=True, nthreads=[("", 1)], timeout=8)
async def test_nobody_waits_for_what_could_not_be_switched_on(c, s, a):
    with patch("dask_gpurt.plugins.patches.p2p.SpecSwap", side_effect=KeyError("moved")):
        with pytest.raises(KeyError, match="moved"):
            await dask_gpurt.enable(c)
    assert not (await dask_gpurt.status(c))["active"]
    assert await c.submit(sum, [1, 2]) == 3


def handlers(s):
    return {name for name in s.handlers if name.startswith("gpurt_")}


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_of_clients_that_switch_it_on_at_once_one_does(c, s, a, b):
    """Or there would be two, each of which took the other's hooks for stock's."""
    retrieve, stock_handlers = vars(s.plugins["shuffle"]).copy(), dict(s.handlers)
    async with Client(s.address, asynchronous=True, set_as_default=False) as d:
        await asyncio.gather(dask_gpurt.enable(c), dask_gpurt.enable(d))
        plugin = s.plugins["gpurt"]
        assert plugin.is_active
        assert all(handler.__self__ is plugin for handler in map(s.handlers.get, handlers(s)))
        assert "gpurt" in a.plugins and "gpurt" in b.plugins
        await dask_gpurt.disable(d)
    assert vars(s.plugins["shuffle"]) == retrieve
    assert handlers(s) == {"gpurt_status"}
    assert s.handlers == {**stock_handlers, "gpurt_status": s.handlers["gpurt_status"]}
    assert "gpurt" not in {*s.plugins, *a.plugins, *b.plugins}


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_it_can_be_switched_on_again_before_it_is_quite_off(c, s, a, b):
    """A worker may take its time to let go of it."""
    lets_go, plugin_remove = asyncio.Event(), b.handlers["plugin-remove"]

    async def remove_later(**message):
        await lets_go.wait()
        return await plugin_remove(**message)

    b.handlers["plugin-remove"] = remove_later
    await dask_gpurt.enable(c)
    async with Client(s.address, asynchronous=True, set_as_default=False) as d:
        off = asyncio.ensure_future(dask_gpurt.disable(c))
        await async_poll_for(lambda: "gpurt" not in s.worker_plugins, timeout=10)
        on = asyncio.ensure_future(dask_gpurt.enable(d))
        # It came as far as it can.
        await async_poll_for(lambda: activation_lock(s)._waiters, timeout=10)
        lets_go.set()
        await asyncio.gather(off, on)
        assert (await dask_gpurt.status(d))["active"]
    assert s.plugins["gpurt"].is_active
    assert "gpurt" in s.worker_plugins
    assert {"gpurt_next_uses", "gpurt_disable"} <= handlers(s)
    assert "gpurt" in a.plugins and "gpurt" in b.plugins


@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"memory_limit": "1 GiB"})
async def test_memory_settings_of_a_later_client_hold_for_workers_that_start(c, s, a, tmp_path):
    await dask_gpurt.enable(c)
    with (
        dask.config.set({"gpurt.memory.directory": str(tmp_path)}),
        captured_logger("dask_gpurt") as logged,
    ):
        await dask_gpurt.enable(c)
        # Nothing new.
        await dask_gpurt.enable(c)
    assert logged.getvalue().count("the 1 that run keep theirs") == 1
    async with Worker(s.address, nthreads=1, memory_limit="1 GiB") as b:
        await async_poll_for(lambda: b.address in s.plugins["gpurt"].ready, timeout=10)
        reports = (await dask_gpurt.status(c))["workers"]
        said = {one: report["memory"]["disk"]["directory"] for one, report in reports.items()}
    assert said[b.address].startswith(str(tmp_path))
    assert not said[a.address].startswith(str(tmp_path))


@gen_cluster(nthreads=[], config={"gpurt.enabled": True})
async def test_nothing_keeps_a_worker_that_is_closed(s):
    """A process may start many, one after the other; each has memory and an open file."""
    async with Worker(s.address) as worker:
        await async_poll_for(lambda: s.plugins["gpurt"].ready, timeout=10)
        kept = weakref.ref(worker)
    del worker

    def is_gone():
        gc.collect()
        return kept() is None

    await async_poll_for(is_gone, timeout=10)

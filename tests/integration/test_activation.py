"""The flag activates the runtime on real clusters, or one message says why it cannot."""

from __future__ import annotations

import asyncio
import os
import pathlib
import re
import signal
import subprocess
import sys

import dask
import pandas as pd
import pytest
from distributed import Client, LocalCluster
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt import preload
from dask_gpurt.errors import ActivationError, StrictFallbackError
from tests.failure.gates import until
from tests.integration.comparing import collection, partitions, runs
from tests.integration.flagged_programs import flagged, shuffled, until_workers
from tests.integration.processes import (
    FUTURE_DISTRIBUTED,
    WITHOUT_HEARTBEATS,
    WITHOUT_PACKAGE,
    command_line_cluster,
    environment,
    run_program,
)
from tests.limits import HANG_S

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


@pytest.fixture
def cluster(tmp_path):
    with command_line_cluster(tmp_path) as started:
        yield started


@pytest.mark.parametrize("value", [False, None, "no", "Off", 0, " false "])
def test_flag_accepts_words_for_off(value):
    with dask.config.set({"gpurt.enabled": value}):
        assert not preload._flag_is_set()


@pytest.mark.cluster
class TestFlag:
    def test_flag_in_the_environment(self, tmp_path):
        done = run_program(PROGRAM.format(before=""), directory=tmp_path, **{ON: "true"})
        assert "SUM 499500\nRUNS 1 0 True" in done.stdout, done.stderr

    def test_flag_in_a_yaml_file(self, tmp_path):
        folder = tmp_path / "config"
        folder.mkdir()
        (folder / "mine.yaml").write_text("gpurt:\n  enabled: true\n")
        done = run_program(PROGRAM.format(before=""), directory=tmp_path, DASK_CONFIG=str(folder))
        assert "RUNS 1 0 True" in done.stdout, done.stderr

    def test_flag_set_in_the_program(self, tmp_path):
        before = 'dask.config.set({"gpurt.enabled": True})'
        done = run_program(PROGRAM.format(before=before), directory=tmp_path)
        assert "RUNS 1 0 True" in done.stdout, done.stderr

    def test_without_the_flag_dask_runs(self, tmp_path):
        done = run_program(PROGRAM.format(before=""), directory=tmp_path)
        assert "SUM 499500\nRUNS 0 0 False" in done.stdout, done.stderr

    def test_wrong_setting_is_one_line_and_dask_runs(self, tmp_path):
        env = {ON: "true", "DASK_GPURT__SHUFFLE__IN_FLIGHT": "plenty", **WITHOUT_HEARTBEATS}
        done = run_program(PROGRAM.format(before=""), directory=tmp_path, **env)
        assert "RUNS 0 0 False" in done.stdout, done.stderr
        assert done.stderr.count("gpurt.shuffle.in-flight") == 1
        assert "Traceback" not in done.stderr

    def test_wrong_flag_is_one_line_and_dask_runs(self, tmp_path):
        env = {ON: "ture", **WITHOUT_HEARTBEATS}
        done = run_program(PROGRAM.format(before=""), directory=tmp_path, **env)
        assert "RUNS 0 0 False" in done.stdout, done.stderr
        assert done.stderr.count("gpurt.enabled is 'ture'; it may be true or false") == 1
        assert "Traceback" not in done.stderr

    def test_misspelt_flag_is_named_and_dask_runs(self, tmp_path):
        env = {"DASK_GPURT__ENABLE": "true", **WITHOUT_HEARTBEATS}
        done = run_program(PROGRAM.format(before=""), directory=tmp_path, **env)
        assert "RUNS 0 0 False" in done.stdout, done.stderr
        assert done.stderr.count("gpurt.enable is ignored; did you mean gpurt.enabled?") == 1
        assert "Traceback" not in done.stderr

    def test_wrong_flag_refuses_work_if_strict(self, tmp_path):
        env = {ON: "ture", "DASK_GPURT__STRICT": "true"}
        done = run_program(PROGRAM.format(before=""), directory=tmp_path, **env)
        assert "SUM" not in done.stdout
        assert "StrictFallbackError: gpurt.enabled is 'ture'" in done.stderr

    def test_flag_in_the_configuration_of_the_scheduler(self, cluster):
        cluster.scheduler(**{ON: "true"})
        cluster.worker("--no-nanny")
        with cluster.client() as client:
            client.wait_for_workers(1)
            assert len(partitions(client, shuffled())) == 3
            assert runs(client) == {"gpurt": 1, "stock": 0}
            # A client that has the flag, too, changes nothing and causes no message.
            with flagged(), cluster.client():
                assert dask_gpurt.status(client)["active"]
        assert "already contains a plugin" not in cluster.log_text()


@pytest.mark.cluster
class TestRunningCluster:
    def test_runtime_follows_the_life_of_a_cluster(self, cluster):
        """The runtime is enabled on a running cluster; workers join, one dies, and all restart."""
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
                # The nanny restarts a worker that was killed.
                victim, pid = next(iter(client.run(os.getpid).items()))
                os.kill(pid, signal.SIGKILL)
                client.sync(until_workers, client, lambda workers: victim not in workers)
                check(2)
                client.restart()
                check(2)
                # The other client never had the flag, but the whole cluster has the runtime.
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

    def test_asynchronous_client_enables_the_runtime(self):
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

        with flagged():
            assert asyncio.run(main()) == 400


@pytest.mark.cluster
class Labelled(pd.DataFrame):
    """A kind of DataFrame without an adapter."""

    @property
    def _constructor(self):
        return Labelled


class TestWhereItCannotWork:
    def test_scheduler_without_the_package_runs_dask(self, cluster, caplog, tmp_path):
        cluster.scheduler(before=WITHOUT_PACKAGE)
        cluster.worker("--no-nanny")
        with flagged(), cluster.client() as client:
            (record,) = [r for r in caplog.records if r.name == "dask_gpurt"]
            assert "dask-gpurt cannot be imported there" in record.message
            assert f"pip install dask-gpurt=={dask_gpurt.__version__}" in record.message
            assert client.scheduler.address in record.message
            client.wait_for_workers(1)
            assert len(partitions(client, shuffled())) == 3
            status = dask_gpurt.status(client)
            assert not status["active"] and "cannot be imported there" in status["reason"]
            with pytest.raises(ActivationError, match="dask-gpurt cannot be imported there"):
                with dask_gpurt.trace(client, tmp_path / "trace.json"):
                    pass

    def test_strict_refuses_work_instead(self, cluster):
        cluster.scheduler(before=WITHOUT_PACKAGE)
        cluster.worker("--no-nanny")
        with dask.config.set({"gpurt.enabled": True, "gpurt.strict": True}):
            with cluster.client() as client:
                client.wait_for_workers(1)
                with pytest.raises(StrictFallbackError, match="pip install dask-gpurt") as raised:
                    client.submit(sum, [1, 2])
                assert str(raised.value).endswith("forbids to go on with stock Dask.")
                assert "Stock Dask runs" not in str(raised.value)
                dask_gpurt.disable(client)
                assert client.submit(sum, [1, 2]).result() == 3

    def test_worker_without_the_package_is_named(self, cluster):
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
            # Another worker without the package can join, too.
            cluster.worker("--no-nanny", "--name", "late", before=WITHOUT_PACKAGE)
            client.wait_for_workers(3)
            assert len(dask_gpurt.status(client)["not_ready"]) == 2
            # When the last of these workers has left, the runtime works again.
            for worker in status["workers"]:
                if worker == address:
                    client.retire_workers([worker])
            client.retire_workers(list(dask_gpurt.status(client)["not_ready"]))
            assert len(partitions(client, shuffled())) == 3
            assert runs(client) == {"gpurt": 1, "stock": 1}

    @pytest.mark.parametrize("waits", ["shuffle-transfer", "shuffle-barrier"])
    def test_joining_worker_without_the_package_restarts_the_run(self, cluster, waits):
        """The shuffle restarts with stock Dask once it needs the new worker."""
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

    def test_unsupported_distributed_leaves_the_runtime_off(self, cluster):
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

    def test_a_scheduler_that_keeps_no_events_stays_stock(self):
        with (
            dask.config.set({"distributed.admin.low-level-log-length": 0}),
            LocalCluster(
                n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
            ) as local,
            Client(local, set_as_default=False) as client,
        ):
            with pytest.raises(ActivationError, match="set distributed"):
                dask_gpurt.enable(client)
            assert not [name for name in local.scheduler.handlers if "gpurt" in name]
            assert len(partitions(client, shuffled())) == 3

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
    def test_unusable_setting_is_an_error_when_strict(self, key, value):
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


def run_python(source):
    """Run a program in a fresh interpreter without settings of this process."""
    return subprocess.run(
        [sys.executable, "-c", source],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )


def test_a_cluster_without_frames_imports_what_it_needs(tmp_path):
    """pandas and pyarrow each take about as long to import as a worker of stock Dask to start."""
    source = """
import sys
import numpy
from distributed import Client, LocalCluster
RUNS = ("dask_gpurt.plugins.shuffle.exchange_run", "dask_gpurt.transport.ucx.engine")
DATA = ("dask_gpurt.codecs", "dask_gpurt.shuffle.shards", "dask_gpurt.transport.shared")
def libraries(role="worker", later=RUNS):
    modules = (f"dask_gpurt.plugins.{role}", "pandas", "pyarrow", *later)
    return [module for module in modules if module in sys.modules]
if __name__ == "__main__":
    with LocalCluster(n_workers=2, dashboard_address=":0") as cluster, Client(cluster) as client:
        held = client.map(numpy.ones, [1000, 2000], workers=[*client.scheduler_info()["workers"]])
        print(sum(map(len, client.gather(held))), *client.run(libraries).values())
        print(client.run_on_scheduler(libraries, "scheduler", RUNS + DATA))
"""
    done = run_program(source, directory=tmp_path, **{ON: "true"})
    worker, scheduler = (f"['dask_gpurt.plugins.{role}']" for role in ("worker", "scheduler"))
    assert done.stdout == f"3000 {worker} {worker}\n{scheduler}\n", done.stderr


@pytest.mark.parametrize(
    "call",
    [
        dask_gpurt.enable,
        dask_gpurt.disable,
        dask_gpurt.status,
        dask_gpurt.progress,
        lambda cluster: dask_gpurt.trace(cluster, "x.json"),
    ],
    ids=["enable", "disable", "status", "progress", "trace"],
)
def test_a_cluster_in_place_of_its_client_is_named(call):
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        pytest.raises(TypeError, match=r"such as Client\(cluster\), not a LocalCluster"),
    ):
        call(cluster)


class TestCostWhenOff:
    def test_disabled_runtime_imports_only_its_preload(self):
        source = """
import sys
from distributed import Client, LocalCluster
with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as c, Client(c):
    print(sorted(m for m in sys.modules if m.startswith("dask_gpurt")))
"""
        done = run_python(source)
        assert done.stdout.strip() == (
            "['dask_gpurt', 'dask_gpurt.preload', 'dask_gpurt.quiet']"
        ), done.stderr

    def test_preload_of_a_disabled_runtime_takes_under_20_ms(self):
        """The time is that of reading our YAML and importing the preload, after dask's import."""
        source = """
import time, pathlib, dask.config, yaml, sys
path = next(p for p in pathlib.Path(sys.prefix, "etc/dask").glob("gpurt.yaml"))
began = time.perf_counter()
yaml.safe_load(path.read_text())
import dask_gpurt.preload
dask_gpurt.preload._flag_is_set()
print(time.perf_counter() - began)
"""
        times = [float(run_python(source).stdout) for _ in range(3)]
        assert min(times) < 0.020

    def test_importing_the_package_loads_nothing_heavy(self):
        source = "import sys, os; e = dict(os.environ); import dask_gpurt; "
        source += "assert e == dict(os.environ); "
        source += "print([m for m in ('dask', 'distributed', 'pandas', 'numpy', 'pyarrow', 'cupy') "
        source += "if m in sys.modules])"
        done = run_python(source)
        assert done.stdout.strip() == "[]"


def _leftovers(client):
    """Return traces of a disabled runtime on the live objects that it had changed."""

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


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_the_reference_has_each_field_of_the_status(c, s, a):
    await dask_gpurt.enable(c)
    page = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
    rows = re.search(r"## The cluster\n(.*?)\n## ", page.read_text(), re.DOTALL)[1]
    first_cells = "".join(re.findall(r"^\|([^|]*)\|", rows, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(await dask_gpurt.status(c))

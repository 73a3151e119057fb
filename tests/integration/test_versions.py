"""Clusters with different versions in their processes run stock Dask and report the difference.

Python, distributed or this package differ, or this package is missing. No process dies, and one
message says what differs and what to do.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import dask
import dask.dataframe as dd
import distributed
import pandas as pd
import pytest

import dask_gpurt
from dask_gpurt.command import connect, doctor
from dask_gpurt.errors import ActivationError
from dask_gpurt.plugins.simulation.workload_recorder import recorded
from tests.failure.gates import until
from tests.integration.comparing import partitions, runs
from tests.integration.environments import OLD, minor_of, second_python, with_versions, without
from tests.integration.processes import (
    WITHOUT_HEARTBEATS,
    command_line_cluster,
    run_program,
    without_closing,
)

HERE = minor_of(sys.executable)
VERSION = dask_gpurt.__version__
OURS = f"dask-gpurt=={VERSION}"
ON = {"DASK_GPURT__ENABLED": "true"}

#: A program that prints the result of a stock computation, and whether the runtime is on.
PROGRAM = """
import warnings
warnings.simplefilter("ignore")
from distributed import Client
with Client(scheduler_file="scheduler.json", set_as_default=False) as client:
    client.wait_for_workers(1)
    print("SUM", client.submit(sum, range(5)).result())
    try:
        import dask_gpurt
    except ImportError:
        print("STOCK")
    else:
        print("ACTIVE", dask_gpurt.status(client)["active"])
"""


def shuffled():
    # The graph contains no function of this module, so it runs in any Python.
    return dd.from_pandas(pd.DataFrame({"a": range(100)}), npartitions=2).shuffle("a")


@pytest.fixture
def cluster(tmp_path):
    with command_line_cluster(tmp_path) as started:
        yield started


@pytest.fixture(scope="module")
def other_python():
    return second_python()


@pytest.fixture
def run(tmp_path):
    def run_with(python, **env):
        quiet = WITHOUT_HEARTBEATS | env
        done = run_program(PROGRAM, directory=tmp_path, python=python, **quiet)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        said = [line for line in done.stderr.splitlines() if "dask_gpurt" in line]
        return done.stdout.split("\n", 1)[0], done.stdout.split("\n")[1], said

    return run_with


def client_with_flag(cluster):
    with dask.config.set({"gpurt.enabled": True}):
        return cluster.client()


def assert_alive(*processes):
    assert [process.poll() for process in processes] == [None] * len(processes)


def assert_no_traceback(log):
    text = without_closing(log.read_text())
    assert "Traceback" not in text, text


@pytest.mark.cluster
@pytest.mark.slow
class TestClients:
    def test_other_python_version_is_reported(self, cluster, run, other_python):
        """The client connects before, and then after the runtime is on."""
        there = minor_of(other_python)
        processes = cluster.scheduler(), cluster.worker("--no-nanny")
        differs = f"Python {HERE} runs there, not {there}; use Python {there} there"
        value, active, (said,) = run(other_python, **ON)
        assert (value, active) == ("SUM 10", "ACTIVE False")
        assert said.startswith("dask_gpurt is not active: the scheduler at tcp://127.0.0.1:")
        assert said.endswith(f": {differs}. Stock Dask runs.")
        with client_with_flag(cluster) as client:
            assert dask_gpurt.status(client)["active"]
            value, active, (said,) = run(other_python, **ON)
            assert (value, active) == ("SUM 10", "ACTIVE True")
            assert said.endswith(f": {differs}. Settings are unchanged.")
            assert len(partitions(client, shuffled())) == 2
            assert runs(client) == {"gpurt": 1, "stock": 0}
        assert_alive(*processes)
        assert_no_traceback(cluster.logs[0])

    def test_other_python_without_the_package_is_reported(
        self, cluster, run, other_python, tmp_path
    ):
        cluster.scheduler(**ON)
        cluster.worker("--no-nanny")
        python = without(tmp_path / "without", "dask_gpurt", python=other_python)
        assert run(python, **ON) == ("SUM 10", "STOCK", [])
        assert_no_traceback(cluster.logs[0])

    def test_other_package_version_is_reported(self, cluster, run, tmp_path):
        cluster.scheduler()
        cluster.worker("--no-nanny")
        value, active, (said,) = run(with_versions(tmp_path / "old", dask_gpurt=OLD), **ON)
        assert (value, active) == ("SUM 10", "ACTIVE False")
        assert f"dask-gpurt {VERSION} is installed there, not {OLD}" in said
        assert f"run `pip install dask-gpurt=={OLD}` there. Stock Dask runs." in said
        assert_no_traceback(cluster.logs[0])


@pytest.mark.cluster
@pytest.mark.slow
class TestSchedulers:
    @pytest.mark.parametrize("has_package", [True, False])
    def test_other_python_version_is_reported(
        self, cluster, caplog, other_python, tmp_path, has_package
    ):
        there = minor_of(other_python)
        python = other_python
        if not has_package:
            python = without(tmp_path / "without", "dask_gpurt", python=other_python)
        processes = cluster.scheduler(python=python), cluster.worker("--no-nanny", python=python)
        with client_with_flag(cluster) as client:
            (record,) = (one for one in caplog.records if one.name == "dask_gpurt")
            assert client.scheduler.address in record.message
            assert f"Python {there} runs there, not {HERE}" in record.message
            assert f"use Python {HERE} there" in record.message
            missing = "dask-gpurt is not installed there"
            assert (missing in record.message) is not has_package
            client.wait_for_workers(1)
            assert client.submit(sum, range(5)).result() == 10
            assert not dask_gpurt.status(client)["active"]
            assert not dask_gpurt.explain(client, "key")["known"]
            dask_gpurt.disable(client)
            with pytest.raises(ActivationError, match="Stock Dask runs"):
                dask_gpurt.enable(client)
            with pytest.raises(ActivationError, match="Python"), recorded(client):
                pass
        assert_alive(*processes)
        assert_no_traceback(cluster.logs[0])

    def test_missing_package_is_reported(self, cluster, caplog, tmp_path):
        python = without(tmp_path / "without", "dask_gpurt")
        cluster.scheduler(python=python)
        cluster.worker("--no-nanny", python=python)
        with client_with_flag(cluster) as client:
            (record,) = (one for one in caplog.records if one.name == "dask_gpurt")
            assert record.message == (
                f"dask_gpurt is not active: the scheduler at {client.scheduler.address}: "
                "dask-gpurt is not installed there; "
                f"run `pip install dask-gpurt=={VERSION}` there. Stock Dask runs."
            )
            client.wait_for_workers(1)
            assert len(partitions(client, shuffled())) == 2
            assert not dask_gpurt.status(client)["active"]
            found = connect.ask(client, versions=True)
            problems = [one for one in doctor.cluster_findings(found) if one.level == "problem"]
            (worker,) = found["workers"]
            assert [(one.text, one.remedy) for one in problems] == [
                (f"{who}: dask-gpurt is not installed there", f"run `pip install {OURS}` there")
                for who in ("the scheduler", worker)
            ]
            with pytest.raises(ActivationError, match="is not installed there"), recorded(client):
                pass
        assert_no_traceback(cluster.logs[0])


@pytest.mark.cluster
@pytest.mark.slow
class TestWorkers:
    def test_workers_with_other_versions_are_named(self, cluster, other_python, tmp_path):
        """They keep running, and a message names them. Meanwhile stock Dask runs the shuffles."""
        there = minor_of(other_python)
        pythons = {
            "another Python": other_python,
            "neither": without(tmp_path / "neither", "dask_gpurt", python=other_python),
            "without": without(tmp_path / "without", "dask_gpurt"),
            "old": with_versions(tmp_path / "old", dask_gpurt=OLD),
            "untested": with_versions(tmp_path / "untested", distributed="2031.1.0"),
        }
        processes = [cluster.scheduler(**ON), cluster.worker("--no-nanny", "--name", "same")]
        for name, python in pythons.items():
            # One worker has a nanny, so that it is restarted later.
            options = [] if name == "another Python" else ["--no-nanny"]
            processes.append(
                cluster.worker(*options, "--name", name, python=python, **WITHOUT_HEARTBEATS)
            )
        with cluster.client() as client:
            client.wait_for_workers(len(pythons) + 1)
            until(lambda: len(reasons(client)) == len(pythons), "not all workers reported")
            said = reasons(client)
            other = f"Python {there} runs there, not {HERE}"
            missing = "dask-gpurt is not installed there"
            assert said == {
                "another Python": f"{other}; use Python {HERE} there",
                "neither": f"{other}, {missing}; use Python {HERE} there and "
                f"run `pip install dask-gpurt=={VERSION}` there",
                "without": f"{missing}; run `pip install dask-gpurt=={VERSION}` there",
                "old": f"dask-gpurt {OLD} is installed there, not {VERSION}; "
                f"run `pip install dask-gpurt=={VERSION}` there",
                "untested": said["untested"],
            }
            assert said["untested"].startswith("distributed 2031.1.0 is not one this dask_gpurt")
            wanted = f"distributed=={distributed.__version__}"
            assert said["untested"].endswith(f"run `pip install {wanted}` there")
            # No worker was changed. This function runs only on workers with the same Python.
            of_name = addresses(client)
            touched = client.run(
                touched_by_us(), workers=[of_name[one] for one in ("without", "old", "untested")]
            )
            assert set(map(tuple, touched.values())) == {()}
            assert len(partitions(client, shuffled())) == 2
            assert runs(client) == {"gpurt": 0, "stock": 1}
            # The worker that the nanny starts next has the same problem.
            before = of_name["another Python"]
            os.kill(client.run(os.getpid, workers=[before])[before], signal.SIGKILL)
            until(lambda: before not in addresses(client).values(), "the dead worker stays")
            until(lambda: len(reasons(client)) == len(pythons), "the new worker does not report")
            assert reasons(client)["another Python"] == said["another Python"]
            for log in cluster.logs:
                assert_no_traceback(log)
            client.retire_workers([addresses(client)[name] for name in pythons])
            assert len(partitions(client, shuffled())) == 2
            assert runs(client) == {"gpurt": 1, "stock": 1}
        assert_alive(processes[0], processes[1])


def addresses(client):
    """Return the addresses of workers by their names."""
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return {worker["name"]: address for address, worker in workers.items()}


def reasons(client):
    """Return the reasons why workers cannot take part, by their names."""
    not_ready = dask_gpurt.status(client)["not_ready"]
    found = {}
    for name, address in addresses(client).items():
        if (reason := not_ready.get(address)) is not None:
            begin = f"worker {address} on host {socket.gethostname()}: "
            assert reason.startswith(begin)
            found[name] = reason.removeprefix(begin)
    return found


def touched_by_us():
    def left(dask_worker):
        names = ("add_partition", "barrier", "get_or_create_shuffle", "get_shuffle_run")
        on_plugin = [one for one in names if one in vars(dask_worker.plugins["shuffle"])]
        return on_plugin + [one for one in dask_worker.handlers if one.startswith("gpurt")]

    # The function is defined here, because the worker may not have this module.
    left.__module__ = "__main__"
    return left

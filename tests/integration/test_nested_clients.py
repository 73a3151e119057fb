"""Clients that tasks make do not change the settings of the program's client."""

from __future__ import annotations

import dask
import psutil
import pytest
from distributed import Client, LocalCluster, get_client, worker_client

import dask_gpurt
from dask_gpurt.plugins import client_origin
from tests.conftest import stock_client
from tests.integration.processes import command_line_cluster, run_program

ON = {"DASK_GPURT__ENABLED": "true"}
#: The program's settings. All differ from the defaults, which a worker's environment has.
SETTINGS = {
    "gpurt.enabled": True,
    "gpurt.strict": True,
    "gpurt.shuffle.compression": "zstd",
    "gpurt.memory.policy": "lru",
    "gpurt.placement.enabled": False,
}


def ways():
    """Return functions by which a task gets a client. Local functions travel by value."""

    def by_get_client(address):
        return get_client().submit(pow, 2, 5, pure=False).result()

    def by_worker_client(address):
        with worker_client() as client:
            return client.submit(pow, 2, 5, pure=False).result()

    def by_address(address):
        with Client(address, set_as_default=False) as client:
            return client.submit(pow, 2, 5, pure=False).result()

    def by_another_name_of_the_address(address):
        return by_address(address.replace("127.0.0.1", "localhost"))

    async def in_a_coroutine(address):
        async with Client(address, asynchronous=True, set_as_default=False) as client:
            return await client.submit(pow, 2, 5, pure=False)

    def in_a_thread(address):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as threads:
            return threads.submit(by_address, address).result()

    def in_a_process(address):
        import subprocess
        import sys

        program = "import sys; from distributed import Client\n"
        program += "with Client(sys.argv[1]) as c: print(c.submit(pow, 2, 5, pure=False).result())"
        command = [sys.executable, "-c", program, address]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    found = (by_get_client, by_worker_client, by_address, by_another_name_of_the_address)
    found += (in_a_coroutine, in_a_thread, in_a_process)
    return {one.__name__: one for one in found}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster with the flag only in the worker's environment."""
    with command_line_cluster(tmp_path_factory.mktemp("cluster")) as started:
        started.scheduler()
        started.worker("--nthreads", "2", **ON)
        yield started


def settings_at(client):
    def find(dask_scheduler):
        plugin = dask_scheduler.plugins.get("gpurt")
        return None if plugin is None else plugin.settings.to_plain()

    return client.run_on_scheduler(find)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("way", ways())
class TestOnAWorkerWithTheFlag:
    def test_client_in_a_task_does_not_change_settings(self, cluster, way):
        with dask.config.set(SETTINGS), cluster.client() as client:
            client.wait_for_workers(1)
            before = settings_at(client)
            assert (before["strict"], before["placement"]["enabled"]) == (True, False)
            future = client.submit(ways()[way], client.scheduler.address, pure=False)
            assert future.result(timeout=60) == 32
            assert settings_at(client) == before

    def test_client_in_a_task_does_not_enable_the_runtime(self, cluster, way):
        with cluster.client() as client:
            client.wait_for_workers(1)
            dask_gpurt.disable(client)
            # This worker has had no client before.
            client.restart()
            future = client.submit(ways()[way], client.scheduler.address, pure=False)
            assert future.result(timeout=60) == 32
            assert not dask_gpurt.status(client)["active"]


@pytest.mark.cluster
@pytest.mark.slow
class TestOtherClients:
    def test_task_may_enable_the_runtime(self, cluster):
        def enable():
            dask_gpurt.enable(get_client())

        with cluster.client() as client:
            client.wait_for_workers(1)
            dask_gpurt.disable(client)
            client.submit(enable, pure=False).result(timeout=60)
            assert dask_gpurt.status(client)["active"]
            dask_gpurt.disable(client)

    def test_task_may_start_another_cluster_with_the_runtime(self, cluster):
        def program():
            options = {"n_workers": 1, "processes": False, "dashboard_address": ":0"}
            with LocalCluster(**options) as inner, Client(inner, set_as_default=False) as client:
                return dask_gpurt.status(client)["active"]

        with cluster.client() as client:
            client.wait_for_workers(1)
            dask_gpurt.disable(client)
            assert client.submit(program, pure=False).result(timeout=60)
            assert not dask_gpurt.status(client)["active"]

    def test_second_program_brings_its_settings(self, cluster):
        with dask.config.set(SETTINGS), cluster.client() as client:
            with dask.config.set({"gpurt.shuffle.compression": "lz4"}), cluster.client():
                assert settings_at(client)["shuffle"]["compression"] == "lz4"
            assert settings_at(client)["strict"]
            dask_gpurt.disable(client)


@pytest.mark.parametrize("way", ["by_get_client", "by_address", "in_a_coroutine"])
def test_client_in_a_task_does_not_change_the_cluster_flag(way):
    """In a cluster within one process, all clients share the flag."""
    with stock_client(1, n_threads=2) as client, dask.config.set({"gpurt.enabled": True}):
        address = client.scheduler.address
        assert client.submit(ways()[way], address).result(timeout=60) == 32
        assert not dask_gpurt.status(client)["active"]
        with Client(address, set_as_default=False):
            assert dask_gpurt.status(client)["active"]


@pytest.mark.cluster
@pytest.mark.slow
def test_task_below_the_run_command_keeps_client_settings(tmp_path):
    source = """
    import sys
    from dask_gpurt.cli import gpurt
    if __name__ == "__main__":
        sys.argv = ["dask gpurt", "run", "inner.py"]
        gpurt()
    """
    (tmp_path / "inner.py").write_text(
        """
import dask, dask_gpurt
from distributed import Client, LocalCluster, get_client

def task():
    return get_client().submit(pow, 2, 5, pure=False).result()

if __name__ == "__main__":
    with LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=":0") as cluster:
        # Workers have what the program started with, and the program has changed its mind since.
        with dask.config.set({"gpurt.strict": True}), Client(cluster) as client:
            print("TASK", client.submit(task).result())
            print("STRICT", dask_gpurt.status(client)["strict"])
"""
    )
    done = run_program(source, directory=tmp_path)
    assert "TASK 32\nSTRICT True" in done.stdout, done.stderr


IDENTITY = {
    "address": "tcp://10.0.0.1:8786",
    "workers": {"tcp://10.0.0.2:7001": {}, "tcp://[fe80::1]:7002": {}, "inproc://10.0.0.2/1/2": {}},
}


@pytest.mark.parametrize(
    ("ports", "hosts", "found"),
    [
        ({7001}, {"10.0.0.2"}, ["tcp://10.0.0.2:7001"]),
        ({7002}, {"10.0.0.2", "fe80::1"}, ["tcp://[fe80::1]:7002"]),
        # Another program has that port on this host.
        ({7001}, {"10.0.0.3"}, []),
        ({7003}, {"10.0.0.2"}, []),
        # The parent is a program with a cluster in its own process.
        ({7001, 8786}, {"10.0.0.1", "10.0.0.2"}, []),
    ],
)
def test_process_descends_from_a_worker(ports, hosts, found):
    assert client_origin.ancestor_workers(IDENTITY, ports, hosts) == found


def test_hidden_ancestors_are_none(monkeypatch):
    """Where the system hides processes of other users, their parents cannot be listed."""

    def hidden(process):
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "parents", hidden)
    assert client_origin._ports_of_ancestors() == set()

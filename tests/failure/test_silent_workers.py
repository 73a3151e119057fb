"""Broadcasts return the answers of other workers while one worker's event loop is blocked."""

from __future__ import annotations

import asyncio
import os
import threading

import dask
import pytest
from distributed import Client, LocalCluster, wait

import dask_gpurt
from dask_gpurt.command import connect, doctor, status
from dask_gpurt.plugins import activation, ask_workers

pytestmark = pytest.mark.cluster


def hold_up(began, go_on):
    """Block the event loop of a worker by opening a pipe that has no writer yet."""
    for path, flags in [(began, os.O_WRONLY), (go_on, os.O_RDONLY)]:
        os.close(os.open(path, flags))


@pytest.fixture(scope="module")
def cluster():
    settings = {
        "gpurt.enabled": True,
        # Reports on machines are fetched only when a test asks for them.
        "gpurt.topology.file": None,
        "gpurt.topology.probe": "off",
        # It would remove copies of values that several workers hold.
        "distributed.scheduler.active-memory-manager.start": False,
    }
    with (
        dask.config.set(settings),
        LocalCluster(2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def held_up(cluster, tmp_path, monkeypatch):
    """The blocked worker and the other one; deadlines end once the other one has answered."""

    async def until_others_have(asked, deadline_s):
        while sum(not one.done() for one in asked) > 1:
            late = [one for one in asked if not one.done()]
            await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)

    monkeypatch.setattr(ask_workers, "_until_late", until_others_have)
    workers = sorted(cluster.scheduler_info()["workers"])
    pipes = [tmp_path / name for name in ("began", "go_on")]
    for one in pipes:
        os.mkfifo(one)
    running = threading.Thread(
        target=cluster.run, args=(hold_up, *map(str, pipes)), kwargs={"workers": workers[:1]}
    )
    running.start()
    os.close(os.open(pipes[0], os.O_RDONLY))
    yield workers
    os.close(os.open(pipes[1], os.O_WRONLY))
    running.join()


def test_status_and_doctor_name_the_silent_worker(cluster, held_up, capsys):
    silent, other = held_up
    found = dask_gpurt.status(cluster)
    assert list(found["silent"]) == [silent]
    assert found["workers"][silent] is None
    assert found["workers"][other]["counters"]
    assert status.show(cluster.scheduler.address, None, False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines if silent in line] == ["does not answer"]
    with connect.connected(cluster.scheduler.address) as outside:
        said = doctor.cluster_findings(connect.ask(outside, versions=True))
    problems = [one.text for one in said if one.level == "problem"]
    assert problems == [f"{silent} does not answer"]
    assert any(other in one.text and one.level == "ok" for one in said)


def test_silent_worker_does_not_block_the_machine_description(cluster, held_up):
    silent, _ = held_up
    machines = cluster.sync(activation.machines, cluster, False)
    assert machines["workers"] == 1
    assert "no answer in" in machines["problems"][silent]


def test_workers_that_answer_tell_where_a_result_is(cluster, request):
    futures = cluster.scatter([b"x"], broadcast=True)
    wait(futures)
    silent, other = request.getfixturevalue("held_up")
    found = dask_gpurt.explain(cluster, futures[0])
    assert list(found["silent"]) == [silent]
    assert list(found["memory"]) == [other]

"""Schedulers and workers in processes of their own exit when they are told to."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import wait
from distributed.diagnostics.plugin import WorkerPlugin

import dask_gpurt
from tests.failure.gates import until
from tests.failure.stage import frame
from tests.integration.comparing import collection
from tests.integration.processes import CommandLineCluster, command_line_cluster
from tests.thoroughness import some

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: Far more seconds than a worker needs to exit, and fewer than an earlier hang took.
TIMEOUT_S = 40

FLAG = {"DASK_GPURT__ENABLED": "true", "PYTHONPATH": str(Path(__file__).parents[2])}


class Lingers(WorkerPlugin):
    """A user's plugin whose teardown never ends by itself."""

    name = "lingers"

    def __init__(self, path: str) -> None:
        self.path = path

    async def teardown(self, worker: Any) -> None:
        Path(self.path).touch()
        await asyncio.Event().wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[CommandLineCluster]:
    with command_line_cluster(tmp_path) as cluster:
        yield cluster


def ends(process: subprocess.Popen[Any]) -> bool:
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def shuffled(client: Any) -> Any:
    with client.as_current():
        found = collection([frame(i) for i in range(3)]).shuffle("key", npartitions=3).persist()
        wait(found, TIMEOUT_S)
    return found


@pytest.mark.parametrize("nanny", some(["--nanny", "--no-nanny"], 1))
def test_scheduler_ends_before_its_workers(cluster: CommandLineCluster, nanny: str) -> None:
    scheduler = cluster.scheduler(**FLAG)
    workers = [cluster.worker(nanny, **FLAG) for _ in range(2)]
    with cluster.client() as client:
        client.wait_for_workers(2, TIMEOUT_S)
        assert dask_gpurt.status(client)["active"]
        kept = shuffled(client)
        scheduler.send_signal(signal.SIGTERM)
        assert all(ends(process) for process in (scheduler, *workers))
        del kept
    assert "CancelledError" not in cluster.logs[0].read_text()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_worker_may_be_closed_twice_at_once(
    cluster: CommandLineCluster, tmp_path: Path, second: signal.Signals
) -> None:
    """The scheduler closes a worker, and a signal does so at the same time."""
    cluster.scheduler(**FLAG)
    worker = cluster.worker("--no-nanny", **FLAG)
    with cluster.client() as client:
        client.wait_for_workers(1, TIMEOUT_S)
        begun = tmp_path / "begun"
        client.register_plugin(Lingers(str(begun)))
        (address,) = client.scheduler_info()["workers"]
        client.loop.add_callback(
            client.scheduler.retire_workers, workers=[address], close_workers=True, remove=True
        )
        until(begun.exists, "it does not begin to close")
        os.kill(worker.pid, second)
        assert ends(worker), cluster.log_text()

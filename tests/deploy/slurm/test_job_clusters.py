"""Jobs of SLURM get the runtime from the client's flag, and their answers equal stock Dask's."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import dask.array as da
import numpy as np
import pytest
from dask.system import CPU_COUNT
from distributed import Client

import dask_gpurt
from dask_gpurt.topology import description
from tests.deploy.slurm.job_cluster import JobCluster, cluster_of_jobs, frames
from tests.deploy.slurm.throwaway import Slurm
from tests.integration.comparing import assert_same_partitions, collection, partitions, runs
from tests.limits import HANG_S

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def jobs(slurm: Slurm) -> Iterator[JobCluster]:
    """Start a job on each node, and give the nodes different addresses."""
    # Node n1 gets 127.0.0.1, and node n2 gets 127.0.0.2.
    host = ["--host", "127.0.0.${SLURMD_NODENAME#n}"]
    options = {"interface": None, "worker_extra_args": host}
    scheduler = {"host": "127.0.0.1", "dashboard_address": ":0"}
    with cluster_of_jobs(slurm, 2, scheduler_options=scheduler, **options) as started:
        yield started


def test_flag_of_the_client_reaches_the_workers(jobs: JobCluster) -> None:
    assert set(jobs.environ("DASK_GPURT__ENABLED").values()) == {None}
    assert set(jobs.environ("SLURMD_NODENAME").values()) == {"n1", "n2"}
    before = runs(jobs.client)
    assert len(partitions(jobs.client, collection(frames()).shuffle("key"))) == 6
    status = dask_gpurt.status(jobs.client)
    assert status["active"]
    assert status["runs"] == {"gpurt": before["gpurt"] + 1, "stock": before["stock"]}
    assert all(report is not None for report in status["workers"].values())
    assert len(status["workers"]) == 2
    paths = {link["path"] for one in status["workers"].values() for link in one["links"].values()}
    assert paths == {"shared"}


def lazy_frames(name: str) -> Any:
    left, right = collection(frames()), collection(frames(3, 300))
    if name == "shuffle":
        return left.shuffle("key", npartitions=5)
    if name == "merge":
        return left.merge(right, on="key", how="inner")
    return left.set_index("key", divisions=[0, 100, 250, 500])


@contextlib.contextmanager
def stock(jobs: JobCluster) -> Iterator[Client]:
    """Switch the runtime off on the same workers."""
    dask_gpurt.disable(jobs.client)
    try:
        yield jobs.client
    finally:
        dask_gpurt.enable(jobs.client)


@pytest.mark.parametrize("name", ["shuffle", "merge", "set_index"])
def test_frames_equal_those_of_stock_dask(jobs: JobCluster, name: str) -> None:
    before = runs(jobs.client)
    got = partitions(jobs.client, lazy_frames(name))
    assert runs(jobs.client)["gpurt"] > before["gpurt"]
    with stock(jobs) as client:
        assert_same_partitions(got, partitions(client, lazy_frames(name)))


def test_rechunked_arrays_equal_those_of_stock_dask(jobs: JobCluster) -> None:
    values = np.random.default_rng(2).random((400, 400))
    lazy = da.from_array(values, chunks=(400, 50)).rechunk((50, 400), method="p2p")
    before = runs(jobs.client)
    got = jobs.client.compute(lazy).result()
    assert runs(jobs.client)["gpurt"] == before["gpurt"] + 1
    with stock(jobs) as client:
        np.testing.assert_array_equal(got, client.compute(lazy).result())
    np.testing.assert_array_equal(got, values)


def gpurt(jobs: JobCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dask", "gpurt", *arguments]
    address = jobs.client.scheduler.address
    return subprocess.run(
        [*command, "--scheduler", address], capture_output=True, text=True, timeout=HANG_S
    )


def test_two_nodes_of_one_host_are_one_host(jobs: JobCluster) -> None:
    found = gpurt(jobs, "topology")
    assert found.returncode == 0, found.stderr
    (host,) = description.parse(found.stdout).hosts
    assert {*host.addresses} == {"127.0.0.1", "127.0.0.2"}


def test_doctor_says_what_a_job_has(jobs: JobCluster) -> None:
    asked = ["srun", "--cpus-per-task=1", "--mem=100", "--time=5", "--gres=gpu:1"]
    command = [*asked, sys.executable, "-m", "dask", "gpurt", "doctor"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert re.search(r"job \d+ on n\d, 1 core, 100 MiB, GPUs \d, .* until \d{4}-", found.stdout)
    # SLURM limits the memory so that Dask sees it, and here it does not confine a job to cores.
    assert ("and the job has 1\n" in found.stdout) == (CPU_COUNT > 1)
    assert "slurm memory" not in found.stdout

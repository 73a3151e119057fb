"""Jobs with GPUs, jobs whose Python lacks the package, and jobs over TLS."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from distributed.security import Security

import dask_gpurt
from tests.deploy.slurm.job_cluster import cluster_of_jobs, frames
from tests.deploy.slurm.throwaway import Slurm
from tests.failure.gates import until
from tests.integration.comparing import collection, partitions, runs
from tests.integration.environments import without
from tests.thoroughness import only_if_all

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@only_if_all
def test_each_gpu_job_has_a_gpu_of_its_own(slurm: Slurm) -> None:
    with cluster_of_jobs(slurm, 3, directives=["--gres=gpu:1"]) as jobs:
        nodes, gpus = jobs.environ("SLURMD_NODENAME"), jobs.environ("CUDA_VISIBLE_DEVICES")
        taken = {(nodes[address], gpus[address]) for address in nodes}
        assert len(taken) == 3
        assert taken <= {(node, gpu) for node in ("n1", "n2") for gpu in ("0", "1")}
        assert len(partitions(jobs.client, collection(frames()).shuffle("key"))) == 6
        assert runs(jobs.client) == {"gpurt": 1, "stock": 0}


def test_job_without_the_package_is_named_by_its_id(
    slurm: Slurm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python = without(tmp_path / "without", "dask_gpurt")
    with cluster_of_jobs(slurm, 1, python=python) as jobs:
        ((address, job),) = jobs.jobs().items()
        until(lambda: dask_gpurt.status(jobs.client)["not_ready"], "the worker does not report")
        named = f"worker {address} on host {socket.gethostname()} in SLURM job {job}: "
        reason = dask_gpurt.status(jobs.client)["not_ready"][address]
        assert reason.startswith(f"{named}dask-gpurt is not installed there; run `pip install")
        assert len(partitions(jobs.client, collection(frames()).shuffle("key"))) == 6
        status = dask_gpurt.status(jobs.client)
        assert status["runs"] == {"gpurt": 0, "stock": 1}
        assert [one["why"] for one in status["fallbacks"]] == [reason]
    assert reason in [record.message for record in caplog.records]


def test_runtime_is_on_in_jobs_over_tls(slurm: Slurm, tmp_path: Path) -> None:
    options = {"protocol": "tls://", "security": Security.temporary()}
    with cluster_of_jobs(slurm, 2, shared_temp_directory=str(tmp_path), **options) as jobs:
        assert jobs.client.scheduler.address.startswith("tls://")
        assert len(partitions(jobs.client, collection(frames()).shuffle("key"))) == 6
        assert runs(jobs.client) == {"gpurt": 1, "stock": 0}

"""Clusters of dask-jobqueue, whose workers are jobs of a throw-away SLURM."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dask
import numpy as np
import pandas as pd
import pytest
import yaml
from distributed import Client

from tests.deploy.slurm.throwaway import Slurm
from tests.failure.stage import Departures
from tests.limits import HANG_S

#: Process memory is not watched: libraries alone would take more than such a small limit.
SMALL_MEMORY = [
    "export DASK_DISTRIBUTED__WORKER__MEMORY__SPILL=False",
    "export DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE=False",
    "export DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE=False",
]


class JobCluster(NamedTuple):
    """A cluster of jobs, a client that has the flag, and a plugin that notices who leaves."""

    slurm: Slurm
    cluster: Any
    client: Client
    departures: Departures

    def environ(self, name: str) -> dict[str, str | None]:
        """Return an environment variable of each worker, by its address."""
        return self.client.run(lambda: os.environ.get(name))

    def jobs(self) -> dict[str, str]:
        """Return the id of each worker's job, by the worker's address."""
        return {address: str(job) for address, job in self.environ("SLURM_JOB_ID").items()}


@contextlib.contextmanager
def cluster_of_jobs(
    slurm: Slurm,
    n_jobs: int,
    prologue: Sequence[str] = (),
    directives: Sequence[str] = (),
    **options: Any,
) -> Iterator[JobCluster]:
    """Start jobs with one worker each. Only the client has the flag.

    Parameters
    ----------
    prologue
        Lines of the job script before the worker's command.
    directives
        Options of `sbatch`.
    options
        Arguments of `SLURMCluster`.
    """
    jobqueue = pytest.importorskip("dask_jobqueue", reason="starts workers as jobs")
    places = {name: str(slurm.folder / name) for name in ("scratch", "logs", "importable")}
    # Workers look up functions of tests by name. They must not find the package beside the tests,
    # only the installed one.
    tests = Path(places["importable"], "tests")
    tests.parent.mkdir(exist_ok=True)
    if not tests.exists():
        tests.symlink_to(Path(__file__).parents[2])
    lines = [f"export PYTHONPATH={tests.parent}", *prologue]
    chosen = {
        "queue": "debug",
        "cores": 1,
        "processes": 1,
        "memory": "1GB",
        "walltime": "00:10:00",
        "interface": "lo",
        "python": sys.executable,
        "job_script_prologue": lines,
        "job_extra_directives": [f"--chdir={slurm.folder}", *directives],
        "local_directory": places["scratch"],
        "log_directory": places["logs"],
        "scheduler_options": {"dashboard_address": ":0"},
        **options,
    }
    departures = Departures()
    # distributed's own fixtures put back the configuration from before dask-jobqueue was imported.
    defaults = yaml.safe_load(Path(jobqueue.__file__).with_name("jobqueue.yaml").read_text())
    with (
        dask.config.set({"gpurt.enabled": False, **defaults}),
        jobqueue.SLURMCluster(**chosen) as cluster,
    ):
        cluster.scheduler.add_plugin(departures)
        cluster.scale(jobs=n_jobs)
        with (
            dask.config.set({"gpurt.enabled": True}),
            Client(cluster, set_as_default=False) as client,
        ):
            client.wait_for_workers(n_jobs, timeout=HANG_S)
            yield JobCluster(slurm, cluster, client, departures)


def frames(n_frames: int = 6, n_rows: int = 2000) -> list[pd.DataFrame]:
    rng = np.random.default_rng(1)
    return [
        pd.DataFrame(
            {
                "key": rng.integers(0, 500, n_rows),
                "value": rng.random(n_rows),
                "text": pd.array(rng.choice(["a", "bb", "ccc"], n_rows), dtype="str"),
            }
        )
        for _ in range(n_frames)
    ]

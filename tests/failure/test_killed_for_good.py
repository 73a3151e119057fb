"""Killed workers leave no files, even if no other worker starts and sweeps."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import psutil
import pytest
from dask import dataframe as dd
from distributed import wait

import dask_gpurt
from tests.failure.gates import Gate, pass_gate, until
from tests.failure.memory_stage import SETTINGS, make_block
from tests.integration.processes import command_line_cluster
from tests.limits import HANG_S
from tests.thoroughness import some

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def held(part: pd.DataFrame, path: str) -> pd.DataFrame:
    if len(part):
        pass_gate(path)
    return part


def files_without_a_name(pid: int) -> int:
    """Return the open files of spilled shards."""
    n_files = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            n_files += "gpurt-shuffle-" in os.readlink(descriptor)
        except FileNotFoundError:
            pass
    return n_files


def ours(directory: Path, name: str = "gpurt-") -> list[str]:
    """List files and directories by a part of their path; removals meanwhile are no error."""
    paths = (os.path.join(at, one) for at, ds, fs in os.walk(directory) for one in (*ds, *fs))
    return [path for path in paths if name in path]


@pytest.mark.parametrize(
    ("where", "nanny"), some([("of all", "--nanny"), ("of the worker", "--no-nanny")], 1)
)
def test_killed_workers_leave_no_files_or_memory(tmp_path: Path, where: str, nanny: str) -> None:
    config: dict[str, Any] = SETTINGS | {"gpurt.enabled": True, "gpurt.shuffle.memory": "64 KiB"}
    if where == "of all":
        config["gpurt.memory.directory"] = str(tmp_path / "values")
    with dask.config.set(config), Gate() as gate, command_line_cluster(tmp_path) as cluster:
        env = {
            "DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(dask.config.config),
            "PYTHONPATH": str(ROOT),
        }
        cluster.scheduler(**env)
        local = ["--local-directory", str(tmp_path / "local")]
        outer = cluster.worker("--memory-limit", "32 MiB", nanny, *local, **env)
        with cluster.client() as client:
            client.wait_for_workers(1, timeout=HANG_S)
            dask_gpurt.enable(client)
            (pid,) = client.run(os.getpid).values()
            blocks = client.map(make_block, range(20))
            with client.as_current():
                wait(blocks, timeout=HANG_S)
            rows = np.random.default_rng(0).integers(0, 1000, 50_000)
            frame = dd.from_pandas(pd.DataFrame({"key": rows}), npartitions=8)
            with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
                lazy = frame.shuffle("key").map_partitions(held, gate.path, meta=frame._meta)
                outputs = client.compute(lazy)
            gate.wait_for()
            values = tmp_path / ("values" if where == "of all" else "local")
            until(lambda: len(ours(values, "dask-gpurt-values-")) > 5, "none on disk")
            assert files_without_a_name(pid) >= 1
            assert not ours(tmp_path, "gpurt-shuffle-")
            # Both are stopped first, so that neither notices the death of the other.
            processes = {outer.pid, pid}
            reapers = psutil.Process(pid).children()
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for one in processes:
                    os.kill(one, number)
            until(lambda: not ours(tmp_path), "something stays on disk")
            until(lambda: not any(map(_runs, reapers)), "a reaper stays")
            del blocks, outputs


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE

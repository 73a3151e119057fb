"""The helpers of `processes.py` start and stop processes as documented."""

from __future__ import annotations

import pytest

from tests.integration.no_heartbeats import NEVER_MS
from tests.integration.processes import WITHOUT_HEARTBEATS, run_program

PROGRAM = """
from distributed import Client, LocalCluster

def pause_ms(dask_worker):
    callback = dask_worker.periodic_callbacks["heartbeat"]
    return callback.is_running(), callback.callback_time

if __name__ == "__main__":
    with LocalCluster(n_workers=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        print(client.run(pause_ms).values())
"""


@pytest.mark.cluster
@pytest.mark.parametrize("env", [{}, WITHOUT_HEARTBEATS], ids=["stock", "without"])
def test_a_worker_without_heartbeats_sends_none(tmp_path, env):
    done = run_program(PROGRAM, directory=tmp_path, **env)
    assert (f"(True, {NEVER_MS})" in done.stdout) == bool(env), done.stderr
    assert "(True, " in done.stdout

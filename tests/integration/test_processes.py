"""What the tests take for an error of a process, and what they know to be stock Dask's own."""

from __future__ import annotations

import pytest

from tests.integration.processes import run_program, shows_a_traceback

#: A cluster that closes as soon as a heartbeat waits for the scheduler's answer.
CLOSES_WITH_A_HEARTBEAT = """
import asyncio, threading
from distributed import LocalCluster

cluster = LocalCluster(n_workers=1, processes=False, protocol="tcp", dashboard_address=":0")
arrived = threading.Event()

async def no_answer(**_):
    arrived.set()
    await asyncio.Event().wait()

cluster.scheduler.handlers["heartbeat_worker"] = no_answer
arrived.wait()
cluster.close()
"""


@pytest.mark.cluster
def test_a_heartbeat_that_a_closing_cluster_cuts_off_is_no_error_of_ours(tmp_path):
    stderr = run_program(CLOSES_WITH_A_HEARTBEAT, directory=tmp_path).stderr
    assert "CommClosedError" in stderr
    assert not shows_a_traceback(stderr)
    stderr += run_program("1 / 0", directory=tmp_path).stderr
    assert shows_a_traceback(stderr)

"""A program that ends without closing the cluster in its process leaves no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.processes import WITHOUT_HEARTBEATS, run_program, without_closing

BEGIN = """
import sys
import dask.array as da
from distributed import Client, wait

if __name__ == "__main__":
    client = Client(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0")
    rows = da.ones((40, 40), chunks=(10, 40))
"""
ENDS = {
    "idle": "",
    "after a rechunk": "rows.rechunk((40, 10), method='p2p').sum().compute()",
    "values are held": "held = rows.persist(); wait(held)",
    "outputs are held": "held = rows.rechunk((40, 9), method='p2p').persist(); wait(held)",
    "the client is closed": "client.close()",
    "with a code": "sys.exit(3)",
}


AT = "2026-11-26 14:46:08,871 - "
BATCHED = f"{AT}distributed.batched - INFO - Batched Comm Closed <InProc>\n"
HEARTBEAT = (
    f"{AT}distributed.worker - ERROR - Unexpected exception during heartbeat. Closing worker.\n"
)
BEGIN_OF_ERROR = 'Traceback (most recent call last):\n  File "x.py", line 1, in x\n    await y\n'
CLOSED_POOL = "RuntimeError: ConnectionPool is closed\n"
ENTRIES_OF_STOCK = [
    BATCHED,
    f"{BATCHED}{BEGIN_OF_ERROR}distributed.comm.core.CommClosedError\n",
    HEARTBEAT + BEGIN_OF_ERROR + CLOSED_POOL,
    f"{AT}tornado.application - ERROR - Exception in callback <bound method Worker.heartbeat of "
    f"<Worker 'tls://127.0.0.1:1'>>\n{BEGIN_OF_ERROR}{CLOSED_POOL}",
    f"{AT}distributed.worker - ERROR - Failed to communicate with scheduler during heartbeat.\n"
    f"{BEGIN_OF_ERROR}StreamClosedError: x\n\nThe above exception was the cause:\n\n"
    f"{BEGIN_OF_ERROR}distributed.comm.core.CommClosedError: in <TCP>\n",
]


@pytest.mark.parametrize("entry", ENTRIES_OF_STOCK)
def test_entries_of_stock_for_a_closing_cluster_are_left_out(entry: str) -> None:
    assert without_closing(f"begin\n{entry}{entry}the end\n") == "begin\nthe end\n"
    assert without_closing(entry.rstrip("\n")) == ""


@pytest.mark.parametrize("before", ["", HEARTBEAT, f"{AT}a - INFO - b\n"])
def test_other_errors_are_kept(before: str) -> None:
    other = f"{before}{BEGIN_OF_ERROR}KeyError: 'x'\n"
    assert without_closing(f"{other}{HEARTBEAT}{BEGIN_OF_ERROR}{CLOSED_POOL}") == other


@pytest.mark.share(3)
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_closes_nothing_ends_without_a_traceback(end: str, tmp_path: Path) -> None:
    source = f"{BEGIN}    {ENDS[end]}\n"
    done = run_program(source, directory=tmp_path, DASK_GPURT__ENABLED="true", **WITHOUT_HEARTBEATS)
    assert done.returncode == (3 if end == "with a code" else 0), done.stderr
    assert "Traceback" not in without_closing(done.stderr), done.stderr

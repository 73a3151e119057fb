"""A program that ends without closing the cluster in its process leaves no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.processes import WITHOUT_HEARTBEATS, run_program, without_closed_early

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


def test_only_stocks_own_entry_is_left_out() -> None:
    line = "2026-11-26 14:46:08,871 - distributed.batched - INFO - Batched Comm Closed <InProc>\n"
    of_stock = (
        line + "Traceback (most recent call last):\n"
        '  File "batched.py", line 115, in _background_send\n'
        "    nbytes = yield coro\n"
        "             ^^^^^^^^^^\n"
        "distributed.comm.core.CommClosedError\n"
    )
    other = "Traceback (most recent call last):\n  File\nKeyError: 'x'\nthe end\n"
    assert without_closed_early(f"begin\n{of_stock}{other}") == f"begin\n{other}"
    assert without_closed_early(line + "next\n") == "next\n"


@pytest.mark.share(3)
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_closes_nothing_ends_without_a_traceback(end: str, tmp_path: Path) -> None:
    source = f"{BEGIN}    {ENDS[end]}\n"
    done = run_program(source, directory=tmp_path, DASK_GPURT__ENABLED="true", **WITHOUT_HEARTBEATS)
    assert done.returncode == (3 if end == "with a code" else 0), done.stderr
    assert "Traceback" not in without_closed_early(done.stderr), done.stderr

"""A script that ends soon after its start, as users' scripts with errors do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

SCRIPT = """
import dask_gpurt
from distributed import Client, LocalCluster

if __name__ == "__main__":
    client = Client(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None))
    dask_gpurt.enable(client)
    {last}
"""


@pytest.mark.cluster
@pytest.mark.parametrize("last", ["pass", "raise SystemExit('an error of the user')"])
def test_script_that_ends_at_once_shows_its_own_error_alone(last: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(last=last))
    command = [sys.executable, str(script)]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ended.returncode == ("error" in last)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "dask_gpurt" not in ended.stderr, ended.stderr

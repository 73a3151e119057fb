"""Suites of device frames over real UCX, with the memory of the CUDA stand-in."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.standins import build
from tests.standins.device_links import needs_standin
from tests.transport.ucx_processes import needs_ucxx

pytestmark = [needs_standin, needs_ucxx]

#: Tests in which UCX is given device memory, or has to refuse it.
TESTS = "travel or limit or fails_on or spilled or nothing_on or rechunked_on or slow_link"
#: Cells of the failure matrix: each deed while device memory is on its way.
CELLS = "transfer and not bystander"


def counters_of(tmp_path, suite, *options):
    """Run a suite in another process, in which all of it must pass; return the counters."""
    path = tmp_path / "counters.json"
    plugins = ["-p", "no:cacheprovider", "-p", "tests.standins.cuda_frames"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", *plugins, suite, *options],
        env=build.environment() | {"STANDIN_COUNTERS": str(path)},
        cwd=build.ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


@pytest.mark.cluster
@pytest.mark.slow
def test_device_frames_travel_over_real_ucx(tmp_path):
    counters = counters_of(tmp_path, "tests/integration/test_device_frames.py", "-k", TESTS)
    # UCX, and nothing else, copies by the driver.
    assert counters["copied_nbytes"] > 10_000_000
    assert counters["allocations"] > 100


@pytest.mark.cluster
@pytest.mark.slow
def test_device_frames_survive_failures_of_workers(tmp_path):
    options = ["-p", "tests.standins.cuda_matrix", "-k", CELLS]
    counters = counters_of(tmp_path, "tests/failure/test_matrix.py", *options)
    # Of the cells whose workers are in that process.
    assert counters["copied_nbytes"] > 1_000_000

"""Shuffles end where workers may have few files open."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import environment

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("few_files.py")
N_WORKERS = 8
N_FILES = 256


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (N_FILES, N_FILES))


def test_shuffle_between_many_workers_ends_with_few_open_files(tmp_path: Path) -> None:
    """Both ends of two connections for each pair of workers would take all files."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(N_WORKERS)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        preexec_fn=limit_files,
    )
    assert done.returncode == 0, done.stderr
    n_inputs = 2 * N_WORKERS
    expected = [n_inputs * 1000, 1000 * sum(range(n_inputs)), 1]
    assert [int(word) for word in done.stdout.split()] == expected
    assert "Too many open files" not in done.stderr

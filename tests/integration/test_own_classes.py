"""Frames and arrays with objects of a script's own classes arrive unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import environment
from tests.limits import HANG_S
from tests.thoroughness import some

PROGRAM = Path(__file__).with_name("own_classes.py")
#: Objects that cannot be pickled, and the type that the error names.
UNSENDABLE = {
    "lock": "_thread.lock",
    "a lock among numbers": "_thread.lock",
    "lock in a dict": "_thread.lock",
    "generator": "generator",
}


def answers(directory: Path, n_workers: int, *, is_cell: bool = False, **env: str):
    """Run the program; return the name and outcome of each case."""
    # Like a notebook's cell, this code has no file that a worker could import.
    cell = f"exec(compile({PROGRAM.read_text()!r}, '<cell>', 'exec'))"
    command = [sys.executable, *(["-c", cell] if is_cell else [str(PROGRAM)])]
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment(N_WORKERS=str(n_workers), DASK_GPURT__ENABLED="true", **env),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert not done.returncode, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("n_workers", "env", "paths"),
    some(
        [
            pytest.param(2, {"DASK_GPURT__SHUFFLE__MEMORY": "2 B"}, "shared", id="two that spill"),
            pytest.param(
                3,
                {"DASK_GPURT__SHUFFLE__TRANSPORT": "comm", "is_cell": True},
                "comm",
                id="cell and three over comms",
            ),
            pytest.param(1, {}, "", id="one worker"),
        ],
        1,
    ),
)
def test_objects_of_own_classes_arrive_as_sent(tmp_path, n_workers, env, paths):
    found = answers(tmp_path, n_workers, **env)
    assert found.pop("runs on stock") == "0"
    assert found.pop("spilled") == str("DASK_GPURT__SHUFFLE__MEMORY" in env)
    assert found.pop("paths") == paths
    errors = {name: found.pop(name) for name in UNSENDABLE}
    assert set(found.values()) == {"as sent"}, found
    assert len(found) >= 20
    # Errors are the same with one worker, which no object leaves.
    for name, what in UNSENDABLE.items():
        assert errors[name].startswith("TypeError: column 'v' cannot be sent"), errors[name]
        assert what in errors[name]
        assert "Leave it out before the shuffle" in errors[name]

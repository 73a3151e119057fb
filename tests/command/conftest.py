"""Fixtures that run `dask gpurt`, and plain Python for comparison, in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANG_S


@dataclass(frozen=True)
class Outcome:
    """The output and exit code of a process."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Starts processes in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # A flag in the environment of the test run must not change the tests.
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.upper().startswith("DASK_GPURT__")
        }

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def python(self, *args: str, stdin: str = "", env: Mapping[str, str] | None = None) -> Outcome:
        done = subprocess.run(
            [sys.executable, *args],
            input=stdin.encode(),
            capture_output=True,
            cwd=self.directory,
            env={**self.env, **(env or {})},
            timeout=HANG_S,
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    def gpurt(self, *args: str, stdin: str = "", env: Mapping[str, str] | None = None) -> Outcome:
        return self.python("-m", "dask_gpurt.cli", *args, stdin=stdin, env=env)

    def run(self, *args: str, stdin: str = "") -> tuple[Outcome, dict[str, Any]]:
        """Run a script by `dask gpurt run`, with a report."""
        path = self.directory / "report.json"
        outcome = self.gpurt("run", "--report", str(path), *args, stdin=stdin)
        return outcome, json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture
def user_yaml(shell: Shell, tmp_path: Path) -> Callable[[str], Path]:
    """Write a configuration file into the folder that Dask reads for a user."""
    if "DASK_CONFIG" in os.environ:
        pytest.skip("DASK_CONFIG is set, and its files override those of a user")
    shell.env["HOME"] = str(tmp_path / "home")

    def write(text: str) -> Path:
        return shell.write("home/.config/dask/mine.yaml", text)

    return write

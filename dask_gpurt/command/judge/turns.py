"""One turn of a program in a process of its own, on stock Dask or with the runtime.

The process is `dask gpurt run`, with the runtime off for stock Dask. So both sides start their
clusters and measure in the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Like the program `dask`, the process finds no module in the current directory as it starts.
_PROGRAM = """
import os, sys
if not sys.flags.safe_path:
    sys.path[0] = os.path.dirname(sys.executable)
from dask_gpurt.cli import gpurt
gpurt(prog_name="dask gpurt")
"""
#: Most characters of an output that are compared.
MAX_OUTPUT = 16 << 20
#: Most lines of an error that are shown.
MAX_ERROR_LINES = 40
#: Seconds that an interrupted program may take to end.
GRACE_S = 20.0
#: The first words of the closing report of `dask gpurt run`.
_REPORT = "dask gpurt: "


@dataclass(frozen=True)
class Turn:
    """The outcome of one turn.

    Attributes
    ----------
    code
        Exit status; None if the program did not end in time.
    error
        The last lines that the program wrote to standard error.
    report
        As `dask gpurt run --report` writes it; empty if there is none.
    """

    code: int | None
    output: str
    error: list[str]
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of the program, without the start of the cluster that was started for it."""
        return float(self.report.get("wall_s", 0.0) - self.report.get("cluster_start_s", 0.0))

    @property
    def schedulers(self) -> dict[str, bool]:
        """Whether the runtime was on, by address of a scheduler."""
        return {one["scheduler"]: one["active"] for one in self.report.get("clusters", ())}


class Program:
    """A program to run in turns.

    Parameters
    ----------
    options
        Options of `dask gpurt run`.
    command
        The script and its arguments.
    stdin
        The standard input of each turn.
    """

    def __init__(
        self, options: Sequence[str], command: Sequence[str], stdin: bytes, directory: Path
    ) -> None:
        self._options, self._command, self._stdin = options, command, stdin
        self._directory = directory

    def run(self, *, stock: bool, timeout_s: float) -> Turn:
        """Run the program once.

        Raises
        ------
        KeyboardInterrupt
            The user pressed Ctrl-C. The program and its cluster have ended.
        """
        paths = [self._directory / name for name in ("output", "error", "report", "input")]
        output, error, report, given = paths
        given.write_bytes(self._stdin)
        report.unlink(missing_ok=True)
        side = ["--stock"] if stock else []
        first = [sys.executable, "-c", _PROGRAM, "run", "--no-progress", "--report", str(report)]
        with output.open("wb") as out, error.open("wb") as err, given.open("rb") as stdin:
            process = subprocess.Popen(
                [*first, *side, *self._options, *self._command],
                stdin=stdin,
                stdout=out,
                stderr=err,
                # Ctrl-C reaches this process alone, which passes it on once.
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        found: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(report.read_text(encoding="utf-8"))
        with output.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_OUTPUT)
        return Turn(code, text, _last_lines(error), found)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program that still runs as Ctrl-C does, then kill it."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        # Its cluster is in another process group, and ends when this process has ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_lines(path: Path) -> list[str]:
    """Return the last lines of an error, without the closing report."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        lines = file.read().decode(errors="replace").splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith(_REPORT)]
    return lines[: starts[-1] if starts else len(lines)][-MAX_ERROR_LINES:]

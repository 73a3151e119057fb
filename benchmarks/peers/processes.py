"""The processes of the engines, as the program that measures sees them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import ROOT, Engine

#: Longest wait for an engine to start, or for one work.
DEADLINE_S = 900.0
#: Longest wait for an engine to stop by itself.
STOP_S = 30.0


class FailedError(Exception):
    """An engine failed, ended, or took too long."""


class EngineProcess:
    """A warm engine in a process of its own. It starts here, and waits until it is ready.

    Attributes
    ----------
    absent
        Why the engine cannot run, or None.
    about
        Its versions and settings.
    """

    def __init__(self, engine: Engine, folder: Path, n_partitions: int) -> None:
        self.engine = engine
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
        command = [str(engine.python), "-m", "benchmarks.peers.child", engine.module]
        self._process = subprocess.Popen(
            [*command, engine.option, str(folder), str(n_partitions)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            # Workers of engines import the functions that reduce a partition. Spark finds its own
            # Python, but only if it is told to.
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": str(engine.python)},
            # An engine's own processes belong to this group.
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.about: dict[str, Any] = {}
        self.absent: str | None = None
        try:
            self.about = self._answer()
            self.absent = self.about.get("absent")
        except FailedError as error:
            self.absent = f"it does not start: {error}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise FailedError(f"no answer in {DEADLINE_S:g} s") from None
        if not line:
            self._log.seek(0)
            last = [one.strip() for one in self._log if one.strip()][-1:]
            raise FailedError(f"its process ended: {''.join(last)[:300]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def work(self, name: str) -> tuple[float, dict[str, Any]]:
        """Do one work; return its seconds and its answer.

        Raises
        ------
        FailedError
            There is no answer.
        """
        assert self._process.stdin is not None
        try:
            print(name, file=self._process.stdin, flush=True)
        except OSError:
            pass  # the process ended, and the answer says why
        found = self._answer()
        if "error" in found:
            raise FailedError(found["error"])
        return found["seconds"], found["answer"]

    def close(self) -> None:
        """Stop the engine and all its processes."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

"""Helpers that start schedulers, workers and programs as processes, by the usual commands."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from distributed import Client

from tests.limits import HANG_S

#: Code to run before the command: it makes imports of this package fail, as if not installed.
WITHOUT_PACKAGE = "import sys, dask.sizeof; sys.modules['dask_gpurt'] = None\n"
#: Code to run before the command: it makes distributed look like an untested release.
FUTURE_DISTRIBUTED = "import distributed; distributed.__version__ = '2031.1.0'\n"

#: Environment for programs whose error output is checked. A worker of stock Dask may print a
#: traceback if it closes during a heartbeat.
WITHOUT_HEARTBEATS = {
    "DASK_DISTRIBUTED__WORKER__PRELOAD": str(Path(__file__).with_name("no_heartbeats.py"))
}


#: Stock Dask's log entries of a cluster that closes, which depend on timing: a connection is closed
#: while messages wait to be sent, or while a heartbeat is under way.
_CLOSING = re.compile(
    r"^.* - distributed\.batched - INFO - Batched Comm Closed.*(?:\n|$)"
    r"(?:Traceback .*\n(?:[ \t]+.*\n)*\S+(?:\n|$))?"
    r"|^.* ERROR - (?:Failed to communicate with scheduler during heartbeat"
    r"|Unexpected exception during heartbeat"
    r"|Exception in callback <bound method Worker\.heartbeat of ).*\n"
    r"(?:(?!.* - [A-Z]+ - ).*\n)*?"
    r"(?:distributed\.comm\.core\.CommClosedError|RuntimeError: ConnectionPool is closed)"
    r".*(?:\n|$)",
    re.MULTILINE,
)


def without_closing(log: str) -> str:
    """Return a log without those entries of stock Dask, some of which have a traceback."""
    return _CLOSING.sub("", log)


def environment(**more: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DASK_GPURT")}
    return {**inherited, **more}


def run_program(
    source: str, *, directory: Path, python: str = sys.executable, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a program from a file, as `python program.py`."""
    path = directory / "program.py"
    path.write_text(textwrap.dedent(source))
    return subprocess.run(
        [python, str(path)],
        cwd=directory,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


class CommandLineCluster:
    """`dask scheduler` and `dask worker`, started one by one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = directory / "scheduler.json"
        self._processes: list[subprocess.Popen[str]] = []
        self.logs: list[Path] = []

    def start(
        self,
        what: str,
        *arguments: str,
        before: str = "",
        python: str = sys.executable,
        **env: str,
    ) -> subprocess.Popen:
        # This is like `dask scheduler ...`, after other code in the same process.
        program = before + f"import sys; from dask.cli import run_cli; sys.argv = {['dask', what]}"
        program += f" + {list(arguments)}; run_cli()"
        log = self._directory / f"{what}-{len(self._processes)}.log"
        self.logs.append(log)
        with log.open("w") as file:
            process = subprocess.Popen(
                [python, "-c", program],
                cwd=self._directory,
                env=environment(**env),
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._processes.append(process)
        return process

    def scheduler(self, before: str = "", **env: str) -> subprocess.Popen:
        if before == WITHOUT_PACKAGE:
            # Without the package, the YAML file that lists its preload would be missing, too.
            env = {"DASK_DISTRIBUTED__SCHEDULER__PRELOAD": "[]", **env}
        arguments = ["--port", "0", "--dashboard-address", ":0", "--host", "127.0.0.1"]
        arguments += ["--scheduler-file", str(self._file)]
        return self.start("scheduler", *arguments, before=before, **env)

    def worker(self, *arguments: str, before: str = "", **env: str) -> subprocess.Popen:
        if before == WITHOUT_PACKAGE:
            env = {"DASK_DISTRIBUTED__WORKER__PRELOAD": "[]", **env}
        options = ["--scheduler-file", str(self._file), "--nthreads", "1", "--no-dashboard"]
        return self.start("worker", *options, *arguments, before=before, **env)

    def client(self, **options: object) -> Client:
        return Client(scheduler_file=str(self._file), set_as_default=False, **options)

    def log_text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def stop(self) -> None:
        # Workers stop before the scheduler, because one that loses it meanwhile may not exit.
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def command_line_cluster(directory: Path) -> Iterator[CommandLineCluster]:
    cluster = CommandLineCluster(directory)
    try:
        yield cluster
    finally:
        cluster.stop()

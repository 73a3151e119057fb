"""Nsight Systems around the worker processes of a cluster that this package starts.

Worker processes are started by multiprocessing, which starts a script of ours in place of Python.
So workers that a nanny starts later, in place of others, are wrapped as well.
"""

from __future__ import annotations

import json
import multiprocessing
import shlex
import shutil
import sys
from pathlib import Path

import dask.config

from dask_gpurt.command.traces import nsys_start

#: What nsys replaces by the name of the host and by the number of the process.
_OUTPUT = "worker-%h-%p"
_FLAGS = (
    "--trace=cuda,nvtx,ucx,osrt",
    # Samples of the call stack make reports large, and Dask has its own profiler.
    "--sample=none",
    "--cpuctxsw=none",
    "--force-overwrite=true",
)


def find() -> str | None:
    """Return the path of nsys; None if this host has none."""
    return shutil.which("nsys")


def profile_command(nsys: str, directory: Path) -> list[str]:
    """Return the command that runs another one under nsys, and writes one report a process."""
    return [nsys, "profile", *_FLAGS, f"--output={directory / _OUTPUT}"]


def wrap_workers(nsys: str, directory: Path, folder: Path) -> None:
    """Make multiprocessing start the workers of this process under nsys, from now on.

    Parameters
    ----------
    nsys
        Path of nsys.
    directory
        Folder of the reports.
    folder
        Folder for the script, which has to stay as long as workers may start.
    """
    script = folder / "python"
    words = [
        *(sys.executable, "-I", "-S", nsys_start.__file__),
        *(json.dumps(profile_command(nsys, directory)), sys.executable),
    ]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o700)
    multiprocessing.set_executable(str(script))
    dask.config.set({"distributed.worker.multiprocessing-method": "spawn"})

"""Starts a worker process under Nsight Systems. `nsys_wrapper` runs this file as a program.

multiprocessing starts this program in place of Python. Its arguments are the command of nsys as
JSON, then Python and the arguments for it. The program stays as the parent of nsys, and Dask's
nanny waits for it and signals it. nsys needs some time for its report after the worker has ended.
A nanny that loses its patience kills this program alone.

It imports nothing of this package, so that it starts quickly.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

#: In the arguments of each process that multiprocessing starts, except for its own helpers.
_MARK = "--multiprocessing-fork"


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _below(pid: int) -> Iterator[int]:
    """Yield the processes that a process started, and those that they started."""
    for child in _read(f"/proc/{pid}/task/{pid}/children").split():
        yield int(child)
        yield from _below(int(child))


def _watch(end_of_parent: int, nsys: int, python: str) -> None:
    """Wait for the end of this program, then kill the worker. nsys writes its report and ends.

    Other processes below nsys are its own, and may be writing the report.
    """
    os.read(end_of_parent, 1)
    for pid in list(_below(nsys)):
        program, *arguments = _read(f"/proc/{pid}/cmdline").split("\0")
        if program == python and _MARK in arguments:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def main() -> None:
    """Start a command under nsys, and end as it ends."""
    nsys, command = json.loads(sys.argv[1]), sys.argv[2:]
    if _MARK not in command:
        os.execv(command[0], command)
    # Neither end is inherited by nsys.
    end_of_parent, alive = os.pipe()
    try:
        # A session of its own: a signal for the whole group would cut the report off.
        process = subprocess.Popen(nsys + command, start_new_session=True, close_fds=False)
    except OSError as error:
        print(f"{nsys[0]} cannot be started, so a worker runs without it: {error}", file=sys.stderr)
        os.execv(command[0], command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: process.send_signal(number))
    is_watcher = os.fork() == 0
    # Pipes that belong to the worker must not stay open here.
    keep = end_of_parent if is_watcher else alive
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    if is_watcher:
        os.setsid()
        _watch(end_of_parent, process.pid, command[0])
        os._exit(0)
    status = process.wait()
    if status < 0:
        # End by the same signal.
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()

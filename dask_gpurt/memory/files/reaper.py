"""A helper process that removes a process's files as soon as the process is gone, even if killed.

A killed process removes nothing itself, and the next process that sweeps the directory may start
late or never. So each process that keeps values starts a shell. The shell waits for the end of a
pipe that only this process writes to; the system closes the pipe however the process ends.

The reaper is optional. Without a shell, or if the shell is killed too, a sweep finds the directory
later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess

logger = logging.getLogger("dask_gpurt.memory")

#: The trap: signals to a process group must not end the shell before it is done.
_SCRIPT = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$1" && rm -f -- "$2"'
#: Longest wait for the shell on `close`, when hardly anything is left to remove.
_PATIENCE_S = 5.0


class Reaper:
    """A shell that removes a directory and then a file, once this process and its forks are gone.

    Attributes
    ----------
    pid
        Process id of the shell; None if there is none.
    """

    def __init__(self, directory: str, file: str) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "dask-gpurt-reaper", directory, file],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )
        except (OSError, RuntimeError) as error:
            # There is no shell, the limit of processes is reached, or Python is about to end.
            logger.info("%s stays until a sweep if this process is killed: %s", directory, error)

    @property
    def pid(self) -> int | None:
        return self._shell.pid if self._shell is not None else None

    def close(self) -> None:
        """Let the shell remove what is left, and wait for it."""
        shell, self._shell = self._shell, None
        if shell is None:
            return
        assert shell.stdin is not None
        with contextlib.suppress(OSError):
            shell.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            shell.wait(_PATIENCE_S)

"""Removes what a process kept on disk as soon as the process is gone, even if it was killed.

A killed process can remove nothing itself, and the next one of the same directory may come late or
never. So a process that keeps values has a shell beside it, which waits for the end of a pipe that
only this process writes to. The system closes the pipe however the process ends.

The reaper is a help and no duty. Without a shell, or if it is killed too, a sweep finds the
directory later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess

logger = logging.getLogger("dask_gpurt.memory")

#: Signals to a group of processes must not end this one before it is done.
_SCRIPT = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$1" && rm -f -- "$2"'
#: There is hardly anything left to remove when a process ends it in order.
_PATIENCE_S = 5.0


class Reaper:
    """Removes a directory and then a file, once this process and its forks are gone.

    Attributes
    ----------
    pid
        Of the shell; None if there is none.
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
            # No shell here, no more processes, or Python is about to end.
            logger.info("nobody removes %s if this process is killed: %s", directory, error)

    @property
    def pid(self) -> int | None:
        return self._shell.pid if self._shell is not None else None

    def end(self) -> None:
        """Let it remove what is left, and wait for it."""
        shell, self._shell = self._shell, None
        if shell is None:
            return
        assert shell.stdin is not None
        with contextlib.suppress(OSError):
            shell.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            shell.wait(_PATIENCE_S)

"""A helper process that removes a process's files as soon as the process is gone, even if killed.

A killed process removes nothing itself, and the next process that sweeps the directory may start
late or never. So each process that keeps values starts a shell. The shell waits for the end of a
pipe that only this process writes to; the system closes the pipe however the process ends.

A process that closes leaves the removal to its reaper, too. Linux removes a file only after those
of its pages that are on their way to the disk, and a slow disk may have gigabytes of them.

The reaper is optional. Without a shell, or if the shell is killed too, a sweep finds the directory
later.
"""

from __future__ import annotations

import logging
import os
import subprocess

logger = logging.getLogger("dask_gpurt.memory")

#: The trap: signals to a process group must not end the shell before it is done.
_SCRIPT = """trap "" HUP INT TERM
if read -r moved; then set -- "$moved" "$moved$3"; fi
rm -rf -- "$1" && rm -f -- "$2"
"""
_NAME = "dask-gpurt-reaper"
#: Longest wait for the shell on `close`. Dask kills a worker that takes five seconds to close.
_PATIENCE_S = 1.0


class Reaper:
    """A shell that removes a directory and then a file, once this process and its forks are gone.

    Parameters
    ----------
    directory
        The directory to remove.
    suffix
        The file to remove has the name of the directory and this suffix.

    Attributes
    ----------
    pid
        Process id of the shell; None if there is none.
    """

    def __init__(self, directory: str, suffix: str) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, _NAME, directory, directory + suffix, suffix],
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

    def close(self, moved: str | None = None) -> bool:
        """Let the shell remove the files now, and wait for a moment.

        Parameters
        ----------
        moved
            New path of the directory, if it and the file were moved.

        Returns
        -------
        bool
            Whether the shell is still at work. If not, it may have failed.
        """
        shell, self._shell = self._shell, None
        if shell is None:
            return False
        assert shell.stdin is not None
        try:
            with shell.stdin as stdin:
                if moved is not None:
                    stdin.write(os.fsencode(moved) + b"\n")
        except OSError:
            pass  # it was killed
        try:
            shell.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return True
        return False

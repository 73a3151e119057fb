"""Removal of files, each once none of its pages are on their way to the disk.

Linux removes a file only after it has written the pages that it has begun to write. On a slow disk
that takes seconds. A thread that waits for it can neither be stopped nor killed, and its process
cannot end before. So a thread of this module asks the kernel before it removes a file, and looks
again a moment later if necessary: the kernel has no event for it. Linux 6.5 and later answer; on
other systems the thread waits for the disk instead of the caller.

`memory.files.disk_tier` decides which files are removed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from dask_gpurt.system_calls import writeback_nbytes

#: Delay between two looks at the files that are left, and the most files of one look.
_INTERVAL_S = 0.05
_MOST_FILES = 64


class Remover:
    """A thread that removes files, started with the first one.

    Parameters
    ----------
    remove
        Removes a file, and never raises.
    pending_nbytes
        Returns the bytes of an open file that are on their way to the disk.
    """

    def __init__(
        self,
        remove: Callable[[str], None],
        pending_nbytes: Callable[[int], int] = writeback_nbytes,
    ) -> None:
        self._remove = remove
        self._pending_nbytes = pending_nbytes
        self._changed = threading.Condition()
        self._paths: list[str] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, path: str) -> None:
        """Have a file removed. After `close`, this does nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._paths.append(path)
            self._changed.notify_all()
            if self._thread is not None:
                return
            # A daemon: it must not keep the process alive.
            thread = threading.Thread(target=self._serve, name="gpurt remove", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process cannot start more threads
                self._paths.clear()
            else:
                self._thread = thread
                return
        self._remove(path)

    @property
    def is_busy(self) -> bool:
        """Whether files are left to remove."""
        return bool(self._paths)

    def wait(self) -> None:
        """Wait until all files are removed, or until `close`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paths)

    def close(self) -> None:
        """Leave the files that are left to others. This does not wait."""
        with self._changed:
            self._is_closed = True
            self._paths.clear()
            self._changed.notify_all()

    def _serve(self) -> None:
        while paths := self._next():
            for path in paths:
                if not self._is_closed and not self._is_pending(path):
                    self._remove(path)
                    self._done(path)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _INTERVAL_S if self._paths else 0)

    def _next(self) -> list[str]:
        """Return the oldest files, and none after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._paths or self._is_closed)
            return self._paths[:_MOST_FILES]

    def _done(self, path: str) -> None:
        with self._changed, contextlib.suppress(ValueError):
            self._paths.remove(path)
            self._changed.notify_all()

    def _is_pending(self, path: str) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return self._pending_nbytes(fd) > 0
        finally:
            os.close(fd)

"""The directory that a process keeps values in, and the removal of those of dead processes.

A directory has a lock file beside it, which its process holds locked (`flock`) for as long as it
lives; the system lets go of the lock however the process ends. The lock file comes before the
directory and goes after it. Whoever holds the lock may remove both, so:

- a lock that can be taken belongs to nobody any more, or to somebody who has made the file and not
  locked it yet;
- the latter finds, once he has the lock, that the file he locked is not the one at its path, and
  starts over with another name.

A process that was forked off holds the lock too: what it leaves is swept once both are gone.

Directories and files are for their user alone. Those of other users are let be.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from typing import Any

from dask_gpurt.memory.block_io import takes_direct

logger = logging.getLogger("dask_gpurt.memory")

PREFIX = "dask-gpurt-values-"
_LOCK = ".lock"
#: Answers of file systems without locks. A sweep gets the same answer, and leaves them alone.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


class ValueDirectory:
    """A directory of this process; made when it is first asked for.

    Parameters
    ----------
    parent
        Where it is made; made too if it is not there.
    system
        The module `os` but in tests.
    """

    def __init__(
        self, parent: str, system: Any = os, new_name: Callable[[], str] | None = None
    ) -> None:
        self.parent = parent
        self._system = system
        self._new_name = new_name or (lambda: PREFIX + secrets.token_hex(8))
        # Held while the directory is made, which happens once; never while a file is written.
        self._making = threading.Lock()
        self._path: str | None = None
        self._lock_fd = -1
        self._pid = -1
        self._is_direct = False

    def ready(self) -> tuple[str, bool]:
        """Its path, and whether its file system does direct I/O.

        Raises
        ------
        OSError
            It cannot be made.
        """
        with self._making:
            if self._path is None:
                self._make()
            assert self._path is not None
            return self._path, self._is_direct

    def lost(self, path: str) -> bool:
        """Whether the directory at `path` is gone; another one is then made for whoever asks."""
        with self._making:
            if os.path.isdir(path):
                return False
            if path == self._path:
                self._remove()
            return True

    def remove(self) -> None:
        """Remove it and all that is in it."""
        with self._making:
            self._remove()

    def _make(self) -> None:
        system = self._system
        system.makedirs(self.parent, mode=0o700, exist_ok=True)
        while True:
            path = os.path.join(self.parent, self._new_name())
            fd = _made_lock(system, path + _LOCK)
            if fd is not None:
                break
        made = False
        try:
            system.mkdir(path, 0o700)
            made = True
            self._is_direct = takes_direct(system, os.path.join(path, "probe"))
        except BaseException:
            if made:
                _remove_tree(path)
            _unlink(path + _LOCK)
            system.close(fd)
            raise
        self._path, self._lock_fd, self._pid = path, fd, os.getpid()

    def _remove(self) -> None:
        path, fd = self._path, self._lock_fd
        if path is None:
            return
        self._path, self._lock_fd = None, -1
        # A fork has the descriptor too, and nothing to remove.
        if os.getpid() == self._pid:
            _remove_tree(path)
            _unlink(path + _LOCK)
        with contextlib.suppress(OSError):
            self._system.close(fd)


def sweep(parent: str) -> int:
    """Remove what dead processes of this user left in a directory; how many there were.

    Never raises: what cannot be removed is left, and said.
    """
    n_removed = 0
    try:
        names = os.listdir(parent)
    except OSError:
        return 0
    for name in names:
        if name.startswith(PREFIX) and name.endswith(_LOCK):
            path = os.path.join(parent, name.removesuffix(_LOCK))
            try:
                n_removed += _swept(path)
            except OSError as error:
                logger.warning("cannot remove %s of a dead worker: %s", path, error)
    return n_removed


def _swept(path: str) -> bool:
    lock = path + _LOCK
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        if os.fstat(fd).st_uid != os.geteuid() or not _locked(fd) or not _is_at(fd, lock):
            return False
        _remove_tree(path)
        if os.path.lexists(path):
            raise OSError(errno.ENOTEMPTY, "some of it cannot be removed")
        # Last: without it, whoever comes next would not know that something is left.
        os.unlink(lock)
        return True
    finally:
        os.close(fd)


def _made_lock(system: Any, path: str) -> int | None:
    """A locked file at `path`; None if the name is taken, or a sweep got hold of it first."""
    flags = system.O_RDWR | system.O_CREAT | system.O_EXCL | system.O_CLOEXEC | system.O_NOFOLLOW
    try:
        fd: int = system.open(path, flags, 0o600)
    except FileExistsError:
        return None
    try:
        mine = _locked(fd) and _is_at(fd, path)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return fd
        _unlink(path)
        system.close(fd)
        raise
    if mine:
        return fd
    system.close(fd)
    return None


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _remove_tree(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)

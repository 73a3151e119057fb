"""The directory in which a process keeps values, and the removal of those of dead processes.

Each directory has a lock file beside it. The file names its owner (`memory.files.owner`), and the
owner holds the file locked (`flock`) for as long as it lives. The lock file is created before the
directory and removed after it. A sweep removes both if the owner is provably dead. It skips a file
that names no owner: its process may be about to write the name, or be an earlier version.

If a process is killed, its reaper (`memory.files.reaper`) removes both at once. A sweep removes the
directories that a reaper missed. A forked process inherits the lock, so its directory is swept once
parent and child are both gone.

Directories and files are private to their user. Those of other users are skipped.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from typing import Any

from dask_gpurt.memory.files import owner
from dask_gpurt.memory.files.block_io import supports_direct
from dask_gpurt.memory.files.owner import Fate
from dask_gpurt.memory.files.reaper import Reaper

logger = logging.getLogger("dask_gpurt.memory")

PREFIX = "dask-gpurt-values-"
_LOCK = ".lock"
#: Errors of file systems without locks.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


class ValueDirectory:
    """A directory of this process, created on first use.

    Parameters
    ----------
    parent
        Directory to create it in; created too if missing.
    system
        The module `os`, or a fake in tests.
    new_name
        Returns a name for the directory.
    locks
        Whether to lock files; False if the user says that this file system's locks do not work.
    aside
        Directory to which this one is moved before its files are removed, on the same file system.
        Necessary if someone else removes `parent`: Dask's event loop would wait for the files.
    """

    def __init__(
        self,
        parent: str,
        system: Any = os,
        new_name: Callable[[], str] | None = None,
        *,
        locks: bool = True,
        aside: str | None = None,
    ) -> None:
        self.parent = parent
        self._aside = aside
        self._locks = locks
        self._system = system
        self._new_name = new_name or (lambda: PREFIX + secrets.token_hex(8))
        # Held while the directory is created or removed; never while a file is written.
        self._making = threading.Lock()
        self._path: str | None = None
        self._lock_fd = -1
        self._pid = -1
        self._reaper: Reaper | None = None
        self._is_direct = False

    def ready(self) -> tuple[str, bool]:
        """Return the path, and whether its file system supports direct I/O.

        Raises
        ------
        OSError
            The directory cannot be created.
        """
        with self._making:
            if self._path is None:
                self._make()
            assert self._path is not None
            return self._path, self._is_direct

    def is_lost(self, path: str) -> bool:
        """Return whether the directory at `path` is gone. If so, `ready` creates a new one."""
        with self._making:
            if os.path.isdir(path):
                return False
            if path == self._path:
                self._remove()
            return True

    def remove(self) -> None:
        """Remove the directory with its content."""
        with self._making:
            self._remove()

    def _make(self) -> None:
        system = self._system
        system.makedirs(self.parent, mode=0o700, exist_ok=True)
        while True:
            path = os.path.join(self.parent, self._new_name())
            fd = _create_lock(system, path + _LOCK, self._locks)
            if fd is not None:
                break
        made = False
        try:
            system.mkdir(path, 0o700)
            made = True
            self._is_direct = supports_direct(system, os.path.join(path, "probe"))
        except BaseException:
            if made:
                _remove_tree(path)
            _unlink(path + _LOCK)
            system.close(fd)
            raise
        self._path, self._lock_fd, self._pid = path, fd, os.getpid()
        self._reaper = Reaper(path, _LOCK)

    def _remove(self) -> None:
        path, fd, reaper = self._path, self._lock_fd, self._reaper
        if path is None:
            return
        self._path, self._lock_fd, self._reaper = None, -1, None
        # A forked process has the descriptor too, but owns no directory.
        if os.getpid() == self._pid:
            moved = self._moved_aside(path)
            if reaper is None or not reaper.close(moved):
                # There was no shell, or it could not remove all.
                _remove_tree(moved or path)
                _unlink((moved or path) + _LOCK)
        with contextlib.suppress(OSError):
            self._system.close(fd)

    def _moved_aside(self, path: str) -> str | None:
        """Move the directory and its lock file; return the new path, None if they stay."""
        # A path with a line break cannot be told to the reaper.
        if self._aside is None or "\n" in self._aside:
            return None
        moved = os.path.join(self._aside, os.path.basename(path))
        try:
            # The lock file first: a sweep finds directories by their lock files.
            os.rename(path + _LOCK, moved + _LOCK)
            os.rename(path, moved)
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(moved + _LOCK, path + _LOCK)
            return None
        return moved


def sweep(parent: str, locks: bool = True) -> int:
    """Remove the directories that this user's dead processes left; return how many were removed.

    This never raises: failures are logged.

    Parameters
    ----------
    locks
        As for `ValueDirectory`. Without locks, only a process that can be looked up counts as dead.
    """
    n_removed = 0
    unknown = []
    try:
        names = os.listdir(parent)
    except OSError:
        return 0
    for name in names:
        if name.startswith(PREFIX) and name.endswith(_LOCK):
            path = os.path.join(parent, name.removesuffix(_LOCK))
            try:
                found = _sweep_one(path, locks)
            except OSError as error:
                logger.warning("cannot remove %s of a dead worker: %s", path, error)
                continue
            n_removed += found is Fate.DEAD
            if found is Fate.UNKNOWN:
                unknown.append(path)
    if unknown:
        logger.info(
            "%s has %d directories of processes that cannot be looked up from here, such as those "
            "of other machines. They are kept. %s%s names the process of the first one. Remove "
            "a directory and its lock file if that process is gone.",
            parent,
            len(unknown),
            unknown[0],
            _LOCK,
        )
    return n_removed


def _sweep_one(path: str, locks: bool) -> Fate | None:
    """Remove a directory if its process is dead; return the fate of that process.

    Return None if the directory is gone or belongs to another user.
    """
    lock = path + _LOCK
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            return None
        found = owner.fate(
            owner.unpacked(os.pread(fd, owner.MOST_NBYTES, 0)),
            owner.this_place(),
            owner.started,
            status.st_dev,
            lambda: _try_lock(fd) if locks else None,
        )
        if found is not Fate.DEAD:
            return found
        if not _is_at(fd, lock):
            return None
        _remove_tree(path)
        if os.path.lexists(path):
            raise OSError(errno.ENOTEMPTY, "some of its content cannot be removed")
        # Last: without the lock file, the next sweep would not find the directory.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lock)
        return found
    finally:
        os.close(fd)


def _create_lock(system: Any, path: str, locks: bool) -> int | None:
    """Create a locked file that names this process; return None if the name is taken."""
    flags = system.O_RDWR | system.O_CREAT | system.O_EXCL | system.O_CLOEXEC | system.O_NOFOLLOW
    try:
        fd: int = system.open(path, flags, 0o600)
    except FileExistsError:
        return None
    try:
        is_locked = _try_lock(fd) if locks else None
        # False: a sweep of an earlier version holds the lock for a moment, and removes the file.
        if is_locked is not False and _is_at(fd, path):
            me = owner.this_process(bool(is_locked), os.fstat(fd).st_dev)
            if me is not None:
                os.write(fd, me.packed())
            return fd
    except BaseException:
        _unlink(path)
        system.close(fd)
        raise
    _unlink(path)
    system.close(fd)
    return None


def _try_lock(fd: int) -> bool | None:
    """Take a lock; return False if another process has it, None if there are no locks here."""
    import fcntl  # Windows lacks it, and clients there import this module

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
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

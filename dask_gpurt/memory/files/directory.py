"""The directory that a process keeps values in, and the removal of those of dead processes.

A directory has a lock file beside it. The file names its owner (`memory.files.owner`), and the
process holds it locked (`flock`) for as long as it lives. The lock file comes before the directory
and goes after it. A sweep removes both if the owner can be shown to be dead. It leaves a file
without an owner alone: its process may be about to write its name, or be of an earlier version.

A killed process has its reaper (`memory.files.reaper`) remove both at once. A sweep is for what
that one could not do.

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

from dask_gpurt.memory.files import owner
from dask_gpurt.memory.files.block_io import takes_direct
from dask_gpurt.memory.files.owner import Fate
from dask_gpurt.memory.files.reaper import Reaper

logger = logging.getLogger("dask_gpurt.memory")

PREFIX = "dask-gpurt-values-"
_LOCK = ".lock"
#: Answers of file systems without locks.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


class ValueDirectory:
    """A directory of this process; made when it is first asked for.

    Parameters
    ----------
    parent
        Where it is made; made too if it is not there.
    system
        The module `os` but in tests.
    locks
        Whether files are locked here; False where users say that this file system's locks do not
        work.
    """

    def __init__(
        self,
        parent: str,
        system: Any = os,
        new_name: Callable[[], str] | None = None,
        *,
        locks: bool = True,
    ) -> None:
        self.parent = parent
        self._locks = locks
        self._system = system
        self._new_name = new_name or (lambda: PREFIX + secrets.token_hex(8))
        # Held while the directory is made, which happens once; never while a file is written.
        self._making = threading.Lock()
        self._path: str | None = None
        self._lock_fd = -1
        self._pid = -1
        self._reaper: Reaper | None = None
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
            fd = _made_lock(system, path + _LOCK, self._locks)
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
        self._reaper = Reaper(path, path + _LOCK)

    def _remove(self) -> None:
        path, fd, reaper = self._path, self._lock_fd, self._reaper
        if path is None:
            return
        self._path, self._lock_fd, self._reaper = None, -1, None
        # A fork has the descriptor too, and nothing to remove.
        if os.getpid() == self._pid:
            _remove_tree(path)
            _unlink(path + _LOCK)
            if reaper is not None:
                reaper.end()
        with contextlib.suppress(OSError):
            self._system.close(fd)


def sweep(parent: str, locks: bool = True) -> int:
    """Remove what dead processes of this user left in a directory; how many there were.

    Never raises: what cannot be removed is left, and said.

    Parameters
    ----------
    locks
        As for `ValueDirectory`. Without locks, only processes that can be looked up are dead.
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
                found = _swept(path, locks)
            except OSError as error:
                logger.warning("cannot remove %s of a dead worker: %s", path, error)
                continue
            n_removed += found is Fate.DEAD
            if found is Fate.UNKNOWN:
                unknown.append(path)
    if unknown:
        logger.info(
            "%s has %d directories of processes that cannot be looked up from here, as those of "
            "other machines. They are left alone. %s%s names the process of the first one. Remove "
            "a directory and its lock file if that process is gone.",
            parent,
            len(unknown),
            unknown[0],
            _LOCK,
        )
    return n_removed


def _swept(path: str, locks: bool) -> Fate | None:
    """Remove a directory if its process is dead; what became of that process.

    None for what is of another user, or gone.
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
            lambda: _locked(fd) if locks else None,
        )
        if found is not Fate.DEAD:
            return found
        if not _is_at(fd, lock):
            return None
        _remove_tree(path)
        if os.path.lexists(path):
            raise OSError(errno.ENOTEMPTY, "some of it cannot be removed")
        # Last: without it, whoever comes next would not know that something is left.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lock)
        return found
    finally:
        os.close(fd)


def _made_lock(system: Any, path: str, locks: bool) -> int | None:
    """A file at `path` that names this process and is locked; None if the name is taken."""
    flags = system.O_RDWR | system.O_CREAT | system.O_EXCL | system.O_CLOEXEC | system.O_NOFOLLOW
    try:
        fd: int = system.open(path, flags, 0o600)
    except FileExistsError:
        return None
    try:
        is_locked = _locked(fd) if locks else None
        # Another process had the lock for a moment: an earlier version, which then removes both.
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


def _locked(fd: int) -> bool | None:
    """Take a lock; False if somebody else has it, None if this file system has none."""
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

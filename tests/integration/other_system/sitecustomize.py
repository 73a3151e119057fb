"""Makes this package see another system: `OTHER_SYSTEM` is `darwin` (macOS) or `win32` (Windows).

Python imports this module at its start if its directory is in `PYTHONPATH`. Only the modules of
`dask_gpurt` are affected. They see modules of the standard library without the names that the
other system lacks, no `/proc`, and a C library without Linux's functions. All else, such as psutil,
runs on the real system. The module tells nothing about the speed of another system, or about calls
that behave differently there.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import pathlib
import platform
import sys
import types
from typing import Any

SYSTEM = os.environ.get("OTHER_SYSTEM")

#: Names that are only on Linux.
OF_LINUX = {
    "os": "memfd_create sched_getaffinity sched_setaffinity O_DIRECT O_TMPFILE posix_fallocate "
    "posix_fadvise copy_file_range splice eventfd pidfd_open fdatasync",
    "fcntl": "F_GET_SEALS F_ADD_SEALS F_OFD_SETLK F_SETPIPE_SZ",
    "select": "epoll",
    "socket": "TCP_INFO TCP_QUICKACK TCP_USER_TIMEOUT SO_PEERCRED AF_NETLINK",
    "time": "CLOCK_BOOTTIME",
}
#: Names that Linux and macOS have, and Windows has not.
OF_UNIX = {
    "os": "pread pwrite preadv pwritev sendfile uname getuid geteuid fork register_at_fork "
    "statvfs fchmod sysconf getloadavg getpgid setsid killpg O_CLOEXEC O_NOCTTY O_NONBLOCK",
    "socket": "AF_UNIX",
    "mmap": "MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS PROT_READ PROT_WRITE",
    "signal": "pthread_sigmask SIGKILL",
}
MODULES_OF_UNIX = {"fcntl", "resource", "pwd", "grp", "termios"}
FUNCTIONS_OF_LINUX = {
    "memfd_create",
    "mremap",
    "fallocate",
    "malloc_trim",
    "mallopt",
    "mallinfo2",
    "syscall",
}


def is_linux_only(path: Any) -> bool:
    is_path = isinstance(path, (str, pathlib.Path))
    return is_path and str(path).startswith(("/proc/", "/sys/", "/dev/shm"))


def without_proc(function: Any, is_affected: Any = lambda: True) -> Any:
    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if is_linux_only(path) and is_affected():
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **kwargs)

    return call


def library(name: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `ctypes.CDLL`."""
    if SYSTEM == "win32" and name is None:
        raise TypeError("argument of type 'NoneType' is not iterable")
    found = ctypes.CDLL(name, *args, **kwargs)
    return Without(found, FUNCTIONS_OF_LINUX, {}) if name is None else found


class Without(types.ModuleType):
    """A module or library without some names, and with others in place of its own."""

    def __init__(self, original: Any, lacks: Any, has: dict[str, Any]) -> None:
        super().__init__("without")
        vars(self).update(_original=original, _lacks=set(lacks), _has=has)

    def __getattr__(self, name: str) -> Any:
        if name in self._lacks:
            raise AttributeError(f"no {name} on {SYSTEM}")
        return self._has[name] if name in self._has else getattr(self._original, name)


def is_ours(module: Any) -> bool:
    return str(module).partition(".")[0] == "dask_gpurt"


def install() -> None:
    paths = ("open", "stat", "lstat", "listdir", "readlink", "scandir")
    has: dict[str, dict[str, Any]] = {
        "os": {name: without_proc(getattr(os, name)) for name in paths},
        "sys": {"platform": SYSTEM},
        "ctypes": {"CDLL": library},
        "platform": {"machine": lambda: "x86_64"},
    }
    lacks = {name: set(names.split()) for name, names in OF_LINUX.items()}
    if SYSTEM == "win32":
        for name, names in OF_UNIX.items():
            lacks.setdefault(name, set()).update(names.split())
    real = {"platform": platform, "sys": sys}
    seen: dict[str, Without] = {}
    import_ = builtins.__import__

    def import_here(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if level == 0 and is_ours((globals or {}).get("__name__")):
            if SYSTEM == "win32" and name in MODULES_OF_UNIX:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in has or name in lacks:
                if name not in seen:
                    original = real.get(name) or import_(name)
                    seen[name] = Without(original, lacks.get(name, ()), has.get(name, {}))
                return seen[name]
        return import_(name, globals, locals, fromlist, level)

    builtins.__import__ = import_here
    is_affected = lambda: is_ours(sys._getframe(2).f_globals.get("__name__"))  # noqa: E731
    builtins.open = without_proc(builtins.open, is_affected)
    pathlib.Path.open = without_proc(pathlib.Path.open)  # type: ignore[method-assign]


if SYSTEM is not None:
    install()

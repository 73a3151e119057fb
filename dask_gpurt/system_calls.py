"""System calls that a Python may lack, and other means to the same end.

A Python that was built against an old C library (conda-forge, uv, manylinux) lacks functions of
`os` although the system it runs on has them. Each of these is asked for here, in this order: the
function of `os`, the C library at run time, the kernel by number, a plainer way.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import stat
from collections.abc import Sequence
from typing import Any

_MFD_CLOEXEC = 1
#: `fcntl.F_GET_SEALS`.
_F_GET_SEALS = 1034
#: Number of `memfd_create`. The numbers of old calls differ between processors.
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "ppc64le": 360, "s390x": 350, "riscv64": 279}
#: Number of `pidfd_open`. The numbers of new calls are the same on all these processors.
_PIDFD_OPEN = 434
#: The kernel lacks a call, or a sandbox forbids it.
_ABSENT = {errno.ENOSYS, errno.EPERM, errno.EACCES}


def _call(number: int | None, *arguments: int | bytes) -> int:
    """Make a system call by number.

    Raises
    ------
    OSError
        It failed. ENOSYS also where the number is unknown.
    """
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        number = None
    if number is None or platform.machine() not in _MEMFD_CREATE:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    syscall.restype = ctypes.c_long
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    answer = int(syscall(ctypes.c_long(number), *wide))
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return answer


def memory_file(name: str) -> int:
    """Descriptor of a new file in memory that has no name, and that a child does not inherit.

    Raises
    ------
    OSError
        The system has no such files.
    """
    # A file of /dev/shm is no substitute: that is often small, and to write past its end is fatal.
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC)
    return _call(_MEMFD_CREATE.get(platform.machine()), name.encode() + b"\0", _MFD_CLOEXEC)


def is_memory_file(fd: int) -> bool:
    """Whether a descriptor is of a file in memory."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    try:
        # Only files in memory know of seals.
        fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        return False
    return True


def process_fd(pid: int) -> int | None:
    """Descriptor that becomes readable when a process ends; None where there are none.

    Raises
    ------
    OSError
        There is no such process.
    """
    try:
        if hasattr(os, "pidfd_open"):
            return os.pidfd_open(pid)
        return _call(_PIDFD_OPEN, pid, 0)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None


def process_start(pid: int) -> str:
    """When a process started, in the kernel's own unit. Tells it from others of its number.

    Raises
    ------
    OSError
        There is no such process, or it has ended and waits for its parent.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of the program comes in brackets, and may hold brackets and spaces.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        fields = []
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return fields[19].decode()


def preadv(fd: int, buffers: Sequence[Any], position: int, system: Any = os) -> int:
    """Read from a position of a file into buffers; returns how many bytes came.

    Parameters
    ----------
    system
        Module `os`, or what stands for it.
    """
    if hasattr(system, "preadv"):
        return int(system.preadv(fd, buffers, position))
    count = 0
    for buffer in buffers:
        data = system.pread(fd, len(buffer), position + count)
        buffer[: len(data)] = data
        count += len(data)
        if len(data) < len(buffer):
            break
    return count


class Wakeup:
    """Wakes a thread that waits for `fd` to become readable.

    Raises
    ------
    OSError
        The process may have no more files.
    """

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.fd, self._end = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._end, False)

    def set(self) -> None:
        """Make it readable; from any thread."""
        try:
            os.write(self._end, (1).to_bytes(8, "little"))
        except BlockingIOError:
            pass  # it is full, and so readable

    def clear(self) -> None:
        """Wait for the next `set`."""
        try:
            while len(os.read(self.fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        os.close(self.fd)
        if self._end != self.fd:
            os.close(self._end)

"""System calls missing from some Python builds, with fallbacks, and writes that write all.

A Python built against an old C library (conda-forge, uv, manylinux) lacks functions of `os` that
the running system supports. Each function here tries, in this order: the function of `os`, the C
library at run time, the system call by number, a simpler equivalent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import sys
from collections.abc import Sequence
from typing import Any

_MFD_CLOEXEC = 1
#: `fcntl.F_GET_SEALS`.
_F_GET_SEALS = 1034
#: System call number of `memfd_create`. The numbers of old calls differ between processors.
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "ppc64le": 360, "s390x": 350, "riscv64": 279}
#: System call number of `cachestat`, the same on all processors, and the place of a number of pages
#: in its answer.
_CACHESTAT = 451
_PAGES_UNDER_WRITEBACK = 2
#: Fields of `/proc/self/status` with resident bytes.
_RESIDENT = {
    "all": "VmRSS",
    "anonymous": "RssAnon",
    "files": "RssFile",
    "shared": "RssShmem",
    "peak": "VmHWM",
}
#: Most bytes of one call. macOS refuses 2 GiB, where Linux reads or writes a part.
_MOST_NBYTES = 1 << 30


def _call(number: int | None, *arguments: Any) -> int:
    """Make a system call by number.

    Raises
    ------
    OSError
        The call failed. ENOSYS if the number of the call is unknown on this processor.
    """
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        number = None
    # The numbers mean other calls on other systems.
    if sys.platform != "linux" or number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    syscall.restype = ctypes.c_long
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    answer = int(syscall(ctypes.c_long(number), *wide))
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return answer


def memory_file(name: str) -> int:
    """Create an anonymous file in memory and return its descriptor, which children do not inherit.

    Raises
    ------
    OSError
        The system has no files in memory.
    """
    # Rejected: a file in /dev/shm. It is often small, and a write past its end kills the process.
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC)
    return _call(_MEMFD_CREATE.get(platform.machine()), name.encode() + b"\0", _MFD_CLOEXEC)


def is_memory_file(fd: int) -> bool:
    """Return whether a descriptor refers to a file in memory."""
    import fcntl  # Windows lacks it, and clients there import this module

    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    try:
        # Only files in memory support seals.
        fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        return False
    return True


def process_namespace() -> int:
    """Return the number of the namespace in which this process has its id; 0 if unknown.

    Each container has its own, unless its engine is told otherwise.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def process_start(pid: int) -> str:
    """Return the start time of a process, in the kernel's unit.

    Together with the number of the process, it identifies the process even if numbers are reused.

    Raises
    ------
    OSError
        There is no such process, or it is a zombie.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The program's name is in brackets, and may itself contain brackets and spaces.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        fields = []
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return fields[19].decode()


def preadv(fd: int, buffers: Sequence[Any], position: int, system: Any = os) -> int:
    """Read from a position of a file into buffers and return the number of bytes read.

    This may be less than all, as with the system call.

    Parameters
    ----------
    system
        The module `os`, or a substitute.
    """
    buffers = _first(buffers, _MOST_NBYTES)
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


def _first(buffers: Sequence[Any], nbytes: int) -> Sequence[Any]:
    """Return the first bytes of these buffers."""
    left = nbytes
    for number, buffer in enumerate(buffers):
        if len(buffer) > left:
            return [*buffers[:number], memoryview(buffer)[:left]]
        left -= len(buffer)
    return buffers


def write_all(fd: int, data: Any, position: int, system: Any = os) -> None:
    """Write a buffer to a position of a file: one call may write less than all of it.

    Parameters
    ----------
    system
        The module `os`, or a substitute.

    Raises
    ------
    OSError
        The system does not write it, for example because the disk is full.
    """
    view = memoryview(data)
    while len(view):
        written = system.pwrite(fd, view[:_MOST_NBYTES], position)
        if not written:
            raise OSError(errno.EIO, "the system wrote no bytes and gave no reason")
        position += written
        view = view[written:]


def writeback_nbytes(fd: int) -> int:
    """Return the bytes of a file that are on their way to the disk, 0 if the system does not tell.

    Linux 6.5 and later tell.
    """
    whole_file = (ctypes.c_uint64 * 2)(0, 0)
    pages = (ctypes.c_uint64 * 5)()
    try:
        _call(_CACHESTAT, fd, whole_file, pages, 0)
    except OSError:
        return 0
    return int(pages[_PAGES_UNDER_WRITEBACK]) * os.sysconf("SC_PAGE_SIZE")


def resident_nbytes() -> dict[str, int]:
    """Return the resident bytes of this process: `all`, `anonymous`, `files` and `shared`.

    `peak` is the most that `all` has been since the program of this process started. Without
    Linux's `/proc`, `all` is that peak too, and its parts are 0.
    """
    found = dict.fromkeys(_RESIDENT, 0)
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        for name, field in _RESIDENT.items():
            found[name] = 1024 * int(lines.get(field, "0").split()[0])
    except (OSError, ValueError):
        import resource  # as `fcntl` above

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["all"] = found["peak"] = most if sys.platform == "darwin" else 1024 * most
    return found


def allocator_nbytes() -> tuple[int, int]:
    """Return the bytes that objects use in glibc's allocator, and those that it keeps free.

    Some of the free bytes may have no page any more. Without glibc 2.33, both are 0.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0, 0
    mallinfo2.restype = _Mallinfo
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd), int(found.fordblks)


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


class Wakeup:
    """A flag with a descriptor `fd` that a thread can wait on to become readable.

    Raises
    ------
    OSError
        The process has no free file descriptors.
    """

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.fd, self._end = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._end, False)

    def set(self) -> None:
        """Make `fd` readable. Thread-safe."""
        try:
            os.write(self._end, (1).to_bytes(8, "little"))
        except BlockingIOError:
            pass  # the buffer is full, so `fd` is readable already

    def clear(self) -> None:
        """Reset `fd`, so that it waits for the next `set`."""
        try:
            while len(os.read(self.fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        os.close(self.fd)
        if self._end != self.fd:
            os.close(self._end)

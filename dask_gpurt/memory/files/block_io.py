"""Reading and writing blocks: past the page cache where it can be, with the copies that takes.

Writing past the page cache (O_DIRECT) needs memory on a 4 KiB boundary. A buffer that lies so goes
to the disk from where it is; others are copied through one bounce buffer, and their checksum is
taken on the way, while the bytes are in the cache. A second bounce buffer that is filled while the
first is written was tried: a thread and a tenth of the time, and tasks want that core.

Everything here takes `system`, which is the module `os` but in tests.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_gpurt.codecs.checksums import STEP_NBYTES, checksum
from dask_gpurt.memory.files.value_file import BLOCK_NBYTES, Bytes, padded
from dask_gpurt.system_calls import preadv

#: Disks want much at once; the page cache of the processor wants little.
BOUNCE_NBYTES = 4 << 20
_SUMMED_AT_ONCE_NBYTES = 4 * STEP_NBYTES
#: Most buffers that the system takes in one call.
_MOST_BUFFERS = 1024
#: Answers of systems and file systems that do not do direct I/O.
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}


def address_of(data: Bytes) -> int:
    return int(data.__array_interface__["data"][0])


def is_aligned(data: Bytes) -> bool:
    return address_of(data) % BLOCK_NBYTES == 0


def empty_blocks(nbytes: int) -> Bytes:
    """Memory that begins on a block's boundary; what NumPy gives begins 16 bytes after one."""
    memory = np.empty(nbytes + BLOCK_NBYTES, np.uint8)
    first = -address_of(memory) % BLOCK_NBYTES
    return memory[first : first + nbytes]


class Bounces:
    """Bounce buffers that are used again: fresh memory costs more than a copy into it.

    May be used by any thread. Keeps as many as were ever in use at once, up to two.
    """

    def __init__(self) -> None:
        self._free: deque[Bytes] = deque(maxlen=2)

    def take(self) -> Bytes:
        try:
            return self._free.pop()
        except IndexError:
            return empty_blocks(BOUNCE_NBYTES)

    def put_back(self, bounce: Bytes) -> None:
        self._free.append(bounce)


def write_all(system: Any, fd: int, data: Bytes, position: int) -> None:
    view = data.data
    while len(view):
        written = system.pwrite(fd, view, position)
        if not written:
            raise OSError(errno.EIO, "the system takes no more bytes and does not say why")
        position += written
        view = view[written:]


def write_through(system: Any, fd: int, data: Bytes, position: int, bounce: Bytes | None) -> int:
    """Write one block and return its checksum.

    Parameters
    ----------
    bounce
        Aligned memory if the file is open for direct I/O; None to write as it is.
    """
    if bounce is None:
        write_all(system, fd, data, position)
        return checksum(data)
    in_place_nbytes = data.nbytes // STEP_NBYTES * STEP_NBYTES if is_aligned(data) else 0
    write_all(system, fd, data[:in_place_nbytes], position)
    total = checksum(data[:in_place_nbytes])
    for start in range(in_place_nbytes, data.nbytes, bounce.nbytes):
        piece = data[start : start + bounce.nbytes]
        for first in range(0, piece.nbytes, _SUMMED_AT_ONCE_NBYTES):
            part = bounce[first : min(first + _SUMMED_AT_ONCE_NBYTES, piece.nbytes)]
            part[:] = piece[first : first + part.nbytes]
            total = checksum(part, total)
        end = padded(piece.nbytes)
        bounce[piece.nbytes : end] = 0
        write_all(system, fd, bounce[:end], position + start)
    return total


def read_into(system: Any, fd: int, parts: Sequence[Bytes]) -> None:
    """Fill consecutive parts from the beginning of a file.

    Raises
    ------
    EOFError
        It is shorter.
    """
    views = [part.data for part in parts if part.nbytes]
    position = first = 0
    while first < len(views):
        count = preadv(fd, views[first : first + _MOST_BUFFERS], position, system)
        if not count:
            raise EOFError
        position += count
        while first < len(views) and count >= len(views[first]):
            count -= len(views[first])
            first += 1
        if count:
            views[first] = views[first][count:]


def takes_direct(system: Any, path: str) -> bool:
    """Whether the file system at `path`, which is made and removed again, does direct I/O.

    Raises
    ------
    OSError
        Another reason than that it does not.
    """
    direct = getattr(system, "O_DIRECT", 0)
    if not direct:
        return False
    block = empty_blocks(BLOCK_NBYTES)
    block[:] = 0
    flags = system.O_RDWR | system.O_CREAT | system.O_EXCL | system.O_CLOEXEC
    fd = -1
    try:
        fd = system.open(path, flags | direct, 0o600)
        write_all(system, fd, block, 0)
        read_into(system, fd, [block])
    except OSError as error:
        if error.errno in _REFUSALS:
            return False
        raise
    except EOFError:
        return False
    finally:
        if fd >= 0:
            system.close(fd)
        # A file system may refuse only after it made the file.
        try:
            system.unlink(path)
        except FileNotFoundError:
            pass
    return True

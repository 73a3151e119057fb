"""Reads and writes of blocks, past the page cache where possible.

Direct I/O (O_DIRECT) needs memory on a 4 KiB boundary. An aligned buffer is written in place.
Other buffers are copied through a bounce buffer, and their checksum is computed on the way, while
the bytes are in the processor's cache. Rejected: a second bounce buffer, filled while the first is
written. It saves a tenth of the time, but takes a thread, and tasks need that core.

All functions take `system`: the module `os`, or a fake in tests.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_gpurt.codecs.checksums import STEP_NBYTES, checksum
from dask_gpurt.memory.files.value_file import BLOCK_NBYTES, Bytes, padded
from dask_gpurt.system_calls import preadv, write_all

#: Size of a bounce buffer. Larger writes are faster; smaller buffers fit the processor's cache.
BOUNCE_NBYTES = 4 << 20
_SUMMED_AT_ONCE_NBYTES = 4 * STEP_NBYTES
#: Most buffers that the system accepts in one call.
_MOST_BUFFERS = 1024
#: Errors of systems and file systems that do not support direct I/O.
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}


def address_of(data: Bytes) -> int:
    return int(data.__array_interface__["data"][0])


def is_aligned(data: Bytes) -> bool:
    return address_of(data) % BLOCK_NBYTES == 0


def empty_blocks(nbytes: int) -> Bytes:
    """Return memory that begins on a block boundary. NumPy's own begins 16 bytes after one."""
    memory = np.empty(nbytes + BLOCK_NBYTES, np.uint8)
    first = -address_of(memory) % BLOCK_NBYTES
    return memory[first : first + nbytes]


class BouncePool:
    """A thread-safe pool of bounce buffers: fresh memory costs more than a copy into it.

    It keeps as many buffers as were ever in use at once, up to two.
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

    def close(self) -> None:
        """Free the buffers, now and when they come back."""
        self._free = deque(maxlen=0)


def write_through(system: Any, fd: int, data: Bytes, position: int, bounce: Bytes | None) -> int:
    """Write one block and return its checksum.

    Parameters
    ----------
    bounce
        Aligned memory if the file is open for direct I/O; None otherwise.
    """
    if bounce is None:
        total = 0
        for start in range(0, data.nbytes, _SUMMED_AT_ONCE_NBYTES):
            # Summed while the bytes are in the processor's cache.
            piece = data[start : start + _SUMMED_AT_ONCE_NBYTES]
            write_all(fd, piece, position + start, system)
            total = checksum(piece, total)
        return total
    in_place_nbytes = data.nbytes // STEP_NBYTES * STEP_NBYTES if is_aligned(data) else 0
    write_all(fd, data[:in_place_nbytes], position, system)
    total = checksum(data[:in_place_nbytes])
    for start in range(in_place_nbytes, data.nbytes, bounce.nbytes):
        piece = data[start : start + bounce.nbytes]
        for first in range(0, piece.nbytes, _SUMMED_AT_ONCE_NBYTES):
            part = bounce[first : min(first + _SUMMED_AT_ONCE_NBYTES, piece.nbytes)]
            part[:] = piece[first : first + part.nbytes]
            total = checksum(part, total)
        end = padded(piece.nbytes)
        bounce[piece.nbytes : end] = 0
        write_all(fd, bounce[:end], position + start, system)
    return total


def read_into(system: Any, fd: int, parts: Sequence[Bytes]) -> None:
    """Fill consecutive parts from the beginning of a file.

    Raises
    ------
    EOFError
        The file is shorter.
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


def supports_direct(system: Any, path: str) -> bool:
    """Return whether a file system supports direct I/O, by a test file that is removed again.

    Raises
    ------
    OSError
        The test failed for another reason.
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
        write_all(fd, block, 0, system)
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
        # Some file systems refuse only after the file was created.
        try:
            system.unlink(path)
        except FileNotFoundError:
            pass
    return True

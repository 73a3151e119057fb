"""Pages of host memory from the system, joined and split without copying.

A page here has 2 MiB, on a 2 MiB boundary. Pages are fungible: `mremap` moves a page to another
address by changing a page table entry, without copying its bytes. So the pages of many small freed
buffers become one large contiguous buffer without a page fault.

`PrivatePages` are anonymous memory, in huge pages if the kernel has any. `SharedPages` belong to an
unnamed in-memory file that another process can open and read, so shards move between processes of
one host. A process that dies leaves nothing to clean up: the memory is freed with the last file
descriptor.

This module needs system calls of Linux; `work_here` tells whether this system has them. It does
not know how pages are used; see `devices.host_memory.pool`.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Any

from dask_gpurt.system_calls import memory_file

PAGE_NBYTES = 2 << 20

# Constants of Linux. Python's `mmap` lacks some of them, and others on other systems.
_PROT_NONE = 0
_PROT_READ_WRITE = 1 | 2
_MAP_SHARED = 1
_PRIVATE = 2 | 0x20  # and anonymous
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MREMAP_MAYMOVE_FIXED = 1 | 2
_MADV_HUGEPAGE = 14
_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2
_FAILED = ctypes.c_void_p(-1).value


@lru_cache(1)
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    size, address, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    library.mmap.restype = address
    library.munmap.argtypes = [address, size]
    library.mremap.argtypes = [address, size, size, number, address]
    library.mremap.restype = address
    library.madvise.argtypes = [address, size, number]
    library.fallocate.argtypes = [number, number, ctypes.c_long, ctypes.c_long]
    return library


def _checked(address: int | None, what: str) -> int:
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        error = MemoryError if code in (0, 12) else OSError
        raise error(f"{what} failed: {os.strerror(code)}")
    return address


def _reserve(n_pages: int) -> int:
    """Reserve an address range on a page boundary, without memory behind it."""
    library = _library()
    wanted = n_pages * PAGE_NBYTES
    flags = _PRIVATE | _MAP_NORESERVE
    start = _checked(library.mmap(None, wanted + PAGE_NBYTES, _PROT_NONE, flags, -1, 0), "mmap")
    first = -(-start // PAGE_NBYTES) * PAGE_NBYTES
    if first > start:
        library.munmap(start, first - start)
    tail = start + wanted + PAGE_NBYTES - (first + wanted)
    if tail:
        library.munmap(first + wanted, tail)
    return first


class PrivatePages:
    """Pages of this process only."""

    def build(self, n_pages: int, spare: list[int]) -> int:
        """Return contiguous pages, built from spare pages as far as they suffice.

        Parameters
        ----------
        spare
            Addresses of unused pages. The pages taken are removed from the end of the list.

        Returns
        -------
        int
            Address of the first page.

        Raises
        ------
        MemoryError
            The system has no more memory.
        """
        if n_pages == 1 and spare:
            return spare.pop()
        library = _library()
        first = _reserve(n_pages)
        moved = min(n_pages, len(spare))
        try:
            for number in range(moved):
                target = first + number * PAGE_NBYTES
                answer = library.mremap(
                    spare[-1], PAGE_NBYTES, PAGE_NBYTES, _MREMAP_MAYMOVE_FIXED, target
                )
                _checked(answer, "mremap")
                self._moved(spare.pop(), target)
            if moved < n_pages:
                self._add(first + moved * PAGE_NBYTES, n_pages - moved)
        except (MemoryError, OSError):
            self.give_back(first, n_pages)
            raise
        return first

    def _moved(self, old: int, new: int) -> None:
        """Record that a page moved to another address."""

    def _add(self, start: int, n_pages: int) -> None:
        """Map fresh pages into a reserved range."""
        nbytes = n_pages * PAGE_NBYTES
        flags = _PRIVATE | _MAP_FIXED
        _checked(_library().mmap(start, nbytes, _PROT_READ_WRITE, flags, -1, 0), "mmap")
        # Only advice: a kernel without huge pages uses small ones.
        _library().madvise(start, nbytes, _MADV_HUGEPAGE)

    def give_back(self, address: int, n_pages: int = 1) -> None:
        """Return pages to the system."""
        _library().munmap(address, n_pages * PAGE_NBYTES)

    def close(self) -> None:
        """Stop sharing the pages with other processes."""

    def reset_after_fork(self) -> bool:
        """Return whether a forked child shares the existing pages with its parent."""
        return False


class SharedPages(PrivatePages):
    """Pages of an in-memory file that other processes read by position.

    The first page of the file is never handed out. The creator of the file writes its signature
    there.

    Raises
    ------
    OSError
        The system does not support such files.
    """

    def __init__(self) -> None:
        self.fd = memory_file("gpurt")
        os.ftruncate(self.fd, PAGE_NBYTES)
        self._end = PAGE_NBYTES
        self._free: list[int] = []
        #: Position in the file, by address of the page.
        self._positions: dict[int, int] = {}

    def _moved(self, old: int, new: int) -> None:
        if (position := self._positions.pop(old, None)) is not None:
            self._positions[new] = position

    def _add(self, start: int, n_pages: int) -> None:
        if self.fd < 0:
            super()._add(start, n_pages)
            return
        library = _library()
        for address in range(start, start + n_pages * PAGE_NBYTES, PAGE_NBYTES):
            if not self._free:
                os.ftruncate(self.fd, self._end + PAGE_NBYTES)
                self._free.append(self._end)
                self._end += PAGE_NBYTES
            flags = _MAP_SHARED | _MAP_FIXED
            position = self._free[-1]
            _checked(
                library.mmap(address, PAGE_NBYTES, _PROT_READ_WRITE, flags, self.fd, position),
                "mmap",
            )
            self._positions[address] = self._free.pop()

    def give_back(self, address: int, n_pages: int = 1) -> None:
        super().give_back(address, n_pages)
        for page in range(address, address + n_pages * PAGE_NBYTES, PAGE_NBYTES):
            position = self._positions.pop(page, None)
            if position is None:  # reserved, but never mapped
                continue
            mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
            if not _library().fallocate(self.fd, mode, position, PAGE_NBYTES):
                self._free.append(position)

    def extents(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """Return where bytes lie in the file: positions and lengths, in order.

        Raises
        ------
        KeyError
            The bytes are not in pages of this file.
        """
        found: list[tuple[int, int]] = []
        end = address + nbytes
        while address < end:
            page = address // PAGE_NBYTES * PAGE_NBYTES
            length = min(end, page + PAGE_NBYTES) - address
            position = self._positions[page] + address - page
            if found and sum(found[-1]) == position:
                position, length = found[-1][0], found[-1][1] + length
                found.pop()
            found.append((position, length))
            address = page + PAGE_NBYTES
        return found

    def close(self) -> None:
        """Close the file. Pages built from now on are private.

        Live buffers keep their mappings and thereby their memory.
        """
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def reset_after_fork(self) -> bool:
        """Close the file in a forked child, whose writes would change the parent's data."""
        self.close()
        return True

    def __del__(self) -> None:
        self.close()


@lru_cache(1)
def work_here() -> bool:
    """Return whether this system can map and move pages: macOS and some sandboxes cannot."""
    pages, spare = PrivatePages(), list[int]()
    try:
        spare.append(pages.build(1, []))
        # Moves the one page, and maps another one behind it.
        pages.give_back(pages.build(2, spare), 2)
    except (AttributeError, OSError):
        return False
    finally:
        for address in spare:
            pages.give_back(address)
    return True


def system_policy() -> str:
    """Return the kernel's policy for huge pages: `always`, `madvise`, `never` or `unknown`."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            words = file.read().split()
    except OSError:
        return "unknown"
    return next((word.strip("[]") for word in words if word.startswith("[")), "unknown")

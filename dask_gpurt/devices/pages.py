"""Huge pages from the system, stitched and cut without copying.

A page here is 2 MiB of private anonymous memory on a 2 MiB boundary, which the kernel backs with
one huge page where it has any. Pages are fungible: moving one to another address (`mremap`) moves
an entry of the page table, not its bytes. That is how pages left behind by many small buffers
become one large contiguous buffer without a single page fault.

Linux only, through the C library. Knows nothing of who uses a page (`devices.pool`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import lru_cache
from typing import Any

PAGE_NBYTES = 2 << 20

_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MREMAP_MAYMOVE_FIXED = 1 | 2
_MADV_HUGEPAGE = 14
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
    return library


def _checked(address: int | None, what: str) -> int:
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        error = MemoryError if code in (0, 12) else OSError
        raise error(f"{what} failed: {os.strerror(code)}")
    return address


def _reserve(n_pages: int) -> int:
    """Address range on a page boundary, with nothing behind it yet."""
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


def build(n_pages: int, spare: list[int]) -> int:
    """Contiguous pages, made of spare ones as far as they go.

    Parameters
    ----------
    spare
        Addresses of pages that nobody uses; those taken are removed from the end.

    Returns
    -------
    int
        Address of the first page.

    Raises
    ------
    MemoryError
        The system has no more.
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
            spare.pop()
        if moved < n_pages:
            start = first + moved * PAGE_NBYTES
            nbytes = (n_pages - moved) * PAGE_NBYTES
            flags = _PRIVATE | _MAP_FIXED
            _checked(library.mmap(start, nbytes, _PROT_READ_WRITE, flags, -1, 0), "mmap")
            # Advice: where the kernel has no huge pages, small ones do.
            library.madvise(start, nbytes, _MADV_HUGEPAGE)
    except (MemoryError, OSError):
        library.munmap(first, n_pages * PAGE_NBYTES)
        raise
    return first


def give_back(address: int, n_pages: int = 1) -> None:
    """Return pages to the system."""
    _library().munmap(address, n_pages * PAGE_NBYTES)


def system_policy() -> str:
    """What the kernel does for memory that asks for huge pages: `always`, `madvise`, `never`."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            words = file.read().split()
    except OSError:
        return "unknown"
    return next((word.strip("[]") for word in words if word.startswith("[")), "unknown")

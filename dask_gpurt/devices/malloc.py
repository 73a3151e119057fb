"""The C library's allocator, told to keep its pages while a shuffle runs.

Dask starts workers with a trim threshold of 64 KiB, which also stops glibc from raising its mmap
threshold by itself: every temporary above 128 KiB is then mapped, faulted in page by page and
unmapped again. Hashing a column costs more than twice as much that way. While a run is active the
thresholds are raised; when the last one ends they are put back and the free pages returned.

Only glibc has these knobs; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: Largest value that glibc accepts on 64-bit machines.
_LARGEST_MMAP_THRESHOLD = 32 << 20
_DEFAULT_THRESHOLD = 128 << 10
#: `mallopt` takes a C int, the environment a size.
_LARGEST_INT = 2**31 - 1


class PageKeeper:
    """Counts who wants pages kept, and tells the allocator when the first comes or the last goes.

    Parameters
    ----------
    keep_nbytes
        Free bytes that the allocator may hold back at the top of its heap.
    """

    def __init__(self, keep_nbytes: int, mallopt: Callable[[int, int], int] | None = None) -> None:
        self._keep_nbytes = min(keep_nbytes, _LARGEST_INT)
        self._mallopt = mallopt or _glibc_mallopt()
        self._lock = threading.Lock()
        self._users = 0

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1 and self._mallopt is not None:
                self._mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
                self._mallopt(_M_TRIM_THRESHOLD, self._keep_nbytes)

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._mallopt is not None:
                self._mallopt(
                    _M_TRIM_THRESHOLD,
                    _environment("MALLOC_TRIM_THRESHOLD_", _DEFAULT_THRESHOLD),
                )
                self._mallopt(
                    _M_MMAP_THRESHOLD,
                    _environment("MALLOC_MMAP_THRESHOLD_", _DEFAULT_THRESHOLD),
                )
                trim()


def _environment(name: str, default: int) -> int:
    try:
        return min(int(os.environ[name]), _LARGEST_INT)
    except (KeyError, ValueError):
        return default


def _glibc_mallopt() -> Callable[[int, int], int] | None:
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - there on glibc alone
        mallopt: Callable[[int, int], int] = library.mallopt
    except (OSError, AttributeError):
        return None
    return mallopt


def trim() -> None:
    """Give free pages back to the system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass

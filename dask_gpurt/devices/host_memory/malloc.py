"""Settings of glibc's allocator that keep free pages in the process while a shuffle runs.

Dask starts workers with a trim threshold of 64 KiB. This setting also stops glibc from raising its
mmap threshold by itself. Every temporary above 128 KiB is then mapped, faulted in page by page, and
unmapped again. Hashing a column becomes more than twice as expensive.

`PageKeeper` raises both thresholds while a run is active. When the last run ends, it returns free
pages to the system and sets the thresholds that the environment asks for. If the environment sets
none, glibc would have raised them by itself, but it stops doing so after any `mallopt` call. So
they then stay at the highest values that glibc would have reached.

Only glibc has these settings. On other C libraries, this module does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Mapping

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: Largest value that glibc accepts on 64-bit machines.
_LARGEST_MMAP_THRESHOLD = 32 << 20
#: Both thresholds, if a setting in the environment stops glibc from raising them.
_DEFAULT_THRESHOLD = 128 << 10
#: Settings that stop glibc from raising its thresholds: environment variable and glibc tunable.
_SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": "glibc.malloc.trim_threshold",
    "MALLOC_MMAP_THRESHOLD_": "glibc.malloc.mmap_threshold",
    "MALLOC_TOP_PAD_": "glibc.malloc.top_pad",
    "MALLOC_MMAP_MAX_": "glibc.malloc.mmap_max",
}
#: `mallopt` takes a C int, but the environment allows larger sizes.
_LARGEST_INT = 2**31 - 1


class PageKeeper:
    """A counter of users that want free pages kept; it changes the allocator for the first and
    last.

    Parameters
    ----------
    keep_nbytes
        Free bytes that the allocator may keep at the top of its heap.
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
                trim_nbytes, mmap_nbytes = _thresholds(os.environ)
                self._mallopt(_M_TRIM_THRESHOLD, trim_nbytes)
                self._mallopt(_M_MMAP_THRESHOLD, mmap_nbytes)
                trim()


def _thresholds(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the trim and mmap thresholds that apply without a run."""
    tunables = dict(
        one.split("=", 1) for one in environment.get("GLIBC_TUNABLES", "").split(":") if "=" in one
    )
    found = {}
    for name, tunable in _SETTINGS.items():
        with contextlib.suppress(KeyError, ValueError):
            found[name] = min(int(tunables.get(tunable) or environment[name]), _LARGEST_INT)
    trim_nbytes, mmap_nbytes = _DEFAULT_THRESHOLD, _DEFAULT_THRESHOLD
    if not found:
        # glibc trims at twice the largest block that it ever mapped and freed.
        trim_nbytes, mmap_nbytes = 2 * _LARGEST_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD
    return (
        found.get("MALLOC_TRIM_THRESHOLD_", trim_nbytes),
        found.get("MALLOC_MMAP_THRESHOLD_", mmap_nbytes),
    )


def _glibc_mallopt() -> Callable[[int, int], int] | None:
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - exists in glibc only
        mallopt: Callable[[int, int], int] = library.mallopt
    except (OSError, AttributeError):
        return None
    return mallopt


def trim() -> None:
    """Return free pages to the system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass

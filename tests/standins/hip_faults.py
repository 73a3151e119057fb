"""Faults of the stand-in for HIP, and its counts of calls, in a process that runs on it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

#: As `enum counter` in `hip/standin.h`.
COUNTERS = (
    "allocations",
    "copies to the device",
    "copies to the host",
    "copies on the device",
    "copies on the default stream",
    "launches",
    "waits for the device",
    "waits for the default stream",
)


def library() -> ctypes.CDLL | None:
    """Return the stand-in that this process runs on, or None."""
    with contextlib.suppress(OSError):
        found = ctypes.CDLL("libamdhip64.so.7")
        if hasattr(found, "standin_count"):
            found.standin_count.restype = ctypes.c_long
            return found
    return None


class Faults:
    """The faults of the stand-in, until `clear`."""

    def __init__(self, standin: ctypes.CDLL) -> None:
        self._standin = standin

    def fail_allocation(self, number: int = 1) -> None:
        """Let an allocation of device memory fail: the first one from now on is number 1."""
        self._standin.standin_fail_allocation(number)

    def stick_event(self, number: int = 1) -> None:
        """Let an event never be done, nor work behind it."""
        self._standin.standin_stick_event(number)

    def hold_copies(self) -> None:
        """Let no copy end."""
        self._standin.standin_hold_copies()

    def lose_device(self) -> None:
        """Let all work fail."""
        self._standin.standin_lose_device()

    def clear(self) -> None:
        """End all faults. Work that was held back goes on."""
        self._standin.standin_clear_faults()


def counts(standin: ctypes.CDLL) -> dict[str, int]:
    """Return the number of calls of each kind so far."""
    return {name: standin.standin_count(number) for number, name in enumerate(COUNTERS)}


@contextlib.contextmanager
def counted(standin: ctypes.CDLL) -> Iterator[dict[str, int]]:
    """Return a dict that holds the calls within the `with` statement once it has ended."""
    before, found = counts(standin), {}
    yield found
    found.update(
        {name: n - before[name] for name, n in counts(standin).items() if n > before[name]}
    )

"""Reads that failed because memory or file descriptors ran out, and how long tasks waited.

The store retries such a read shortly after, because memory comes and goes. If nothing is left that
could free any, retries would never end. So the store abandons the read after a timeout: the
waiting task proceeds, and reads the value itself or fails.

Callers pass the time in; nothing here reads a clock. The caller of `FailedReads` holds the store's
lock.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import numpy as np

from dask_gpurt.memory.decisions.levels import Value

#: A failed read is forgotten if it does not fail again for this long.
FORGET_S = 5.0


def is_short(error: BaseException, nbytes: int) -> bool:
    """Return whether an error of foreign code really comes from a lack of memory or descriptors.

    A value's own code may raise such errors for other reasons, and then waiting does not help.
    So this function tries to get a descriptor, or `nbytes` of memory, itself.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        try:
            np.empty(nbytes, np.uint8)
        except MemoryError:
            return True
    elif number in (errno.EMFILE, errno.ENFILE):
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return True
    return False


@dataclass(eq=False)
class FailedRead:
    """A value whose read failed, and the reason.

    Attributes
    ----------
    n_times
        Failures so far.
    since_s
        Time of the first poll that saw the failure; None before the first poll.
    is_abandoned
        Nothing should wait for this read any longer.
    """

    value: Value
    reason: str
    n_times: int = 0
    since_s: float | None = None
    is_abandoned: bool = False
    _n_seen: int = 0
    _seen_s: float = 0.0

    def poll(self, now_s: float) -> bool:
        """Note the time; return False if the read is no longer retried."""
        if self.since_s is None:
            self.since_s = now_s
        if self.n_times > self._n_seen:
            self._n_seen, self._seen_s = self.n_times, now_s
        return now_s - self._seen_s <= FORGET_S

    def waited_s(self, now_s: float) -> float:
        return now_s - self.since_s if self.since_s is not None else 0.0


class FailedReads:
    """The failed reads of one store."""

    def __init__(self) -> None:
        #: By serial number.
        self._failed: dict[int, FailedRead] = {}

    def add(self, value: Value, reason: str) -> None:
        """Record that there was no memory to read a value."""
        failed = self._failed.setdefault(value.serial, FailedRead(value, reason))
        failed.reason = reason
        failed.n_times += 1

    def remove(self, value: Value) -> None:
        """Remove the record of a value: it was read."""
        self._failed.pop(value.serial, None)

    def poll(self, now_s: float) -> list[FailedRead]:
        """Return the reads that are still retried at this time, the longest wait first."""
        self._failed = {n: failed for n, failed in self._failed.items() if failed.poll(now_s)}
        return sorted(self._failed.values(), key=lambda failed: -failed.waited_s(now_s))

    def pop_abandoned(self, value: Value) -> bool:
        """Return whether the read of a value was abandoned, and remove its record if so."""
        failed = self._failed.get(value.serial)
        if failed is None or not failed.is_abandoned:
            return False
        del self._failed[value.serial]
        return True

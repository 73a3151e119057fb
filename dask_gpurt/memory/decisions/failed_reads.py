"""Values that cannot be read for want of memory: since when, and who has waited long enough.

Memory comes and goes, so what is short of it is read again in a moment. Where nothing is left that
could give any back, that would go on for ever; so whoever waits is let go on in the end, and reads
for itself or fails. Takes the time, and never asks for it; whoever calls `Shortage` holds the
store's lock.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import numpy as np

from dask_gpurt.memory.decisions.residency import Value

#: What was not tried for so long is not waited for any more.
FORGET_S = 5.0


def is_short(error: BaseException, nbytes: int) -> bool:
    """Whether an error of somebody else's code is for want of memory or of descriptors.

    Such code may raise what it likes, and to wait would not help it. So it is looked whether there
    are a descriptor and so many bytes.
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
class PutOff:
    """A value that was not read, and why.

    Attributes
    ----------
    since_s
        When that was first seen. None if it has not been looked at yet.
    is_over
        Nobody is to wait for it any longer.
    """

    value: Value
    reason: str
    n_times: int = 0
    since_s: float | None = None
    is_over: bool = False
    _n_seen: int = 0
    _seen_s: float = 0.0

    def look(self, now_s: float) -> bool:
        """Notes the time; False if nobody tries to read it any more."""
        if self.since_s is None:
            self.since_s = now_s
        if self.n_times > self._n_seen:
            self._n_seen, self._seen_s = self.n_times, now_s
        return now_s - self._seen_s <= FORGET_S

    def waited_s(self, now_s: float) -> float:
        return now_s - self.since_s if self.since_s is not None else 0.0


class Shortage:
    """What a store could not read."""

    def __init__(self) -> None:
        #: By serial number.
        self._put_off: dict[int, PutOff] = {}

    def add(self, value: Value, reason: str) -> None:
        """There was no memory for a value."""
        put_off = self._put_off.setdefault(value.serial, PutOff(value, reason))
        put_off.reason = reason
        put_off.n_times += 1

    def read(self, value: Value) -> None:
        """There is memory for a value."""
        self._put_off.pop(value.serial, None)

    def look(self, now_s: float) -> list[PutOff]:
        """What is waited for at this time, longest first."""
        self._put_off = {n: one for n, one in self._put_off.items() if one.look(now_s)}
        return sorted(self._put_off.values(), key=lambda one: -one.waited_s(now_s))

    def is_over(self, value: Value) -> bool:
        """Whether nobody is to wait for a value any longer. Who asks is told so once."""
        put_off = self._put_off.get(value.serial)
        if put_off is None or not put_off.is_over:
            return False
        del self._put_off[value.serial]
        return True

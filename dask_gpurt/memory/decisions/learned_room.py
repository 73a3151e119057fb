"""The device memory that values may take, learned from allocations that found no room.

A library's memory pool may have a limit, and other processes may use the same device. Nothing
reports either of them. But an allocation that finds no room shows that values take too much. A
store that does not learn this prefetches values that do not fit, and evicts others.

Callers pass the time in; nothing here reads a clock.
"""

from __future__ import annotations

#: The learned room doubles in this time, because the shortage may pass.
DOUBLING_S = 60.0


class LearnedRoom:
    """The room for values that allocations have shown. Safe to use from any thread."""

    def __init__(self) -> None:
        #: The room, and when it was learned. One object, so that no thread sees half of a change.
        self._learned: tuple[int, float] | None = None

    def was_full(self, taken_nbytes: int, wanted_nbytes: int, now_s: float) -> None:
        """Note that an allocation found no room.

        Parameters
        ----------
        taken_nbytes
            Bytes that values took then.
        wanted_nbytes
            Size of the allocation.
        """
        self._learned = max(0, taken_nbytes - wanted_nbytes), now_s

    def room_nbytes(self, limit_nbytes: int, now_s: float) -> int:
        """Return the room for values, which is at most `limit_nbytes`."""
        if self._learned is None:
            return limit_nbytes
        nbytes, at_s = self._learned
        # Beyond a device's size no exponent matters, and a large one would overflow.
        return min(limit_nbytes, int(nbytes * 2.0 ** min(64.0, (now_s - at_s) / DOUBLING_S)))

"""Bandwidth of a link, learnt from the messages that went over it. Pure: the clock is the caller's.

Several messages may be under way at a time and share the link, so it is the bytes of all of them
over the time in which there was any that counts.
"""

from __future__ import annotations

#: Less than this says more of latency than of bandwidth.
_ENOUGH_NBYTES = 1 << 20
#: Older bytes count half after so many new ones.
_WINDOW_NBYTES = 64 << 20


class LinkRate:
    """Bytes a second of one link, as far as is known."""

    def __init__(self) -> None:
        self._under_way = 0
        self._busy_from_s = 0.0
        self._busy_s = 0.0
        self._nbytes = 0.0

    def begin(self, now_s: float) -> None:
        """A message leaves."""
        if not self._under_way:
            self._busy_from_s = now_s
        self._under_way += 1

    def end(self, now_s: float, nbytes: int) -> None:
        """A message of `nbytes` was answered; 0 if it failed."""
        self._busy_s += now_s - self._busy_from_s
        self._busy_from_s = now_s
        self._under_way -= 1
        self._nbytes += nbytes
        if self._nbytes > _WINDOW_NBYTES:
            self._nbytes /= 2
            self._busy_s /= 2

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second, None while not enough went over the link."""
        if self._nbytes < _ENOUGH_NBYTES or self._busy_s <= 0:
            return None
        return self._nbytes / self._busy_s

"""Vector clocks that find missing order between streams of a device.

On a GPU, two streams that use the same memory without an event between them nearly always work. The
emulated device keeps vector clocks, as race detectors do. It reports such a pair when the second
piece of work is queued, independent of the order in which the two run. It also reports memory that
is freed while another stream may still use it, and uses of freed memory.

The clocks are logical. This module starts no threads; the caller holds a lock.
"""

from __future__ import annotations

from dataclasses import dataclass


class HazardError(RuntimeError):
    """Missing order between pieces of work on a device: a bug in the program."""


class Clock:
    """A vector clock: for each stream, the number of its last known piece of work."""

    __slots__ = ("_seen",)

    def __init__(self, seen: dict[str, int] | None = None) -> None:
        self._seen = seen if seen is not None else {}

    def tick(self, stream: str) -> int:
        """Count one more piece of work on a stream and return its number."""
        self._seen[stream] = number = self._seen.get(stream, 0) + 1
        return number

    def merge(self, other: Clock) -> None:
        """Add everything that `other` comes after."""
        for stream, number in other._seen.items():
            if number > self._seen.get(stream, 0):
                self._seen[stream] = number

    def is_after(self, stream: str, number: int) -> bool:
        return self._seen.get(stream, 0) >= number

    def copy(self) -> Clock:
        return Clock(self._seen.copy())


@dataclass(frozen=True)
class Use:
    """An access of a piece of work to bytes of a buffer.

    Attributes
    ----------
    what
        Name of the work in messages.
    stream, number
        The stream, and the number of the work on it.
    start, stop
        Range of bytes.
    """

    what: str
    stream: str
    number: int
    start: int
    stop: int
    writes: bool

    def __str__(self) -> str:
        return f"{self.what} on stream {self.stream!r}"

    def conflicts_with(self, other: Use) -> bool:
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop

    def covers(self, other: Use) -> bool:
        """Return whether every use that conflicts with `other` also conflicts with this one."""
        return (
            (self.writes or not other.writes)
            and self.start <= other.start
            and other.stop <= self.stop
        )


class Uses:
    """The uses of one buffer that later work may have to come after."""

    def __init__(self) -> None:
        self._uses: list[Use] = []
        self._freed_by: Use | None = None

    def add(self, use: Use, clock: Clock, host: Clock) -> None:
        """Record one more use.

        Parameters
        ----------
        clock
            The clock of the use.
        host
            The clock of the host. All work queued from now on comes after it.

        Raises
        ------
        HazardError
            An earlier use conflicts with this one and is not ordered before it. The new use is not
            recorded.
        """
        self.check(use, clock)
        self._uses = [
            old
            for old in self._uses
            if not host.is_after(old.stream, old.number)
            and not (use.covers(old) and clock.is_after(old.stream, old.number))
        ]
        self._uses.append(use)

    def check(self, use: Use, clock: Clock) -> None:
        """Check a use without recording it.

        Raises
        ------
        HazardError
            The memory is freed, or the use is not ordered after one that it conflicts with.
        """
        if self._freed_by is not None:
            raise HazardError(f"{use} uses memory that {self._freed_by} has freed")
        for old in self._uses:
            if old.conflicts_with(use) and not clock.is_after(old.stream, old.number):
                raise HazardError(f"{use} is not ordered after {old}: wait for an event of it")

    def free(self, use: Use, clock: Clock, host: Clock) -> None:
        """Record the last use.

        Raises
        ------
        HazardError
            The memory is already freed, or another use may come after this one.
        """
        self.add(use, clock, host)
        self._freed_by = use

"""Which work on a device is known to come after which, and what that forbids.

On a GPU, two streams that use the same memory without an event between them work nearly always.
The emulated device keeps vector clocks, as race detectors do, and so finds such a pair when the
second of them is queued, whatever order they would have run in. Likewise memory that is freed while
another stream may still use it, and what is used after it was freed.

No clock but logical ones, no threads: whoever calls holds a lock.
"""

from __future__ import annotations

from dataclasses import dataclass


class HazardError(RuntimeError):
    """Work on a device that is not ordered as it must be: an error of the program."""


class Clock:
    """How far into the work of each stream something is known to come after."""

    __slots__ = ("_seen",)

    def __init__(self, seen: dict[str, int] | None = None) -> None:
        self._seen = seen if seen is not None else {}

    def tick(self, stream: str) -> int:
        """One more piece of work on a stream; its number there."""
        self._seen[stream] = number = self._seen.get(stream, 0) + 1
        return number

    def merge(self, other: Clock) -> None:
        """From here on, also after everything that `other` is after."""
        for stream, number in other._seen.items():
            if number > self._seen.get(stream, 0):
                self._seen[stream] = number

    def is_after(self, stream: str, number: int) -> bool:
        return self._seen.get(stream, 0) >= number

    def copy(self) -> Clock:
        return Clock(self._seen.copy())


@dataclass(frozen=True)
class Use:
    """What a piece of work does with bytes of a buffer.

    Attributes
    ----------
    what
        How messages call the work.
    stream, number
        Where it is queued.
    start, stop
        Its bytes.
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
        """Whether what conflicts with `other` always conflicts with this."""
        return (
            (self.writes or not other.writes)
            and self.start <= other.start
            and other.stop <= self.stop
        )


class Uses:
    """What has been queued on one buffer, as far as later work may have to come after it."""

    def __init__(self) -> None:
        self._uses: list[Use] = []
        self._freed_by: Use | None = None

    def add(self, use: Use, clock: Clock, host: Clock) -> None:
        """Take note of one more use.

        Parameters
        ----------
        clock
            What the use comes after.
        host
            What the host has waited for: everything that it queues from now on comes after.

        Raises
        ------
        HazardError
            It is not ordered after one that it conflicts with. Nothing is noted then.
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
        """Only look whether a use would be in order."""
        if self._freed_by is not None:
            raise HazardError(f"{use} uses memory that {self._freed_by} has freed")
        for old in self._uses:
            if old.conflicts_with(use) and not clock.is_after(old.stream, old.number):
                raise HazardError(f"{use} is not ordered after {old}: wait for an event of it")

    def free(self, use: Use, clock: Clock, host: Clock) -> None:
        """The last use.

        Raises
        ------
        HazardError
            It was freed before, or another use may come after this.
        """
        self.add(use, clock, host)
        self._freed_by = use

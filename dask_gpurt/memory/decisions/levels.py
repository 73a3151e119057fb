"""The state of each value and of each level of memory. Pure.

`memory.decisions.residency` changes it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from dask_gpurt.memory.decisions.backoff import Backoff
from dask_gpurt.memory.decisions.moves import Load, Put

#: Dask's priorities: the smaller, the sooner.
TaskPriority = tuple[float, ...]


@dataclass(eq=False, slots=True)
class Value:
    """The state of one key."""

    key: Hashable
    serial: int
    top_level: int
    nbytes: int
    last_used: int
    #: Bytes that this value takes, by level. Never empty.
    copies: dict[int, int] = field(default_factory=dict)
    moving: Put | Load | None = None
    #: Running tasks that need the object in memory.
    pins: int = 0
    #: A task has just used it. If no other use is known, the scheduler probably releases it soon.
    eviction_deferred: bool = False
    #: A task got the object while it was being written. It may have changed it.
    may_have_changed: bool = False
    #: Levels that never take the value: tiers that refuse it, and its top level if the object
    #: cannot be restored.
    refused: set[int] = field(default_factory=set)

    @property
    def in_memory(self) -> bool:
        """Whether the object is in its top level."""
        return self.top_level in self.copies


@dataclass(eq=False, slots=True)
class Level:
    """One level of memory: a top level or a tier.

    Parameters
    ----------
    name
        Name that users see.
    capacity_nbytes
        Most bytes it should hold; None for no limit.
    """

    name: str
    capacity_nbytes: int | None = None
    used_nbytes: int = 0
    #: Reserved for loads in flight, outputs of running tasks, and values read for messages.
    reserved_nbytes: int = 0
    #: Bytes that become free once writes in flight are complete.
    leaving_nbytes: int = 0
    #: A put failed for lack of room or for an error. Ends with `retry`, or when room becomes free.
    is_blocked: bool = False
    #: The retry delay after the tier had no room.
    backoff: Backoff = field(default_factory=Backoff)
    #: Whether a put found no room since the last `retry`, which counts it.
    was_full: bool = False
    members: dict[Hashable, Value] = field(default_factory=dict)
    #: Members that have a copy in another level, too.
    clean: dict[Hashable, Value] = field(default_factory=dict)

    def retry(self, now_s: float) -> None:
        """Allow puts again after a failure: at once, or after a delay if there was no room.

        Without the delay, values would be serialized over and over for nothing.
        """
        if self.was_full:
            self.was_full = False
            self.backoff = self.backoff.after_failure(now_s)
        if not self.backoff.is_waiting(now_s):
            self.is_blocked = False

    def note_room(self) -> None:
        """Note that a put succeeded or that a copy was freed."""
        self.is_blocked = self.was_full = False
        self.backoff = Backoff()

    def shortage_nbytes(self, want_nbytes: int = 0, mark: float = 1.0) -> int:
        """Return the bytes above a share of the capacity if `want_nbytes` more arrived."""
        if self.capacity_nbytes is None:
            return 0
        taken = self.used_nbytes + self.reserved_nbytes + want_nbytes - self.leaving_nbytes
        return max(0, taken - int(self.capacity_nbytes * mark))

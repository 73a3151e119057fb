"""Which value to evict first. Pure.

A policy ranks what could be evicted; the highest rank goes first. It knows neither keys nor tiers:
`memory.decisions.residency` says what may be evicted at all (never the inputs of a running task),
how much, and where to.

The best choice is known if the future is: evict what is used furthest from now (L. A. Belady, A
Study of Replacement Algorithms for a Virtual-Storage Computer, IBM Systems Journal 5(2), 1966). A
worker knows a good part of its future: `memory.decisions.foresight` says when a value is used.
`tests/memory/decisions/test_oracle.py` says how close that comes on recorded programs.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, Protocol


class Role(Enum):
    """What a value is held for."""

    OUTPUT = "output"
    #: A piece of a shuffle's input. It is sure to be used, once, by a task after the barrier.
    SHARD = "shard"


class Candidate(NamedTuple):
    """What a policy may know of a value. A tuple, as thousands are made at a time.

    Attributes
    ----------
    nbytes
        Size in the memory that runs short.
    next_use
        When the next task takes this value: a tuple, such as Dask's priorities; the smaller, the
        sooner. None if no such task is known.
    last_used
        Count of uses on this worker when the value was made or last used: the larger, the more
        recent.
    is_clean
        A valid copy is in a tier below, so that evicting it writes nothing.
    made
        Count of values when this one came: the larger, the later.
    role
        What it is held for.
    """

    nbytes: int
    next_use: tuple[float, ...] | None
    last_used: int
    is_clean: bool
    made: int
    role: Role = Role.OUTPUT


class EvictionPolicy(Protocol):
    """Ranks values. Without state, so that one object serves every worker of a process."""

    @property
    def name(self) -> str:
        """As in the setting."""

    def rank(self, candidate: Candidate) -> tuple[Any, ...]:
        """Comparable with the ranks of all other candidates; the highest is evicted first."""


class NextUse:
    """Furthest next use first.

    1. Outputs without a known use. Mostly a client holds them, and it may never ask again. Clean
       ones go first, the most recently used of them before others: they were read back for a scan,
       and the next scan comes to them last. Dirty ones go in the order in which they were made,
       whenever they were used: what a program made anew it uses sooner than what it made that
       from. The most recent first there as well would move twice the bytes where each step of a
       program makes new data from old. While the uses of a scan are known, which they are once it
       is submitted, neither matters to it: what it has passed goes first.
    2. Shards whose unpack task is not known yet: it comes after everything that is.
    3. What has a known use, the furthest first.
    """

    name = "next-use"

    def rank(self, candidate: Candidate) -> tuple[Any, ...]:
        _, next_use, last_used, is_clean, made, role = candidate
        if next_use is not None:
            return (0, next_use, is_clean, -last_used)
        # The second element is only ever compared within one class, so its type may differ.
        recency = last_used if is_clean else -made
        return (2 if role is Role.OUTPUT else 1, is_clean, recency)


class LeastRecentlyUsed:
    """What Dask does by default; the baseline."""

    name = "lru"

    def rank(self, candidate: Candidate) -> tuple[Any, ...]:
        return (-candidate.last_used,)


class Largest:
    """The fewest evictions, whatever they cost later."""

    name = "largest"

    def rank(self, candidate: Candidate) -> tuple[Any, ...]:
        return (candidate.nbytes, -candidate.last_used)


POLICIES: dict[str, EvictionPolicy] = {
    policy.name: policy for policy in (NextUse(), LeastRecentlyUsed(), Largest())
}

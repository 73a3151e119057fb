"""Eviction policies: which value to evict first. Pure.

A policy ranks the candidates, and the one with the highest rank is evicted first. A policy knows
neither keys nor tiers. `memory.decisions.residency` decides what may be evicted at all (never the
inputs of a running task), how much, and into which tier.

With a known future, the best choice is the value whose next use is furthest away (L. A. Belady, A
Study of Replacement Algorithms for a Virtual-Storage Computer, IBM Systems Journal 5(2), 1966). A
worker knows much of its future: `memory.decisions.foresight` predicts when a value is used.
`tests/memory/decisions/test_oracle.py` measures how close that comes on recorded programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class EvictionCandidate(NamedTuple):
    """The facts about a value that a policy may use. A tuple: thousands are made at a time.

    Attributes
    ----------
    nbytes
        Size in the memory that runs short.
    next_use
        When the next task uses this value: a tuple, such as Dask's priorities; the smaller, the
        sooner. None if no such task is known.
    last_used
        Count of uses on this worker when the value was made or last used: the larger, the more
        recent.
    is_clean
        Whether a tier below has a valid copy, so that the eviction writes nothing.
    made
        Count of values when this one arrived: the larger, the later.
    """

    nbytes: int
    next_use: tuple[float, ...] | None
    last_used: int
    is_clean: bool
    made: int


class EvictionPolicy(Protocol):
    """A ranking of values. It has no state: one object serves every worker of a process."""

    @property
    def name(self) -> str:
        """The name in the setting."""

    def rank(self, candidate: EvictionCandidate) -> tuple[Any, ...]:
        """Return a rank that compares with those of other candidates; the highest goes first."""


class NextUse:
    """The policy that evicts the value with the furthest next use, in two classes.

    1. Values without a known use. Usually only a client holds them, and it may never ask again.

       - Clean ones go first, the most recently used before others. They were read back for a scan,
         and the next scan reaches them last.
       - Dirty ones follow, in the order in which they were made, whatever their last use. A
         program uses its newest data sooner than the data that it was made from. Evicting the most
         recent first here too would move twice the bytes where each step makes new data from old.

       These two rules do not affect a scan that is already submitted. Its uses are known, so its
       values are in class 2 until the scan has passed them.
    2. Values with a known use, the furthest first.
    """

    name = "next-use"

    def rank(self, candidate: EvictionCandidate) -> tuple[Any, ...]:
        _, next_use, last_used, is_clean, made = candidate
        if next_use is not None:
            return (0, next_use, is_clean, -last_used)
        # The second element is compared only within one class, so its type may differ.
        recency = last_used if is_clean else -made
        return (1, is_clean, recency)


class LeastRecentlyUsed:
    """Dask's default policy; the baseline."""

    name = "lru"

    def rank(self, candidate: EvictionCandidate) -> tuple[Any, ...]:
        return (-candidate.last_used,)


class Largest:
    """The policy with the fewest evictions, whatever they cost later."""

    name = "largest"

    def rank(self, candidate: EvictionCandidate) -> tuple[Any, ...]:
        return (candidate.nbytes, -candidate.last_used)


POLICIES: dict[str, EvictionPolicy] = {
    policy.name: policy for policy in (NextUse(), LeastRecentlyUsed(), Largest())
}

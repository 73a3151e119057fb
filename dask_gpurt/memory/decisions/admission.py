"""Admission of tasks: each claims its inputs and room for its output before it begins.

A claim is admitted once its spilled inputs and its expected output fit. Its inputs are then loaded
and stay in memory until the claim ends.

Claims are admitted one after the other in the order of their priority, so that small ones cannot
overtake a large one for ever. If nothing else runs and nothing can be freed, the first claim is
admitted although it does not fit. So a worker that runs short of memory slows down to one task at
a time, and never stalls.

This module only decides, on top of `memory.decisions.residency`. Neither is thread-safe.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

from dask_gpurt.memory.decisions.levels import TaskPriority, Value
from dask_gpurt.memory.decisions.residency import Residency


@dataclass(eq=False, slots=True)
class Claim:
    """The memory that one task needs.

    Attributes
    ----------
    output_nbytes
        Expected size of its result at `top_level`.
    is_admitted
        Whether room is reserved for it.
    is_ready
        Whether its task may begin.
    lost
        Inputs that can no longer be read.
    abandoned
        Inputs that did not fit into memory: the task begins without them there.
    """

    name: Hashable
    values: tuple[Value, ...]
    output_nbytes: int
    priority: TaskPriority
    top_level: int
    is_admitted: bool = False
    is_ready: bool = False
    lost: set[Hashable] = field(default_factory=set)
    abandoned: set[Hashable] = field(default_factory=set)


class Admission:
    """The claims on one residency."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._waiting: list[Claim] = []
        self._loading: list[Claim] = []
        self.running: set[Claim] = set()
        #: Running claims that wait, or seem to wait, for other tasks to end.
        self._waiting_on_others: set[Claim] = set()
        self._is_forced = False
        #: Number of claims that were admitted although they did not fit.
        self.overcommitted = 0

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def request(
        self,
        name: Hashable,
        keys: Collection[Hashable],
        output_nbytes: int = 0,
        priority: TaskPriority = (),
        top_level: int = 0,
    ) -> Claim:
        """Make a claim for a task that wants to begin.

        The claim is ready at once if no other waits, it fits, and all its inputs are in memory.
        Unknown keys are ignored.
        """
        known = self._residency.values
        values = tuple(known[key] for key in keys if key in known)
        claim = Claim(name, values, output_nbytes, priority, top_level)
        if not self._waiting and self._fits_at_once(claim):
            self._begin(claim)
            claim.is_ready = True
            return claim
        self._waiting.append(claim)
        if len(self._waiting) > 1:
            self._waiting.sort(key=lambda waiting: waiting.priority)
        return claim

    def end(self, claim: Claim) -> None:
        """Release a claim: its task ended, or will not begin."""
        if claim in self._waiting:
            self._waiting.remove(claim)
        if not claim.is_admitted:
            return
        claim.is_admitted = False
        self.running.discard(claim)
        self._waiting_on_others.discard(claim)
        if claim in self._loading:
            self._loading.remove(claim)
        self._residency.levels[claim.top_level].reserved_nbytes -= claim.output_nbytes
        for value in claim.values:
            self._residency.unpin(value)

    def mark_lost(self, key: Hashable) -> None:
        """Stop claims from waiting for a value that can no longer be read."""
        for claim in (*self._waiting, *self._loading):
            if any(value.key == key for value in claim.values):
                claim.lost.add(key)

    @property
    def is_stalled(self) -> bool:
        """Whether no running task and no write in flight could free memory.

        Tasks that may wait for other tasks do not count as running.
        """
        is_running = any(claim.is_ready for claim in self.running - self._waiting_on_others)
        return not is_running and not self._residency.is_writing

    def abandon(self, value: Value) -> None:
        """Let claims become ready without a value that there is no room to read."""
        for claim in self._loading:
            if value in claim.values and not value.in_memory:
                claim.abandoned.add(value.key)

    def due(self) -> list[Claim]:
        """Admit what fits, and return the claims that became ready: all inputs are in memory."""
        while self._waiting and self._admit(self._waiting[0]):
            claim = self._waiting.pop(0)
            self._begin(claim)
            self._loading.append(claim)
        ready = [claim for claim in self._loading if not self._load_missing(claim)]
        for claim in ready:
            claim.is_ready = True
            self._loading.remove(claim)
        return ready

    def _begin(self, claim: Claim) -> None:
        claim.is_admitted = True
        self.running.add(claim)
        self._residency.levels[claim.top_level].reserved_nbytes += claim.output_nbytes
        for value in claim.values:
            self._residency.pin(value)

    def _fits_at_once(self, claim: Claim) -> bool:
        # Fast path: usually everything fits, and then this is the only check.
        level = self._residency.levels[claim.top_level]
        if level.shortage_nbytes(claim.output_nbytes + level.leaving_nbytes):
            return False
        return all(value.in_memory for value in claim.values)

    def _load_missing(self, claim: Claim) -> bool:
        missing = False
        for value in self._still_known(claim.values):
            if value.in_memory or value.top_level in value.refused:
                continue
            if value.key not in claim.lost | claim.abandoned:
                self._residency.load(value)
                missing = True
        return missing

    def _admit(self, claim: Claim) -> bool:
        needs: dict[int, int] = {claim.top_level: claim.output_nbytes}
        for value in self._still_known(claim.values):
            if not value.in_memory and not _is_loading(value):
                needs[value.top_level] = needs.get(value.top_level, 0) + value.nbytes
        fits = True
        for top_level, nbytes in needs.items():
            level = self._residency.levels[top_level]
            if not nbytes or not level.shortage_nbytes(nbytes + level.leaving_nbytes):
                continue
            inputs = frozenset(value.key for value in claim.values)
            self._residency.make_room(top_level, nbytes, keep=inputs)
            # A write in flight has not freed its room yet.
            fits &= not level.shortage_nbytes(nbytes + level.leaving_nbytes)
        # A task whose inputs are still read will run soon, so it counts as running here.
        others_run = len(self.running) > len(self._waiting_on_others)
        nothing_frees = not others_run and not self._residency.is_writing
        if not fits and (nothing_frees or self._is_forced):
            self._is_forced = False
            self.overcommitted += 1
            return True
        return fits

    def force_progress(self) -> bool:
        """Have the first claim admitted even if it does not fit; return False if none waits.

        The running tasks seem to wait for it. While they do, the next claim is admitted as soon as
        the previous one has ended, because a task may wait for many others.
        """
        if not self._waiting:
            return False
        self._is_forced = True
        self._waiting_on_others = set(self.running)
        return True

    def may_wait(self, claim: Claim) -> None:
        """Note that a running task may wait for others: these are admitted one after the other."""
        if claim in self.running:
            self._waiting_on_others.add(claim)

    def _still_known(self, values: Iterable[Value]) -> Iterable[Value]:
        # A key may have been released or replaced since the claim was made.
        known = self._residency.values
        return (value for value in values if known.get(value.key) is value)


def _is_loading(value: Value) -> bool:
    return (
        value.moving is not None and not value.in_memory and value.moving.target == value.top_level
    )

"""Who may run: tasks claim their inputs and room for their output before they begin.

A claim is admitted once what it lacks fits: its cold inputs and its expected output. Then its
inputs are brought home and stay there until it ends. Claims are admitted in the order of their
priority, one after the other, so that a large one is not passed over for ever by small ones; when
nothing else runs and nothing can be freed, the first is admitted although it does not fit. So a
worker slows down to one task at a time before it runs out of memory, and never stands still.

Decides only, over `memory.decisions.residency`; not thread-safe, like it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

from dask_gpurt.memory.decisions.residency import Priority, Residency, Value


@dataclass(eq=False, slots=True)
class Claim:
    """What one task needs.

    Attributes
    ----------
    output_nbytes
        What its result is expected to take at `home`.
    is_admitted
        Whether room was given to it.
    lost
        Inputs that turned out not to be readable any more.
    given_up
        Inputs that there is no room for: its task begins without them at home.
    """

    name: Hashable
    values: tuple[Value, ...]
    output_nbytes: int
    priority: Priority
    top_level: int
    is_admitted: bool = False
    is_ready: bool = False
    lost: set[Hashable] = field(default_factory=set)
    abandoned: set[Hashable] = field(default_factory=set)


class Admission:
    """Claims over a residency."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._waiting: list[Claim] = []
        self._loading: list[Claim] = []
        self.running: set[Claim] = set()
        #: Of those, the ones that wait for others to end, or seem to.
        self._waiting_on_others: set[Claim] = set()
        self._is_forced = False
        #: Claims that were admitted although they did not fit.
        self.overcommitted = 0

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def ask(
        self,
        name: Hashable,
        keys: Collection[Hashable],
        output_nbytes: int = 0,
        priority: Priority = (),
        top_level: int = 0,
    ) -> Claim:
        """A task wants to begin; at once if nobody waits, it fits, and all it takes is at home.

        Keys that are not known are left out of account.
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
        """A task ended, or does not want to begin any more."""
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
        """A value cannot be read any more: claims that wait for it are ready, to learn of it."""
        for claim in (*self._waiting, *self._loading):
            if any(value.key == key for value in claim.values):
                claim.lost.add(key)

    @property
    def is_stalled(self) -> bool:
        """Whether nothing runs or is written that could leave room for others.

        What may wait for others itself does not count.
        """
        is_running = any(claim.is_ready for claim in self.running - self._waiting_on_others)
        return not is_running and not self._residency.is_writing

    def abandon(self, value: Value) -> None:
        """There is no room to read a value: claims that wait for it are ready without it."""
        for claim in self._loading:
            if value in claim.values and not value.in_memory:
                claim.abandoned.add(value.key)

    def due(self) -> list[Claim]:
        """Claims that became ready: admitted, with every input at home."""
        while self._waiting and self._admit(self._waiting[0]):
            claim = self._waiting.pop(0)
            self._begin(claim)
            self._loading.append(claim)
        ready = [claim for claim in self._loading if not self._missing(claim)]
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
        # Where everything fits, which is mostly so, this is all that is asked.
        level = self._residency.levels[claim.top_level]
        if level.shortage_nbytes(claim.output_nbytes + level.leaving_nbytes):
            return False
        return all(value.in_memory for value in claim.values)

    def _missing(self, claim: Claim) -> bool:
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
            spare = frozenset(value.key for value in claim.values)
            self._residency.make_room(top_level, nbytes, spare=spare)
            # Room that a copy under way will make is not there yet.
            fits &= not level.shortage_nbytes(nbytes + level.leaving_nbytes)
        is_running = len(self.running) > len(self._waiting_on_others)
        is_stalled = not is_running and not self._residency.is_writing
        if not fits and (is_stalled or self._is_forced):
            self._is_forced = False
            self.overcommitted += 1
            return True
        return fits

    def force_progress(self) -> bool:
        """Admit the first claim next time whether or not it fits; False if none waits.

        What runs seems to wait for it. As long as it does, the next claim is admitted as soon as
        the one before has ended: a task may wait for very many.
        """
        if not self._waiting:
            return False
        self._is_forced = True
        self._waiting_on_others = set(self.running)
        return True

    def may_wait(self, claim: Claim) -> None:
        """What runs may wait for others to end: these begin beside it, one after the other."""
        if claim in self.running:
            self._waiting_on_others.add(claim)

    def _still_known(self, values: Iterable[Value]) -> Iterable[Value]:
        # A key may have been released, or made anew, since the claim was made.
        known = self._residency.values
        return (value for value in values if known.get(value.key) is value)


def _is_loading(value: Value) -> bool:
    return (
        value.moving is not None and not value.in_memory and value.moving.target == value.top_level
    )

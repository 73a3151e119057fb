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
    home: int
    is_admitted: bool = False
    is_ready: bool = False
    lost: set[Hashable] = field(default_factory=set)
    given_up: set[Hashable] = field(default_factory=set)


class Admission:
    """Claims over a residency."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._waiting: list[Claim] = []
        self._loading: list[Claim] = []
        self.running: set[Claim] = set()
        #: Of those, the ones that wait for others to end, or seem to.
        self._waiting_inside: set[Claim] = set()
        self._in_a_hurry = False
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
        home: int = 0,
    ) -> Claim:
        """A task wants to begin; at once if nobody waits, it fits, and all it takes is at home.

        Keys that are not known are left out of account.
        """
        known = self._residency.values
        values = tuple(known[key] for key in keys if key in known)
        claim = Claim(name, values, output_nbytes, priority, home)
        if not self._waiting and self._fits_as_it_is(claim):
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
        self._waiting_inside.discard(claim)
        if claim in self._loading:
            self._loading.remove(claim)
        self._residency.levels[claim.home].reserved_nbytes -= claim.output_nbytes
        for value in claim.values:
            self._residency.unpin(value)

    def lost(self, key: Hashable) -> None:
        """A value cannot be read any more: claims that wait for it are ready, to learn of it."""
        for claim in (*self._waiting, *self._loading):
            if any(value.key == key for value in claim.values):
                claim.lost.add(key)

    @property
    def stands_still(self) -> bool:
        """Whether nothing runs or is written that could leave room for others.

        What may wait for others itself does not count.
        """
        is_running = any(claim.is_ready for claim in self.running - self._waiting_inside)
        return not is_running and not self._residency.is_writing

    def give_up(self, value: Value) -> None:
        """There is no room to read a value: claims that wait for it are ready without it."""
        for claim in self._loading:
            if value in claim.values and not value.is_home:
                claim.given_up.add(value.key)

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
        self._residency.levels[claim.home].reserved_nbytes += claim.output_nbytes
        for value in claim.values:
            self._residency.pin(value)

    def _fits_as_it_is(self, claim: Claim) -> bool:
        # Where everything fits, which is mostly so, this is all that is asked.
        level = self._residency.levels[claim.home]
        if level.shortage_nbytes(claim.output_nbytes + level.leaving_nbytes):
            return False
        return all(value.is_home for value in claim.values)

    def _missing(self, claim: Claim) -> bool:
        missing = False
        for value in self._there(claim.values):
            if value.is_home or value.home in value.refused:
                continue
            if value.key not in claim.lost | claim.given_up:
                self._residency.load(value)
                missing = True
        return missing

    def _admit(self, claim: Claim) -> bool:
        needs: dict[int, int] = {claim.home: claim.output_nbytes}
        for value in self._there(claim.values):
            if not value.is_home and not _is_loading(value):
                needs[value.home] = needs.get(value.home, 0) + value.nbytes
        fits = True
        for home, nbytes in needs.items():
            level = self._residency.levels[home]
            if not nbytes or not level.shortage_nbytes(nbytes + level.leaving_nbytes):
                continue
            spare = frozenset(value.key for value in claim.values)
            self._residency.relieve(home, nbytes, spare=spare)
            # Room that a copy under way will make is not there yet.
            fits &= not level.shortage_nbytes(nbytes + level.leaving_nbytes)
        is_running = len(self.running) > len(self._waiting_inside)
        stands_still = not is_running and not self._residency.is_writing
        if not fits and (stands_still or self._in_a_hurry):
            self._in_a_hurry = False
            self.overcommitted += 1
            return True
        return fits

    def hurry(self) -> bool:
        """Admit the first claim next time whether or not it fits; False if none waits.

        What runs seems to wait for it. As long as it does, the next claim is admitted as soon as
        the one before has ended: a task may wait for very many.
        """
        if not self._waiting:
            return False
        self._in_a_hurry = True
        self._waiting_inside = set(self.running)
        return True

    def may_wait(self, claim: Claim) -> None:
        """What runs may wait for others to end: these begin beside it, one after the other."""
        if claim in self.running:
            self._waiting_inside.add(claim)

    def _there(self, values: Iterable[Value]) -> Iterable[Value]:
        # A key may have been released, or made anew, since the claim was made.
        known = self._residency.values
        return (value for value in values if known.get(value.key) is value)


def _is_loading(value: Value) -> bool:
    return value.moving is not None and not value.is_home and value.moving.target == value.home

"""Which value is where, and what has to move next: the decisions of the store, without its effects.

A value lives as an object in its *home* level (host memory, or a device). Below are tiers that
keep bytes. A copy below stays when the object is brought back, until the value changes hands or
its room is needed: evicting a value that has one is free. Adapters report what happened; `due()`
answers with what to do now: `Put` a copy into a tier, `Load` a value home, `Drop` a copy.

Nothing here reads a clock, takes a lock or touches bytes; `memory.store` does,
`memory.decisions.admission` decides who may run, `memory.decisions.eviction_policy` who has to go.
Not thread-safe: the owner serialises calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_gpurt.memory.decisions.backoff import Backoff
from dask_gpurt.memory.decisions.eviction_order import EvictionOrder
from dask_gpurt.memory.decisions.eviction_policy import Candidate, EvictionPolicy
from dask_gpurt.memory.decisions.moves import Drop, Load, Move, Put

#: As Dask has them: the smaller, the sooner.
Priority = tuple[float, ...]

#: Moves that may be under way at once, of each direction: few, so that decisions stay fresh.
MAX_MOVES = 4
#: With that many writes under way only what has a copy can leave. It is looked for among so many
#: that would leave first: a write ends soon, and looking at all of them is the event loop's time.
MAX_PASSED = 256
#: What is smaller leaves last, whatever the policy says: a move costs more than its room is worth.
SMALL_NBYTES = 64 << 10
#: Once a level is above its mark, it is relieved to this share of it, as far as that takes writes.
LOW_WATER = 0.95
#: What is brought home ahead of need may hold at most this share of a level, but for the first.
#: More would hide no more of the reading, and every byte of it evicts one that is needed later.
AHEAD_SHARE = 0.1


@dataclass(eq=False, slots=True)
class Value:
    """What is known of one key."""

    key: Hashable
    serial: int
    top_level: int
    nbytes: int
    last_used: int
    #: Level to the bytes this value takes there. Never empty.
    copies: dict[int, int] = field(default_factory=dict)
    moving: Put | Load | None = None
    #: Who needs the object where it is: running tasks, messages that are being sent.
    pins: int = 0
    #: Just used. If nobody else is known to want it, its release is probably on the way.
    eviction_deferred: bool = False
    #: Levels that cannot take it, whatever their room; its home, if it cannot be made again.
    refused: set[int] = field(default_factory=set)

    @property
    def in_memory(self) -> bool:
        """Whether the object is there."""
        return self.top_level in self.copies


@dataclass(eq=False, slots=True)
class Level:
    """One level of memory.

    Parameters
    ----------
    name
        What users see.
    capacity_nbytes
        Most bytes it should hold; None without a limit.
    """

    name: str
    capacity_nbytes: int | None = None
    used_nbytes: int = 0
    #: Promised to loads that are under way and to outputs of tasks that run.
    reserved_nbytes: int = 0
    #: Will be free once copies below are complete.
    leaving_nbytes: int = 0
    #: A put failed for want of room or for an error; until `retry`, or until room came free.
    is_blocked: bool = False
    #: How long it is left alone where the tier had no room, and whether that is to be seen to.
    backoff: Backoff = field(default_factory=Backoff)
    was_full: bool = False
    members: dict[Hashable, Value] = field(default_factory=dict)

    def retry(self, now_s: float) -> None:
        """A put that failed may be tried again: at once, or after a while where there was no room.

        Values would be taken apart for nothing, over and over, while nothing else goes on.
        """
        if self.was_full:
            self.was_full = False
            self.backoff = self.backoff.after_failure(now_s)
        if not self.backoff.is_waiting(now_s):
            self.is_blocked = False

    def has_room(self) -> None:
        """A put was done, or a copy let go of."""
        self.is_blocked = self.was_full = False
        self.backoff = Backoff()

    def shortage_nbytes(self, want_nbytes: int = 0, mark: float = 1.0) -> int:
        """Bytes above a share of the capacity, were `want_nbytes` more to come."""
        if self.capacity_nbytes is None:
            return 0
        taken = self.used_nbytes + self.reserved_nbytes + want_nbytes - self.leaving_nbytes
        return max(0, taken - int(self.capacity_nbytes * mark))


class Residency:
    """Values over levels.

    Parameters
    ----------
    levels
        Homes and tiers, fastest first.
    chains
        Home to the tiers its values go down to, in order.
    policy
        Who goes first.
    next_use
        Priority of the next task that needs a key; None if none is known.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        chains: dict[int, tuple[int, ...]],
        policy: EvictionPolicy,
        next_use: Callable[[Hashable], Priority | None] = lambda key: None,
    ) -> None:
        self.levels = list(levels)
        self.chains = chains
        self.policy = policy
        self.values: dict[Hashable, Value] = {}
        self.next_use = next_use
        self._clock = 0
        self._serial = 0
        self._puts = 0
        self._loads = 0
        self._done: list[Move] = []
        #: Of each level: of what is large, and of what is small and leaves after that.
        self._orders = [(EvictionOrder(self._rank), EvictionOrder(self._rank)) for _ in levels]

    # ------------------------------------------------------------------ what happened

    def insert(
        self, key: Hashable, nbytes: int, top_level: int = 0, level: int | None = None
    ) -> Value:
        """A new value is at home, or in a tier alone; then `nbytes` may be unknown, which is 0.

        A value of the same key must have been removed before.
        """
        assert key not in self.values
        self._serial += 1
        value = Value(key, self._serial, top_level, nbytes, self._tick())
        self.values[key] = value
        self._add(value, top_level if level is None else level, nbytes)
        return value

    def add_copy(self, value: Value, level: int) -> None:
        """A tier has a copy that nobody here put there."""
        self._add(value, level, value.nbytes)

    def remove(self, key: Hashable) -> Value:
        """A value is gone; `due` says which copies of it to let go of."""
        value = self.values.pop(key)
        move = value.moving
        if isinstance(move, Put):
            self.levels[move.source].leaving_nbytes -= value.copies[move.source]
        elif isinstance(move, Load):
            self.levels[move.target].reserved_nbytes -= value.nbytes
        for level in list(value.copies):
            self._drop(value, level)
        return value

    def touch(self, key: Hashable) -> Value:
        """A value was used."""
        value = self.values[key]
        value.last_used = self._tick()
        return value

    def put_done(self, move: Put, nbytes: int) -> bool:
        """A copy is complete; False if it is of no use any more and has to be let go of."""
        self._puts -= 1
        value = self._current(move)
        if value is None:
            return False
        value.moving = None
        self._add(value, move.target, nbytes)
        self.levels[move.target].has_room()
        self.levels[move.source].leaving_nbytes -= value.copies[move.source]
        # Wanted again meanwhile: the copy was not in vain, it stays as a clean one.
        if move.source != value.top_level or not value.pins:
            self._drop(value, move.source)
        return True

    def put_cancelled(self, move: Put) -> None:
        """A copy was not begun, because nobody has that value any more."""
        self._puts -= 1

    def put_failed(
        self, move: Put, refused: Collection[int] = (), *, is_full: bool = False
    ) -> None:
        """A copy could not be made: the value stays where it is.

        Parameters
        ----------
        refused
            Tiers that will never take this value. If there are none, that of the move is blocked.
        is_full
            The tier has no room for it, or cannot be written to.
        """
        self._puts -= 1
        value = self._current(move)
        if not refused:
            self.levels[move.target].is_blocked = True
            self.levels[move.target].was_full |= is_full
        if value is None:
            return
        value.moving = None
        value.refused.update(refused)
        self.levels[move.source].leaving_nbytes -= value.copies[move.source]

    def load_done(self, move: Load) -> bool:
        """A value was read; False if it is of no use any more."""
        value = self._load_ended(move)
        if value is None:
            return False
        self._add(value, move.target, value.nbytes)
        value.last_used = self._tick()
        return True

    def load_deferred(self, move: Load) -> Value | None:
        """A value, if it still is one, was not read for want of memory; its copy is as good."""
        return self._load_ended(move)

    def load_refused(self, move: Load) -> None:
        """A copy is as good, and yet no value: whoever wants it reads it, to see what is wrong."""
        value = self._load_ended(move)
        if value is not None:
            value.refused.add(move.target)

    def load_failed(self, move: Load) -> bool:
        """A copy could not be read and is let go of; False if the value has no other."""
        value = self._load_ended(move)
        return value is None or self.drop_copy(value, move.source)

    def _load_ended(self, move: Load) -> Value | None:
        self._loads -= 1
        value = self._current(move)
        if value is not None:
            value.moving = None
            self.levels[move.target].reserved_nbytes -= value.nbytes
        return value

    def drop_copy(self, value: Value, level: int) -> bool:
        """A copy is of no use; False if the value has no other."""
        if len(value.copies) == 1:
            return False
        self._drop(value, level)
        return True

    def retry(self, now_s: float = math.inf) -> None:
        """Tiers that failed may be tried again, if it is time."""
        for level in self.levels:
            level.retry(now_s)

    def pin(self, value: Value) -> None:
        """The object must stay. Eviction that is under way is not stopped; its copy stays clean."""
        value.pins += 1
        value.last_used = self._tick()
        self._order(value, value.top_level).changed()

    def unpin(self, value: Value) -> None:
        value.pins -= 1

    def defer_eviction(self, values: Iterable[Value]) -> None:
        """Inputs of a task that just ended: not worth a write until `rested` says so."""
        for value in values:
            value.eviction_deferred = True
            self._order(value, value.top_level).changed()

    def allow_eviction(self, values: Iterable[Value]) -> None:
        for value in values:
            value.eviction_deferred = False
            self._order(value, value.top_level).changed()

    # ------------------------------------------------------------------ what to do

    def due(self) -> list[Move]:
        """Moves to make now, because levels are above their marks."""
        for number in range(len(self.levels)):
            if self.levels[number].shortage_nbytes():
                self.make_room(number, mark=LOW_WATER)
        return self.take_moves()

    @property
    def is_writing(self) -> bool:
        """Whether copies into tiers are under way: room may come free."""
        return self._puts > 0

    def take_moves(self) -> list[Move]:
        """Moves decided on since the last call."""
        moves, self._done = self._done, []
        return moves

    def load(self, value: Value) -> bool:
        """Decide to bring a value home; False if that cannot begin now."""
        if value.in_memory or isinstance(value.moving, Load):
            return True
        if value.moving is not None:
            return False
        # The fastest copy: levels are numbered from the top.
        move = Load(value.key, value.serial, min(value.copies), value.top_level)
        value.moving = move
        self._loads += 1
        self.levels[value.top_level].reserved_nbytes += value.nbytes
        self._done.append(move)
        return True

    def load_ahead(self, keys: Iterable[Hashable]) -> None:
        """Decide to bring values home before they are needed, soonest first.

        Only into free room, or into that of values that are needed later.
        """
        ahead_nbytes = 0
        for key in keys:
            value = self.values.get(key)
            if value is None or value.pins:
                continue
            level = self.levels[value.top_level]
            if ahead_nbytes and level.capacity_nbytes is not None:
                if ahead_nbytes + value.nbytes > AHEAD_SHARE * level.capacity_nbytes:
                    return
            ahead_nbytes += value.nbytes
            if value.in_memory or value.moving is not None or value.top_level in value.refused:
                continue
            if self._loads >= MAX_MOVES:
                return
            use = self.next_use(key)
            self.make_room(value.top_level, value.nbytes, later_than=use)
            # Room that a write will make is not there yet: the next call sees it.
            if level.shortage_nbytes(value.nbytes + level.leaving_nbytes):
                return
            self.load(value)

    def make_room(
        self,
        number: int,
        want_nbytes: int = 0,
        *,
        mark: float = 1.0,
        spare: frozenset[Hashable] = frozenset(),
        later_than: Priority | None = None,
    ) -> None:
        """Decide what leaves a level so that `want_nbytes` more fit under a mark, if that can be.

        Parameters
        ----------
        spare
            Keys that must stay.
        later_than
            Only values whose next use is after this may leave.
        """
        level = self.levels[number]
        if not level.shortage_nbytes(want_nbytes, mark):
            return
        n_passed = 0
        for value in self._victims(number, spare):
            # Room is made ahead of need only by writing: what has a copy can leave the moment that
            # its room is needed, and may be used before.
            if len(value.copies) > 1 and not level.shortage_nbytes(want_nbytes):
                break
            if later_than is not None and value.in_memory:
                use = self.next_use(value.key)
                if use is not None and use <= later_than:
                    break
            if self._evict(value, number):
                if not level.shortage_nbytes(want_nbytes, mark):
                    break
            elif self._puts >= MAX_MOVES:
                n_passed += 1
                if n_passed == MAX_PASSED:
                    break

    def evict_now(self, number: int, nbytes: int) -> int:
        """Decide what leaves a level now, whatever its mark says; returns how many bytes will.

        Stops at `nbytes`. Whoever asks carries it out at once, so there is no limit to the moves.
        """
        level = self.levels[number]
        before = staying = level.used_nbytes - level.leaving_nbytes
        if nbytes > 0:
            for value in self._victims(number, frozenset()):
                self._evict(value, number, is_limited=False)
                staying = level.used_nbytes - level.leaving_nbytes
                if before - staying >= nbytes:
                    break
        return before - staying

    # ------------------------------------------------------------------ inside

    def _evict(self, value: Value, number: int, *, is_limited: bool = True) -> bool:
        if number != value.top_level and value.in_memory:
            # A clean copy: to write it elsewhere would cost more than making it again.
            self._drop(value, number)
            return True
        below = self._tier_below(value, number)
        if below is None:
            return False
        if below in value.copies:
            self._drop(value, number)
            return True
        if is_limited and self._puts >= MAX_MOVES:
            return False
        move = Put(value.key, value.serial, number, below)
        value.moving = move
        self._puts += 1
        self.levels[number].leaving_nbytes += value.copies[number]
        self._done.append(move)
        return True

    def _tier_below(self, value: Value, number: int) -> int | None:
        """Tier below that has the value already, or else the first that may take it."""
        copy = next((tier for tier in value.copies if tier > number), None)
        if copy is not None:
            return copy
        for tier in self.chains[value.top_level]:
            blocked = self.levels[tier].is_blocked or tier in value.refused
            if tier > number and not blocked:
                return tier
        return None

    def _may_leave(self, value: Value, number: int) -> bool:
        if number == value.top_level:
            return not value.pins and not isinstance(value.moving, Put)
        # What is being read must stay; so must what is the source of a copy further down.
        return value.moving is None

    def _victims(self, number: int, spare: frozenset[Hashable]) -> Iterator[Value]:
        for order in self._orders[number]:
            order.refresh()
            seen: dict[Value, None] = {}
            try:
                while order.rank_more():
                    value = order.ranked.pop()
                    if number not in value.copies or self.values.get(value.key) is not value:
                        continue
                    if value in seen:
                        # It left and came back.
                        continue
                    seen[value] = None
                    if value.key not in spare and self._may_leave(value, number):
                        yield value
            finally:
                order.ranked.extend(reversed(seen))

    def _order(self, value: Value, number: int) -> EvictionOrder[Value]:
        return self._orders[number][value.nbytes < SMALL_NBYTES]

    def _rank(self, value: Value) -> tuple[Any, ...]:
        candidate = Candidate(
            nbytes=value.nbytes,
            next_use=self.next_use(value.key),
            last_used=value.last_used,
            is_clean=len(value.copies) > 1,
            made=value.serial,
        )
        is_worth_it = candidate.is_clean or not value.eviction_deferred
        return (is_worth_it, self.policy.rank(candidate))

    def _current(self, move: Put | Load) -> Value | None:
        value = self.values.get(move.key)
        return value if value is not None and value.serial == move.serial else None

    def _add(self, value: Value, number: int, nbytes: int) -> None:
        level = self.levels[number]
        value.copies[number] = nbytes
        level.members[value.key] = value
        level.used_nbytes += nbytes
        self._order(value, number).add(value)

    def _drop(self, value: Value, number: int) -> None:
        level = self.levels[number]
        level.used_nbytes -= value.copies.pop(number)
        del level.members[value.key]
        level.has_room()
        self._order(value, number).remove(value)
        self._done.append(Drop(value.key, value.serial, number))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

"""Residency of values: which levels have each value, and which moves come next.

A value lives as an object in its *top level*: host memory, or a device. Below are tiers that keep
bytes. After a load, the copy below stays until the value is released or the tier needs the room.
Such a *clean* value is evicted for free. Adapters report what happened, and `due()` returns what
to do now: `Put` a copy into a tier, `Load` a value, `Drop` a copy.

Nothing here reads a clock, takes a lock or touches bytes; `memory.store` does that.
`memory.decisions.admission` decides which task may run, and `memory.decisions.eviction_policy`
which value is evicted first. Not thread-safe: the owner serialises calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

from dask_gpurt.memory.decisions.eviction_order import EvictionOrder
from dask_gpurt.memory.decisions.eviction_policy import EvictionCandidate, EvictionPolicy
from dask_gpurt.memory.decisions.levels import Level, TaskPriority, Value
from dask_gpurt.memory.decisions.moves import Drop, Load, Move, Put

#: Moves that may be in flight at once in each direction: few, so that decisions stay fresh.
MAX_MOVES = 4
#: Most values to look at in search of a clean one while `MAX_MOVES` writes are in flight. A longer
#: search would block the event loop, and a write ends soon.
MAX_PASSED = 256
#: Smaller values are evicted last, whatever the policy says: a move costs more than it frees.
SMALL_NBYTES = 64 << 10
#: A level above its capacity is brought down to this share of it, where that takes writes.
LOW_WATER = 0.95
#: Share of a level that prefetched values may take; the first one may take more. A larger share
#: hides no more reading time, and evicts values that are needed later.
AHEAD_SHARE = 0.1


class Residency:
    """The values of one store and the levels that hold them.

    Parameters
    ----------
    levels
        Top levels and tiers, fastest first.
    chains
        For each top level, the tiers that its values are spilled to, in order.
    policy
        Ranks values for eviction.
    next_use
        Returns a rank of the next use of a key, lower for sooner; None if no use is known.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        chains: dict[int, tuple[int, ...]],
        policy: EvictionPolicy,
        next_use: Callable[[Hashable], TaskPriority | None] = lambda key: None,
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
        self._decided: list[Move] = []
        #: Two orders for each level: large values, and small ones, which are evicted after them.
        self._orders = [(EvictionOrder(self._rank), EvictionOrder(self._rank)) for _ in levels]

    # ------------------------------------------------------------------ what happened

    def insert(
        self, key: Hashable, nbytes: int, top_level: int = 0, level: int | None = None
    ) -> Value:
        """Add a value that is in memory, or only in a tier if `level` is given.

        If a value that is only in a tier has an unknown size, `nbytes` is 0. An earlier value of
        the same key must have been removed before.
        """
        assert key not in self.values
        self._serial += 1
        value = Value(key, self._serial, top_level, nbytes, self._tick())
        self.values[key] = value
        self._add(value, top_level if level is None else level, nbytes)
        return value

    def add_copy(self, value: Value, level: int) -> None:
        """Add a copy that a tier has without a `Put`."""
        self._add(value, level, value.nbytes)

    def remove(self, key: Hashable) -> Value:
        """Remove a value; `due` returns the copies to free."""
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
        """Note that a value was used."""
        value = self.values[key]
        value.last_used = self._tick()
        return value

    def put_done(self, move: Put, nbytes: int) -> bool:
        """Note that a copy is complete; return False if it is useless and must be freed."""
        self._puts -= 1
        value = self._current(move)
        if value is None:
            return False
        value.moving = None
        self.levels[move.target].note_room()
        self.levels[move.source].leaving_nbytes -= value.copies[move.source]
        if move.source == value.top_level and value.may_have_changed:
            # The copy may have a part of the old content and a part of the new one.
            return False
        self._add(value, move.target, nbytes)
        self._drop(value, move.source)
        return True

    def put_cancelled(self, move: Put) -> None:
        """Note that a copy was not begun, because the value is gone."""
        self._puts -= 1

    def put_failed(
        self, move: Put, refused: Collection[int] = (), *, is_full: bool = False
    ) -> None:
        """Note that a copy failed: the value stays where it is.

        Parameters
        ----------
        refused
            Tiers that never take this value. If empty, the target of the move is blocked.
        is_full
            The tier has no room, or cannot be written to.
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
        if self._is_stuck(value):
            self._order(value, move.source).remove(value)

    def load_done(self, move: Load) -> bool:
        """Note that a value was loaded; return False if it is no longer useful."""
        value = self._load_ended(move)
        if value is None:
            return False
        self._add(value, move.target, value.nbytes)
        value.last_used = self._tick()
        return True

    def load_deferred(self, move: Load) -> Value | None:
        """Note that memory was short for a load; return the value if it still exists."""
        return self._load_ended(move)

    def load_refused(self, move: Load) -> None:
        """Note that an intact copy cannot be restored. The task reads it, and gets the error."""
        value = self._load_ended(move)
        if value is not None:
            value.refused.add(move.target)

    def load_failed(self, move: Load) -> bool:
        """Drop a copy that could not be read; return False if the value has no other."""
        value = self._load_ended(move)
        # Somebody else may have found the copy damaged, and dropped it meanwhile.
        return (
            value is None or move.source not in value.copies or self.drop_copy(value, move.source)
        )

    def _load_ended(self, move: Load) -> Value | None:
        self._loads -= 1
        value = self._current(move)
        if value is not None:
            value.moving = None
            self.levels[move.target].reserved_nbytes -= value.nbytes
        return value

    def drop_copy(self, value: Value, level: int) -> bool:
        """Free a copy; return False, and keep it, if the value has no other."""
        if len(value.copies) == 1:
            return False
        self._drop(value, level)
        return True

    def retry(self, now_s: float = math.inf) -> None:
        """Allow writes again to tiers that failed, once their retry delay is over."""
        for level in self.levels:
            level.retry(now_s)

    def pin(self, value: Value) -> None:
        """Keep an object in memory, for a task. A write in flight will be useless."""
        value.pins += 1
        value.may_have_changed = True
        value.last_used = self._tick()
        self._order(value, value.top_level).changed()

    def unpin(self, value: Value) -> None:
        value.pins -= 1

    def defer_eviction(self, values: Iterable[Value]) -> None:
        """Evict a task's inputs last, until `allow_eviction`: they may be released very soon."""
        for value in values:
            value.eviction_deferred = True
            self._order(value, value.top_level).changed()

    def allow_eviction(self, values: Iterable[Value]) -> None:
        for value in values:
            value.eviction_deferred = False
            self._order(value, value.top_level).changed()

    # ------------------------------------------------------------------ what to do

    def due(self) -> list[Move]:
        """Return the moves to make now, because levels are above their capacity."""
        for number in range(len(self.levels)):
            if self.levels[number].shortage_nbytes():
                self.make_room(number, mark=LOW_WATER)
        return self.take_moves()

    @property
    def is_writing(self) -> bool:
        """Whether writes are in flight: room may become free."""
        return self._puts > 0

    def take_moves(self) -> list[Move]:
        """Return the moves decided since the last call."""
        moves, self._decided = self._decided, []
        return moves

    def load(self, value: Value) -> bool:
        """Decide to load a value into its top level; return False if that cannot begin now."""
        if value.in_memory or isinstance(value.moving, Load):
            return True
        if value.moving is not None:
            return False
        # The fastest copy: levels are numbered from the top.
        move = Load(value.key, value.serial, min(value.copies), value.top_level)
        value.moving = move
        self._loads += 1
        self.levels[value.top_level].reserved_nbytes += value.nbytes
        self._decided.append(move)
        return True

    def load_ahead(self, keys: Iterable[Hashable]) -> None:
        """Prefetch values, soonest first, into free room or that of values needed later."""
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
            # A write in flight has not freed its room yet: the next call sees it.
            if level.shortage_nbytes(value.nbytes + level.leaving_nbytes):
                return
            self.load(value)

    def make_room(
        self,
        number: int,
        want_nbytes: int = 0,
        *,
        mark: float = 1.0,
        keep: frozenset[Hashable] = frozenset(),
        later_than: TaskPriority | None = None,
    ) -> None:
        """Decide what to evict from a level so that `want_nbytes` more fit, as far as possible.

        Parameters
        ----------
        mark
            Share of the capacity to stay under.
        keep
            Keys that must stay.
        later_than
            Evict only values whose next use is after this.
        """
        level = self.levels[number]
        if not level.shortage_nbytes(want_nbytes, mark):
            return
        n_passed = 0
        for value in self._victims(number, keep):
            # Only dirty values are evicted before their room is needed, because that takes a write.
            # A clean value is evicted when its room is needed: a task may use it until then.
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
        """Decide to evict `nbytes` from a level, whatever its capacity; return the bytes it frees.

        The number of moves is not limited: the caller carries them out at once.
        """
        return self._evict_until(number, lambda freed_nbytes, _: freed_nbytes >= nbytes)

    def evict_first(self, number: int, n_values: int) -> int:
        """Decide to evict some values from a level, as `evict_now`; return the bytes it frees."""
        return self._evict_until(number, lambda _, n_leaving: n_leaving >= n_values)

    def _evict_until(self, number: int, is_enough: Callable[[int, int], bool]) -> int:
        level = self.levels[number]
        before_nbytes = level.used_nbytes - level.leaving_nbytes
        freed_nbytes = n_leaving = 0
        if is_enough(0, 0):
            return 0
        for value in self._victims(number, frozenset()):
            n_leaving += self._evict(value, number, is_limited=False)
            freed_nbytes = before_nbytes - (level.used_nbytes - level.leaving_nbytes)
            if is_enough(freed_nbytes, n_leaving):
                break
        return freed_nbytes

    # ------------------------------------------------------------------ inside

    def _evict(self, value: Value, number: int, *, is_limited: bool = True) -> bool:
        if number != value.top_level and value.in_memory:
            # The object is in memory too: rewriting it later costs less than moving this copy.
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
        value.may_have_changed = False
        self._puts += 1
        self.levels[number].leaving_nbytes += value.copies[number]
        self._decided.append(move)
        return True

    def _tier_below(self, value: Value, number: int) -> int | None:
        """Return the tier below that already has the value, or the first that may take it."""
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
        # Copies that are being read must stay: for a load, or for a write further down.
        return value.moving is None

    def _is_stuck(self, value: Value) -> bool:
        return len(value.copies) == 1 and value.refused.issuperset(self.chains[value.top_level])

    def _victims(self, number: int, keep: frozenset[Hashable]) -> Iterator[Value]:
        """Yield the values to evict from a level, the best one first.

        If no tier below takes any value, only clean ones can leave. To look at all others each
        time would keep the event loop busy while a disk is full.
        """
        if not self._some_may_sink(number):
            clean = self.levels[number].clean.values()
            ranked = sorted(clean, key=lambda one: (one.nbytes >= SMALL_NBYTES, self._rank(one)))
            for value in reversed(ranked):
                if value.key not in keep and self._may_leave(value, number):
                    yield value
            return
        for order in self._orders[number]:
            order.refresh()
            seen: dict[Value, None] = {}
            try:
                while order.rank_more():
                    value = order.ranked.pop()
                    if number not in value.copies or self.values.get(value.key) is not value:
                        continue
                    if value in seen:  # it was evicted and loaded again
                        continue
                    seen[value] = None
                    if value.key not in keep and self._may_leave(value, number):
                        yield value
            finally:
                order.ranked.extend(value for value in reversed(seen) if not self._is_stuck(value))

    def _some_may_sink(self, number: int) -> bool:
        """Return whether a tier below a level takes values."""
        return any(
            tier > number and not self.levels[tier].is_blocked
            for top, chain in self.chains.items()
            if number == top or number in chain
            for tier in chain
        )

    def _order(self, value: Value, number: int) -> EvictionOrder[Value]:
        return self._orders[number][value.nbytes < SMALL_NBYTES]

    def _rank(self, value: Value) -> tuple[Any, ...]:
        candidate = EvictionCandidate(
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
        if len(value.copies) > 1:
            for each in value.copies:
                self.levels[each].clean[value.key] = value
        level.used_nbytes += nbytes
        self._order(value, number).add(value)

    def _drop(self, value: Value, number: int) -> None:
        level = self.levels[number]
        level.used_nbytes -= value.copies.pop(number)
        del level.members[value.key]
        level.clean.pop(value.key, None)
        if len(value.copies) == 1:
            (last,) = value.copies
            self.levels[last].clean.pop(value.key, None)
        level.note_room()
        self._order(value, number).remove(value)
        self._decided.append(Drop(value.key, value.serial, number))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

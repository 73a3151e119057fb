"""`worker.data`: a mapping whose values live in memory, in tiers below, or both.

Carries out what `memory.residency` and `memory.admission` decide. Asking (`in`, `len`, iteration)
never moves bytes; inserting never waits. Writes and reads happen in lanes, which are threads of
whoever made the store; `_lock` guards the books and is never held over I/O, a copy or a call into
user code. A value is reachable in some level at every instant: an object is let go of after its
copy is complete, a copy after nobody can ask for it.

Decisions read the worker's queue, so they are made where that is safe: `owner` brings a call
there. Knows no Dask; `plugins.memory` makes it a worker's.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from collections.abc import MutableMapping as MutableMappingABC
from functools import partial
from typing import Any, NoReturn

from dask_gpurt.errors import DamagedValueError, TierFullError, will_pass
from dask_gpurt.memory.admission import Admission, Claim
from dask_gpurt.memory.inherited import Inherited
from dask_gpurt.memory.loans import Loans
from dask_gpurt.memory.port import Lane, Lanes, Packing, Tier
from dask_gpurt.memory.report import explained, reported, spilled
from dask_gpurt.memory.residency import Drop, Load, Move, Priority, Put, Residency, Value

logger = logging.getLogger("dask_gpurt.memory")

HOME = 0

#: Told which inputs of a task were lost, once it may begin.
Tell = Callable[[set[Hashable]], None]


class TieredStore(MutableMappingABC[Hashable, Any]):
    """Values over tiers.

    Parameters
    ----------
    residency
        Decides; its level 0 is where objects live, the others are `tiers` in order.
    tiers
        Levels below, fastest first.
    packing, lanes
        See there.
    upcoming
        Keys needed by tasks that will begin soon, soonest first.
    on_lost
        Told a key that cannot be read back any more and is not here from now on.
    """

    def __init__(
        self,
        residency: Residency,
        tiers: list[Tier],
        packing: Packing,
        lanes: Lanes,
        *,
        upcoming: Callable[[], Iterable[Hashable]] = tuple,
        on_lost: Callable[[Hashable], None] = lambda key: None,
    ) -> None:
        self.residency = residency
        self.admission = Admission(residency)
        self._tiers: dict[int, Tier] = dict(enumerate(tiers, HOME + 1))
        self._packing = packing
        self._lanes = lanes
        self._upcoming = upcoming
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self._objects: dict[Hashable, Any] = {}
        #: Where each tier has a value, by serial number and level.
        self._places: dict[tuple[int, int], Any] = {}
        self._loans = Loans(residency.levels[HOME])
        #: Whom to tell that a claim is ready.
        self._tell: dict[Claim, Tell] = {}
        self._is_deciding = False
        self._is_closed = False
        #: As stock's `SpillBuffer` has it: Dask's metrics read it.
        self.cumulative_metrics: defaultdict[tuple[str, str], float] = defaultdict(float)

    # ------------------------------------------------------------------ a mapping

    def __setitem__(self, key: Hashable, value: Any) -> None:
        nbytes = self._packing.sizeof(value)
        with self._lock:
            if key in self.residency.values:
                self._remove(key)
            self._objects[key] = value
            self.residency.insert(key, nbytes, HOME)
            short = self._is_short()
        if short:
            self.decide()

    def __getitem__(self, key: Hashable) -> Any:
        with self._lock:
            found = self.residency.values[key]
            self.residency.touch(key)
            if key in self._objects:
                self._count("memory-read", found.nbytes)
                return self._objects[key]
            if found.serial in self._loans:
                return self._loans[found.serial]
        # Whoever did not claim the key waits for it here; the object is not kept.
        return self._read_through(key)

    def __delitem__(self, key: Hashable) -> None:
        with self._lock:
            self._remove(key)
            waits = self.admission.n_waiting
        if waits:
            self.decide()

    def __contains__(self, key: object) -> bool:
        return key in self.residency.values

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.residency.values)

    def __len__(self) -> int:
        return len(self.residency.values)

    def pop(self, key: Hashable, default: object = None) -> NoReturn:
        raise NotImplementedError("pop() might read from disk for nothing: use del")

    # ------------------------------------------------------------------ tasks and messages

    def claim(
        self,
        name: Hashable,
        keys: Collection[Hashable],
        output_nbytes: int,
        priority: Priority,
        tell: Tell,
    ) -> tuple[Claim, bool]:
        """A task wants to run: its inputs at home, and room for its output. From the owner.

        Returns
        -------
        The claim, for `end`; and whether the task may begin at once. If not, `tell` is called
        later, by the owner, with those keys that were lost.
        """
        with self._lock:
            claim = self.admission.ask(name, keys, output_nbytes, priority)
            self._tell[claim] = tell
        self._decide_now(telling=claim)
        return claim, claim.is_ready and not claim.lost

    def end(self, claim: Claim) -> None:
        """The task of a claim ended or gave up. From the owner."""
        with self._lock:
            self._tell.pop(claim, None)
            self.admission.end(claim)
            if claim.values and self._is_under_pressure():
                self.residency.rest(claim.values)
                self._lanes.later(lambda: self._rested(claim))
            busy = self.admission.n_waiting or self._is_under_pressure()
        if busy:
            self.decide()

    def _rested(self, claim: Claim) -> None:
        with self._lock:
            self.residency.rested(claim.values)
        self.decide()

    def lend(self, key: Hashable) -> int | None:
        """Have a value at hand for a message, without bringing it home. May read: not the owner.

        Returns
        -------
        What `take_back` needs; None if the key is not here.
        """
        with self._lock:
            value = self.residency.values.get(key)
            if value is None:
                return None
            if self._loans.again(value.serial):
                return value.serial
        try:
            found = self._read_through(key)
        except KeyError:
            return None
        with self._lock:
            if not self._loans.again(value.serial):
                self._loans.add(value.serial, found, value.nbytes)
        return value.serial

    def take_back(self, serial: int) -> None:
        """A message that a value was lent for is through."""
        with self._lock:
            self._loans.take_back(serial)

    # ------------------------------------------------------------------ deciding

    def decide(self) -> None:
        """See to it that the owner decides what to move; soon, and once."""
        with self._lock:
            if self._is_deciding or self._is_closed:
                return
            self._is_deciding = True
        self._lanes.owner(self._decide_now)

    def _decide_now(self, telling: Claim | None = None) -> None:
        with self._lock:
            self._is_deciding = False
            if self._is_closed:
                return
            ready = self.admission.due()
            moves = self.residency.due()
            if self.has_cold:
                self.residency.load_ahead(self._upcoming())
                moves += self.residency.take_moves()
            told = [(self._tell[claim], claim) for claim in ready if claim in self._tell]
            self._carry_out(moves)
        for tell, claim in told:
            if claim is not telling or claim.lost:
                tell(claim.lost)

    def _is_short(self) -> bool:
        return any(level.shortage_nbytes() for level in self.residency.levels)

    def _is_under_pressure(self) -> bool:
        return self.has_cold or self._is_short()

    def is_cold(self, key: Hashable) -> bool:
        """Whether a value is here, but not in memory."""
        with self._lock:
            return key in self.residency.values and key not in self._objects

    @property
    def managed_nbytes(self) -> int:
        """Memory that values take, or will once tasks and reads under way have ended."""
        level = self.residency.levels[HOME]
        return level.used_nbytes + level.reserved_nbytes

    def fit(self, room_nbytes: int) -> None:
        """So much memory may values take from here on."""
        with self._lock:
            self.residency.levels[HOME].capacity_nbytes = room_nbytes

    def hurry(self) -> bool:
        """Let the first task that waits begin although it does not fit; False if none waits."""
        with self._lock:
            return self.admission.hurry()

    def retry(self) -> None:
        """Tiers that could not be written to may be tried again."""
        with self._lock:
            self.residency.retry()

    def adopt(
        self, objects: Mapping[Hashable, Any], cold: Mapping[Hashable, int], level: int
    ) -> None:
        """Take over what another store has: objects, and values that stay where they are.

        Parameters
        ----------
        cold
            Keys that are elsewhere, to the bytes they take in memory; `tiers[level - 1]` reads
            them.
        """
        with self._lock:
            for key, nbytes in cold.items():
                value = self.residency.insert_below(key, nbytes, level)
                self._places[value.serial, level] = Inherited(key, nbytes)
            for key, found in objects.items():
                self[key] = found

    @property
    def has_cold(self) -> bool:
        """Whether some value is not in memory."""
        return len(self._objects) < len(self.residency.values)

    def _carry_out(self, moves: list[Move]) -> None:
        """Begin moves; the lock is held."""
        for move in moves:
            if isinstance(move, Put):
                self._move(self._lanes.write, self._put, move)
            elif isinstance(move, Load):
                self._move(self._lanes.read, self._load, move)
            elif move.level == HOME:
                self._objects.pop(move.key, None)
            else:
                self._drop(move)

    def _move(self, lane: Lane, make: Callable[[Any], None], move: Put | Load) -> None:
        names = [self.residency.levels[number].name for number in (move.source, move.target)]
        nbytes = self.residency.values[move.key].nbytes
        lane(partial(make, move), path=" > ".join(names), nbytes=nbytes)

    def _drop(self, move: Drop) -> None:
        place = self._places.pop((move.serial, move.level), None)
        if place is not None:
            self._lanes.write(partial(self._tiers[move.level].drop, place), path="drop")

    def _remove(self, key: Hashable) -> None:
        self._objects.pop(key, None)
        self.residency.remove(key)
        self._carry_out(self.residency.take_moves())

    # ------------------------------------------------------------------ lanes

    def _put(self, move: Put) -> None:
        """Make a copy further down. In a lane."""
        tier = self._tiers[move.target]
        with self._lock:
            value = self.residency.values.get(move.key)
            wanted = value is not None and value.serial == move.serial
            source = self._objects.get(move.key) if move.source == HOME else None
            place = self._places.get((move.serial, move.source))
        if not wanted:
            self._failed_to_put(move)
            return
        try:
            if move.source == HOME:
                flat = self._packing.flatten(source)
            else:
                flat = self._tiers[move.source].get(place)
        except Exception as error:
            # Whatever a value's own pickling raises: it is a matter of that value alone.
            logger.warning("cannot put %r away; it stays in memory: %s", move.key, error)
            self._failed_to_put(move, for_good=True)
            return
        try:
            place = tier.put(flat)
        except TierFullError:
            # Another tier may take what this one has no room for, or no use.
            self._failed_to_put(move, for_good=not self.residency.is_last(move.target))
            return
        except (OSError, MemoryError):
            # The tier says what is wrong, once; values stay where they are.
            self._failed_to_put(move)
            return
        del flat, source
        with self._lock:
            useful = self.residency.put_done(move, place.nbytes) and not self._is_closed
            if useful:
                self._places[move.serial, move.target] = place
            self._carry_out(self.residency.take_moves())
        if not useful:
            tier.drop(place)
        self.decide()

    def _failed_to_put(self, move: Put, *, for_good: bool = False) -> None:
        with self._lock:
            self.residency.put_failed(move, for_good=for_good)
            waits = for_good or self.admission.n_waiting
        if waits:
            self.decide()

    def _load(self, move: Load) -> None:
        """Bring a value home. In a lane."""
        with self._lock:
            place = self._places.get((move.serial, move.source))
        found = None
        error: Exception | None = None
        if place is not None:
            try:
                found = self._restore(move.source, place)
            except Exception as problem:
                if will_pass(problem):
                    # Whoever needs the value asks for it again.
                    with self._lock:
                        self.residency.load_put_off(move)
                    return
                error = problem
        with self._lock:
            value = self.residency.values.get(move.key)
            if place is not None and error is None:
                if self.residency.loaded(move):
                    self._objects[move.key] = found
                lost = False
            else:
                lost = not self.residency.load_failed(move)
            self._carry_out(self.residency.take_moves())
        if lost and value is not None:
            self._lose(value, error)
        self.decide()

    def _restore(self, level: int, place: Any) -> Any:
        flat = self._tiers[level].get(place)
        return self._packing.restore(flat.header, flat.buffers)

    def _read_through(self, key: Hashable) -> Any:
        """Read a cold value in this thread, leaving it where it is.

        Raises
        ------
        KeyError
            It is not here, or cannot be read any more.
        MemoryError
            There is no room for it now.
        """
        while True:
            with self._lock:
                if key in self._objects:
                    return self._objects[key]
                value = self.residency.values[key]
                level = min(value.copies)
                place = self._places[value.serial, level]
            try:
                return self._restore(level, place)
            except Exception as error:
                if will_pass(error):
                    raise
                with self._lock:
                    if self.residency.values.get(key) is not value:
                        continue
                    if level not in value.copies or self.residency.lose(value, level):
                        self._carry_out(self.residency.take_moves())
                        continue
                self._lose(value, error)
                raise KeyError(key) from error

    def _lose(self, value: Value, error: Exception | None) -> None:
        """The last copy of a value cannot be read."""
        logger.error(
            "%r cannot be read back (%s); it will be computed again",
            value.key,
            error if isinstance(error, DamagedValueError | OSError) else repr(error),
        )
        with self._lock:
            self.admission.lost(value.key)
            if self.residency.values.get(value.key) is value:
                self._remove(value.key)
        self._lanes.owner(lambda: self._on_lost(value.key))

    def _count(self, label: str, nbytes: int) -> None:
        self.cumulative_metrics[label, "count"] += 1
        self.cumulative_metrics[label, "bytes"] += nbytes

    def on_io(self, label: str, nbytes: int, seconds: float) -> None:
        """Tiers tell what they moved: `disk-write` or `disk-read`."""
        with self._lock:
            self._count(label, nbytes)
            self.cumulative_metrics[label, "seconds"] += seconds

    # ------------------------------------------------------------------ a look inside

    @property
    def memory(self) -> Mapping[Hashable, Any]:
        """Values in memory. For inspection only."""
        return self._objects

    @property
    def disk(self) -> Collection[Hashable]:
        """Keys that are not in memory. For inspection only."""
        return [key for key in self.residency.values if key not in self._objects]

    @property
    def spilled_total(self) -> tuple[int, int]:
        """Bytes of values that are not in memory: in memory they would take, and as kept."""
        with self._lock:
            return spilled(self.residency) if self.has_cold else (0, 0)

    @property
    def fast(self) -> Mapping[Hashable, Any]:
        """Dask's protocol for stores that can evict: what could be."""
        return self._objects

    def evict(self) -> int:
        """Dask's protocol for stores that can evict: begin to, if nothing is under way."""
        with self._lock:
            level = self.residency.levels[HOME]
            before = level.used_nbytes - level.leaving_nbytes
            capacity, level.capacity_nbytes = level.capacity_nbytes, max(0, before - 1)
            self.residency.relieve(HOME)
            level.capacity_nbytes = capacity
            self._carry_out(self.residency.take_moves())
            freed = before - (level.used_nbytes - level.leaving_nbytes)
        return freed or -1

    def explain(self, key: Hashable) -> dict[str, Any]:
        """Where a value is and why it may or may not leave; `KeyError` if it is not here."""
        with self._lock:
            return explained(self.residency, key)

    def report(self) -> dict[str, Any]:
        """Levels and what was admitted, for `status`."""
        with self._lock:
            return reported(self.residency, self.admission, self.cumulative_metrics)

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._is_closed = True
            self._objects.clear()
            self._places.clear()
        for tier in self._tiers.values():
            tier.close()

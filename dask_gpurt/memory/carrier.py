"""Carries out what was decided to move: the only place where the store touches objects and tiers.

What moves, and when, is decided before (`memory.decisions.residency`, `memory.store`). Writes and
reads happen in lanes, and in threads that cannot wait for a lane: those that read a cold value, and
those whose allocation found no room. The lock guards the books and is never held over I/O, a copy
or a call into user code.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

from dask_gpurt.errors import TierFullError, ValueRefusedError, will_pass
from dask_gpurt.memory.decisions.failed_reads import FailedReads, is_short
from dask_gpurt.memory.decisions.moves import Drop, Load, Move, Put
from dask_gpurt.memory.decisions.residency import Residency, Value
from dask_gpurt.memory.tiers import Lane, Lanes, Packing, Tier

logger = logging.getLogger("dask_gpurt.memory")


class NotRestoredError(Exception):
    """What is in a tier is whole, and to make the value of it again raised the cause."""


class Carrier:
    """Objects at home, their copies in tiers, and the way between.

    Parameters
    ----------
    residency
        Its first levels are homes, one for each of `packings`; the others are `tiers`.
    lock
        Guards residency and books. Reentrant.
    shortage
        Told of what cannot be read for want of memory.
    decide
        Called when something ended that leaves other things to decide.
    lost
        Told of a value whose last copy cannot be read, with no lock held.
    """

    def __init__(
        self,
        residency: Residency,
        tiers: Sequence[Tier],
        packings: Sequence[Packing],
        lanes: Lanes,
        lock: threading.RLock,  # type: ignore[valid-type]
        failed_reads: FailedReads,
        *,
        decide: Callable[[], None],
        lost: Callable[[Value], None],
    ) -> None:
        self._residency = residency
        self._tiers: dict[int, Tier] = dict(enumerate(tiers, len(packings)))
        self._packings = packings
        self._lanes = lanes
        self._lock = lock
        self._failed_reads = failed_reads
        self._ended = threading.Condition(lock)
        self._decide = decide
        self._lost = lost
        #: Values that are at home, whichever that is.
        self.objects: dict[Hashable, Any] = {}
        #: Where each tier has a value, by serial number and level.
        self._places: dict[tuple[int, int], Any] = {}
        #: Copies that wait in a lane, oldest first.
        self._due: dict[Put, None] = {}
        #: Copies that are being made, and the threads that make them.
        self._under_way: dict[Put, int] = {}
        #: Objects that left each home, since ever.
        self._n_left: Counter[int] = Counter()
        #: Types of values that could not be put away, of which that was said.
        self._told_kinds: set[str] = set()
        self._is_closed = False

    # ------------------------------------------------------------------ with the lock held

    def add_copy(self, value: Value, level: int, place: Any) -> None:
        """A tier has a copy that nobody here put there."""
        self._places[value.serial, level] = place

    def begin(self, moves: Iterable[Move]) -> None:
        """Begin what was decided."""
        for move in moves:
            if isinstance(move, Put):
                self._due[move] = None
                self._submit(self._lanes.write, self._put, move)
            elif isinstance(move, Load):
                self._submit(self._lanes.read, self._load, move)
            elif self._is_home(move.level):
                self.objects.pop(move.key, None)
                self._n_left[move.level] += 1
            else:
                self._drop(move)

    def _submit(self, lane: Lane, make: Callable[[Any], None], move: Put | Load) -> None:
        names = [self._residency.levels[number].name for number in (move.source, move.target)]
        nbytes = self._residency.values[move.key].nbytes
        lane(partial(make, move), path=" > ".join(names), nbytes=nbytes)

    def _drop(self, move: Drop) -> None:
        place = self._places.pop((move.serial, move.level), None)
        if place is not None:
            self._lanes.write(partial(self._tiers[move.level].drop, place), path="drop")

    def _is_home(self, level: int) -> bool:
        return level < len(self._packings)

    # ------------------------------------------------------------------ down

    def _put(self, move: Put) -> None:
        """Make a copy further down. In a lane, or in a thread that needs the room."""
        with self._lock:
            if move not in self._due:
                return  # somebody who needed the room did it, or the store was closed
            del self._due[move]
            self._under_way[move] = threading.get_ident()
        try:
            self._copy(move)
        finally:
            with self._lock:
                del self._under_way[move]
                self._ended.notify_all()
        self._decide()

    def _copy(self, move: Put) -> None:
        with self._lock:
            value = self._residency.values.get(move.key)
            if value is None or value.serial != move.serial:
                self._residency.put_cancelled(move)
                return
            # Held by this frame alone: who waits for its room goes on when this returns.
            in_memory = self._is_home(move.source)
            source = self.objects.get(move.key) if in_memory else None
            place = self._places.get((move.serial, move.source))
            # What cannot be taken apart cannot be for any other tier either.
            tiers = self._residency.chains[value.top_level] if in_memory else (move.target,)
        tier = self._tiers[move.target]
        try:
            if in_memory:
                flat = self._packings[move.source].flatten(source)
            else:
                flat = self._tiers[move.source].get(place)
        except ValueRefusedError:
            self._failed(move, [move.target])
            return
        except Exception as error:
            # Whatever a value's own pickling raises: it is a matter of that value alone.
            if not self._is_closed:
                self._complain(move.key, type(source), error)
            self._failed(move, [] if will_pass(error) else tiers)
            return
        try:
            place = tier.put(flat)
        except ValueRefusedError:
            self._failed(move, [move.target])
            return
        except (OSError, MemoryError) as error:
            # Full, or it says what is wrong, once; another tier may take the value.
            is_full = isinstance(error, TierFullError) or not will_pass(error)
            self._failed(move, is_full=is_full)
            return
        del flat, source
        with self._lock:
            useful = self._residency.put_done(move, place.nbytes) and not self._is_closed
            if useful:
                self._places[move.serial, move.target] = place
            self.begin(self._residency.take_moves())
        if not useful:
            tier.drop(place)

    def _complain(self, key: Hashable, kind: type, error: Exception) -> None:
        """Say that a value stays in memory, once for each type: there may be thousands."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        level = logging.DEBUG if name in self._told_kinds else logging.WARNING
        self._told_kinds.add(name)
        logger.log(
            level,
            "cannot put %r away; it stays in memory: %s (said once for values of type %s)",
            key,
            _told(error),
            name,
        )

    def _failed(self, move: Put, refused: Collection[int] = (), *, is_full: bool = False) -> None:
        with self._lock:
            self._residency.put_failed(move, refused, is_full=is_full)

    def make_room(self, top_level: int, nbytes: int) -> bool:
        """Have values leave a home before this returns, for an allocation that found no room there.

        Copies that wait in a lane are made here and now, and those that others are making are
        waited for. May be called by any thread, so `next_use` of the residency has to bear that.
        A thread that is in the middle of the books gets False: a destructor may allocate that
        runs because an object was let go of there.

        Returns
        -------
        Whether objects were let go of. Their memory is free unless somebody else uses them.
        """
        # What `Condition` asks as well. With the lock held there could be no copy without holding
        # it over that, and what is decided could contradict what is being written down.
        if self._lock._is_owned() or self._is_closed:  # type: ignore[attr-defined]
            return False
        level = self._residency.levels[top_level]
        n_left = self._n_left[top_level]
        while self._n_left[top_level] == n_left:
            with self._lock:
                self._residency.evict_now(top_level, nbytes - level.leaving_nbytes)
                self.begin(self._residency.take_moves())
                waiting = [move for move in self._due if move.source == top_level]
            if not waiting:
                break
            # Those that fail are not tried again: there is another tier for the value, or none.
            for move in waiting:
                self._put(move)
        with self._lock:
            # Who is making a copy itself does not wait: another might wait for that one.
            if threading.get_ident() not in self._under_way.values():
                self._ended.wait_for(
                    lambda: (
                        self._n_left[top_level] > n_left
                        or not any(move.source == top_level for move in self._under_way)
                    )
                )
            return self._n_left[top_level] > n_left

    # ------------------------------------------------------------------ up

    def _load(self, move: Load) -> None:
        """Bring a value home. In a lane."""
        with self._lock:
            place = self._places.get((move.serial, move.source))
        found = None
        # Errors are not kept: their tracebacks hold what was being read.
        problem = "nobody knows where it is" if place is None else ""
        if place is not None:
            try:
                found = self._restore(move.target, move.source, place)
            except NotRestoredError:
                with self._lock:
                    self._residency.load_refused(move)
                self._decide()
                return
            except Exception as error:
                if will_pass(error):
                    with self._lock:
                        value = self._residency.load_deferred(move)
                        if value is not None:
                            self._failed_reads.add(value, _told(error))
                    # In a moment: what is short is not there at once. What ends before then has
                    # it decided as well.
                    self._lanes.owner(partial(self._lanes.later, self._decide))
                    return
                problem = _told(error)
        with self._lock:
            if self._is_closed:
                return  # what it was read from may be gone, and that is no loss
            value = self._residency.values.get(move.key)
            if not problem:
                if self._residency.load_done(move) and value is not None:
                    self.objects[move.key] = found
                    self._failed_reads.remove(value)
                lost = False
            else:
                lost = not self._residency.load_failed(move)
            self.begin(self._residency.take_moves())
        if lost and value is not None:
            self._lose(value, problem)
        self._decide()

    def read_through(self, key: Hashable) -> Any:
        """Read a cold value in this thread, leaving it where it is.

        Raises
        ------
        KeyError
            It is not here, or cannot be read any more, or the store was closed.
        MemoryError, OSError
            There is no room for it now.
        NotRestoredError
            Its own unpickling raises something.
        """
        while True:
            with self._lock:
                if key in self.objects:
                    return self.objects[key]
                value = self._residency.values[key]
                if self._is_closed:
                    raise KeyError(key)
                level = min(value.copies)
                place = self._places[value.serial, level]
            try:
                found = self._restore(value.top_level, level, place)
                with self._lock:
                    self._failed_reads.remove(value)
                    value.refused.discard(value.top_level)
                return found
            except NotRestoredError as error:
                _note(error, key)
                raise
            except Exception as error:
                with self._lock:
                    if will_pass(error):
                        self._failed_reads.add(value, _told(error))
                        raise
                    if self._is_closed or self._residency.values.get(key) is not value:
                        continue
                    if level not in value.copies or self._residency.drop_copy(value, level):
                        self.begin(self._residency.take_moves())
                        continue
                self._lose(value, _told(error))
                raise KeyError(key) from error

    def _restore(self, top_level: int, level: int, place: Any) -> Any:
        """Read a value from a tier, which sees to it that this is what was put there.

        Raises
        ------
        NotRestoredError
            The value itself is not to be had of it.
        """
        flat = self._tiers[level].get(place)
        try:
            return self._packings[top_level].restore(flat.header, flat.buffers)
        except BaseException as error:
            # On a device there is no room but for what has left it, which takes a while.
            if will_pass(error) and (top_level or is_short(error, flat.nbytes)):
                raise
            raise NotRestoredError from error

    def _lose(self, value: Value, problem: str) -> None:
        """The last copy of a value cannot be read."""
        logger.error(
            "%r cannot be read back (%s); it is lost, or is computed again if a task made it",
            value.key,
            problem,
        )
        self._lost(value)

    def close(self) -> None:
        """Let go of copies. Objects stay: a worker that closes still sends them to its peers."""
        with self._lock:
            self._is_closed = True
            self._due.clear()
            self._places.clear()
        for tier in self._tiers.values():
            tier.close()


def _note(error: NotRestoredError, key: Hashable) -> None:
    """Have the cause say which value it is about."""
    note = f"raised when {key!r} was put together again, which had left memory"
    cause = error.__cause__
    assert cause is not None
    # Code of others may raise the same error each time.
    if note not in getattr(cause, "__notes__", ()):
        cause.add_note(note)


def _told(error: Exception) -> str:
    """What an error says. The error itself would hold the value by its traceback."""
    says = str(error) if isinstance(error, TypeError | OSError | MemoryError) else ""
    return says or repr(error)

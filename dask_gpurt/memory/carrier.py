"""The data mover of the store: the only module that touches the objects and the tiers.

It carries out the moves that `memory.decisions.residency` and `memory.store` decided. Most writes
and reads run in lanes. Two kinds of threads cannot wait for a lane, so they move bytes themselves.
The first kind reads a spilled value. The second kind found no room for an allocation.

The lock guards the bookkeeping. It is never held over I/O or a copy. The only code of users that
runs under it is the destructor of a value that leaves.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

from dask_gpurt.errors import TierFullError, ValueRefusedError, is_temporary
from dask_gpurt.frames.flat.values import Flat
from dask_gpurt.memory.decisions.failed_reads import FailedReads, is_short
from dask_gpurt.memory.decisions.levels import Value
from dask_gpurt.memory.decisions.moves import Drop, Load, Move, Put
from dask_gpurt.memory.decisions.residency import Residency
from dask_gpurt.memory.tiers import DirectTier, Lane, Lanes, Packing, Tier

logger = logging.getLogger("dask_gpurt.memory")


class NotRestoredError(Exception):
    """The copy in a tier is intact, but restoring its value raised the cause of this error."""


class Carrier:
    """The objects in memory, their copies in tiers, and the moves between them.

    Parameters
    ----------
    residency
        Its first levels are top levels, one for each of `packings`; the others are `tiers`.
    lock
        Guards the residency and the bookkeeping. Reentrant.
    failed_reads
        Records the reads that memory was too short for.
    decide
        Called after a move, when there may be more to decide.
    lost
        Called with a value whose last copy cannot be read, with no lock held.
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
        #: Values that are in their top level, whichever it is.
        self.objects: dict[Hashable, Any] = {}
        #: Place of each copy in its tier, by serial number and level.
        self._places: dict[tuple[int, int], Any] = {}
        #: Writes that wait in a lane, oldest first.
        self._queued: dict[Put, None] = {}
        #: Writes in flight, and the threads that make them.
        self._in_flight: dict[Put, int] = {}
        #: Objects that ever left each top level.
        self._n_left: Counter[int] = Counter()
        #: Types of values that could not be spilled, and for which that was logged.
        self._logged_types: set[str] = set()
        self._is_closed = False

    # ------------------------------------------------------------------ with the lock held

    def add_copy(self, value: Value, level: int, place: Any) -> None:
        """Add a copy that a tier has without a `Put`."""
        self._places[value.serial, level] = place

    def begin(self, moves: Iterable[Move]) -> None:
        """Begin the moves that were decided."""
        for move in moves:
            if isinstance(move, Put):
                self._queued[move] = None
                self._submit(self._lanes.write, self._put, move)
            elif isinstance(move, Load):
                self._submit(self._lanes.read, self._load, move)
            elif self._is_top_level(move.level):
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

    def _is_top_level(self, level: int) -> bool:
        return level < len(self._packings)

    # ------------------------------------------------------------------ down

    def _put(self, move: Put) -> None:
        """Write a copy further down. Runs in a lane, or in a thread that needs the room."""
        with self._lock:
            if move not in self._queued:
                return  # a thread that needed the room made it, or the store was closed
            del self._queued[move]
            self._in_flight[move] = threading.get_ident()
        try:
            self._copy(move)
        finally:
            with self._lock:
                del self._in_flight[move]
                self._ended.notify_all()
        self._decide()

    def _copy(self, move: Put) -> None:
        with self._lock:
            value = self._residency.values.get(move.key)
            if value is None or value.serial != move.serial:
                self._residency.put_cancelled(move)
                return
            # No other frame may reference the object: `make_room` promises that its memory is free.
            is_top = self._is_top_level(move.source)
            source = self.objects.get(move.key) if is_top else None
            place = self._places.get((move.serial, move.source))
            # A value that cannot be flattened for one tier cannot be flattened for another.
            tiers = self._residency.chains[value.top_level] if is_top else (move.target,)
        flat = self._flattened(move, source, place, tiers)
        if flat is None:
            return
        place = self._written(move, flat, type(source), tiers)
        if place is None:
            return
        del flat, source
        with self._lock:
            useful = self._residency.put_done(move, place.nbytes) and not self._is_closed
            if useful:
                self._places[move.serial, move.target] = place
            self.begin(self._residency.take_moves())
        if not useful:
            self._tiers[move.target].drop(place)

    def _flattened(self, move: Put, source: Any, place: Any, tiers: Collection[int]) -> Flat | None:
        """Return the bytes to copy; report a failure to the residency, and return None.

        Parameters
        ----------
        source, place
            The object in a top level, or its place in a tier.
        tiers
            Levels that will never take the value if it cannot be flattened.
        """
        try:
            if self._is_top_level(move.source):
                return self._packings[move.source].flatten(source)
            return self._tiers[move.source].get(place)
        except ValueRefusedError:
            self._failed(move, [move.target])
        except BaseException as error:
            # A value's own pickling may raise anything, as a panic of Rust, which is no Exception.
            # That concerns this value alone.
            self._stays(move, type(source), error, tiers)
        return None

    def _written(self, move: Put, flat: Flat, kind: type, tiers: Collection[int]) -> Any:
        """Return the place of a new copy; report a failure to the residency, and return None.

        Parameters
        ----------
        kind, tiers
            Type of the value; levels that will never take it if it cannot leave its device.
        """
        tier = self._tiers[move.target]
        try:
            return tier.put(flat if isinstance(tier, DirectTier) else flat.on_host())
        except ValueRefusedError:
            self._failed(move, [move.target])
        except (OSError, MemoryError) as error:
            # The tier is full, or has logged the error once; another tier may take the value.
            is_full = isinstance(error, TierFullError) or not is_temporary(error)
            self._failed(move, is_full=is_full)
        except Exception as error:
            # The device failed, or the computation of the value did.
            self._stays(move, kind, error, tiers)
        return None

    def _stays(self, move: Put, kind: type, error: BaseException, tiers: Collection[int]) -> None:
        """Report that a value stays where it is."""
        # A damaged copy in a tier is reported when the value is needed.
        if not self._is_closed and self._is_top_level(move.source):
            self._log_not_spilled(move.key, kind, error)
        self._failed(move, [] if is_temporary(error) else tiers)

    def _log_not_spilled(self, key: Hashable, kind: type, error: BaseException) -> None:
        """Warn that a value stays in memory, once for each type: there may be thousands."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        level = logging.DEBUG if name in self._logged_types else logging.WARNING
        self._logged_types.add(name)
        logger.log(
            level,
            "cannot spill %r; it stays in memory: %s (logged once for values of type %s)",
            key,
            _text_of(error),
            name,
        )

    def _failed(self, move: Put, refused: Collection[int] = (), *, is_full: bool = False) -> None:
        with self._lock:
            self._residency.put_failed(move, refused, is_full=is_full)

    def make_room(self, top_level: int, nbytes: int) -> bool:
        """Evict values from a top level at once, for an allocation that found no room there.

        This method makes the writes that wait in a lane itself, and waits for those in flight. Any
        thread may call it, so the residency's `next_use` must be thread-safe. A thread that holds
        the lock gets False: an object freed there may have a destructor that allocates.

        Returns
        -------
        Whether objects were freed. Their memory is free unless something else refers to them.
        """
        # `_is_owned` is private, but `threading.Condition` uses it too. A thread with the lock must
        # not copy: others would wait, and its own bookkeeping may be half done.
        if self._lock._is_owned() or self._is_closed:  # type: ignore[attr-defined]
            return False
        level = self._residency.levels[top_level]
        n_left = self._n_left[top_level]
        while self._n_left[top_level] == n_left:
            with self._lock:
                self._residency.evict_now(top_level, nbytes - level.leaving_nbytes)
                self.begin(self._residency.take_moves())
                waiting = [move for move in self._queued if move.source == top_level]
            if not waiting:
                break
            # A write that fails is not repeated: the value goes to another tier, or to none.
            for move in waiting:
                self._put(move)
        with self._lock:
            # A thread with a write in flight must not wait: another may wait for that write.
            if threading.get_ident() not in self._in_flight.values():
                self._ended.wait_for(
                    lambda: (
                        self._n_left[top_level] > n_left
                        or not any(move.source == top_level for move in self._in_flight)
                    )
                )
            return self._n_left[top_level] > n_left

    # ------------------------------------------------------------------ up

    def _load(self, move: Load) -> None:
        """Load a value into its top level. Runs in a lane."""
        with self._lock:
            place = self._places.get((move.serial, move.source))
        found = None
        # Only the text of errors is kept: their tracebacks hold the value.
        problem = "its place is unknown" if place is None else ""
        if place is not None:
            try:
                found = self._restore(move.target, move.source, place)
            except NotRestoredError:
                with self._lock:
                    self._residency.load_refused(move)
                self._decide()
                return
            except Exception as error:
                if is_temporary(error):
                    with self._lock:
                        value = self._residency.load_deferred(move)
                        if value is not None:
                            self._failed_reads.add(value, _text_of(error))
                    # Later, because the shortage lasts a moment. A move that ends before then
                    # calls `decide` too.
                    self._lanes.owner(partial(self._lanes.later, self._decide))
                    return
                problem = _text_of(error)
        with self._lock:
            if self._is_closed:
                return  # closing may have removed the copy, so a failure is no loss
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
        """Read a spilled value in this thread; it stays spilled.

        Raises
        ------
        KeyError
            The value is not here or can no longer be read, or the store was closed.
        MemoryError, OSError
            There is no room for it now.
        NotRestoredError
            Its own unpickling raised an error.
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
                _add_note(error, key)
                raise
            except Exception as error:
                with self._lock:
                    if is_temporary(error):
                        self._failed_reads.add(value, _text_of(error))
                        raise
                    if self._is_closed or self._residency.values.get(key) is not value:
                        continue
                    if level not in value.copies or self._residency.drop_copy(value, level):
                        self.begin(self._residency.take_moves())
                        continue
                self._lose(value, _text_of(error))
                raise KeyError(key) from error

    def _restore(self, top_level: int, level: int, place: Any) -> Any:
        """Read a value from a tier, which verifies the bytes.

        Raises
        ------
        NotRestoredError
            The bytes are intact, but the value cannot be restored.
        """
        tier = self._tiers[level]
        with contextlib.ExitStack() as stack:
            # A host value would reference the tier's memory, so it gets a copy.
            if top_level and isinstance(tier, DirectTier):
                header, buffers = stack.enter_context(tier.lent(place))
            else:
                flat = tier.get(place)
                header, buffers = flat.header, flat.buffers
            try:
                return self._packings[top_level].restore(header, buffers)
            except BaseException as error:
                # On a device, room is usually short for a while: until other values have left it.
                nbytes = len(header) + sum(buffer.nbytes for buffer in buffers)
                if is_temporary(error) and (top_level or is_short(error, nbytes)):
                    raise
                raise NotRestoredError from error

    def _lose(self, value: Value, problem: str) -> None:
        """Report that the last copy of a value cannot be read."""
        logger.error(
            "%r cannot be read back (%s); it is lost, or is computed again if a task made it",
            value.key,
            problem,
        )
        self._lost(value)

    def close(self) -> None:
        """Free all copies. Objects stay: a closing worker still sends them to its peers."""
        with self._lock:
            self._is_closed = True
            self._queued.clear()
            self._places.clear()
        for tier in self._tiers.values():
            tier.close()


def _add_note(error: NotRestoredError, key: Hashable) -> None:
    """Add a note to the cause that names the value."""
    note = f"raised while restoring {key!r}, which had been spilled"
    cause = error.__cause__
    assert cause is not None
    # Foreign code may raise the same error object each time.
    if note not in getattr(cause, "__notes__", ()):
        cause.add_note(note)


def _text_of(error: BaseException) -> str:
    """Return the text of an error. The error itself would hold the value by its traceback."""
    text = str(error) if isinstance(error, TypeError | OSError | MemoryError) else ""
    return text or repr(error)

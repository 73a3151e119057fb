"""`worker.data`: a mapping whose values live in memory, in tiers below, or both.

Puts together what decides (`memory.decisions.residency`, `memory.decisions.admission`) and what
does (`memory.carrier`). Asking (`in`, `len`, iteration) never moves bytes; inserting never waits. A
value is reachable in some level at every instant: an object is let go of after its copy is
complete, a copy after nobody can ask for it.

Decisions read the worker's queue, so they are made where that is safe: `owner` brings a call
there. Knows no Dask; `plugins.memory.manager` makes it a worker's.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import MutableMapping as MutableMappingABC
from typing import Any, NoReturn

from dask_gpurt.memory.carrier import Carrier, NotRestoredError
from dask_gpurt.memory.decisions.admission import Admission, Claim
from dask_gpurt.memory.decisions.failed_reads import FailedRead, FailedReads
from dask_gpurt.memory.decisions.residency import Level, Priority, Residency, Value
from dask_gpurt.memory.files.inherited import Inherited
from dask_gpurt.memory.send_buffers import SendBuffers
from dask_gpurt.memory.store_report import explained, reported, spilled_nbytes
from dask_gpurt.memory.tiers import Lanes, Packing, Tier

#: Where objects of the host live.
HOST = 0

#: Told which inputs of a task were lost, once it may begin.
Tell = Callable[[set[Hashable]], None]


class TieredStore(MutableMappingABC[Hashable, Any]):
    """Values over tiers.

    Parameters
    ----------
    residency
        Decides. Its first levels are homes, where objects live: `HOME` is the host's memory, others
        are devices. The levels after them are `tiers` in order.
    tiers
        Levels below, fastest first.
    packings
        One for each home.
    lanes
        Threads of whoever makes the store.
    home_of
        Which home a value has.
    upcoming
        Keys needed by tasks that will begin soon, soonest first.
    on_lost
        Told a key that cannot be read back any more and is not here from now on.
    """

    def __init__(
        self,
        residency: Residency,
        tiers: Sequence[Tier],
        packings: Sequence[Packing],
        lanes: Lanes,
        *,
        top_level_of: Callable[[Any], int] = lambda value: HOST,
        upcoming: Callable[[], Iterable[Hashable]] = tuple,
        on_lost: Callable[[Hashable], None] = lambda key: None,
    ) -> None:
        self.residency = residency
        self.admission = Admission(residency)
        self._packings = packings
        self._top_level_of = top_level_of
        self._lanes = lanes
        self._upcoming = upcoming
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self._failed_reads = FailedReads()
        self._carrier = Carrier(
            residency,
            tiers,
            packings,
            lanes,
            self._lock,
            self._failed_reads,
            decide=self.decide,
            lost=self._lose,
        )
        self._objects = self._carrier.objects
        self._send_buffers = SendBuffers()
        #: Whom to tell that a claim is ready.
        self._tell: dict[Claim, Tell] = {}
        self._is_deciding = False
        self._is_closed = False
        #: Bytes of values that are about to be put, where their home is the host's memory and they
        #: were measured already. Whoever does not put one after all takes it out.
        self.measured: dict[Hashable, int] = {}
        #: As stock's `SpillBuffer` has it: Dask's metrics read it.
        self.cumulative_metrics: defaultdict[tuple[str, str], float] = defaultdict(float)

    # ------------------------------------------------------------------ a mapping

    def __setitem__(self, key: Hashable, value: Any) -> None:
        top_level = self._top_level_of(value)
        nbytes = self.measured.pop(key, None)
        if nbytes is None or top_level != HOST:
            nbytes = self._packings[top_level].sizeof(value)
        with self._lock:
            if key in self.residency.values:
                self._remove(key)
            self._objects[key] = value
            self.residency.insert(key, nbytes, top_level)
            short = self.residency.levels[top_level].shortage_nbytes()
        if short:
            self.decide()

    def __getitem__(self, key: Hashable) -> Any:
        with self._lock:
            found = self.residency.touch(key)
            if key in self._objects:
                self._count("memory-read", found.nbytes)
                return self._objects[key]
            if found.serial in self._send_buffers:
                return self._send_buffers[found.serial]
        # Whoever did not claim the key waits for it here; the object is not kept.
        try:
            return self._carrier.read_through(key)
        except NotRestoredError as error:
            refusal = error.__cause__
        # It would be this as often as it is computed again. Raised out here, or each of the two
        # would lead to the other.
        assert refusal is not None
        raise refusal

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
        top_level: int = HOST,
    ) -> tuple[Claim, bool]:
        """A task wants to run: its inputs at home, and room for its output. From the owner.

        Parameters
        ----------
        home
            Where its output will be.

        Returns
        -------
        The claim, for `end`; and whether the task may begin at once. If not, `tell` is called
        later, by the owner, with those keys that were lost.
        """
        with self._lock:
            claim = self.admission.request(name, keys, output_nbytes, priority, top_level)
            if claim.is_ready and not self._is_under_pressure():
                return claim, True
            self._tell[claim] = tell
        self._decide_now(telling=claim)
        return claim, claim.is_ready and not claim.lost

    def end(self, claim: Claim) -> None:
        """The task of a claim ended or gave up. From the owner."""
        with self._lock:
            self._tell.pop(claim, None)
            self.admission.end(claim)
            is_pressed = self._is_under_pressure()
            if claim.values and is_pressed:
                self.residency.defer_eviction(claim.values)
                self._lanes.later(lambda: self._allow_eviction(claim))
            waits = self.admission.n_waiting
        if waits or is_pressed:
            self.decide()

    def may_wait(self, claim: Claim) -> None:
        """The task of a claim may wait for others, which then must not wait for it."""
        with self._lock:
            self.admission.may_wait(claim)
            waits = self.admission.n_waiting
        if waits:
            self.decide()

    def _allow_eviction(self, claim: Claim) -> None:
        with self._lock:
            self.residency.allow_eviction(claim.values)
        self.decide()

    def read_for_send(self, key: Hashable) -> int | None:
        """Have a value at hand for a message, without bringing it home. May read: not the owner.

        Returns
        -------
        What `take_back` needs; None if the key is not here.

        Raises
        ------
        MemoryError, OSError
            There is no room for it now.
        NotRestoredError
            Its own unpickling raises the cause.
        """
        with self._lock:
            value = self.residency.values.get(key)
            if value is None:
                return None
            if self._send_buffers.acquire(value.serial):
                return value.serial
        try:
            found = self._carrier.read_through(key)
        except KeyError:
            return None
        with self._lock:
            if not self._send_buffers.acquire(value.serial):
                level = self.residency.levels[value.top_level]
                self._send_buffers.add(value.serial, found, value.nbytes, level)
        return value.serial

    def end_send(self, serial: int) -> None:
        """A message that a value was lent for is through."""
        with self._lock:
            self._send_buffers.release(serial)

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
            if self.has_spilled:
                self.residency.load_ahead(self._upcoming())
                moves += self.residency.take_moves()
            told = [(self._tell[claim], claim) for claim in ready if claim in self._tell]
            self._carrier.begin(moves)
        for tell, claim in told:
            if claim is not telling or claim.lost:
                tell(claim.lost)

    def _is_under_pressure(self) -> bool:
        return self.has_spilled or any(map(Level.shortage_nbytes, self.residency.levels))

    def is_spilled(self, key: Hashable) -> bool:
        """Whether a value is here, but not in memory."""
        with self._lock:
            return key in self.residency.values and key not in self._objects

    @property
    def managed_nbytes(self) -> int:
        """Memory that values take, or will once tasks and reads under way have ended."""
        level = self.residency.levels[HOST]
        return level.used_nbytes + level.reserved_nbytes

    def set_capacity(self, room_nbytes: int, top_level: int = HOST) -> None:
        """So much memory may values take at a home from here on."""
        with self._lock:
            self.residency.levels[top_level].capacity_nbytes = room_nbytes

    def make_room(self, top_level: int, nbytes: int) -> bool:
        """Have values leave a home at once; see `Carrier.make_room`. What `on_full` calls."""
        return self._carrier.make_room(top_level, nbytes)

    def force_progress(self) -> bool:
        """Let the first task that waits begin although it does not fit; False if none waits."""
        with self._lock:
            return self.admission.force_progress()

    def retry(self, now_s: float = math.inf) -> None:
        """Tiers that could not be written to may be tried again, if it is time."""
        with self._lock:
            self.residency.retry(now_s)

    def failed_reads(self, now_s: float) -> list[FailedRead]:
        """What cannot be read for want of memory, and since when; longest first."""
        with self._lock:
            return self._failed_reads.poll(now_s)

    def abandon_reads(self, failed: Iterable[FailedRead]) -> None:
        """Whoever waits for these reads goes on, if nothing else does that could make room.

        Tasks read for themselves, and fail if they cannot; messages learn it by `is_given_up`.
        """
        with self._lock:
            if not self.admission.is_stalled:
                return
            for one in failed:
                one.is_abandoned = True
                self.admission.abandon(one.value)
        self.decide()

    def is_abandoned(self, key: Hashable) -> bool:
        """Whether to wait no longer for a value that could not be read."""
        with self._lock:
            value = self.residency.values.get(key)
            return value is not None and self._failed_reads.pop_abandoned(value)

    def spilled(self) -> dict[Hashable, int]:
        """Serial numbers of the values that are not in memory, by key."""
        with self._lock:
            values = self.residency.values.items()
            return {key: value.serial for key, value in values if key not in self._objects}

    def copies_at(self, level: int) -> dict[Hashable, int]:
        """Serial numbers of the values that a tier has a copy of, by key."""
        with self._lock:
            values = self.residency.values.items()
            return {key: value.serial for key, value in values if level in value.copies}

    def add_copy_at(self, level: int, key: Hashable, serial: int) -> None:
        """A tier has a copy of a value now that nobody here put there: others below are not needed.

        Nothing is done about a value that is gone or on its way, or is at home on a device, whose
        bytes are not what such a tier reads.
        """
        with self._lock:
            value = self.residency.values.get(key)
            if value is None or value.serial != serial or value.moving:
                return
            if value.top_level != HOST or level in value.copies:
                return
            others = [other for other in value.copies if other != value.top_level]
            self.residency.add_copy(value, level)
            self._carrier.add_copy(value, level, Inherited(key, value.nbytes))
            for other in others:
                self.residency.drop_copy(value, other)
            self._carrier.begin(self.residency.take_moves())

    def contents(self) -> tuple[dict[Hashable, Any], dict[Hashable, int]]:
        """Values in memory, and serial numbers of all, at one instant: lanes go on meanwhile."""
        with self._lock:
            serials = {key: value.serial for key, value in self.residency.values.items()}
            return dict(self._objects), serials

    def mark_lost(self, key: Hashable) -> None:
        """A value is of no use to anybody: have it computed again."""
        value = self.residency.values.get(key)
        if value is not None:
            self._lose(value)

    def adopt(
        self, objects: Mapping[Hashable, Any], spilled: Mapping[Hashable, int], level: int
    ) -> None:
        """Take over what another store has: objects, and values that stay where they are.

        Parameters
        ----------
        cold
            Keys that are elsewhere, to the bytes they take in memory; the tier at `level` reads
            them.
        """
        with self._lock:
            for key, nbytes in spilled.items():
                value = self.residency.insert(key, nbytes, level=level)
                self._carrier.add_copy(value, level, Inherited(key, nbytes))
            for key, found in objects.items():
                self[key] = found

    @property
    def has_spilled(self) -> bool:
        """Whether some value is not in memory."""
        return len(self._objects) < len(self.residency.values)

    def _remove(self, key: Hashable) -> None:
        self._objects.pop(key, None)
        self.residency.remove(key)
        self._carrier.begin(self.residency.take_moves())

    def _lose(self, value: Value) -> None:
        with self._lock:
            self.admission.mark_lost(value.key)
            if self.residency.values.get(value.key) is value:
                self._remove(value.key)
        self._lanes.owner(lambda: self._on_lost(value.key))

    def _count(self, label: str, nbytes: int) -> None:
        self.cumulative_metrics[label, "count"] += 1
        self.cumulative_metrics[label, "bytes"] += nbytes

    def io(self) -> dict[tuple[str, str], float]:
        """What tiers moved so far, by `disk-write` or `disk-read` and unit."""
        with self._lock:
            counts = self.cumulative_metrics.items()
            return {label: amount for label, amount in counts if label[0] != "memory-read"}

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

    #: What Dask's own store calls them, by which Prometheus counts tasks on disk.
    slow = disk

    @property
    def spilled_total(self) -> tuple[int, int]:
        """Bytes of values that are not in memory: in memory they would take, and as kept."""
        with self._lock:
            return spilled_nbytes(self.residency) if self.has_spilled else (0, 0)

    @property
    def fast(self) -> Mapping[Hashable, Any]:
        """Dask's protocol for stores that can evict: what could be."""
        return self._objects

    def evict(self) -> int:
        """Dask's protocol for stores that can evict: begin to, if nothing is under way."""
        with self._lock:
            leaving_nbytes = self.residency.evict_now(HOST, 1)
            self._carrier.begin(self.residency.take_moves())
        return leaving_nbytes or -1

    def explain(self, key: Hashable) -> dict[str, Any]:
        """Where a value is and why it may or may not leave; `KeyError` if it is not here."""
        with self._lock:
            return explained(self.residency, key)

    def report(self) -> dict[str, Any]:
        """Levels and what was admitted, for `status`."""
        with self._lock:
            return reported(self.residency, self.admission, self.cumulative_metrics)

    def close(self) -> None:
        """Nothing moves any more; tasks that wait may begin, whatever is left. From the owner."""
        with self._lock:
            self._is_closed = True
            told = [tell for claim, tell in self._tell.items() if not claim.is_ready]
        for tell in told:
            tell(set())

    def forget(self) -> None:
        """Let go of objects: somebody else has them. Nobody asks for them here any more."""
        with self._lock:
            self._objects.clear()

    def clear(self) -> None:
        """Let go of what tiers have, once closed. Removes files: not the owner."""
        self._carrier.close()

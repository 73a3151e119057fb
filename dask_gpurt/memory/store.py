"""The store behind `worker.data`: a mapping whose values are in memory, in tiers below, or in both.

It connects the decisions (`memory.decisions.residency`, `memory.decisions.admission`) to the data
mover (`memory.carrier`). Queries (`in`, `len`, iteration) never move bytes, and an insertion never
waits. At every instant, some level has the value: an object is freed after its copy is complete,
and a copy after its value was released.

Decisions read the worker's task queue, so they run on the thread that owns it: the `owner` lane
brings them there. This module knows no Dask; `plugins.memory.manager` installs it on a worker.
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
from dask_gpurt.memory.decisions.levels import Level, TaskPriority, Value
from dask_gpurt.memory.decisions.residency import Residency
from dask_gpurt.memory.files.inherited import Inherited
from dask_gpurt.memory.send_buffers import SendBuffers
from dask_gpurt.memory.store_report import Spilled, explained, reported, spilled_nbytes
from dask_gpurt.memory.tiers import Lanes, Packing, Tier

#: Number of the top level in host memory.
HOST = 0

#: Called with the inputs of a task that were lost, once the task may begin.
OnReady = Callable[[set[Hashable]], None]


class TieredStore(MutableMappingABC[Hashable, Any]):
    """A mapping whose values are spread over memory and tiers.

    Parameters
    ----------
    residency
        Decides which value is where. Its first levels are top levels, where objects live: `HOST`
        is host memory, others are devices. The levels after them are `tiers`, in order.
    tiers
        Levels below, fastest first.
    packings
        One for each top level.
    lanes
        Threads that do the work; the caller owns them.
    top_level_of
        Returns the top level of a value.
    upcoming
        Returns the keys that tasks need soon, soonest first.
    on_lost
        Called with a key whose value can no longer be read and was removed.
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
        #: Callbacks of claims that are not ready yet.
        self._on_ready: dict[Claim, OnReady] = {}
        self._is_deciding = False
        self._is_closed = False
        #: Known sizes of host values that are about to be inserted. A caller that inserts nothing
        #: after all removes its entry.
        self.measured: dict[Hashable, int] = {}
        #: Same as in Dask's `SpillBuffer`: Dask's metrics read it.
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
        # A caller without a claim reads the value itself; the object is not kept.
        try:
            return self._carrier.read_through(key)
        except NotRestoredError as error:
            cause = error.__cause__
        # Not a lost value: computing it again would only lead to the same error. Raised outside of
        # the `except` block, or the two errors would reference each other.
        assert cause is not None
        raise cause

    def __delitem__(self, key: Hashable) -> None:
        with self._lock:
            self._remove(key)
            waits = self.admission.n_waiting
        if waits:
            self.decide()

    def __contains__(self, key: object) -> bool:
        return key in self.residency.values

    def __iter__(self) -> Iterator[Hashable]:
        # A copy: a lane may lose a value while a loop on the event loop is under way.
        return iter([*self.residency.values])

    def __len__(self) -> int:
        return len(self.residency.values)

    def pop(self, key: Hashable, default: object = None) -> NoReturn:
        raise NotImplementedError("pop() might read from disk for nothing; use del")

    # ------------------------------------------------------------------ tasks and messages

    def claim(
        self,
        name: Hashable,
        keys: Collection[Hashable],
        output_nbytes: int,
        priority: TaskPriority,
        on_ready: OnReady,
        top_level: int = HOST,
    ) -> tuple[Claim, bool]:
        """Claim a task's inputs in memory, and room for its output. Called on the owner's thread.

        Parameters
        ----------
        top_level
            Expected top level of its output.

        Returns
        -------
        The claim, for `end`; and whether the task may begin at once. If not, `on_ready` is called
        later, on the owner's thread, with the keys that were lost.
        """
        with self._lock:
            claim = self.admission.request(name, keys, output_nbytes, priority, top_level)
            if claim.is_ready and not self._is_under_pressure():
                return claim, True
            self._on_ready[claim] = on_ready
        self._decide_now(claimed=claim)
        return claim, claim.is_ready and not claim.lost

    def end(self, claim: Claim) -> None:
        """Release a claim: its task ended or was abandoned. Called on the owner's thread."""
        with self._lock:
            self._on_ready.pop(claim, None)
            self.admission.end(claim)
            is_pressed = self._is_under_pressure()
            if claim.values and is_pressed:
                self.residency.defer_eviction(claim.values)
                self._lanes.later(lambda: self._allow_eviction(claim))
            waits = self.admission.n_waiting
        if waits or is_pressed:
            self.decide()

    def may_wait(self, claim: Claim) -> None:
        """Note that a claim's task may wait for others, so none of them may wait for its memory."""
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
        """Read a spilled value into memory for a message. It stays spilled.

        This may read from disk, so it must not run on the owner's thread.

        Returns
        -------
        The serial number for `end_send`; None if the key is not here.

        Raises
        ------
        MemoryError, OSError
            There is no room for it now.
        NotRestoredError
            Its own unpickling raised the cause.
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
        """Free a value that was read for a message, once no other message needs it."""
        with self._lock:
            self._send_buffers.release(serial)

    # ------------------------------------------------------------------ deciding

    def decide(self) -> None:
        """Schedule one decision about moves on the owner's thread."""
        with self._lock:
            if self._is_deciding or self._is_closed:
                return
            self._is_deciding = True
        self._lanes.owner(self._decide_now)

    def _decide_now(self, claimed: Claim | None = None) -> None:
        with self._lock:
            self._is_deciding = False
            if self._is_closed:
                return
            ready = self.admission.due()
            moves = self.residency.due()
            if self.has_spilled:
                self.residency.load_ahead(self._upcoming())
                moves += self.residency.take_moves()
            calls = [(self._on_ready[claim], claim) for claim in ready if claim in self._on_ready]
            self._carrier.begin(moves)
        for on_ready, claim in calls:
            # `claim` returns the answer for the claim that it has just made.
            if claim is not claimed or claim.lost:
                on_ready(claim.lost)

    def _is_under_pressure(self) -> bool:
        return self.has_spilled or any(map(Level.shortage_nbytes, self.residency.levels))

    def is_spilled(self, key: Hashable) -> bool:
        """Return whether a value is here, but not in memory."""
        # Without the lock: the event loop asks once for each input of a queued task.
        value = self.residency.values.get(key)
        return value is not None and not value.in_memory

    @property
    def managed_nbytes(self) -> int:
        """Host memory that values take, or will take once tasks and reads in flight have ended."""
        level = self.residency.levels[HOST]
        return level.used_nbytes + level.reserved_nbytes

    def set_capacity(self, room_nbytes: int, top_level: int = HOST) -> None:
        """Set how much memory values may take at a top level."""
        with self._lock:
            self.residency.levels[top_level].capacity_nbytes = room_nbytes

    def make_room(self, top_level: int, nbytes: int) -> bool:
        """Evict values from a top level at once; see `Carrier.make_room`. For `Device.on_full`."""
        return self._carrier.make_room(top_level, nbytes)

    def force_progress(self) -> bool:
        """Admit the first waiting task although it does not fit; return False if none waits."""
        with self._lock:
            return self.admission.force_progress()

    def retry(self, now_s: float = math.inf) -> None:
        """Allow writes again to tiers that failed, once their retry delay is over."""
        with self._lock:
            self.residency.retry(now_s)

    def failed_reads(self, now_s: float) -> list[FailedRead]:
        """Return the reads that memory is too short for, the longest wait first."""
        with self._lock:
            return self._failed_reads.poll(now_s)

    def abandon_reads(self, failed: Iterable[FailedRead]) -> None:
        """Stop waiting for failed reads, unless a running task or a write could still free memory.

        The waiting tasks begin, and read the values themselves or fail. Messages ask
        `is_abandoned`.
        """
        with self._lock:
            if not self.admission.is_stalled:
                return
            for one in failed:
                one.is_abandoned = True
                self.admission.abandon(one.value)
        self.decide()

    def is_abandoned(self, key: Hashable) -> bool:
        """Return whether the failed read of a value was abandoned. It is reported once."""
        with self._lock:
            value = self.residency.values.get(key)
            return value is not None and self._failed_reads.pop_abandoned(value)

    def spilled(self) -> dict[Hashable, int]:
        """Return the serial numbers of the values that are not in memory, by key."""
        with self._lock:
            values = self.residency.values.items()
            return {key: value.serial for key, value in values if key not in self._objects}

    def copies_at(self, level: int) -> dict[Hashable, int]:
        """Return the serial numbers of the values that have a copy at a level, by key."""
        with self._lock:
            values = self.residency.values.items()
            return {key: value.serial for key, value in values if level in value.copies}

    def add_copy_at(self, level: int, key: Hashable, serial: int) -> None:
        """Add a copy that a tier has without a `Put`, and free the value's other copies below.

        This does nothing if the value is gone or moving. It does nothing for device values either,
        because such a tier reads other bytes than theirs.
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
        """Return the values in memory and the serial numbers of all, at one instant.

        Lanes continue meanwhile.
        """
        with self._lock:
            serials = {key: value.serial for key, value in self.residency.values.items()}
            return dict(self._objects), serials

    def mark_lost(self, key: Hashable) -> None:
        """Remove a value as lost, so that it is computed again."""
        value = self.residency.values.get(key)
        if value is not None:
            self._lose(value)

    def adopt(
        self, objects: Mapping[Hashable, Any], spilled: Mapping[Hashable, int], level: int
    ) -> None:
        """Take over the content of another store: its objects, and its spilled values in place.

        Parameters
        ----------
        spilled
            Bytes that each spilled value takes in memory, by key. The tier at `level` reads them.
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
        """Return the totals of what tiers moved, by `disk-write` or `disk-read` and unit."""
        with self._lock:
            counts = self.cumulative_metrics.items()
            return {label: amount for label, amount in counts if label[0] != "memory-read"}

    def on_io(self, label: str, nbytes: int, seconds: float) -> None:
        """Count bytes and seconds that a tier spent on a `disk-write` or `disk-read`."""
        with self._lock:
            self._count(label, nbytes)
            self.cumulative_metrics[label, "seconds"] += seconds

    # ------------------------------------------------------------------ inspection

    @property
    def memory(self) -> Mapping[Hashable, Any]:
        """Values in memory. For inspection only."""
        return self._objects

    @property
    def disk(self) -> Collection[Hashable]:
        """Keys that are not in memory. For inspection only."""
        return [key for key in self.residency.values if key not in self._objects]

    #: The name in Dask's own store, by which Prometheus counts tasks on disk.
    slow = disk

    @property
    def spilled_total(self) -> Spilled:
        """Bytes of the spilled values: the size they have in memory, and their stored size."""
        with self._lock:
            return spilled_nbytes(self.residency) if self.has_spilled else Spilled(0, 0)

    @property
    def fast(self) -> Mapping[Hashable, Any]:
        """Values that could be evicted. Part of Dask's protocol for stores that can evict."""
        return self._objects

    def clear(self) -> None:
        """Remove all values, without loading them first as a mapping does by default."""
        for key in [*self]:
            del self[key]

    def evict(self, n_values: int = 1) -> int:
        """Begin to evict values; return their bytes, or -1 if there is none.

        Part of Dask's protocol for stores that can evict.
        """
        with self._lock:
            leaving_nbytes = self.residency.evict_first(HOST, n_values)
            self._carrier.begin(self.residency.take_moves())
        return leaving_nbytes or -1

    def explain(self, key: Hashable) -> dict[str, Any]:
        """Return where a value is and why; raise `KeyError` if it is not here."""
        with self._lock:
            return explained(self.residency, key)

    def report(self) -> dict[str, Any]:
        """Return the levels and the admission figures, for `status`."""
        with self._lock:
            return reported(self.residency, self.admission, self.cumulative_metrics)

    def close(self) -> None:
        """Stop all decisions and let waiting tasks begin. Called on the owner's thread."""
        with self._lock:
            self._is_closed = True
            calls = [call for claim, call in self._on_ready.items() if not claim.is_ready]
        for on_ready in calls:
            on_ready(set())

    def release_objects(self) -> None:
        """Drop the references to objects, after another store has taken them over."""
        with self._lock:
            self._objects.clear()

    def free_tiers(self) -> None:
        """Free what tiers hold, after `close`. It removes files: not on the owner's thread."""
        self._carrier.close()

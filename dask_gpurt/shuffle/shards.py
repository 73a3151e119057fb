"""The shards of one run on one worker: in memory up to a limit, on disk beyond it.

A *shard* holds the rows of one input partition, or of all that one task hands over, for a range
of this worker's output partitions. The store takes shards from transfer tasks of its own worker and
from peers. It drops duplicates, and returns the pieces of an output partition in the order of the
input partitions. It first spills the shards that tasks read last, because tasks read outputs in
ascending order of slots. It frees a shard once the results of all its partitions are safe. Many
small shards are merged (`shuffle.merging`), before they are spilled or outputs are assembled.

Locking: `_lock` guards the index and the accounting, and is never held over I/O or a copy.
`_spilling` lets one thread at a time write. Rows are reachable in memory or on disk at every
instant: one step replaces shards by those that they were merged into.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dask_gpurt.errors import (
    IncompleteExchangeError,
    PartitionReleasedError,
    ProtocolError,
    ShardStorageError,
    is_temporary,
)
from dask_gpurt.frames.adapter import BodyAdapter, Packed, Piece, fresh, on_host
from dask_gpurt.metrics import Counters
from dask_gpurt.shuffle import merging
from dask_gpurt.shuffle.budget import Budget
from dask_gpurt.shuffle.plan import SHARD_TARGET_NBYTES
from dask_gpurt.shuffle.shard import Shard
from dask_gpurt.shuffle.slot_index import SlotIndex, are_interleaved
from dask_gpurt.shuffle.spill_file import Extent, SpillFile, SpillFiles

logger = logging.getLogger("dask_gpurt.shuffle")

#: Spilling stops below this share of the limit, so that it does not restart at once.
LOW_WATER = 0.8
#: Share of the limit for the shards with rows of one slot. They stay in memory for the next slot.
_WINDOW_SHARE = 0.2
#: Share of the limit for shards that are merged together, if it is more than usual.
_GROUP_SHARE = 1 / 16


class _Arrival(NamedTuple):
    """The shards of one task's inputs: their attempt, how many there are, and which arrived."""

    attempt: int
    n_shards: int
    numbers: set[int]


class ShardStore:
    """A store of the shards of one run on one worker.

    Parameters
    ----------
    adapter
        Packs and unpacks the bodies.
    slots
        First slot of this worker's output partitions, and one past the last.
    directory
        Directory of spill files; created when the first shard is spilled.
    budget
        Memory that shards may take before some are spilled; shared by the runs of a worker.
    on_disk_io
        Called with `disk-write` or `p2p-disk-read` and the number of bytes, in the thread that did
        the I/O.
    empty_at
        Returns memory for merged shards.
    slots_per_lane
        Shards share pages if their first slots, divided by this, are equal.
    run_later
        Runs a call that may take long, off the critical path.
    readers
        How many results tasks make from a slot, for slots with more than one.
    may_spill
        False keeps everything in memory, as on a full disk.
    """

    def __init__(
        self,
        adapter: BodyAdapter,
        slots: tuple[int, int],
        directory: str,
        budget: Budget,
        counters: Counters,
        open_file: Callable[[str], SpillFile] = SpillFile,
        *,
        on_disk_io: Callable[[str, int], None] | None = None,
        empty_at: merging.EmptyAt = lambda nbytes, slot: fresh(nbytes),
        slots_per_lane: int = 1,
        run_later: Callable[[Callable[[], None]], object] = lambda call: call(),
        readers: Mapping[int, int] | None = None,
        may_spill: bool = True,
    ) -> None:
        self._adapter = adapter
        self._slots = slots
        self._directory = directory
        self._budget = budget
        self._counters = counters
        self._on_disk_io = on_disk_io or (lambda label, nbytes: None)
        self._empty_at = empty_at
        self._slots_per_lane = slots_per_lane
        self._lock = threading.Lock()
        self._files = SpillFiles(directory, self._lock, open_file, run_later)
        self._spilling = threading.Lock()
        self._arrived: dict[int, _Arrival] = {}
        #: A set in the order of insertion.
        self._shards: dict[Shard, None] = {}
        #: One object for equal layouts: each may have all categories of a column.
        self._layout_keys: dict[bytes, bytes] = {}
        #: Groups that are still to be merged before the first output; None before `seal`.
        self._unmerged: list[list[Shard]] | None = None
        self._n_merging = 0
        self._merged = threading.Condition(self._lock)
        #: All shards, and their index; None until `seal` has merged them.
        self._sealed: tuple[list[Shard], SlotIndex] | None = None
        self._readers = readers or {}
        #: Results that are safe, for slots with several readers.
        self._results: dict[int, set[Hashable]] = {}
        self._released: set[int] = set()
        #: Why no shard can be spilled; None if they can.
        self._refusal = None if may_spill else "the disk damaged a shard before"
        self._may_spill = may_spill
        self._has_warned = False
        self._closed = False
        self.resident_nbytes = 0
        self._on_disk_nbytes = 0
        self.spilled_nbytes = 0
        self.unspilled_nbytes = 0

    def _count_resident(self, nbytes: int) -> None:
        self.resident_nbytes += nbytes
        self._budget.change(nbytes)

    def _count_on_disk(self, nbytes: int) -> None:
        self._on_disk_nbytes += nbytes
        self._budget.change_on_disk(nbytes)

    def add(self, shards: Sequence[Shard]) -> None:
        """Add shards; drop duplicates and shards of a second attempt.

        Raises
        ------
        ProtocolError
            A shard covers slots that are not this worker's.
        """
        first, end = self._slots
        for shard in shards:
            if shard.first_slot < first or shard.end_slot > end:
                raise ProtocolError(
                    f"shard for slots {shard.first_slot}-{shard.end_slot} sent to the owner "
                    f"of {first}-{end}"
                )
        with self._lock:
            if self._closed:
                return
            for shard in shards:
                known = self._arrived.setdefault(
                    shard.source, _Arrival(shard.attempt, shard.count, set())
                )
                # The first attempt wins: the task ran twice, and its rows must count once.
                if known.attempt != shard.attempt or shard.number in known.numbers:
                    continue
                known.numbers.add(shard.number)
                shard.layout_key = self._layout_keys.setdefault(shard.layout_key, shard.layout_key)
                self._shards[shard] = None
                self._count_resident(shard.nbytes)

    @property
    def is_over_limit(self) -> bool:
        over = self._budget.used_nbytes > self._budget.limit_nbytes
        return over and self._refusal is None and self.resident_nbytes > 0

    def try_disk_again(self) -> None:
        """Allow writes again after an error of the disk, which may have room now."""
        if self._may_spill:
            self._refusal = None

    def why_stuck(self) -> str | None:
        """Return why shards stay in memory that is needed; None if there is room, or a disk."""
        budget = self._budget
        is_needed = budget.is_lowered and budget.used_nbytes > budget.limit_nbytes
        return self._refusal if is_needed and self.resident_nbytes else None

    def make_room(self) -> None:
        """Spill until below the low-water mark. Writes; call from a thread."""
        with self._spilling:
            if not self.is_over_limit:
                return
            self._merge_before_spilling()
            file: SpillFile | None = None
            try:
                for shard in self._victims():
                    if self._closed:
                        break
                    if shard.on_disk is None:
                        if file is None:
                            file = self._files.open_for_writing()
                        self._write(shard, file)
                    self._evict(shard)
                    if self._budget.used_nbytes <= LOW_WATER * self._budget.limit_nbytes:
                        break
            except OSError as error:
                # Nothing is lost: this shard and all after it are still in memory.
                if not is_temporary(error):
                    self._refusal = error.strerror or str(error)
                    logger.error(
                        "cannot spill shuffle data to %s (%s); it stays in memory from now on. "
                        "Free some space, or point Dask's temporary-directory to another disk.",
                        self._directory,
                        error,
                    )
                elif not self._has_warned:
                    self._has_warned = True
                    logger.warning("cannot spill shuffle data now (%s); it is retried later", error)
            finally:
                if file is not None:
                    self._files.release([file])

    def _victims(self) -> list[Shard]:
        with self._lock:
            resident = [shard for shard in self._shards if shard.is_resident]
        # Shards that share pages are spilled in the order in which they came, so that whole pages
        # become free. A shard that stays in between would keep its page.
        n_slots = self._slots_per_lane
        return sorted(resident, key=lambda shard: shard.first_slot // n_slots, reverse=True)

    def _write(self, shard: Shard, file: SpillFile) -> None:
        with self._lock:
            packed, body = shard.packed, shard.body
        if packed is None and body is not None:
            packed = self._adapter.pack(body)
        if packed is None:
            return  # released in the meantime
        packed = on_host(packed)
        extent = file.append(packed.buffer)
        with self._lock:
            if not shard.n_unreleased or self._closed:
                return
            file.keep()
            shard.on_disk = (file, extent)
            shard.sections = (packed.arrow_nbytes, packed.pickle_nbytes)
            shard.packed_nbytes = packed.buffer.nbytes
            self._count_on_disk(packed.buffer.nbytes)
            self.spilled_nbytes += packed.buffer.nbytes
        self._counters.add(spilled_nbytes=packed.buffer.nbytes)
        self._on_disk_io("disk-write", packed.buffer.nbytes)

    def _evict(self, shard: Shard) -> None:
        with self._lock:
            if shard.is_resident and shard.on_disk is not None and not self._closed:
                shard.body = shard.packed = None
                self._count_resident(-shard.nbytes)

    def seal(self) -> None:
        """End the input phase: check that no shard is missing, merge small ones, make the index.

        Threads that call this meanwhile share the merging.

        Raises
        ------
        IncompleteExchangeError
            An input partition announced more shards than arrived.
        """
        with self._lock:
            # A spill may still merge shards, which must not be in two groups.
            self._merged.wait_for(lambda: self._unmerged is not None or not self._n_merging)
            if self._unmerged is None:
                for source, known in self._arrived.items():
                    if len(known.numbers) != known.n_shards:
                        raise IncompleteExchangeError(
                            f"{len(known.numbers)} of {known.n_shards} shards of input partition "
                            f"{source} arrived"
                        )
                is_mixed = are_interleaved(self._shards)
                n_pieces = merging.count_runs if is_mixed else merging.count_slots
                self._unmerged = self._groups_read_again() or self._groups(
                    merging.has_small_pieces, merging.LEAST_PIECES, n_pieces
                )
        while (group := self._next_unmerged()) is not None:
            self._merge(group)
        with self._lock:
            self._merged.wait_for(lambda: not self._n_merging)
            if self._sealed is None:
                shards = list(self._shards)
                self._sealed = shards, SlotIndex(self._slots, shards)

    # ------------------------------------------------------------------ merging

    def _groups(
        self,
        is_small: Callable[[Shard, merging.CountPieces], bool],
        least_pieces: int = 0,
        n_pieces: merging.CountPieces = merging.count_slots,
        nbytes: int = 0,
    ) -> list[list[Shard]]:
        """Return groups of shards to merge. Call with the lock."""
        if self._adapter.merge is None or self._closed:
            return []
        return merging.groups(self._shards, is_small, least_pieces, n_pieces, nbytes)

    def _groups_read_again(self) -> list[list[Shard]]:
        """Return groups of shards that would be read from disk for each slot. Call with the lock.

        It assumes that all shards are alike. If a shard covers 5 % of the slots, then a slot reads
        5 % of all bytes.
        """
        limit_nbytes = self._budget.limit_nbytes
        stored_nbytes = self.resident_nbytes + self._on_disk_nbytes
        if stored_nbytes <= limit_nbytes:
            return []
        first, end = self._slots
        most_pieces = (end - first) * _WINDOW_SHARE * limit_nbytes / stored_nbytes
        return self._groups(
            partial(merging.would_be_read_again, most_pieces=most_pieces),
            nbytes=int(_GROUP_SHARE * limit_nbytes),
        )

    def _next_unmerged(self) -> list[Shard] | None:
        with self._lock:
            if not self._unmerged:
                return None
            self._n_merging += 1
            return self._unmerged.pop()

    def _merge_before_spilling(self) -> None:
        """Merge shards that cover many slots. Each of these slots would read such a shard again."""
        with self._lock:
            groups = [] if self._unmerged is not None else self._groups_read_again()
        for group in groups:
            with self._lock:
                if self._unmerged is not None:
                    return
                self._n_merging += 1
            self._merge(group)

    def _merge(self, group: list[Shard]) -> None:
        """Replace shards by merged ones; leave them as they are if that fails."""
        made: list[Shard] = []
        files: list[SpillFile] = []
        try:
            assert self._adapter.merge is not None
            bodies = [self._body(shard) for shard in group]
            may_spill = self._on_disk_nbytes or self.is_over_limit
            nbytes = merging.SPILLED_NBYTES if may_spill else SHARD_TARGET_NBYTES
            made = merging.merged(group, bodies, self._adapter.merge, self._empty_at, nbytes)
        except (MemoryError, ValueError, PartitionReleasedError, ShardStorageError) as error:
            # Without memory for a copy, pieces are assembled one by one. The task that reads a
            # damaged shard reports it. And a run may be closed meanwhile.
            logger.debug("small shards are not merged: %r", error)
        finally:
            with self._lock:
                if made and not self._closed:
                    for shard in group:
                        if shard.on_disk is not None:
                            files.append(shard.on_disk[0])
                        self._drop(shard)
                        shard.n_unreleased = 0
                        del self._shards[shard]
                    for shard in made:
                        self._shards[shard] = None
                        self._count_resident(shard.nbytes)
                self._n_merging -= 1
                self._merged.notify_all()
            self._files.release(files)

    # ------------------------------------------------------------------ out

    def rows_of_slots(self) -> dict[int, int]:
        """Return the rows that arrived so far, for each of this worker's slots."""
        first, end = self._slots
        rows = np.zeros(end - first, dtype=np.int64)
        with self._lock:
            for shard in self._shards:
                rows[shard.first_slot - first : shard.end_slot - first] += shard.rows_per_slot
        return dict(enumerate(rows.tolist(), first))

    def pieces(self, slot: int) -> list[Piece]:
        """Return the pieces of one output partition in the order of the inputs. May read from disk.

        Raises
        ------
        PartitionReleasedError
            `release` has freed the partition.
        ShardStorageError
            A spilled shard cannot be read, or fails its checksum.
        """
        with self._lock:
            if slot in self._released:
                raise PartitionReleasedError(f"slot {slot} was released")
            if self._closed:
                raise PartitionReleasedError("the run was closed")
            assert self._sealed is not None, "pieces() before seal()"
            shards, index = self._sealed
            numbers, starts, stops = index.rows_of(slot)
            found = [shards[number] for number in numbers]
            bodies = [shard.body for shard in found]
        if any(body is None for body in bodies):
            bodies = [
                self._body(shard) if body is None else body
                for shard, body in zip(found, bodies, strict=True)
            ]
        return list(map(Piece, bodies, starts, stops))

    def _body(self, shard: Shard) -> Any:
        with self._lock:
            body, packed, on_disk = shard.body, shard.packed, shard.on_disk
        if body is not None:
            return body
        if packed is None:
            if on_disk is None:
                raise PartitionReleasedError("the run was closed while it was read")
            packed = self._read(shard, on_disk)
        body = self._adapter.unpack(shard.layout_key, packed)
        with self._lock:
            if shard.body is None and shard.n_unreleased and not self._closed:
                # The body's arrays are views of the packed buffer, so one of the two is enough. A
                # body with objects takes more memory than the buffer did.
                counted_nbytes = shard.nbytes if shard.packed is not None else 0
                self._count_resident(body.nbytes - counted_nbytes)
                shard.body, shard.packed, shard.nbytes = body, None, body.nbytes
        return body

    def _read(self, shard: Shard, on_disk: tuple[SpillFile, Extent]) -> Packed:
        file, extent = on_disk
        buffer = np.empty(shard.packed_nbytes, dtype=np.uint8)
        failure: OSError | None = None
        try:
            file.read_into(buffer, extent)
        except OSError as error:
            failure = error
        if self._closed or not shard.n_unreleased:
            # The file was closed meanwhile; its descriptor may belong to another file now.
            raise PartitionReleasedError("the shard was released while it was read") from failure
        if isinstance(failure, ShardStorageError):
            raise failure
        if failure is not None:
            raise ShardStorageError(f"cannot read {file.path}: {failure}") from failure
        self.unspilled_nbytes += buffer.nbytes
        self._counters.add(unspilled_nbytes=buffer.nbytes)
        self._on_disk_io("p2p-disk-read", buffer.nbytes)
        return Packed(buffer, shard.n_rows, *shard.sections)

    def release(self, slot: int, result: Hashable = None) -> None:
        """Record that a result made of an output partition is safe.

        After the last expected result, free the shards that only this partition needed.

        Parameters
        ----------
        result
            Name of the result. The same one may be made, and lost, several times.
        """
        files: list[SpillFile] = []
        with self._lock:
            if slot in self._released or self._sealed is None:
                return
            if slot in self._readers:
                results = self._results.setdefault(slot, set())
                results.add(result)
                if len(results) < self._readers[slot]:
                    return
            self._released.add(slot)
            shards, index = self._sealed
            for number in set(index.rows_of(slot)[0]):
                shard = shards[number]
                shard.n_unreleased -= 1
                if not shard.n_unreleased:
                    if shard.on_disk is not None:
                        files.append(shard.on_disk[0])
                    self._drop(shard)
        self._files.release(files)

    def _drop(self, shard: Shard) -> None:
        if shard.is_resident:
            self._count_resident(-shard.nbytes)
        if shard.on_disk is not None:
            self._count_on_disk(-shard.packed_nbytes)
        shard.body = shard.packed = shard.on_disk = None

    def close(self) -> None:
        """Free all shards and delete all files."""
        with self._lock:
            self._closed = True
            self._shards.clear()
            self._layout_keys.clear()
            self._sealed = [], SlotIndex(self._slots, ())
            self._count_resident(-self.resident_nbytes)
            self._count_on_disk(-self._on_disk_nbytes)
        # Wait for a spill in progress: its file must not be closed meanwhile.
        with self._spilling:
            self._files.close()

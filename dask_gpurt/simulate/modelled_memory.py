"""The memory of a modelled worker: which results are in memory, and which are on disk.

A result is written to disk when the worker holds more than its target, the one needed last first,
as the runtime does. Received shards of a shuffle have a share of their own; the rest goes to disk.
The model decides and counts. The caller moves the bytes, which take time on the host's disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable

#: Share of the limit above which results go to disk, as `distributed.worker.memory.target`.
TARGET = 0.6
#: Share of the limit for received shards, as `gpurt.shuffle.memory`.
SHARDS = 0.3


class ModelledMemory:
    """Bytes that a worker holds.

    Parameters
    ----------
    limit_nbytes
        The worker's limit; may be infinite.
    next_use
        Returns when a result is needed next: a larger number is later.

    Attributes
    ----------
    needed_nbytes
        The most that had to be in memory at once: inputs and outputs of running tasks, results that
        are being sent, and shards. Everything else could be on disk.
    written_nbytes, read_nbytes
        Bytes that went to disk, and that came back.
    """

    def __init__(self, limit_nbytes: float, next_use: Callable[[Hashable], float]) -> None:
        self.limit_nbytes = limit_nbytes
        self._next_use = next_use
        self._held: dict[Hashable, int] = {}
        self._on_disk: dict[Hashable, int] = {}
        self._writing: dict[Hashable, int] = {}
        self._users: Counter[Hashable] = Counter()
        self._held_nbytes = 0
        self._writing_nbytes = 0
        self._reserved_nbytes = 0
        self._shards_nbytes = 0.0
        self._shards_on_disk_nbytes = 0.0
        self._in_use_nbytes = 0
        self.needed_nbytes = 0
        self.written_nbytes = 0
        self.read_nbytes = 0

    @property
    def used_nbytes(self) -> int:
        """Bytes in memory now."""
        return self._held_nbytes + self._reserved_nbytes + int(self._shards_nbytes)

    @property
    def is_writing(self) -> bool:
        """Whether bytes are on their way to disk."""
        return bool(self._writing)

    @property
    def has_results_on_disk(self) -> bool:
        """Whether any result is on disk."""
        return bool(self._on_disk)

    def on_disk_nbytes(self, keys: Iterable[Hashable]) -> int:
        """Return how many bytes of these results are on disk."""
        return sum(self._on_disk.get(key, 0) for key in keys)

    def has_room(self, nbytes: int, inputs: Iterable[Hashable]) -> bool:
        """Return whether the output and the inputs of a task fit beside all that is in memory."""
        return self.used_nbytes + nbytes + self.on_disk_nbytes(inputs) <= self.limit_nbytes

    def put(self, key: Hashable, nbytes: int) -> None:
        """Take a result into memory."""
        if key in self._held or key in self._on_disk:
            return
        self._held[key] = nbytes
        self._held_nbytes += nbytes
        if key in self._users:
            self._in_use_nbytes += nbytes
        self._note_need()

    def drop(self, key: Hashable) -> None:
        """Forget a result."""
        nbytes = self._held.pop(key, 0)
        self._held_nbytes -= nbytes
        if key in self._users:
            self._in_use_nbytes -= nbytes
        self._writing_nbytes -= self._writing.pop(key, 0)
        self._on_disk.pop(key, None)

    def reserve(self, nbytes: int) -> None:
        """Count the output of a task that runs; a negative number ends that."""
        self._reserved_nbytes += nbytes
        self._note_need()

    def use(self, keys: Iterable[Hashable]) -> list[tuple[Hashable, int]]:
        """Keep results in memory, and return those that have to be read first."""
        to_read = []
        for key in keys:
            if key not in self._users:
                self._in_use_nbytes += self._held.get(key, 0)
            self._users[key] += 1
            if key in self._on_disk:
                to_read.append((key, self._read(key)))
            self._writing_nbytes -= self._writing.pop(key, 0)
        self._note_need()
        return to_read

    def read_ahead(self, keys: Iterable[Hashable]) -> list[tuple[Hashable, int]]:
        """Return results to read now although nothing uses them yet, as far as there is room."""
        to_read = []
        for key in keys:
            nbytes = self._on_disk.get(key)
            if nbytes is None:
                continue
            if self.used_nbytes + nbytes > TARGET * self.limit_nbytes:
                break
            to_read.append((key, self._read(key)))
        return to_read

    def _read(self, key: Hashable) -> int:
        nbytes = self._on_disk.pop(key)
        self.put(key, nbytes)
        self.read_nbytes += nbytes
        return nbytes

    def unuse(self, keys: Iterable[Hashable]) -> None:
        """End a `use`."""
        for key in keys:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._in_use_nbytes -= self._held.get(key, 0)

    def to_write(
        self, wanted_nbytes: int = 0, inputs: Collection[Hashable] = ()
    ) -> list[tuple[Hashable, int]]:
        """Return results to write to disk now. Call `written` for each later.

        Parameters
        ----------
        wanted_nbytes
            Bytes that a task wants beside those that are there.
        inputs
            Inputs of that task, which stay.
        """
        held_nbytes = self.used_nbytes - self._writing_nbytes + wanted_nbytes
        excess = held_nbytes - TARGET * self.limit_nbytes
        if excess <= 0:
            return []
        kept = self._users.keys() | self._writing.keys() | set(inputs)
        free = (key for key in self._held if key not in kept)
        chosen = []
        for key in sorted(free, key=self._next_use, reverse=True):
            nbytes = self._held[key]
            if not nbytes:
                continue
            self._writing[key] = nbytes
            self._writing_nbytes += nbytes
            chosen.append((key, nbytes))
            excess -= nbytes
            if excess <= 0:
                break
        return chosen

    def written(self, key: Hashable) -> None:
        """Free the memory of a result that is on disk now."""
        nbytes = self._writing.pop(key, None)
        if nbytes is None:
            return  # it was dropped or used meanwhile
        self.written_nbytes += nbytes
        self._writing_nbytes -= nbytes
        self._held_nbytes -= self._held.pop(key)
        self._on_disk[key] = nbytes

    def take_shards(self, nbytes: float) -> float:
        """Take shards of a shuffle, and return how many bytes of them go to disk."""
        room = max(SHARDS * self.limit_nbytes - self._shards_nbytes, 0.0)
        excess = max(nbytes - room, 0.0)
        self._shards_nbytes += nbytes - excess
        self._shards_on_disk_nbytes += excess
        self.written_nbytes += int(excess)
        self._note_need()
        return excess

    def give_shards(self, nbytes: float) -> float:
        """Give shards to an output, and return how many bytes of them come from disk."""
        everything = self._shards_nbytes + self._shards_on_disk_nbytes
        if everything <= 0:
            return 0.0
        part = min(nbytes / everything, 1.0)
        from_disk = part * self._shards_on_disk_nbytes
        self._shards_nbytes *= 1 - part
        self._shards_on_disk_nbytes *= 1 - part
        self.read_nbytes += int(from_disk)
        return from_disk

    def _note_need(self) -> None:
        needed = self._in_use_nbytes + self._reserved_nbytes + int(self._shards_nbytes)
        self.needed_nbytes = max(self.needed_nbytes, needed)

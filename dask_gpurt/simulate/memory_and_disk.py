"""The memory of a modelled worker with the disk of its host: tasks wait for room and for reads.

`ModelledMemory` decides what goes to disk. This module moves the bytes over the link to the disk,
which takes time, and calls back when they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from functools import partial

from dask_gpurt.simulate.modelled_memory import ModelledMemory
from dask_gpurt.simulate.transfers import Transfers


class MemoryAndDisk:
    """Memory of one worker, whose results go to disk and come back when tasks need them.

    Parameters
    ----------
    memory
        Its bytes.
    transfers
        All transfers of the simulation.
    disk
        Names of the links to the disk; without one, bytes move at once.
    upcoming
        Returns the inputs of each of the next tasks, the most urgent first.
    """

    def __init__(
        self,
        memory: ModelledMemory,
        transfers: Transfers,
        disk: tuple[str, ...],
        upcoming: Callable[[], Iterable[Collection[Hashable]]],
    ) -> None:
        self.memory = memory
        self._transfers, self._disk, self._upcoming = transfers, disk, upcoming
        #: Tasks that wait for memory, and the number of running tasks.
        self._waiting: list[Callable[[], None]] = []
        self._n_running = 0
        #: Results that are on their way from disk, and what to do when they are there.
        self._reading: dict[Hashable, list[Callable[[], None]]] = {}

    def begin(
        self,
        inputs: Collection[Hashable],
        output_nbytes: int,
        shards_nbytes: float,
        start: Callable[[], object],
    ) -> None:
        """Call `start` when a task has room for its output, and its inputs are in memory.

        Parameters
        ----------
        inputs
            Results that it needs.
        output_nbytes
            Bytes of its output.
        shards_nbytes
            Bytes of the shards that it takes.
        start
            Called once, now or later.
        """
        memory = self.memory
        self._write_excess(output_nbytes + memory.on_disk_nbytes(inputs), inputs)
        is_full = not memory.has_room(output_nbytes, inputs)
        # If nothing can free memory, the task begins, and the worker needs more than it has.
        if is_full and (self._n_running or memory.is_writing):
            self._waiting.append(partial(self.begin, inputs, output_nbytes, shards_nbytes, start))
            return
        self._n_running += 1
        memory.reserve(output_nbytes)
        from_disk_nbytes = memory.give_shards(shards_nbytes)
        self.bring(inputs, partial(self._move, from_disk_nbytes, start))
        self._read_ahead()

    def end(self, inputs: Collection[Hashable], output_nbytes: int) -> None:
        """End a task. Its output is put into memory with `keep`."""
        self._n_running -= 1
        self.memory.reserve(-output_nbytes)
        self.memory.unuse(inputs)

    def keep(self, results: Iterable[tuple[Hashable, int]]) -> None:
        """Take results into memory, with their bytes."""
        for key, nbytes in results:
            self.memory.put(key, nbytes)
        self._write_excess()
        self._begin_waiting()

    def drop(self, key: Hashable) -> None:
        """Forget a result."""
        self.memory.drop(key)
        self._begin_waiting()

    def bring(self, keys: Collection[Hashable], done: Callable[[], object]) -> None:
        """Use results, and call `done` when those on disk have been read."""
        for key, nbytes in self.memory.use(keys):
            self._read(key, nbytes)
        missing = {key for key in keys if key in self._reading}
        if not missing:
            done()
            return

        def arrived(key: Hashable) -> None:
            missing.discard(key)
            if not missing:
                done()

        for key in sorted(missing, key=str):
            self._reading[key].append(partial(arrived, key))

    def take_shards(self, nbytes: float) -> None:
        """Take shards of a shuffle. Those that memory has no room for go to disk."""
        self._move(self.memory.take_shards(nbytes), lambda: None)
        self._write_excess()

    def _begin_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for begin in waiting:
            begin()

    def _read(self, key: Hashable, nbytes: int) -> None:
        self._reading.setdefault(key, [])

        def read() -> None:
            for arrived in self._reading.pop(key, ()):
                arrived()

        self._move(nbytes, read)

    def _read_ahead(self) -> None:
        """Read inputs of the next tasks beside the running ones, as far as there is room."""
        if not self.memory.has_results_on_disk:
            return
        for inputs in self._upcoming():
            for key, nbytes in self.memory.read_ahead(inputs):
                self._read(key, nbytes)

    def _write_excess(self, wanted_nbytes: int = 0, inputs: Collection[Hashable] = ()) -> None:
        for key, nbytes in self.memory.to_write(wanted_nbytes, inputs):
            self._move(nbytes, partial(self._written, key))

    def _written(self, key: Hashable) -> None:
        self.memory.written(key)
        self._begin_waiting()

    def _move(self, nbytes: float, done: Callable[[], object]) -> None:
        """Call `done` when the disk of the host has written or read these bytes."""
        if nbytes:
            self._transfers.start(self._disk, nbytes, done)
        else:
            done()

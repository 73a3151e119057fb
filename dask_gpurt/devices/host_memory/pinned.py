"""A pool of host memory in blocks of one size, allocated once and reused.

Pinning memory costs as much as copying it a few times. A pinned pool with allocations of any size
fragments until it is useless. So a value takes as many blocks as it needs, adjacent or not, and a
free block fits any later value. After a warm-up, the pool requests no more memory from the system.

The caller passes the function that pins. On a machine without a GPU, the blocks are ordinary
memory. This module does not know what a block contains; `memory.host_tiers` stores values in
blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dask_gpurt.devices.host_memory.pool import Buffer

#: Copies over PCIe reach their full rate at a few hundred KiB. On average, the last block of a
#: value is half empty, so larger blocks would waste more.
BLOCK_NBYTES = 1 << 20


def plain(nbytes: int) -> Buffer:
    """Return memory that is not pinned."""
    return np.empty(nbytes, dtype=np.uint8)


class Scattered:
    """Bytes that lie in several pieces of host memory, in order.

    Attributes
    ----------
    parts
        The pieces. They are valid as long as their owner says.
    """

    __slots__ = ("nbytes", "parts")

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self.parts = tuple(parts)
        self.nbytes = sum(part.nbytes for part in self.parts)


class Block(NamedTuple):
    """A part of memory that was pinned in one call."""

    memory: Buffer
    start: int


class Blocks:
    """Memory of one value: some blocks, the last of which may be partly used.

    Attributes
    ----------
    nbytes
        Usable bytes, as requested.
    blocks
        The blocks in order.
    block_nbytes
        Size of a block.
    """

    __slots__ = ("block_nbytes", "blocks", "nbytes")

    def __init__(self, nbytes: int, blocks: list[Block], block_nbytes: int) -> None:
        self.nbytes = nbytes
        self.blocks = blocks
        self.block_nbytes = block_nbytes

    def stretches(self, start: int, nbytes: int) -> Iterator[Buffer]:
        """Yield the contiguous pieces that hold the bytes from `start` on, in order.

        Adjacent blocks make one piece. A copy of a MiB takes the engine of a GPU as long as Python
        takes to start it.

        Raises
        ------
        IndexError
            The value has fewer bytes.
        """
        if not 0 <= start <= start + nbytes <= self.nbytes:
            raise IndexError(f"{nbytes} bytes at {start} exceed a value of {self.nbytes}")
        while nbytes:
            number, offset = divmod(start, self.block_nbytes)
            memory, first = self.blocks[number]
            end = first + self.block_nbytes
            for one in self.blocks[number + 1 :]:
                if one.memory is not memory or one.start != end or end - first >= offset + nbytes:
                    break
                end += self.block_nbytes
            taken = min(nbytes, end - first - offset)
            yield memory[first + offset : first + offset + taken]
            start += taken
            nbytes -= taken

    def write(self, start: int, source: Buffer) -> None:
        """Copy `source` in at byte `start`."""
        done = 0
        for piece in self.stretches(start, source.nbytes):
            np.copyto(piece, source[done : done + piece.nbytes])
            done += piece.nbytes

    def read(self, start: int, out: Buffer) -> None:
        """Fill `out` with the bytes from `start` on."""
        done = 0
        for piece in self.stretches(start, out.nbytes):
            np.copyto(out[done : done + piece.nbytes], piece)
            done += piece.nbytes


class PinnedPool:
    """A pool of blocks of one size. Safe to use from any thread.

    Parameters
    ----------
    capacity_nbytes
        Most bytes to take from the system, rounded down to whole blocks.
    block_nbytes
        Size of a block.
    pin
        Returns memory of the given size, pinned if that is possible. It is slow, so the pool calls
        it without a lock held, once for all blocks that a request lacks.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        block_nbytes: int = BLOCK_NBYTES,
        pin: Callable[[int], Buffer] = plain,
    ) -> None:
        self.block_nbytes = block_nbytes
        self.capacity_nbytes = capacity_nbytes // block_nbytes * block_nbytes
        self._pin = pin
        self._lock = threading.Lock()
        self._idle: list[Block] = []
        self._n_used = 0
        self._n_allocations = 0

    def size_of(self, nbytes: int) -> int:
        """Return the bytes that a value takes of the pool, in whole blocks."""
        return -(-nbytes // self.block_nbytes) * self.block_nbytes

    def take(self, nbytes: int) -> Blocks:
        """Return uninitialized memory. Return it with `give_back`.

        Raises
        ------
        MemoryError
            The pool or the system has too little memory left. Nothing was taken.
        """
        n_blocks = self.size_of(nbytes) // self.block_nbytes
        with self._lock:
            if (self._n_used + n_blocks) * self.block_nbytes > self.capacity_nbytes:
                raise MemoryError(
                    f"no room for {n_blocks} blocks of {self.block_nbytes} bytes: {self._n_used} "
                    f"are used of {self.capacity_nbytes // self.block_nbytes}"
                )
            # Count the blocks before they exist, so that threads that pin at the same time stay
            # within the capacity: idle blocks are always used first.
            self._n_used += n_blocks
            kept = max(0, len(self._idle) - n_blocks)
            blocks = self._idle[kept:]
            del self._idle[kept:]
        if len(blocks) < n_blocks:
            try:
                blocks += self._grow(n_blocks - len(blocks))
            except BaseException:
                with self._lock:
                    self._n_used -= n_blocks
                    self._idle += blocks
                raise
        return Blocks(nbytes, blocks, self.block_nbytes)

    def _grow(self, n_blocks: int) -> list[Block]:
        memory = self._pin(n_blocks * self.block_nbytes)
        with self._lock:
            self._n_allocations += 1
        return [Block(memory, start) for start in range(0, memory.nbytes, self.block_nbytes)]

    def give_back(self, blocks: Blocks) -> None:
        """Return the memory of a value to the pool. Repeated calls do nothing."""
        with self._lock:
            self._n_used -= len(blocks.blocks)
            self._idle += blocks.blocks
            blocks.blocks = []
            blocks.nbytes = 0

    @property
    def n_allocations(self) -> int:
        """Number of requests to the system for memory."""
        with self._lock:
            return self._n_allocations

    @property
    def used_nbytes(self) -> int:
        """Bytes in blocks that are in use."""
        with self._lock:
            return self._n_used * self.block_nbytes

    @property
    def idle_nbytes(self) -> int:
        """Bytes in free blocks, kept for later values."""
        with self._lock:
            return len(self._idle) * self.block_nbytes

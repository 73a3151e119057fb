"""Host memory in blocks of one size, which is allocated once and then used again and again.

Pinning memory costs about as much as copying it a few times over, and a pool of pinned memory that
is cut to order fragments until it is of no use. So values lie in as many blocks as they need, next
to each other or not, and a block that comes free fits whatever comes next. After a warm-up the
system is not asked for anything.

What pins is handed in: on a machine without a GPU the blocks are plain memory. What lies in a block
is not known here (`memory.host_tiers` keeps values in them).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from dask_gpurt.devices.host_memory.pool import Buffer

#: Copies over PCIe reach their full rate at a few hundred KiB; the last block of a value is half
#: empty on average.
BLOCK_NBYTES = 1 << 20


def plain(nbytes: int) -> Buffer:
    """Memory that is not pinned."""
    return np.empty(nbytes, dtype=np.uint8)


class Blocks:
    """Memory of one value: some blocks, of which the last may not be full.

    Attributes
    ----------
    nbytes
        Bytes that can be used: those that were asked for.
    blocks
        In the order of the bytes.
    """

    __slots__ = ("blocks", "nbytes")

    def __init__(self, nbytes: int, blocks: list[Buffer]) -> None:
        self.nbytes = nbytes
        self.blocks = blocks

    def stretches(self, start: int, nbytes: int) -> Iterator[Buffer]:
        """The contiguous pieces that bytes `start` to `start + nbytes` lie in, in order.

        Raises
        ------
        IndexError
            There are not so many bytes.
        """
        if not 0 <= start <= start + nbytes <= self.nbytes:
            raise IndexError(f"{nbytes} bytes from {start} of {self.nbytes}")
        while nbytes:
            block_nbytes = self.blocks[0].nbytes
            number, offset = divmod(start, block_nbytes)
            taken = min(nbytes, block_nbytes - offset)
            yield self.blocks[number][offset : offset + taken]
            start += taken
            nbytes -= taken

    def write(self, start: int, source: Buffer) -> None:
        """Copy `source` in, from byte `start` on."""
        done = 0
        for piece in self.stretches(start, source.nbytes):
            np.copyto(piece, source[done : done + piece.nbytes])
            done += piece.nbytes

    def read(self, start: int, out: Buffer) -> None:
        """Fill `out` from byte `start` on."""
        done = 0
        for piece in self.stretches(start, out.nbytes):
            np.copyto(out[done : done + piece.nbytes], piece)
            done += piece.nbytes


class PinnedPool:
    """Blocks of one size. Safe to use from any thread.

    Parameters
    ----------
    capacity_nbytes
        Most it may ever take from the system; what is no whole block is left out.
    block_nbytes
        Size of a block.
    pin
        Gives that many bytes, pinned where that means something. Slow, so it is called without a
        lock held, once for all blocks that a request lacks.
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
        self._idle: list[Buffer] = []
        self._n_used = 0
        self._n_allocations = 0

    def size_of(self, nbytes: int) -> int:
        """Bytes that so many take of the pool: whole blocks."""
        return -(-nbytes // self.block_nbytes) * self.block_nbytes

    def take(self, nbytes: int) -> Blocks:
        """Uninitialised memory; `give_back` it.

        Raises
        ------
        MemoryError
            So much is not left, or the system has no more. Nothing was taken.
        """
        n_blocks = self.size_of(nbytes) // self.block_nbytes
        with self._lock:
            if (self._n_used + n_blocks) * self.block_nbytes > self.capacity_nbytes:
                raise MemoryError(
                    f"{n_blocks} blocks of {self.block_nbytes} bytes wanted; {self._n_used} are "
                    f"used of {self.capacity_nbytes // self.block_nbytes}"
                )
            # Counted before they are there: what two threads pin at once stays within the cap,
            # because idle blocks are taken first.
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
        return Blocks(nbytes, blocks)

    def _grow(self, n_blocks: int) -> list[Buffer]:
        memory = self._pin(n_blocks * self.block_nbytes)
        with self._lock:
            self._n_allocations += 1
        return [
            memory[start : start + self.block_nbytes]
            for start in range(0, memory.nbytes, self.block_nbytes)
        ]

    def give_back(self, blocks: Blocks) -> None:
        """The memory is not used any more; giving it back twice does nothing more."""
        with self._lock:
            self._n_used -= len(blocks.blocks)
            self._idle += blocks.blocks
            blocks.blocks = []
            blocks.nbytes = 0

    @property
    def n_allocations(self) -> int:
        """Times the system was asked for memory."""
        with self._lock:
            return self._n_allocations

    @property
    def used_nbytes(self) -> int:
        """Bytes in blocks that somebody uses."""
        with self._lock:
            return self._n_used * self.block_nbytes

    @property
    def idle_nbytes(self) -> int:
        """Bytes in blocks that nobody uses; they stay for the next value."""
        with self._lock:
            return len(self._idle) * self.block_nbytes

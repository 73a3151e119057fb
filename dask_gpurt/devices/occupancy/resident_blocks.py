"""How many blocks of a kernel a multiprocessor holds at once, and what keeps it from holding more.

The four limits of NVIDIA's occupancy calculation, and AMD's, which are of the same form, over the
table of `devices.occupancy.architectures`. Computes only: a driver that is there has calls of its
own for this, and what to do with the result is for `devices.occupancy.planner`.

Two things are not modelled. The driver may give the L1 cache more of the array than the least;
then fewer blocks are resident than computed here, never more. And thread block clusters, whose
blocks are placed together.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from dask_gpurt.devices.occupancy.architectures import Architecture


class Limit(enum.Enum):
    """What keeps one more block from being resident."""

    THREADS = "threads"
    REGISTERS = "registers"
    SHARED_MEMORY = "shared memory"
    BLOCKS = "blocks"


@dataclass(frozen=True)
class Launch:
    """What a launch needs of a multiprocessor, for each of its blocks.

    Attributes
    ----------
    threads
        Threads of a block.
    registers
        32-bit registers of a thread, as compiled.
    static_nbytes, dynamic_nbytes
        Shared memory: declared in the kernel, and asked for by the launch.
    """

    threads: int
    registers: int
    static_nbytes: int = 0
    dynamic_nbytes: int = 0

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"a block of {self.threads} threads")
        if min(self.registers, self.static_nbytes, self.dynamic_nbytes) < 0:
            raise ValueError(f"less than nothing in {self}")


@dataclass(frozen=True)
class Occupancy:
    """How many blocks are resident on each multiprocessor, if there are enough of them.

    Attributes
    ----------
    allowed
        Blocks that each limit alone would let in.
    """

    allowed: Mapping[Limit, int]

    @property
    def blocks(self) -> int:
        """Resident blocks; 0 for a launch that the driver would refuse."""
        return min(self.allowed.values())

    @property
    def binding(self) -> frozenset[Limit]:
        """The limits that are reached first."""
        return frozenset(limit for limit, n in self.allowed.items() if n == self.blocks)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def charged_nbytes(architecture: Architecture, launch: Launch) -> int:
    """Shared memory that a block takes of its multiprocessor.

    What it asked for and what the driver reserves, rounded up to the granule: the rule of
    `cuda_occupancy.h`. A block that uses none is charged a granule here, which changes no result:
    more of those would fit than may be resident.
    """
    asked = launch.static_nbytes + launch.dynamic_nbytes + architecture.shared_reserved_nbytes
    return _round_up(max(1, asked), architecture.shared_granule_nbytes)


def warps_of(architecture: Architecture, launch: Launch) -> int:
    """Warps of a block; the last may be half empty."""
    return -(-launch.threads // architecture.warp_size)


def registers_of_warp(architecture: Architecture, launch: Launch) -> int:
    """Registers that a warp takes of its partition.

    ``registers * warp_size``, rounded up to the granule. A kernel that uses none is charged for
    one, which never binds.
    """
    wanted = max(1, launch.registers) * architecture.warp_size
    return _round_up(wanted, architecture.register_granule)


def occupancy(architecture: Architecture, launch: Launch) -> Occupancy:
    """Resident blocks of a launch, by the rules of `cuda_occupancy.h` (AMD's are of the same form).

    Threads: whole warps are resident. ``warps_per_sm // warps``, with ``warps`` the warps of a
    block.

    Registers: a warp takes `registers_of_warp` out of one partition of the register file. So
    ``registers_per_sm // partitions // registers_of_warp`` warps fit in a partition, and those of
    all partitions, divided by ``warps`` and rounded down, are the blocks of the multiprocessor.
    The simpler ``registers_per_sm // registers of a block`` lets in blocks that the hardware does
    not: with 40 registers a thread, 51 warps instead of 48. One block must fit with its warps
    rounded up to all partitions.

    Shared memory: ``shared_per_sm_nbytes // charged_nbytes``.

    Blocks: a fixed number; and where barriers are counted (gfx90a), one for each block that has
    more than one warp.
    """
    warps = warps_of(architecture, launch)
    by_threads = 0
    if launch.threads <= architecture.threads_per_block:
        by_threads = architecture.warps_per_sm // warps

    of_warp = registers_of_warp(architecture, launch)
    of_block = of_warp * _round_up(warps, architecture.partitions)
    by_registers = 0
    if (
        launch.registers <= architecture.registers_per_thread
        and of_block <= architecture.registers_per_block
    ):
        partition = architecture.registers_per_sm // architecture.partitions
        by_registers = partition // of_warp * architecture.partitions // warps

    by_shared = 0
    asked = launch.static_nbytes + launch.dynamic_nbytes
    if asked <= architecture.shared_per_block_opt_in_nbytes:
        by_shared = architecture.shared_per_sm_nbytes // charged_nbytes(architecture, launch)

    by_blocks = architecture.blocks_per_sm
    if warps > 1 and architecture.barriers_per_sm is not None:
        by_blocks = min(by_blocks, architecture.barriers_per_sm)
    return Occupancy(
        {
            Limit.THREADS: by_threads,
            Limit.REGISTERS: by_registers,
            Limit.SHARED_MEMORY: by_shared,
            Limit.BLOCKS: by_blocks,
        }
    )


def shortages(
    architecture: Architecture, launch: Launch, blocks: int, other: Launch
) -> frozenset[Limit]:
    """What there is not enough of for a block of `other` beside so many of `launch`.

    Warps are taken to be spread evenly over the partitions of the register file.
    """
    warps, other_warps = warps_of(architecture, launch), warps_of(architecture, other)
    partition = architecture.registers_per_sm // architecture.partitions
    registers = 0
    for one, n_warps in ((launch, blocks * warps), (other, other_warps)):
        in_fullest = -(-n_warps // architecture.partitions)
        registers += in_fullest * registers_of_warp(architecture, one)
    shared = blocks * charged_nbytes(architecture, launch) + charged_nbytes(architecture, other)
    most_blocks = occupancy(architecture, launch).allowed[Limit.BLOCKS]
    short = {
        Limit.THREADS: blocks * warps + other_warps > architecture.warps_per_sm,
        Limit.REGISTERS: registers > partition,
        Limit.SHARED_MEMORY: shared > architecture.shared_per_sm_nbytes,
        Limit.BLOCKS: blocks + 1 > most_blocks,
    }
    return frozenset(limit for limit, is_short in short.items() if is_short)

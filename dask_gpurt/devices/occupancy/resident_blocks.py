"""A calculation of how many blocks of a kernel a multiprocessor holds, and which limit binds.

It applies the four limits of NVIDIA's occupancy calculation to the table of
`devices.occupancy.architectures`. AMD's limits have the same form. With a GPU, the driver has calls
for this. `devices.occupancy.planner` decides what to do with the result.

The calculation leaves out two things. The driver may give the L1 cache more than the minimum; then
fewer blocks are resident than computed, never more. The blocks of a thread block cluster are placed
together.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from dask_gpurt.devices.occupancy.architectures import Architecture


class Limit(enum.Enum):
    """A resource that limits the number of resident blocks."""

    THREADS = "threads"
    REGISTERS = "registers"
    SHARED_MEMORY = "shared memory"
    BLOCKS = "blocks"


@dataclass(frozen=True)
class Launch:
    """The resources that each block of a launch needs.

    Attributes
    ----------
    threads
        Threads of a block.
    registers
        32-bit registers of a thread in the compiled kernel.
    static_nbytes, dynamic_nbytes
        Shared memory declared in the kernel, and requested by the launch.
    """

    threads: int
    registers: int
    static_nbytes: int = 0
    dynamic_nbytes: int = 0

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"a block has at least one thread, not {self.threads}")
        if min(self.registers, self.static_nbytes, self.dynamic_nbytes) < 0:
            raise ValueError(f"negative resource in {self}")


@dataclass(frozen=True)
class Occupancy:
    """The number of blocks resident on each multiprocessor, if the launch has enough of them.

    Attributes
    ----------
    allowed
        Number of blocks that each limit alone allows.
    """

    allowed: Mapping[Limit, int]

    @property
    def blocks(self) -> int:
        """Resident blocks; 0 if the driver would refuse the launch."""
        return min(self.allowed.values())

    @property
    def binding(self) -> frozenset[Limit]:
        """The limits that allow the fewest blocks."""
        return frozenset(limit for limit, n in self.allowed.items() if n == self.blocks)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def charged_nbytes(architecture: Architecture, launch: Launch) -> int:
    """Return the shared memory that a block takes of its multiprocessor.

    This is the block's own memory and the driver's reserve, rounded up to the granule, as in
    `cuda_occupancy.h`. A block without shared memory is charged one granule. This changes no
    result: more blocks of one granule fit than may be resident.
    """
    asked = launch.static_nbytes + launch.dynamic_nbytes + architecture.shared_reserved_nbytes
    return _round_up(max(1, asked), architecture.shared_granule_nbytes)


def warps_of(architecture: Architecture, launch: Launch) -> int:
    """Return the number of warps of a block. The last warp may be partly empty."""
    return -(-launch.threads // architecture.warp_size)


def registers_of_warp(architecture: Architecture, launch: Launch) -> int:
    """Return the registers that a warp takes of its partition.

    ``registers * warp_size``, rounded up to the granule. A kernel without registers is charged for
    one register, which never limits it.
    """
    wanted = max(1, launch.registers) * architecture.warp_size
    return _round_up(wanted, architecture.register_granule)


def occupancy(architecture: Architecture, launch: Launch) -> Occupancy:
    """Compute the resident blocks of a launch by the rules of `cuda_occupancy.h`.

    Threads: whole warps are resident, so ``warps_per_sm // warps``, with ``warps`` of a block.

    Registers: a warp takes `registers_of_warp` from one partition of the register file. So
    ``registers_per_sm // partitions // registers_of_warp`` warps fit into a partition. The warps of
    all partitions, divided by ``warps`` and rounded down, give the number of blocks. The simpler
    ``registers_per_sm // registers of a block`` allows blocks that the hardware does not: with 40
    registers a thread, 51 warps instead of 48. One block must fit with its warps rounded up to all
    partitions.

    Shared memory: ``shared_per_sm_nbytes // charged_nbytes``.

    Blocks: a fixed number. If barriers are limited (gfx90a), each block with more than one warp
    also needs one.
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
    """Return the resources that a block of `other` lacks beside this many blocks of `launch`.

    The calculation spreads warps evenly over the partitions of the register file.
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

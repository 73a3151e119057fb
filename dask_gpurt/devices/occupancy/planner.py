"""How much shared memory to ask for, so that fewer blocks of a kernel are resident at once.

A block stays where it is until it ends. A kernel of communication that finds every multiprocessor
full therefore waits for blocks of computation to end, and competes with those that wait. What a
launch can change without a change to its kernel is its dynamic shared memory: asking for more than
the kernel uses leaves room for fewer blocks. `plan` says how much to ask for so that k blocks
stay; `plan_beside`, so that a given kernel of communication fits. Both may refuse, and say why.

Decides only: nothing here asks a driver, and nothing launches; `devices.occupancy.shaping` does.
The arithmetic of residency is in `devices.occupancy.resident_blocks`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Literal

from dask_gpurt.devices.occupancy.architectures import Architecture
from dask_gpurt.devices.occupancy.resident_blocks import (
    Launch,
    Limit,
    Occupancy,
    occupancy,
    shortages,
)


class Reason(enum.Enum):
    """Why a launch is left as it is."""

    NOTHING_PENDING = "no communication is pending"
    DOES_NOT_RUN = "the launch exceeds what a block may have"
    FEW_ALREADY = "no more blocks than that are resident anyway"
    FITS_ALREADY = "the other kernel's block fits beside the resident ones as it is"
    BLOCK_MAXIMUM = "a block may not have that much shared memory"
    NO_SUCH_AMOUNT = "shared memory is given out too coarsely for that number of blocks"
    NO_ROOM = "the other kernel's block does not fit beside even one block"


@dataclass(frozen=True)
class Plan:
    """What to launch with.

    Attributes
    ----------
    dynamic_nbytes
        Dynamic shared memory to launch with; never less than the launch asked for by itself.
    most_nbytes
        The most that leaves as many blocks. More than needed only takes from the L1 cache.
    blocks
        Blocks resident then.
    unshaped_blocks
        Blocks resident if nothing is done.
    free_nbytes
        Shared memory of the multiprocessor that no block has then.
    needs_opt_in
        Whether the kernel must be allowed this much before it is launched.
    """

    dynamic_nbytes: int
    most_nbytes: int
    blocks: int
    unshaped_blocks: int
    free_nbytes: int
    needs_opt_in: bool


@dataclass(frozen=True)
class Refusal:
    """A launch to leave as it is, and why.

    Attributes
    ----------
    limits
        What binds at the number of blocks in question, where that is the reason.
    blocks
        Blocks resident without a change.
    needed_nbytes
        Dynamic shared memory that would have been needed, where its size is the reason.
    """

    reason: Reason
    blocks: int
    limits: frozenset[Limit] = frozenset()
    needed_nbytes: int | None = None

    def __str__(self) -> str:
        names = " and ".join(sorted(limit.value for limit in self.limits))
        return self.reason.value + (f" ({names})" if names else "")


def plan(
    architecture: Architecture,
    launch: Launch,
    leave: int | Literal["fewest", "most"],
    *,
    pending: bool,
    opt_in: bool = True,
) -> Plan | Refusal:
    """The dynamic shared memory that leaves exactly so many blocks resident.

    ``u``, what a block must be charged, is the least multiple of the granule of which ``leave + 1``
    do not fit: ``u = (shared_per_sm // (leave + 1) // granule + 1) * granule``. Of all amounts
    that leave as many blocks it takes the least from the L1 cache, and leaves the most shared
    memory to others.

    Parameters
    ----------
    leave
        Blocks to leave on each multiprocessor, one or more; or the fewest, or the most below
        what is resident now, that there is an amount for.
    pending
        Whether communication waits or runs. If none does, shaping could only cost.
    opt_in
        Whether the kernel may be allowed more than the usual 48 KiB.

    Raises
    ------
    ValueError
        `leave` is less than one.
    """
    if not isinstance(leave, str) and leave < 1:
        raise ValueError(f"leaves {leave} blocks: one has to be resident to run at all")
    now = occupancy(architecture, launch)
    if not pending:
        return Refusal(Reason.NOTHING_PENDING, now.blocks)
    if now.blocks == 0:
        return Refusal(Reason.DOES_NOT_RUN, 0, now.binding)
    if not isinstance(leave, str):
        return _exactly(architecture, launch, now, leave, opt_in)
    found: Plan | Refusal = Refusal(Reason.FEW_ALREADY, now.blocks, now.binding)
    choices = range(1, now.blocks)
    for blocks in choices if leave == "fewest" else reversed(choices):
        found = _exactly(architecture, launch, now, blocks, opt_in)
        if isinstance(found, Plan):
            break
    return found


def _exactly(
    architecture: Architecture, launch: Launch, now: Occupancy, blocks: int, opt_in: bool
) -> Plan | Refusal:
    if now.blocks <= blocks:
        return Refusal(Reason.FEW_ALREADY, now.blocks, now.binding)
    capacity, granule = architecture.shared_per_sm_nbytes, architecture.shared_granule_nbytes
    charged = (capacity // (blocks + 1) // granule + 1) * granule
    fixed = architecture.shared_reserved_nbytes + launch.static_nbytes
    if opt_in:
        most_of_block = architecture.shared_per_block_opt_in_nbytes
    else:
        most_of_block = architecture.shared_per_block_nbytes
    # Fills its last granule: less would be charged the same.
    dynamic = charged - fixed
    if capacity // charged < blocks:
        return Refusal(Reason.NO_SUCH_AMOUNT, now.blocks)
    if dynamic + launch.static_nbytes > most_of_block:
        return Refusal(Reason.BLOCK_MAXIMUM, now.blocks, needed_nbytes=dynamic)
    return Plan(
        dynamic_nbytes=dynamic,
        most_nbytes=min(
            capacity // blocks // granule * granule - fixed, most_of_block - launch.static_nbytes
        ),
        blocks=blocks,
        unshaped_blocks=now.blocks,
        free_nbytes=capacity - blocks * charged,
        needs_opt_in=dynamic + launch.static_nbytes > architecture.shared_per_block_nbytes,
    )


def plan_beside(
    architecture: Architecture,
    launch: Launch,
    other: Launch,
    *,
    pending: bool,
    on_turnover: bool = False,
    opt_in: bool = True,
) -> Plan | Refusal:
    """The gentlest plan for `launch` that leaves room for a block of `other`.

    Shared memory is not the only room that a block needs: of a communication library's kernel,
    the registers may not fit where its shared memory would.

    Parameters
    ----------
    other
        The kernel of communication.
    on_turnover
        Room has to be there once a resident block has ended, instead of at once. Weaker, and
        enough where `other` has a higher priority than the blocks that wait.
    """
    now = occupancy(architecture, launch)
    if not pending:
        return Refusal(Reason.NOTHING_PENDING, now.blocks)
    if now.blocks == 0 or occupancy(architecture, other).blocks == 0:
        return Refusal(Reason.DOES_NOT_RUN, now.blocks)
    ended = 1 if on_turnover else 0
    if not shortages(architecture, launch, now.blocks - ended, other):
        return Refusal(Reason.FITS_ALREADY, now.blocks)
    limits = shortages(architecture, launch, 1 - ended, other)
    for blocks in range(now.blocks - 1, 0, -1):
        found = _exactly(architecture, launch, now, blocks, opt_in)
        if isinstance(found, Refusal):
            continue
        shaped = replace(launch, dynamic_nbytes=found.dynamic_nbytes)
        limits = shortages(architecture, shaped, blocks - ended, other)
        if not limits:
            return found
    return Refusal(Reason.NO_ROOM, now.blocks, limits)

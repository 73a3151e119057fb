"""Plans for the shared memory of a launch, so that fewer of its blocks are resident at once.

A block stays on its multiprocessor until it ends. If computation fills every multiprocessor, a
communication kernel waits for blocks to end and competes with other waiting blocks. A launch can
change its dynamic shared memory without a change to its kernel. If it requests more than the kernel
uses, fewer blocks fit. `plan` returns how much to request so that k blocks stay resident.
`plan_beside` returns how much to request so that a given communication kernel fits. Both may
refuse, with a reason.

This module only decides. `devices.occupancy.shaping` asks drivers and launches kernels.
`devices.occupancy.resident_blocks` computes how many blocks are resident.
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
    """Reasons to leave a launch unchanged."""

    NOTHING_PENDING = "no communication is pending"
    DOES_NOT_RUN = "the launch exceeds what a block may have"
    FEW_ALREADY = "no more blocks than that are resident anyway"
    FITS_ALREADY = "the other kernel's block fits beside the resident ones as it is"
    BLOCK_MAXIMUM = "a block may not have that much shared memory"
    NO_SUCH_AMOUNT = "shared memory is given out too coarsely for that number of blocks"
    NO_ROOM = "the other kernel's block does not fit beside even one block"


@dataclass(frozen=True)
class LaunchPlan:
    """The shared memory of a shaped launch, and its effect.

    Attributes
    ----------
    dynamic_nbytes
        Dynamic shared memory to request; never less than the original request.
    most_nbytes
        The largest request with the same number of blocks. It takes more of the L1 cache for no
        gain.
    blocks
        Resident blocks with the plan.
    unshaped_blocks
        Resident blocks without the plan.
    free_nbytes
        Shared memory of the multiprocessor that stays free with the plan.
    needs_opt_in
        The kernel must opt in to this much shared memory before the launch.
    """

    dynamic_nbytes: int
    most_nbytes: int
    blocks: int
    unshaped_blocks: int
    free_nbytes: int
    needs_opt_in: bool


@dataclass(frozen=True)
class Refusal:
    """A launch to leave unchanged, with the reason.

    Attributes
    ----------
    limits
        The limits that bind at the number of blocks in question, if they are the reason.
    blocks
        Resident blocks without a change.
    needed_nbytes
        Dynamic shared memory that a plan would need, if its size is the reason.
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
) -> LaunchPlan | Refusal:
    """Plan the dynamic shared memory that leaves exactly this number of blocks resident.

    A block must be charged ``u``: the smallest multiple of the granule of which ``leave + 1`` do
    not fit, ``u = (shared_per_sm // (leave + 1) // granule + 1) * granule``. Among all amounts with
    the same number of blocks, this one takes the least from the L1 cache and leaves the most shared
    memory free.

    Parameters
    ----------
    leave
        Resident blocks on each multiprocessor, at least one. `"fewest"` or `"most"` take the
        smallest or largest number, below the current one, for which a plan exists.
    pending
        Communication waits or runs. Without it, shaping would only cost time.
    opt_in
        The kernel may opt in to more than the usual 48 KiB.

    Raises
    ------
    ValueError
        `leave` is less than one.
    """
    if not isinstance(leave, str) and leave < 1:
        raise ValueError(f"cannot leave {leave} resident blocks: at least one must run")
    now = occupancy(architecture, launch)
    if not pending:
        return Refusal(Reason.NOTHING_PENDING, now.blocks)
    if now.blocks == 0:
        return Refusal(Reason.DOES_NOT_RUN, 0, now.binding)
    if not isinstance(leave, str):
        return _exactly(architecture, launch, now, leave, opt_in)
    found: LaunchPlan | Refusal = Refusal(Reason.FEW_ALREADY, now.blocks, now.binding)
    choices = range(1, now.blocks)
    for blocks in choices if leave == "fewest" else reversed(choices):
        found = _exactly(architecture, launch, now, blocks, opt_in)
        if isinstance(found, LaunchPlan):
            break
    return found


def _exactly(
    architecture: Architecture, launch: Launch, now: Occupancy, blocks: int, opt_in: bool
) -> LaunchPlan | Refusal:
    if now.blocks <= blocks:
        return Refusal(Reason.FEW_ALREADY, now.blocks, now.binding)
    capacity, granule = architecture.shared_per_sm_nbytes, architecture.shared_granule_nbytes
    charged = (capacity // (blocks + 1) // granule + 1) * granule
    fixed = architecture.shared_reserved_nbytes + launch.static_nbytes
    if opt_in:
        most_of_block = architecture.shared_per_block_opt_in_nbytes
    else:
        most_of_block = architecture.shared_per_block_nbytes
    # Fill the last granule: a smaller request is charged the same.
    dynamic = charged - fixed
    if capacity // charged < blocks:
        return Refusal(Reason.NO_SUCH_AMOUNT, now.blocks)
    if dynamic + launch.static_nbytes > most_of_block:
        return Refusal(Reason.BLOCK_MAXIMUM, now.blocks, needed_nbytes=dynamic)
    return LaunchPlan(
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
) -> LaunchPlan | Refusal:
    """Plan for `launch` with the most resident blocks that leave room for a block of `other`.

    A block needs more than shared memory: the registers of a communication kernel may not fit even
    if its shared memory does.

    Parameters
    ----------
    other
        The communication kernel.
    on_turnover
        Require room only after one resident block has ended. This weaker condition is enough if
        `other` has a higher priority than the waiting blocks.
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

"""The memory of the shards of one run on one worker, and which of them share pages."""

from __future__ import annotations

from dask_gpurt.devices.host_memory.pool import Buffer, HostPool, Tenant

#: The lanes of a run may keep this share of the budget for shards in pages that they still fill.
_OPEN_SHARE = 1 / 8
#: A lane holds a page, however little arrives for its slots. With so many lanes, the shards of one
#: are already a small part of all.
_MOST_LANES = 64


class RunMemory:
    """Host memory for the shards of one run.

    Shards of the same partitions are freed together, so each lane of the pool has adjacent slots.
    One lane for each slot would be too many: each slot would hold a page of its own, and sorted
    data has few shards for a slot.

    Parameters
    ----------
    pool
        Pool for shards that stay here.
    outgoing
        Pool that peers of this host can read.
    slots
        First slot of this worker's output partitions, and one past the last.
    limit_nbytes
        Budget for the shards of this worker.

    Attributes
    ----------
    slots_per_lane
        Shards share pages if their first slots, divided by this, are equal.
    """

    def __init__(
        self, pool: HostPool, outgoing: HostPool, slots: tuple[int, int], limit_nbytes: int
    ) -> None:
        self._pool, self._outgoing = pool, outgoing
        n_lanes = min(_MOST_LANES, int(_OPEN_SHARE * limit_nbytes) // pool.lane_nbytes)
        self.slots_per_lane = max(1, -(-(slots[1] - slots[0]) // max(1, n_lanes)))
        self._tenant = Tenant()

    def stored(self, nbytes: int, first_slot: int) -> Buffer:
        """Return memory for a shard that stays here and begins at this slot."""
        return self._tenant.empty(self._pool, nbytes, first_slot // self.slots_per_lane)

    def outgoing(self, nbytes: int) -> Buffer:
        """Return memory for an outgoing shard, where peers of this host can read it."""
        return self._tenant.empty(self._outgoing, nbytes, "outgoing")

    def all_stored(self) -> None:
        """Note that all shards are here: pages that lanes would fill next are free for outputs."""
        self._tenant.close_lanes()

    def close(self) -> None:
        """Release the pages that lanes fill. See `Tenant.close`."""
        self._tenant.close()

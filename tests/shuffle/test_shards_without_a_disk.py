"""Shards that no disk takes stay in memory, and the store says when that is needed."""

from __future__ import annotations

import errno

from dask_gpurt.shuffle.spill_file import SpillFile
from tests.shuffle.shard_rig import ROW_NBYTES, Rig, make_rows, read_slot, spread_shards


def test_store_without_a_disk_keeps_shards_in_memory(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=0, may_spill=False)
    rig.store.add(spread_shards(3))
    assert not rig.store.is_over_limit
    rig.store.make_room()
    assert rig.store.spilled_nbytes == 0
    rig.store.seal()
    assert [read_slot(rig.store, slot) for slot in range(3)] == [
        make_rows(0, s, 2) for s in range(3)
    ]


def test_shards_are_stuck_once_memory_is_short_too(tmp_path):
    class Disk(SpillFile):
        def append(self, buffer):
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().append(buffer)

    is_full = True
    rig = Rig(tmp_path, limit_nbytes=2 * ROW_NBYTES, open_file=Disk)
    rig.store.add(spread_shards(3))
    rig.store.make_room()
    # Over the limit, but the process has memory.
    assert rig.store.why_stuck() is None
    rig.budget.lower_limit(ROW_NBYTES)
    assert rig.store.why_stuck() == "No space left on device"
    is_full = False
    rig.store.try_disk_again()
    rig.store.make_room()
    assert rig.store.why_stuck() is None
    assert rig.store.spilled_nbytes > 0


def test_damaged_disk_is_not_tried_again(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=2 * ROW_NBYTES, may_spill=False)
    rig.store.add(spread_shards(3))
    rig.budget.lower_limit(ROW_NBYTES)
    rig.store.try_disk_again()
    rig.store.make_room()
    assert "damaged" in rig.store.why_stuck()
    assert rig.store.spilled_nbytes == 0

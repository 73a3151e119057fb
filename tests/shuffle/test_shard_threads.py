"""A store of shards stays correct while several threads use it at the same time."""

from __future__ import annotations

import threading

import pytest

from dask_gpurt.errors import (
    PartitionReleasedError,
)
from dask_gpurt.metrics import Counters
from dask_gpurt.shuffle.spill_file import SpillFile
from tests.shuffle.shard_rig import (
    PATIENCE_S,
    ROW_NBYTES,
    Rig,
    TripleFrames,
    in_thread,
    make_rows,
    make_shard,
    read_slot,
    spread_shards,
)

# ------------------------------------------------------------------ at the same time


class SlowDisk(SpillFile):
    """A file whose first write waits for the test."""

    begun: threading.Event
    may_end: threading.Event

    @classmethod
    def new(cls):
        events = {"begun": threading.Event(), "may_end": threading.Event()}
        return type("SlowDisk", (cls,), events)

    def append(self, buffer):
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return super().append(buffer)


@pytest.mark.parametrize("packed", [False, True])
def test_a_shard_freed_during_its_write_leaves_nothing(tmp_path, packed):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add([make_shard(0, 0, [2], packed=packed)])
    rig.store.seal()
    spilling = in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    rig.store.release(0)
    assert rig.budget.used_nbytes == 0
    disk.may_end.set()
    spilling()
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == rig.budget.least_nbytes == 0
    assert rig.store.spilled_nbytes == 0
    assert rig.files == []


def test_a_shard_freed_after_its_write_leaves_no_file(tmp_path):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add([make_shard(0, 0, [2])])
    rig.store.seal()
    spilling = in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    assert rig.budget.used_nbytes == 2 * ROW_NBYTES, "in memory until it is on disk"
    disk.may_end.set()
    spilling()
    assert len(rig.files) == 1
    rig.store.release(0)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0
    assert rig.files == []


def test_a_shard_freed_before_its_write_is_not_written(tmp_path):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    near, far = spread_shards(2)
    rig.store.add([near, far])
    rig.store.seal()
    spilling = in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    rig.store.release(0)
    disk.may_end.set()
    spilling()
    assert not near.is_resident
    assert near.on_disk is None
    assert rig.store.spilled_nbytes == far.nbytes
    assert read_slot(rig.store, 1) == make_rows(0, 1, 2)
    rig.store.release(1)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0
    assert rig.files == []


@pytest.mark.parametrize("packed", [False, True])
def test_shard_is_readable_during_its_write(tmp_path, packed):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add([make_shard(0, 0, [2, 1], packed=packed)])
    rig.store.seal()
    spilling = in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    assert read_slot(rig.store, 0) == make_rows(0, 0, 2)
    disk.may_end.set()
    spilling()
    assert read_slot(rig.store, 1) == make_rows(0, 1, 1)
    for slot in range(2):
        rig.store.release(slot)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0
    assert rig.files == []


def test_shards_that_arrive_during_a_write_are_kept(tmp_path):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add([make_shard(0, 0, [2])])
    spilling = in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    rig.store.add([make_shard(1, 0, [3])])
    disk.may_end.set()
    spilling()
    assert rig.budget.used_nbytes == 3 * ROW_NBYTES
    rig.store.make_room()
    rig.store.seal()
    assert read_slot(rig.store, 0) == make_rows(0, 0, 2) + make_rows(1, 0, 3)


def test_only_one_thread_spills_at_a_time(tmp_path):
    """The second thread finds enough room when its turn comes."""
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add(spread_shards(4))
    first = in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    second = in_thread(rig.store.make_room)
    disk.may_end.set()
    first()
    second()
    assert rig.store.spilled_nbytes == 8 * ROW_NBYTES
    assert len(rig.files) == 1


def test_store_closed_during_a_write_leaves_nothing(tmp_path, caplog):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add(spread_shards(3))
    spilling = in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    closing = in_thread(rig.store.close)
    assert rig.budget.emptied.wait(PATIENCE_S)
    disk.may_end.set()
    spilling()
    closing()
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == rig.budget.least_nbytes == 0
    assert not rig.directory.exists()
    assert not caplog.messages, "the disk is not full, the run is over"


def test_closing_after_an_uncounted_write_leaves_nothing(tmp_path):
    class ClosingCounters(Counters):
        def add(self, **amounts):
            super().add(**amounts)
            if amounts.get("spilled_nbytes") and not closing:
                closing.append(in_thread(rig.store.close))
                assert rig.budget.emptied.wait(PATIENCE_S)

    closing = []
    rig = Rig(tmp_path, limit_nbytes=0, counters=ClosingCounters())
    rig.store.add(spread_shards(2))
    rig.store.make_room()
    closing[0]()
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == rig.budget.least_nbytes == 0
    assert not rig.directory.exists()


def test_store_is_closed_before_the_first_file_is_made(tmp_path, caplog):
    def open_file(path):
        if not closing:
            closing.append(in_thread(rig.store.close))
            assert rig.budget.emptied.wait(PATIENCE_S)
        return SpillFile(path)

    closing = []
    rig = Rig(tmp_path, limit_nbytes=0, open_file=open_file)
    rig.store.add(spread_shards(2))
    rig.store.make_room()
    closing[0]()
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0
    assert not rig.directory.exists()
    assert not caplog.messages, "the disk is not full, the run is over"


@pytest.mark.parametrize("is_spilled", [False, True])
def test_closing_during_a_read_leaves_the_budget_empty(tmp_path, is_spilled):
    """The budget outlives the run: leaked bytes would be missing for every later run."""

    class ClosingFrames(TripleFrames):
        def unpack(self, layout_key, packed):
            rig.store.close()
            return super().unpack(layout_key, packed)

    rig = Rig(tmp_path, limit_nbytes=0, adapter=ClosingFrames())
    rig.store.add([make_shard(0, 0, [2], packed=True)])
    if is_spilled:
        rig.store.make_room()
    rig.store.seal()
    try:
        found = read_slot(rig.store, 0)
    except PartitionReleasedError:
        pass  # as valid as the rows
    else:
        assert found == make_rows(0, 0, 2)
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == rig.budget.least_nbytes == 0


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_read_that_outlives_its_store_is_discarded(tmp_path, is_reused):
    """The file is closed during the read, and its descriptor may belong to another file."""

    class ClosingFile(SpillFile):
        def read_into(self, buffer, extent):
            rig.store.close()
            if is_reused:
                buffer[:] = 0
            else:
                super().read_into(buffer, extent)

    rig = Rig(tmp_path, limit_nbytes=0, open_file=ClosingFile)
    rig.store.add([make_shard(0, 0, [2])])
    rig.store.make_room()
    rig.store.seal()
    with pytest.raises(PartitionReleasedError):
        rig.store.pieces(0)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0


def test_shard_read_by_two_threads_counts_once(tmp_path):
    class MeetingFrames(TripleFrames):
        def unpack(self, layout_key, packed):
            meeting.wait(PATIENCE_S)
            return super().unpack(layout_key, packed)

    meeting = threading.Barrier(2)
    rig = Rig(tmp_path, limit_nbytes=0, adapter=MeetingFrames())
    rig.store.add([make_shard(0, 0, [2, 3])])
    rig.store.make_room()
    rig.store.seal()
    readers = [in_thread(read_slot, rig.store, slot) for slot in (0, 1)]
    assert [reader() for reader in readers] == [make_rows(0, 0, 2), make_rows(0, 1, 3)]
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == 5 * ROW_NBYTES


def test_a_shard_that_is_freed_while_it_is_read_is_not_kept(tmp_path):
    class ReleasingFrames(TripleFrames):
        def unpack(self, layout_key, packed):
            rig.store.release(0)
            return super().unpack(layout_key, packed)

    rig = Rig(tmp_path, limit_nbytes=0, adapter=ReleasingFrames())
    rig.store.add([make_shard(0, 0, [2])])
    rig.store.make_room()
    rig.store.seal()
    assert read_slot(rig.store, 0) == make_rows(0, 0, 2)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0
    assert rig.files == []


def test_shard_evicted_during_a_read_has_all_rows(tmp_path):
    class EvictingFrames(TripleFrames):
        def unpack(self, layout_key, packed):
            rig.store.make_room()
            return super().unpack(layout_key, packed)

    rig = Rig(tmp_path, limit_nbytes=0, adapter=EvictingFrames())
    rig.store.add([make_shard(0, 0, [2, 1], packed=True)])
    rig.store.seal()
    assert read_slot(rig.store, 0) == make_rows(0, 0, 2)
    assert read_slot(rig.store, 1) == make_rows(0, 1, 1)
    for slot in range(2):
        rig.store.release(slot)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0

"""Small shards become few without a change of any output, and in the order of the inputs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dask_gpurt.errors import ShardStorageError
from dask_gpurt.shuffle import merging
from tests.shuffle.shard_rig import (
    PATIENCE_S,
    ROW_NBYTES,
    MergingFrames,
    Rig,
    in_thread,
    make_joined_shard,
    make_rows,
    make_shard,
    read_slot,
)

N_SLOTS = 10


@pytest.fixture(autouse=True)
def merge_few(monkeypatch):
    monkeypatch.setattr(merging, "LEAST_PIECES", 1)


def rig_with(tmp_path, adapter, sources, **options):
    rig = Rig(tmp_path, adapter=adapter, **options)
    for source in sources:
        rig.store.add([make_shard(source, 0, [1 + source % 3] * N_SLOTS)])
    return rig


def expected(slot, sources):
    return [row for s in sorted(sources) for row in make_rows(s, slot, 1 + s % 3)]


def test_all_rows_of_a_slot_are_one_piece(tmp_path):
    rig = rig_with(tmp_path, MergingFrames(), sources := [5, 1, 4, 30])
    rig.store.seal()
    for slot in range(N_SLOTS):
        assert len(rig.store.pieces(slot)) == 1
        assert read_slot(rig.store, slot) == expected(slot, sources)


def test_inputs_of_two_tasks_that_alternate_are_one_piece(tmp_path):
    rig = Rig(tmp_path, adapter=MergingFrames())
    for sources in ([0, 2, 4], [1, 3]):
        counts_of = {source: [1 + source % 3] * N_SLOTS for source in sources}
        rig.store.add([make_joined_shard(counts_of, 0)])
    rig.store.seal()
    for slot in range(N_SLOTS):
        assert len(rig.store.pieces(slot)) == 1
        assert read_slot(rig.store, slot) == expected(slot, range(5))


def test_inputs_of_tasks_one_after_the_other_stay_as_they_are(tmp_path, monkeypatch):
    """Their pieces are large enough, as the rows of all inputs of a task are one piece."""
    monkeypatch.setattr(merging, "SMALL_PIECE_NBYTES", 4 * ROW_NBYTES)
    adapter = MergingFrames()
    rig = Rig(tmp_path, adapter=adapter)
    for sources in ([0, 1], [2, 3]):
        counts_of = dict.fromkeys(sources, [2] * N_SLOTS)
        rig.store.add([make_joined_shard(counts_of, 0)])
    rig.store.seal()
    assert adapter.n_merged == 0
    assert len(rig.store.pieces(0)) == 2


@pytest.fixture
def one_slot_each(monkeypatch):
    """Merged shards have one slot each; of real size, they have as many as fit."""
    monkeypatch.setattr(merging, "cut_shards", lambda *_: [(n, n + 1) for n in range(10)])


def test_slots_are_freed_one_after_the_other(tmp_path, one_slot_each):
    """A small input's shard would stay until its last slot is read."""
    rig = rig_with(tmp_path, MergingFrames(), range(6))
    rig.store.seal()
    kept = [rig.store.resident_nbytes]
    for slot in range(N_SLOTS):
        rig.store.release(slot)
        kept.append(rig.store.resident_nbytes)
    assert np.diff(kept).tolist() == [-kept[0] // N_SLOTS] * N_SLOTS


def test_spilled_slots_are_read_once(tmp_path, one_slot_each):
    """Shards are merged before they are spilled, so a slot reads only its own part of the file."""
    rig = rig_with(tmp_path, MergingFrames(), sources := range(40), limit_nbytes=0)
    rig.store.make_room()
    assert rig.store.resident_nbytes == 0
    rig.store.seal()
    for slot in range(N_SLOTS):
        assert read_slot(rig.store, slot) == expected(slot, sources)
        rig.store.release(slot)
        rig.store.make_room()
    assert rig.counted("unspilled_nbytes") == rig.counted("spilled_nbytes")


def spill_sources(tmp_path, adapter, n_sources, counts, limit_share, n_slots=N_SLOTS):
    """Return a store to which sources came one by one, with memory for a share of their bytes."""
    shards = [make_shard(source, 0, counts) for source in range(n_sources)]
    limit_nbytes = int(limit_share * sum(shard.nbytes for shard in shards))
    rig = Rig(tmp_path, adapter=adapter, limit_nbytes=limit_nbytes, slots=(0, n_slots))
    for shard in shards:
        rig.store.add([shard])
        rig.store.make_room()
    return rig


@pytest.mark.parametrize("limit_share", [0.3, 0.6, 0.95])
def test_full_shards_are_not_read_for_each_slot(tmp_path, monkeypatch, one_slot_each, limit_share):
    """Their rows of a slot are spread over more bytes than there is memory for."""
    monkeypatch.setattr(merging, "SHARD_TARGET_NBYTES", ROW_NBYTES)
    counts = [2] * N_SLOTS
    monkeypatch.setattr(merging, "MERGED_NBYTES", 5 * make_shard(0, 0, counts).nbytes)
    rig = spill_sources(tmp_path, MergingFrames(), 40, counts, limit_share)
    rig.store.seal()
    for slot in range(N_SLOTS):
        assert len(read_slot(rig.store, slot)) == 80
        rig.store.make_room()
        rig.store.release(slot)
    assert 0 < rig.counted("unspilled_nbytes") <= rig.counted("spilled_nbytes")


def test_full_shards_of_few_slots_are_spilled_as_they_are(tmp_path, monkeypatch):
    """There is memory for all of them that have rows of a slot."""
    monkeypatch.setattr(merging, "SMALL_PIECE_NBYTES", 0)
    monkeypatch.setattr(merging, "SHARD_TARGET_NBYTES", ROW_NBYTES)
    rig = spill_sources(tmp_path, adapter := MergingFrames(), 40, [2, 2], 0.8, 50)
    rig.store.seal()
    assert rig.counted("spilled_nbytes") > 0
    assert adapter.n_merged == 0


def test_sources_that_come_after_a_merge_keep_their_place(tmp_path):
    rig = rig_with(tmp_path, adapter := MergingFrames(), [0, 2, 4], limit_nbytes=0)
    rig.store.make_room()
    assert adapter.n_merged == 3
    for source in (1, 3):
        rig.store.add([make_shard(source, 0, [1 + source % 3] * N_SLOTS)])
    rig.store.seal()
    for slot in range(N_SLOTS):
        assert read_slot(rig.store, slot) == expected(slot, range(5))


def test_a_duplicate_of_a_merged_shard_is_dropped(tmp_path):
    rig = rig_with(tmp_path, MergingFrames(), [0, 1], limit_nbytes=0)
    rig.store.make_room()
    rig.store.add([make_shard(1, 0, [9] * N_SLOTS, attempt=2), make_shard(0, 0, [1] * N_SLOTS)])
    rig.store.seal()
    assert read_slot(rig.store, 3) == expected(3, [0, 1])


def test_without_memory_for_a_merge_pieces_stay_small(tmp_path):
    class Short(MergingFrames):
        def merge(self, bodies, selections):
            raise MemoryError

    rig = rig_with(tmp_path, Short(), sources := [0, 1, 2])
    rig.store.seal()
    assert read_slot(rig.store, 4) == expected(4, sources)
    assert len(rig.store.pieces(4)) == 3


def test_a_damaged_shard_is_left_to_the_task_that_reads_it(tmp_path, monkeypatch):
    """It may have been spilled since it was chosen for a merge."""

    def damaged(shard):
        raise ShardStorageError("the file ended before its shard did")

    rig = rig_with(tmp_path, MergingFrames(), sources := [0, 1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "_body", damaged)
        rig.store.seal()
    assert read_slot(rig.store, 4) == expected(4, sources)
    assert len(rig.store.pieces(4)) == 3


def test_threads_share_the_merging(tmp_path, monkeypatch):
    """Each of two groups is merged while the other one is."""
    together = threading.Barrier(2, timeout=20)

    class Meeting(MergingFrames):
        def merge(self, bodies, selections):
            together.wait()
            return super().merge(bodies, selections)

    monkeypatch.setattr(merging, "MERGED_NBYTES", 2 * make_shard(0, 0, [3] * N_SLOTS).nbytes)
    rig = rig_with(tmp_path, adapter := Meeting(), sources := [2, 5, 8, 11])
    waiting = [in_thread(rig.store.seal) for _ in range(2)]
    for join in waiting:
        join()
    assert adapter.n_merged == 4
    assert read_slot(rig.store, 0) == expected(0, sources)


def test_outputs_wait_for_a_merge_that_a_spill_has_begun(tmp_path, monkeypatch):
    """Memory may run short at any time, also when the first output is read."""
    begun, waits_or_merges, may_end = (threading.Event() for _ in range(3))
    merges = []

    class Slow(MergingFrames):
        def merge(self, bodies, selections):
            merges.append(threading.current_thread())
            if len(merges) > 1:
                waits_or_merges.set()
            begun.set()
            assert may_end.wait(PATIENCE_S)
            return super().merge(bodies, selections)

    shards = [make_shard(source, 0, [3] * N_SLOTS) for source in range(6)]
    limit_nbytes = sum(shard.nbytes for shard in shards) // 2
    rig = Rig(tmp_path, limit_nbytes, adapter=Slow())
    rig.store.add(shards)
    wait_for = rig.store._merged.wait_for

    def noticed(predicate):
        waits_or_merges.set()
        return wait_for(predicate)

    monkeypatch.setattr(rig.store._merged, "wait_for", noticed)
    spilled = in_thread(rig.store.make_room)
    assert begun.wait(PATIENCE_S)
    sealed = in_thread(rig.store.seal)
    assert waits_or_merges.wait(PATIENCE_S)
    may_end.set()
    spilled()
    sealed()
    assert len(merges) == 1
    for slot in (0, N_SLOTS - 1):
        assert read_slot(rig.store, slot) == [r for s in range(6) for r in make_rows(s, slot, 3)]


def test_a_run_may_close_during_a_merge(tmp_path):
    rig = None

    class Closing(MergingFrames):
        def merge(self, bodies, selections):
            rig.store.close()
            return super().merge(bodies, selections)

    rig = rig_with(tmp_path, Closing(), [0, 1, 2])
    rig.store.seal()
    assert rig.budget.used_nbytes == 0

"""Shards are kept, read and released; no row is lost, doubled or given to another slot."""

from __future__ import annotations

import pytest

from dask_gpurt.errors import (
    IncompleteExchangeError,
    PartitionReleasedError,
    ProtocolError,
)
from tests.shuffle.shard_rig import (
    LAYOUT_KEY,
    PLENTY,
    ROW_NBYTES,
    Rig,
    TripleFrames,
    WatchedBudget,
    make_rows,
    make_shard,
    read_slot,
)

# ------------------------------------------------------------------ shards


def test_a_shard_knows_its_rows():
    shard = make_shard(3, 4, [2, 0, 1])
    assert (shard.first_slot, shard.end_slot, shard.n_rows) == (4, 7, 3)
    assert shard.n_unreleased == 2
    assert shard.nbytes == 3 * ROW_NBYTES


@pytest.mark.parametrize("packed", [False, True])
def test_a_shard_counts_the_memory_of_its_content(packed):
    assert make_shard(0, 0, [5], packed=packed).nbytes == 5 * ROW_NBYTES


# ------------------------------------------------------------------ in and out


def test_pieces_come_in_the_order_of_their_sources(rig):
    for source in (30, 4, 100, 5):
        rig.store.add([make_shard(source, 0, [2, 1])])
    rig.store.seal()
    assert [row[0] for row in read_slot(rig.store, 1)] == [4, 5, 30, 100]
    assert read_slot(rig.store, 0) == [row for s in (4, 5, 30, 100) for row in make_rows(s, 0, 2)]


def test_shards_of_a_source_may_come_in_any_order(rig):
    shards = [make_shard(0, first, [1, 2], number=n, count=3) for n, first in enumerate((0, 2, 6))]
    rig.store.add([shards[2]])
    rig.store.add([shards[0], shards[1]])
    rig.store.seal()
    found = {slot: read_slot(rig.store, slot) for slot in range(10)}
    rows_of = {0: 1, 1: 2, 2: 1, 3: 2, 6: 1, 7: 2}
    assert found == {slot: make_rows(0, slot, rows_of.get(slot, 0)) for slot in range(10)}


def test_slot_outside_of_all_shards_of_a_source_has_no_pieces(rig):
    rig.store.add(
        [make_shard(0, 2, [1], number=0, count=2), make_shard(0, 5, [1], number=1, count=2)]
    )
    rig.store.seal()
    assert [len(rig.store.pieces(slot)) for slot in range(8)] == [0, 0, 1, 0, 0, 1, 0, 0]


def test_a_source_without_rows_for_a_slot_has_no_piece_there(rig):
    rig.store.add([make_shard(0, 0, [1, 0, 1]), make_shard(1, 0, [1, 1, 1])])
    rig.store.seal()
    assert read_slot(rig.store, 1) == make_rows(1, 1, 1)
    assert len(rig.store.pieces(1)) == 1


def test_a_packed_shard_is_unpacked_once(tmp_path):
    class Counting(TripleFrames):
        n_unpacked = 0

        def unpack(self, layout_key, packed):
            self.n_unpacked += 1
            return super().unpack(layout_key, packed)

    adapter = Counting()
    rig = Rig(tmp_path, adapter=adapter)
    rig.store.add([make_shard(0, 0, [2, 2], packed=True)])
    rig.store.seal()
    before = rig.budget.used_nbytes
    assert read_slot(rig.store, 0) == make_rows(0, 0, 2)
    assert read_slot(rig.store, 1) == make_rows(0, 1, 2)
    assert adapter.n_unpacked == 1
    assert rig.budget.used_nbytes == before == 4 * ROW_NBYTES


@pytest.mark.parametrize("is_spilled", [False, True])
def test_a_shard_that_grows_when_unpacked_counts_its_new_size(tmp_path, is_spilled):
    class Growing(TripleFrames):
        def unpack(self, layout_key, packed):
            return super().unpack(layout_key, packed).astype(complex)

    rig = Rig(tmp_path, limit_nbytes=0 if is_spilled else PLENTY, adapter=Growing())
    rig.store.add([make_shard(0, 0, [2, 2], packed=True)])
    rig.store.make_room()
    rig.store.seal()
    assert rig.budget.used_nbytes == (0 if is_spilled else 4 * ROW_NBYTES)
    assert read_slot(rig.store, 0) == make_rows(0, 0, 2)
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == 8 * ROW_NBYTES
    for slot in range(2):
        rig.store.release(slot)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0


def test_reading_twice_gives_the_same(rig):
    rig.store.add([make_shard(0, 0, [3])])
    rig.store.seal()
    assert read_slot(rig.store, 0) == read_slot(rig.store, 0) == make_rows(0, 0, 3)


def test_store_without_shards_has_no_pieces(rig):
    rig.store.seal()
    assert rig.store.pieces(0) == []
    rig.store.release(0)
    rig.store.close()
    assert rig.budget.used_nbytes == 0


# ------------------------------------------------------------------ duplicates and gaps


def test_duplicate_shard_counts_once(rig):
    rig.store.add([make_shard(0, 0, [2]), make_shard(0, 0, [2])])
    rig.store.add([make_shard(0, 0, [2])])
    rig.store.seal()
    assert read_slot(rig.store, 0) == make_rows(0, 0, 2)
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == 2 * ROW_NBYTES


def test_second_attempt_with_other_cuts_is_dropped(rig):
    rig.store.add([make_shard(0, 0, [1, 1], number=0, count=2, attempt=1)])
    rig.store.add([make_shard(0, 0, [1, 1, 1, 1], number=0, count=1, attempt=2)])
    rig.store.add([make_shard(0, 2, [1, 1], number=1, count=2, attempt=2)])
    rig.store.add([make_shard(0, 2, [1, 1], number=1, count=2, attempt=1)])
    rig.store.seal()
    assert [read_slot(rig.store, slot) for slot in range(4)] == [
        make_rows(0, s, 1) for s in range(4)
    ]
    assert rig.budget.used_nbytes == 4 * ROW_NBYTES


def test_attempts_of_different_sources_are_independent(rig):
    rig.store.add([make_shard(0, 0, [1], attempt=1), make_shard(1, 0, [1], attempt=2)])
    rig.store.seal()
    assert read_slot(rig.store, 0) == [(0, 0, 0), (1, 0, 0)]


def test_a_duplicate_of_a_freed_shard_is_dropped(rig):
    rig.store.add([make_shard(0, 0, [1])])
    rig.store.seal()
    rig.store.release(0)
    rig.store.add([make_shard(0, 0, [1])])
    assert rig.budget.used_nbytes == 0


def test_a_missing_shard_is_noticed(rig):
    rig.store.add([make_shard(8, 0, [1]), make_shard(7, 0, [1], number=0, count=3)])
    rig.store.add([make_shard(7, 4, [1], number=2, count=3)])
    with pytest.raises(IncompleteExchangeError, match="2 of 3 shards of input partition 7"):
        rig.store.seal()


def test_a_duplicate_does_not_stand_in_for_a_missing_shard(rig):
    rig.store.add([make_shard(7, 0, [1], number=0, count=2)] * 2)
    with pytest.raises(IncompleteExchangeError, match="1 of 2"):
        rig.store.seal()


def test_missing_shards_may_still_arrive(rig):
    rig.store.add([make_shard(0, 4, [1], number=1, count=2)])
    with pytest.raises(IncompleteExchangeError):
        rig.store.seal()
    rig.store.add([make_shard(0, 0, [1], number=0, count=2)])
    rig.store.seal()
    assert read_slot(rig.store, 0) + read_slot(rig.store, 4) == [(0, 0, 0), (0, 4, 0)]


def test_sealing_twice_changes_nothing(rig):
    rig.store.add([make_shard(0, 0, [1])])
    rig.store.seal()
    rig.store.seal()
    assert read_slot(rig.store, 0) == make_rows(0, 0, 1)


@pytest.mark.parametrize(
    ("first_slot", "counts"),
    [(4, [1]), (4, [1, 1]), (9, [1, 1]), (10, [1]), (0, [1] * 20), (2**32 - 1, [1])],
)
def test_shards_for_slots_of_another_worker_are_refused(tmp_path, first_slot, counts):
    rig = Rig(tmp_path, slots=(5, 10))
    good = make_shard(0, 5, [1, 0, 0, 0, 1])
    with pytest.raises(ProtocolError, match="owner of 5-10"):
        rig.store.add([good, make_shard(1, first_slot, counts)])
    assert rig.budget.used_nbytes == 0, "a message is taken as a whole or not at all"
    rig.store.add([good])
    rig.store.seal()
    assert read_slot(rig.store, 9) == make_rows(0, 9, 1)


# ------------------------------------------------------------------ release


def test_reading_a_released_slot_is_refused(rig):
    rig.store.add([make_shard(0, 0, [1, 1])])
    rig.store.seal()
    rig.store.release(0)
    with pytest.raises(PartitionReleasedError):
        rig.store.pieces(0)
    assert read_slot(rig.store, 1) == make_rows(0, 1, 1)


def test_reading_a_released_empty_slot_is_refused(rig):
    rig.store.add([make_shard(0, 0, [1])])
    rig.store.seal()
    rig.store.release(5)
    with pytest.raises(PartitionReleasedError):
        rig.store.pieces(5)


@pytest.mark.parametrize("packed", [False, True])
def test_memory_is_freed_with_the_last_partition_of_a_shard(rig, packed):
    rig.store.add(
        [make_shard(0, 0, [1, 0, 2], packed=packed), make_shard(1, 2, [4], packed=packed)]
    )
    rig.store.seal()
    used = []
    for slot in (1, 0, 2):
        rig.store.release(slot)
        used.append(rig.budget.used_nbytes // ROW_NBYTES)
        assert rig.budget.used_nbytes == rig.store.resident_nbytes
    assert used == [7, 7, 0]


def test_the_body_of_a_shard_is_freed_with_its_last_partition(rig):
    shard = make_shard(0, 0, [1, 1])
    rig.store.add([shard])
    rig.store.seal()
    rig.store.release(0)
    assert shard.is_resident
    rig.store.release(1)
    assert not shard.is_resident


def test_releasing_twice_counts_once(rig):
    rig.store.add([make_shard(0, 0, [1, 1])])
    rig.store.seal()
    rig.store.release(0)
    rig.store.release(0)
    assert rig.budget.used_nbytes == 2 * ROW_NBYTES
    assert read_slot(rig.store, 1) == make_rows(0, 1, 1)


def test_stores_share_a_budget(tmp_path):
    budget = WatchedBudget(PLENTY)
    first, second = (Rig(tmp_path / name, budget=budget) for name in "ab")
    first.store.add([make_shard(0, 0, [3])])
    second.store.add([make_shard(0, 0, [4])])
    assert budget.used_nbytes == 7 * ROW_NBYTES
    first.store.close()
    assert (first.store.resident_nbytes, second.store.resident_nbytes) == (0, 4 * ROW_NBYTES)
    assert budget.used_nbytes == 4 * ROW_NBYTES
    second.store.seal()
    second.store.release(0)
    assert budget.used_nbytes == 0


def test_closing_frees_all_shards_and_files(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=3 * ROW_NBYTES)
    rig.store.add(
        [make_shard(0, first, [2], number=n, count=3) for n, first in enumerate((0, 3, 6))]
    )
    rig.store.make_room()
    assert rig.files
    rig.store.close()
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == 0
    assert not rig.directory.exists()


def test_closing_twice_counts_once(rig):
    rig.store.add([make_shard(0, 0, [2])])
    rig.store.close()
    rig.store.close()
    assert rig.budget.used_nbytes == 0


def test_shards_added_after_closing_are_dropped(rig):
    rig.store.close()
    rig.store.add([make_shard(0, 0, [2])])
    rig.store.make_room()
    assert rig.budget.used_nbytes == 0
    assert not rig.directory.exists()


def test_reading_a_closed_store_is_an_error(rig):
    """A task that reads while the run is closed must fail, not return no rows."""
    rig.store.add([make_shard(0, 0, [2])])
    rig.store.seal()
    rig.store.close()
    with pytest.raises(PartitionReleasedError):
        rig.store.pieces(0)


def test_shards_of_one_layout_share_its_description(tmp_path):
    """Each message brings its own, which may have a million categories."""
    rig = Rig(tmp_path)
    shards = [make_shard(source, 0, [1] * 10) for source in range(3)]
    for shard in shards:
        shard.layout_key = bytes(bytearray(LAYOUT_KEY))
    assert shards[0].layout_key is not shards[1].layout_key
    rig.store.add(shards)
    assert len({id(shard.layout_key) for shard in shards}) == 1

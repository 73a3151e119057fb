"""Tests of the shard store: no row is lost, doubled or given to another slot.

Every row contains its origin: (source, slot, number within the slot). So an error in the rows shows
in the rows.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import shutil
import stat
import threading
from itertools import accumulate
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dask_gpurt.errors import (
    IncompleteExchangeError,
    PartitionReleasedError,
    ProtocolError,
    ShardStorageError,
)
from dask_gpurt.frames.adapter import Packed
from dask_gpurt.metrics import Counters
from dask_gpurt.shuffle import shards
from dask_gpurt.shuffle.plan import cut_shards
from dask_gpurt.shuffle.shards import LOW_WATER, Budget, Shard, ShardStore
from dask_gpurt.shuffle.spill_file import SpillFile

LAYOUT_KEY = b"source, slot, number"
ROW_NBYTES = 24
PATIENCE_S = 20.0
PLENTY = 1 << 30


class TripleFrames:
    """The smallest adapter that can pack and unpack: bodies are arrays of triples."""

    def pack(self, body):
        buffer = np.frombuffer(body.tobytes(), dtype=np.uint8)
        # Arbitrary lengths of the sections, so that losing them shows.
        return Packed(buffer, len(body), arrow_nbytes=len(body), pickle_nbytes=2 * len(body))

    def unpack(self, layout_key, packed):
        assert layout_key == LAYOUT_KEY
        body = packed.buffer.view(np.int64).reshape(-1, 3)
        assert packed.n_rows == packed.arrow_nbytes == len(body)
        assert packed.pickle_nbytes == 2 * len(body)
        return body


def _rows(source, slot, count):
    return [(source, slot, number) for number in range(count)]


def _shard(source, first_slot, counts, number=0, count=1, attempt=1, packed=False):
    """Return a shard with `counts` rows for each of the slots from `first_slot`."""
    rows = [row for i, n in enumerate(counts) for row in _rows(source, first_slot + i, n)]
    body = np.array(rows, dtype=np.int64).reshape(-1, 3)
    contents = {"packed": TripleFrames().pack(body)} if packed else {"body": body}
    return Shard.with_rows(
        counts,
        source=source,
        attempt=attempt,
        number=number,
        count=count,
        first_slot=first_slot,
        layout_key=LAYOUT_KEY,
        **contents,
    )


def _read(store, slot):
    pieces = store.pieces(slot)
    return [tuple(row) for piece in pieces for row in piece.body[piece.start : piece.stop].tolist()]


class WatchedBudget(Budget):
    """A budget that signals when it is empty, and records its minimum."""

    def __init__(self, limit_nbytes):
        super().__init__(limit_nbytes)
        self.emptied = threading.Event()
        self.least_nbytes = 0

    def change(self, nbytes):
        super().change(nbytes)
        self.least_nbytes = min(self.least_nbytes, self.used_nbytes)
        if not self.used_nbytes:
            self.emptied.set()


def files_of(directory):
    """Return the open files that once had a name in a directory."""
    found = {}
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(descriptor)
            if name.startswith(f"{directory}/"):
                found[name] = descriptor
    return [found[name] for name in sorted(found)]


def change(path, position, data):
    """Overwrite bytes of a file."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(position)
        file.write(data)


class Rig:
    """A store for slots 0 to 9, and all objects that a test inspects."""

    def __init__(self, root, limit_nbytes=PLENTY, **options):
        self.directory = pathlib.Path(root) / "run"
        self.budget = options.pop("budget", None) or WatchedBudget(limit_nbytes)
        self.counters = options.pop("counters", None) or Counters()
        adapter = options.pop("adapter", None) or TripleFrames()
        slots = options.pop("slots", (0, 10))
        self.store = ShardStore(
            adapter, slots, str(self.directory), self.budget, self.counters, **options
        )

    @property
    def files(self):
        """Open files: they have no name any more, but descriptors refer to them."""
        assert not self.directory.exists()
        return files_of(self.directory)

    def counted(self, name):
        return self.counters.snapshot()[name]


@pytest.fixture
def rig(tmp_path):
    """A store with room for all shards."""
    return Rig(tmp_path)


def _in_thread(function, *args):
    """Run a function in a thread; return a future of its result."""
    outcome = []

    def target():
        try:
            outcome.append(function(*args))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()

    def join():
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "stuck"
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    return join


# ------------------------------------------------------------------ shards


def test_a_shard_knows_its_rows():
    shard = _shard(3, 4, [2, 0, 1])
    assert (shard.first_slot, shard.end_slot, shard.n_rows) == (4, 7, 3)
    assert [shard.rows_of(slot) for slot in (4, 5, 6)] == [(0, 2), (2, 2), (2, 3)]
    assert shard.unread == 2
    assert shard.nbytes == 3 * ROW_NBYTES


@pytest.mark.parametrize("packed", [False, True])
def test_a_shard_counts_the_memory_of_its_content(packed):
    assert _shard(0, 0, [5], packed=packed).nbytes == 5 * ROW_NBYTES


# ------------------------------------------------------------------ in and out


def test_pieces_come_in_the_order_of_their_sources(rig):
    for source in (30, 4, 100, 5):
        rig.store.add([_shard(source, 0, [2, 1])])
    rig.store.seal()
    assert [row[0] for row in _read(rig.store, 1)] == [4, 5, 30, 100]
    assert _read(rig.store, 0) == [row for s in (4, 5, 30, 100) for row in _rows(s, 0, 2)]


def test_shards_of_a_source_may_come_in_any_order(rig):
    shards = [_shard(0, first, [1, 2], number=n, count=3) for n, first in enumerate((0, 2, 6))]
    rig.store.add([shards[2]])
    rig.store.add([shards[0], shards[1]])
    rig.store.seal()
    found = {slot: _read(rig.store, slot) for slot in range(10)}
    rows_of = {0: 1, 1: 2, 2: 1, 3: 2, 6: 1, 7: 2}
    assert found == {slot: _rows(0, slot, rows_of.get(slot, 0)) for slot in range(10)}


def test_a_slot_before_or_between_the_shards_of_a_source_has_no_pieces(rig):
    rig.store.add([_shard(0, 2, [1], number=0, count=2), _shard(0, 5, [1], number=1, count=2)])
    rig.store.seal()
    assert [len(rig.store.pieces(slot)) for slot in range(8)] == [0, 0, 1, 0, 0, 1, 0, 0]


def test_a_source_without_rows_for_a_slot_has_no_piece_there(rig):
    rig.store.add([_shard(0, 0, [1, 0, 1]), _shard(1, 0, [1, 1, 1])])
    rig.store.seal()
    assert _read(rig.store, 1) == _rows(1, 1, 1)
    assert len(rig.store.pieces(1)) == 1


def test_a_packed_shard_is_unpacked_once(tmp_path):
    class Counting(TripleFrames):
        n_unpacked = 0

        def unpack(self, layout_key, packed):
            self.n_unpacked += 1
            return super().unpack(layout_key, packed)

    adapter = Counting()
    rig = Rig(tmp_path, adapter=adapter)
    rig.store.add([_shard(0, 0, [2, 2], packed=True)])
    rig.store.seal()
    before = rig.budget.used_nbytes
    assert _read(rig.store, 0) == _rows(0, 0, 2)
    assert _read(rig.store, 1) == _rows(0, 1, 2)
    assert adapter.n_unpacked == 1
    assert rig.budget.used_nbytes == before == 4 * ROW_NBYTES


@pytest.mark.parametrize("is_spilled", [False, True])
def test_a_shard_that_grows_when_unpacked_counts_its_new_size(tmp_path, is_spilled):
    class Growing(TripleFrames):
        def unpack(self, layout_key, packed):
            return super().unpack(layout_key, packed).astype(complex)

    rig = Rig(tmp_path, limit_nbytes=0 if is_spilled else PLENTY, adapter=Growing())
    rig.store.add([_shard(0, 0, [2, 2], packed=True)])
    rig.store.make_room()
    rig.store.seal()
    assert rig.budget.used_nbytes == (0 if is_spilled else 4 * ROW_NBYTES)
    assert _read(rig.store, 0) == _rows(0, 0, 2)
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == 8 * ROW_NBYTES
    for slot in range(2):
        rig.store.release(slot)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0


def test_reading_twice_gives_the_same(rig):
    rig.store.add([_shard(0, 0, [3])])
    rig.store.seal()
    assert _read(rig.store, 0) == _read(rig.store, 0) == _rows(0, 0, 3)


def test_a_store_without_shards(rig):
    rig.store.seal()
    assert rig.store.pieces(0) == []
    rig.store.release(0)
    rig.store.close()
    assert rig.budget.used_nbytes == 0


# ------------------------------------------------------------------ duplicates and gaps


def test_a_shard_that_comes_twice_counts_once(rig):
    rig.store.add([_shard(0, 0, [2]), _shard(0, 0, [2])])
    rig.store.add([_shard(0, 0, [2])])
    rig.store.seal()
    assert _read(rig.store, 0) == _rows(0, 0, 2)
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == 2 * ROW_NBYTES


def test_a_second_attempt_is_dropped_even_where_it_was_cut_differently(rig):
    rig.store.add([_shard(0, 0, [1, 1], number=0, count=2, attempt=1)])
    rig.store.add([_shard(0, 0, [1, 1, 1, 1], number=0, count=1, attempt=2)])
    rig.store.add([_shard(0, 2, [1, 1], number=1, count=2, attempt=2)])
    rig.store.add([_shard(0, 2, [1, 1], number=1, count=2, attempt=1)])
    rig.store.seal()
    assert [_read(rig.store, slot) for slot in range(4)] == [_rows(0, s, 1) for s in range(4)]
    assert rig.budget.used_nbytes == 4 * ROW_NBYTES


def test_attempts_of_different_sources_are_independent(rig):
    rig.store.add([_shard(0, 0, [1], attempt=1), _shard(1, 0, [1], attempt=2)])
    rig.store.seal()
    assert _read(rig.store, 0) == [(0, 0, 0), (1, 0, 0)]


def test_a_duplicate_of_a_freed_shard_is_dropped(rig):
    rig.store.add([_shard(0, 0, [1])])
    rig.store.seal()
    rig.store.release(0)
    rig.store.add([_shard(0, 0, [1])])
    assert rig.budget.used_nbytes == 0


def test_a_missing_shard_is_noticed(rig):
    rig.store.add([_shard(8, 0, [1]), _shard(7, 0, [1], number=0, count=3)])
    rig.store.add([_shard(7, 4, [1], number=2, count=3)])
    with pytest.raises(IncompleteExchangeError, match="2 of 3 shards of input partition 7"):
        rig.store.seal()


def test_a_duplicate_does_not_stand_in_for_a_missing_shard(rig):
    rig.store.add([_shard(7, 0, [1], number=0, count=2)] * 2)
    with pytest.raises(IncompleteExchangeError, match="1 of 2"):
        rig.store.seal()


def test_missing_shards_may_still_arrive(rig):
    rig.store.add([_shard(0, 4, [1], number=1, count=2)])
    with pytest.raises(IncompleteExchangeError):
        rig.store.seal()
    rig.store.add([_shard(0, 0, [1], number=0, count=2)])
    rig.store.seal()
    assert _read(rig.store, 0) + _read(rig.store, 4) == [(0, 0, 0), (0, 4, 0)]


def test_sealing_twice_changes_nothing(rig):
    rig.store.add([_shard(0, 0, [1])])
    rig.store.seal()
    rig.store.seal()
    assert _read(rig.store, 0) == _rows(0, 0, 1)


@pytest.mark.parametrize(
    ("first_slot", "counts"),
    [(4, [1]), (4, [1, 1]), (9, [1, 1]), (10, [1]), (0, [1] * 20), (2**32 - 1, [1])],
)
def test_shards_for_slots_of_another_worker_are_refused(tmp_path, first_slot, counts):
    rig = Rig(tmp_path, slots=(5, 10))
    good = _shard(0, 5, [1, 0, 0, 0, 1])
    with pytest.raises(ProtocolError, match="owner of 5-10"):
        rig.store.add([good, _shard(1, first_slot, counts)])
    assert rig.budget.used_nbytes == 0, "a message is taken as a whole or not at all"
    rig.store.add([good])
    rig.store.seal()
    assert _read(rig.store, 9) == _rows(0, 9, 1)


# ------------------------------------------------------------------ release


def test_reading_a_released_slot_is_refused(rig):
    rig.store.add([_shard(0, 0, [1, 1])])
    rig.store.seal()
    rig.store.release(0)
    with pytest.raises(PartitionReleasedError):
        rig.store.pieces(0)
    assert _read(rig.store, 1) == _rows(0, 1, 1)


def test_reading_a_released_empty_slot_is_refused(rig):
    rig.store.add([_shard(0, 0, [1])])
    rig.store.seal()
    rig.store.release(5)
    with pytest.raises(PartitionReleasedError):
        rig.store.pieces(5)


@pytest.mark.parametrize("packed", [False, True])
def test_memory_goes_with_the_last_partition_of_a_shard(rig, packed):
    rig.store.add([_shard(0, 0, [1, 0, 2], packed=packed), _shard(1, 2, [4], packed=packed)])
    rig.store.seal()
    used = []
    for slot in (1, 0, 2):
        rig.store.release(slot)
        used.append(rig.budget.used_nbytes // ROW_NBYTES)
        assert rig.budget.used_nbytes == rig.store.resident_nbytes
    assert used == [7, 7, 0]


def test_the_body_of_a_shard_is_freed_with_its_last_partition(rig):
    shard = _shard(0, 0, [1, 1])
    rig.store.add([shard])
    rig.store.seal()
    rig.store.release(0)
    assert shard.is_resident
    rig.store.release(1)
    assert not shard.is_resident


def test_letting_go_twice_counts_once(rig):
    rig.store.add([_shard(0, 0, [1, 1])])
    rig.store.seal()
    rig.store.release(0)
    rig.store.release(0)
    assert rig.budget.used_nbytes == 2 * ROW_NBYTES
    assert _read(rig.store, 1) == _rows(0, 1, 1)


def test_stores_share_a_budget(tmp_path):
    budget = WatchedBudget(PLENTY)
    first, second = (Rig(tmp_path / name, budget=budget) for name in "ab")
    first.store.add([_shard(0, 0, [3])])
    second.store.add([_shard(0, 0, [4])])
    assert budget.used_nbytes == 7 * ROW_NBYTES
    first.store.close()
    assert (first.store.resident_nbytes, second.store.resident_nbytes) == (0, 4 * ROW_NBYTES)
    assert budget.used_nbytes == 4 * ROW_NBYTES
    second.store.seal()
    second.store.release(0)
    assert budget.used_nbytes == 0


def test_closing_frees_all_shards_and_files(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=3 * ROW_NBYTES)
    rig.store.add([_shard(0, first, [2], number=n, count=3) for n, first in enumerate((0, 3, 6))])
    rig.store.make_room()
    assert rig.files
    rig.store.close()
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == 0
    assert not rig.directory.exists()


def test_closing_twice_counts_once(rig):
    rig.store.add([_shard(0, 0, [2])])
    rig.store.close()
    rig.store.close()
    assert rig.budget.used_nbytes == 0


def test_shards_added_after_closing_are_dropped(rig):
    rig.store.close()
    rig.store.add([_shard(0, 0, [2])])
    rig.store.make_room()
    assert rig.budget.used_nbytes == 0
    assert not rig.directory.exists()


def test_reading_a_closed_store_is_an_error(rig):
    """A task that reads while the run is closed must fail, not return no rows."""
    rig.store.add([_shard(0, 0, [2])])
    rig.store.seal()
    rig.store.close()
    with pytest.raises(PartitionReleasedError):
        rig.store.pieces(0)


# ------------------------------------------------------------------ over the limit


def _spread(n_shards, n_rows=2, source=0, packed=False):
    """Return shards of one source: `n_rows` rows for each of the first slots."""
    return [
        _shard(source, slot, [n_rows], number=slot, count=n_shards, packed=packed)
        for slot in range(n_shards)
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_the_furthest_slots_are_spilled_down_to_the_low_water_mark(tmp_path, packed):
    rig = Rig(tmp_path, limit_nbytes=15 * ROW_NBYTES)
    shards = _spread(8, packed=packed)
    rig.store.add([shards[i] for i in (3, 7, 0, 5, 1, 6, 2, 4)])
    assert rig.store.is_over_limit
    rig.store.make_room()
    # 16 rows, and at most 0.8 x 15 = 12 may stay.
    assert LOW_WATER == 0.8
    assert [shard.is_resident for shard in shards] == [True] * 6 + [False] * 2
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == 12 * ROW_NBYTES
    assert rig.store.spilled_nbytes == rig.counted("spilled_nbytes") == 4 * ROW_NBYTES
    assert not rig.store.is_over_limit


def test_nothing_is_spilled_at_the_limit(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=4 * ROW_NBYTES)
    rig.store.add(_spread(2))
    assert not rig.store.is_over_limit
    rig.store.make_room()
    assert not rig.directory.exists()
    assert rig.store.spilled_nbytes == 0


def test_a_store_does_not_spill_for_another_store(tmp_path):
    budget = WatchedBudget(ROW_NBYTES)
    first, second = (Rig(tmp_path / name, budget=budget) for name in "ab")
    first.store.add(_spread(4))
    assert first.store.is_over_limit
    assert not second.store.is_over_limit


@pytest.mark.parametrize("packed", [False, True])
def test_spilled_shards_read_back_equal(tmp_path, packed):
    rig = Rig(tmp_path, limit_nbytes=0)
    for source in (1, 0, 2):
        rig.store.add(_spread(5, n_rows=source + 1, source=source, packed=packed))
    rig.store.make_room()
    assert rig.budget.used_nbytes == 0
    rig.store.seal()
    for slot in range(5):
        assert _read(rig.store, slot) == [r for s in range(3) for r in _rows(s, slot, s + 1)]
    assert rig.counted("unspilled_nbytes") == rig.counted("spilled_nbytes") == 30 * ROW_NBYTES


def test_a_shard_that_was_read_back_takes_memory_until_it_is_freed(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add([_shard(0, 0, [1, 2])])
    rig.store.make_room()
    rig.store.seal()
    _read(rig.store, 0)
    _read(rig.store, 1)
    assert rig.budget.used_nbytes == 3 * ROW_NBYTES
    assert rig.counted("unspilled_nbytes") == 3 * ROW_NBYTES, "read once for both"
    rig.store.release(0)
    rig.store.release(1)
    assert rig.budget.used_nbytes == 0


def test_a_clean_shard_is_not_written_again(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=0)
    shard = _shard(0, 0, [1, 2])
    rig.store.add([shard])
    rig.store.make_room()
    rig.store.seal()
    for _ in range(3):
        assert _read(rig.store, 1) == _rows(0, 1, 2)
        assert shard.is_resident
        rig.store.make_room()
        assert not shard.is_resident
        assert rig.budget.used_nbytes == 0
    assert rig.store.spilled_nbytes == rig.counted("spilled_nbytes") == 3 * ROW_NBYTES
    assert len(rig.files) == 1


def test_files_are_private(tmp_path):
    modes = []

    def open_file(path):
        modes.append(stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode))
        return SpillFile(path)

    rig = Rig(tmp_path, limit_nbytes=0, open_file=open_file)
    before = os.umask(0)
    try:
        rig.store.add(_spread(2))
        rig.store.make_room()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(file.stat().st_mode) for file in rig.files] == [0o600]
    assert modes == [0o700]


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = tmp_path / "000000.shards"
    path.write_bytes(b"of somebody else")
    with pytest.raises(FileExistsError):
        SpillFile(str(path))
    assert path.read_bytes() == b"of somebody else"


def test_later_spills_append_to_the_same_file_up_to_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_NBYTES", 4 * ROW_NBYTES)
    rig = Rig(tmp_path, limit_nbytes=0)
    n_files = []
    for source in range(6):
        rig.store.add([_shard(source, 0, [1, 1])])
        rig.store.make_room()
        n_files.append(len(rig.files))
    assert n_files == [1, 1, 2, 2, 3, 3]
    rig.store.seal()
    assert _read(rig.store, 1) == [row for source in range(6) for row in _rows(source, 1, 1)]
    for slot in range(2):
        rig.store.release(slot)
    assert rig.files == []


def test_spills_after_a_file_was_deleted_get_a_new_one(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add([_shard(0, 0, [1])])
    rig.store.make_room()
    rig.store.seal()
    rig.store.add([_shard(1, 5, [1])])
    rig.store.release(0)
    assert rig.files == []
    rig.store.make_room()
    assert len(rig.files) == 1


def test_a_file_is_deleted_with_the_last_of_its_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_NBYTES", 1)
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add(_spread(3))
    rig.store.make_room()
    rig.store.add([_shard(1, 5, [1])])
    rig.store.make_room()
    rig.store.seal()
    assert len(rig.files) == 2
    n_files = []
    for slot in (1, 0, 5, 2):
        rig.store.release(slot)
        n_files.append(len(rig.files))
    assert n_files == [2, 2, 1, 0]
    assert rig.budget.used_nbytes == 0


def test_the_caller_that_releases_a_shard_does_not_delete_its_file(tmp_path):
    removals = []
    rig = Rig(tmp_path, limit_nbytes=0, run_later=removals.append)
    rig.store.add(_spread(2))
    rig.store.make_room()
    rig.store.seal()
    for slot in range(2):
        rig.store.release(slot)
    assert len(rig.files) == 1
    # The run may end before the file is removed, and leaves no file behind.
    rig.store.close()
    assert rig.files == []
    (removal,) = removals
    removal()


def test_a_shard_in_memory_and_on_disk_is_freed_in_both(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add([_shard(0, 0, [2])])
    rig.store.make_room()
    rig.store.seal()
    _read(rig.store, 0)
    rig.store.release(0)
    assert rig.budget.used_nbytes == 0
    assert rig.files == []


def test_freeing_a_shard_on_disk_does_not_change_the_budget(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add([_shard(0, 0, [2])])
    rig.store.make_room()
    rig.store.seal()
    rig.store.release(0)
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == 0


# ------------------------------------------------------------------ disks that fail


class FullDisk(SpillFile):
    """A file that fails from the n-th write on."""

    n_writes_left = 0

    @classmethod
    def after(cls, n_writes):
        return type("FullDiskSoon", (cls,), {"n_writes_left": n_writes})

    def append(self, buffer):
        cls = type(self)
        cls.n_writes_left -= 1
        if cls.n_writes_left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().append(buffer)


@pytest.mark.parametrize("n_writes", range(7))
def test_a_full_disk_loses_nothing_and_is_reported_once(tmp_path, caplog, n_writes):
    rig = Rig(tmp_path, limit_nbytes=0, open_file=FullDisk.after(n_writes))
    shards = _spread(6)
    with caplog.at_level(logging.ERROR, "dask_gpurt.shuffle"):
        for shard in shards:
            rig.store.add([shard])
            rig.store.make_room()
        rig.store.make_room()
    n_written = min(n_writes, 6)
    assert [shard.is_resident for shard in shards] == [False] * n_written + [True] * (6 - n_written)
    assert rig.budget.used_nbytes == (6 - n_written) * 2 * ROW_NBYTES
    assert rig.store.spilled_nbytes == n_written * 2 * ROW_NBYTES
    assert not rig.store.is_over_limit
    reports = caplog.messages
    assert len(reports) == (n_writes < 6)
    assert all(str(rig.directory) in text and "No space left" in text for text in reports)
    assert len(rig.files) == (n_written > 0), "no file without a shard"
    rig.store.seal()
    assert [_read(rig.store, slot) for slot in range(6)] == [_rows(0, s, 2) for s in range(6)]
    for slot in range(6):
        rig.store.release(slot)
    assert rig.budget.used_nbytes == 0
    assert rig.files == []


@pytest.mark.parametrize("n_writes", range(4))
def test_a_disk_that_fills_up_in_the_middle_of_a_file(tmp_path, n_writes):
    rig = Rig(tmp_path, limit_nbytes=0, open_file=FullDisk.after(n_writes))
    shards = _spread(4)
    rig.store.add(shards)
    rig.store.make_room()
    # The last slots are spilled first.
    assert [shard.is_resident for shard in shards] == [True] * (4 - n_writes) + [False] * n_writes
    assert len(rig.files) == (n_writes > 0)
    rig.store.seal()
    assert [_read(rig.store, slot) for slot in range(4)] == [_rows(0, s, 2) for s in range(4)]
    rig.store.close()
    assert not rig.directory.exists()
    assert rig.budget.used_nbytes == 0


def test_a_lack_of_descriptors_is_temporary_and_reported_once(tmp_path, caplog):
    def open_file(path):
        if failures:
            raise OSError(failures.pop(), "Too many open files")
        return SpillFile(path)

    failures = [errno.EMFILE, errno.ENFILE]
    rig = Rig(tmp_path, limit_nbytes=0, open_file=open_file)
    rig.store.add(_spread(3))
    for _ in range(2):
        rig.store.make_room()
        assert rig.store.is_over_limit
        assert rig.budget.used_nbytes == 6 * ROW_NBYTES
    rig.store.make_room()
    assert rig.budget.used_nbytes == 0
    (report,) = [r for r in caplog.records if r.name == "dask_gpurt.shuffle"]
    assert (report.levelno, "retried later" in report.message) == (logging.WARNING, True)
    rig.store.seal()
    assert [_read(rig.store, slot) for slot in range(3)] == [_rows(0, s, 2) for s in range(3)]


def test_a_directory_that_cannot_be_made_loses_nothing(tmp_path, caplog):
    (tmp_path / "run").write_text("in the way")
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add(_spread(3))
    rig.store.make_room()
    rig.store.make_room()
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
    rig.store.seal()
    assert [_read(rig.store, slot) for slot in range(3)] == [_rows(0, s, 2) for s in range(3)]
    rig.store.close()
    assert (tmp_path / "run").read_text() == "in the way"


def test_a_write_that_comes_in_parts_is_finished(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    file = SpillFile(str(tmp_path / "file"))
    contents = np.arange(100, dtype=np.uint8)
    extents = [file.append(contents), file.append(contents[::-1].copy())]
    assert [extent.position for extent in extents] == [0, 100]
    (path,) = files_of(tmp_path)
    assert path.read_bytes() == contents.tobytes() + contents[::-1].tobytes()
    file.remove()


def test_a_read_that_comes_in_parts_is_finished(tmp_path, monkeypatch):
    file = SpillFile(str(tmp_path / "file"))
    contents = np.arange(100, dtype=np.uint8)
    file.append(contents[:3])
    extent = file.append(contents)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    found = np.zeros_like(contents)
    file.read_into(found, extent)
    assert found.tolist() == contents.tolist()
    file.remove()


@pytest.mark.parametrize("length", [0, 1, 5 * ROW_NBYTES - 1])
def test_a_file_that_was_cut_short_is_an_error(tmp_path, length):
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add([_shard(0, 0, [5])])
    rig.store.make_room()
    rig.store.seal()
    os.truncate(rig.files[0], length)
    with pytest.raises(ShardStorageError, match="ended before"):
        rig.store.pieces(0)
    assert rig.budget.used_nbytes == 0


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    class Broken(SpillFile):
        def read_into(self, buffer, extent):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    rig = Rig(tmp_path, limit_nbytes=0, open_file=Broken)
    rig.store.add([_shard(0, 0, [5])])
    rig.store.make_room()
    rig.store.seal()
    with pytest.raises(ShardStorageError, match=r"cannot read .*\.shards.*Input/output"):
        rig.store.pieces(0)


def zero(path, first, second):
    change(path, first, bytes(5 * ROW_NBYTES))


def flip_one_bit(path, first, second):
    data = bytearray(path.read_bytes())
    data[first + 77] ^= 16
    change(path, 0, data)


def swap(path, first, second):
    data = path.read_bytes()
    change(path, first, data[second : second + 5 * ROW_NBYTES])
    change(path, second, data[first : first + 5 * ROW_NBYTES])


def repeat(path, first, second):
    change(path, first, path.read_bytes()[second : second + 5 * ROW_NBYTES])


def cut_and_lengthen(path, first, second):
    length = path.stat().st_size
    os.truncate(path, first + 1)
    os.truncate(path, length)


@pytest.mark.parametrize("damage", [zero, flip_one_bit, swap, repeat, cut_and_lengthen])
def test_other_bytes_than_were_written_are_an_error_before_they_are_parsed(tmp_path, damage):
    class NothingToParse(TripleFrames):
        def unpack(self, layout_key, packed):
            pytest.fail("damaged bytes were parsed")

    rig = Rig(tmp_path, limit_nbytes=0, adapter=NothingToParse())
    shards = [_shard(0, 0, [5]), _shard(1, 1, [5])]
    rig.store.add(shards)
    rig.store.make_room()
    rig.store.seal()
    (path,) = rig.files
    damage(path, *(shard.on_disk[1].position for shard in shards))
    with pytest.raises(ShardStorageError, match="returned other bytes"):
        rig.store.pieces(0)
    assert rig.budget.used_nbytes == 0


@pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, (1 << 20) + 1, (3 << 20) + 65_537])
def test_each_byte_of_a_file_is_checked(tmp_path, nbytes):
    file = SpillFile(str(tmp_path / "file"))
    contents = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    file.append(contents[:5])
    extent = file.append(contents)
    found = np.zeros_like(contents)
    file.read_into(found, extent)
    assert np.array_equal(found, contents)
    (path,) = files_of(tmp_path)
    for position in sorted({0, nbytes // 3, nbytes - 1} & set(range(nbytes))):
        change(path, extent.position + position, bytes([contents[position] ^ 1]))
        with pytest.raises(ShardStorageError, match="returned other bytes"):
            file.read_into(found, extent)
        change(path, extent.position + position, contents[position : position + 1].tobytes())
    file.read_into(found, extent)
    file.remove()


def test_a_store_that_is_kept_off_the_disk(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=0, may_spill=False)
    rig.store.add(_spread(3))
    assert not rig.store.is_over_limit
    rig.store.make_room()
    assert rig.store.spilled_nbytes == 0
    rig.store.seal()
    assert [_read(rig.store, slot) for slot in range(3)] == [_rows(0, s, 2) for s in range(3)]


def test_removing_the_directory_loses_no_shard(tmp_path):
    """A user may clean up the directory."""
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add(_spread(3))
    rig.store.make_room()
    shutil.rmtree(tmp_path)
    rig.store.add([_shard(1, 4, [2])])
    rig.store.make_room()
    rig.store.seal()
    assert [_read(rig.store, slot) for slot in range(3)] == [_rows(0, s, 2) for s in range(3)]
    assert _read(rig.store, 4) == _rows(1, 4, 2)
    rig.store.close()
    assert rig.files == []


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
def test_a_shard_that_is_freed_while_it_is_written(tmp_path, packed):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add([_shard(0, 0, [2], packed=packed)])
    rig.store.seal()
    spilling = _in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    rig.store.release(0)
    assert rig.budget.used_nbytes == 0
    disk.may_end.set()
    spilling()
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == rig.budget.least_nbytes == 0
    assert rig.store.spilled_nbytes == 0
    assert rig.files == []


def test_a_shard_that_is_freed_right_after_it_was_written(tmp_path):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add([_shard(0, 0, [2])])
    rig.store.seal()
    spilling = _in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    assert rig.budget.used_nbytes == 2 * ROW_NBYTES, "in memory until it is on disk"
    disk.may_end.set()
    spilling()
    assert len(rig.files) == 1
    rig.store.release(0)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0
    assert rig.files == []


def test_a_shard_that_is_freed_before_its_turn_to_be_written(tmp_path):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    near, far = _spread(2)
    rig.store.add([near, far])
    rig.store.seal()
    spilling = _in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    rig.store.release(0)
    disk.may_end.set()
    spilling()
    assert not near.is_resident
    assert near.on_disk is None
    assert rig.store.spilled_nbytes == far.nbytes
    assert _read(rig.store, 1) == _rows(0, 1, 2)
    rig.store.release(1)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0
    assert rig.files == []


@pytest.mark.parametrize("packed", [False, True])
def test_a_shard_is_readable_while_it_is_written(tmp_path, packed):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add([_shard(0, 0, [2, 1], packed=packed)])
    rig.store.seal()
    spilling = _in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    assert _read(rig.store, 0) == _rows(0, 0, 2)
    disk.may_end.set()
    spilling()
    assert _read(rig.store, 1) == _rows(0, 1, 1)
    for slot in range(2):
        rig.store.release(slot)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0
    assert rig.files == []


def test_shards_that_arrive_while_others_are_written(tmp_path):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add([_shard(0, 0, [2])])
    spilling = _in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    rig.store.add([_shard(1, 0, [3])])
    disk.may_end.set()
    spilling()
    assert rig.budget.used_nbytes == 3 * ROW_NBYTES
    rig.store.make_room()
    rig.store.seal()
    assert _read(rig.store, 0) == _rows(0, 0, 2) + _rows(1, 0, 3)


def test_only_one_thread_spills_at_a_time(tmp_path):
    """The second thread finds enough room when its turn comes."""
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add(_spread(4))
    first = _in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    second = _in_thread(rig.store.make_room)
    disk.may_end.set()
    first()
    second()
    assert rig.store.spilled_nbytes == 8 * ROW_NBYTES
    assert len(rig.files) == 1


def test_closing_while_a_shard_is_written(tmp_path, caplog):
    disk = SlowDisk.new()
    rig = Rig(tmp_path, limit_nbytes=0, open_file=disk)
    rig.store.add(_spread(3))
    spilling = _in_thread(rig.store.make_room)
    assert disk.begun.wait(PATIENCE_S)
    closing = _in_thread(rig.store.close)
    assert rig.budget.emptied.wait(PATIENCE_S)
    disk.may_end.set()
    spilling()
    closing()
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == rig.budget.least_nbytes == 0
    assert not rig.directory.exists()
    assert not caplog.messages, "the disk is not full, the run is over"


def test_closing_between_a_write_and_its_accounting(tmp_path):
    class ClosingCounters(Counters):
        def add(self, **amounts):
            super().add(**amounts)
            if amounts.get("spilled_nbytes") and not closing:
                closing.append(_in_thread(rig.store.close))
                assert rig.budget.emptied.wait(PATIENCE_S)

    closing = []
    rig = Rig(tmp_path, limit_nbytes=0, counters=ClosingCounters())
    rig.store.add(_spread(2))
    rig.store.make_room()
    closing[0]()
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == rig.budget.least_nbytes == 0
    assert not rig.directory.exists()


def test_closing_before_the_first_file_is_made(tmp_path, caplog):
    def open_file(path):
        if not closing:
            closing.append(_in_thread(rig.store.close))
            assert rig.budget.emptied.wait(PATIENCE_S)
        return SpillFile(path)

    closing = []
    rig = Rig(tmp_path, limit_nbytes=0, open_file=open_file)
    rig.store.add(_spread(2))
    rig.store.make_room()
    closing[0]()
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0
    assert not rig.directory.exists()
    assert not caplog.messages, "the disk is not full, the run is over"


@pytest.mark.parametrize("is_spilled", [False, True])
def test_closing_while_a_partition_is_read_leaves_the_budget_empty(tmp_path, is_spilled):
    """The budget outlives the run: leaked bytes would be missing for every later run."""

    class ClosingFrames(TripleFrames):
        def unpack(self, layout_key, packed):
            rig.store.close()
            return super().unpack(layout_key, packed)

    rig = Rig(tmp_path, limit_nbytes=0, adapter=ClosingFrames())
    rig.store.add([_shard(0, 0, [2], packed=True)])
    if is_spilled:
        rig.store.make_room()
    rig.store.seal()
    try:
        found = _read(rig.store, 0)
    except PartitionReleasedError:
        pass  # as valid as the rows
    else:
        assert found == _rows(0, 0, 2)
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
    rig.store.add([_shard(0, 0, [2])])
    rig.store.make_room()
    rig.store.seal()
    with pytest.raises(PartitionReleasedError):
        rig.store.pieces(0)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0


def test_two_threads_read_a_spilled_shard_and_it_counts_once(tmp_path):
    class MeetingFrames(TripleFrames):
        def unpack(self, layout_key, packed):
            meeting.wait(PATIENCE_S)
            return super().unpack(layout_key, packed)

    meeting = threading.Barrier(2)
    rig = Rig(tmp_path, limit_nbytes=0, adapter=MeetingFrames())
    rig.store.add([_shard(0, 0, [2, 3])])
    rig.store.make_room()
    rig.store.seal()
    readers = [_in_thread(_read, rig.store, slot) for slot in (0, 1)]
    assert [reader() for reader in readers] == [_rows(0, 0, 2), _rows(0, 1, 3)]
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == 5 * ROW_NBYTES


def test_a_shard_that_is_freed_while_it_is_read_is_not_kept(tmp_path):
    class ReleasingFrames(TripleFrames):
        def unpack(self, layout_key, packed):
            rig.store.release(0)
            return super().unpack(layout_key, packed)

    rig = Rig(tmp_path, limit_nbytes=0, adapter=ReleasingFrames())
    rig.store.add([_shard(0, 0, [2])])
    rig.store.make_room()
    rig.store.seal()
    assert _read(rig.store, 0) == _rows(0, 0, 2)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0
    assert rig.files == []


def test_a_shard_that_is_evicted_while_it_is_read(tmp_path):
    class EvictingFrames(TripleFrames):
        def unpack(self, layout_key, packed):
            rig.store.make_room()
            return super().unpack(layout_key, packed)

    rig = Rig(tmp_path, limit_nbytes=0, adapter=EvictingFrames())
    rig.store.add([_shard(0, 0, [2, 1], packed=True)])
    rig.store.seal()
    assert _read(rig.store, 0) == _rows(0, 0, 2)
    assert _read(rig.store, 1) == _rows(0, 1, 1)
    for slot in range(2):
        rig.store.release(slot)
    assert rig.budget.used_nbytes == rig.budget.least_nbytes == 0


# ------------------------------------------------------------------ against a plain dict

N_SLOTS = 6
row_counts = st.lists(st.integers(0, 3), min_size=N_SLOTS, max_size=N_SLOTS)


class StoreMachine(RuleBasedStateMachine):
    """Random operations on a store, compared with a dict."""

    @initialize(limit_rows=st.sampled_from([0, 3, 8, 1000]))
    def open(self, limit_rows):
        self.root = TemporaryDirectory()
        self.rig = Rig(self.root.name, limit_nbytes=limit_rows * ROW_NBYTES, slots=(0, N_SLOTS))
        self.shards = []
        self.counts = {}
        self.sent = {}
        self.released = set()
        self.sealed = False

    def _cut(self, source, counts, shard_rows, attempt, packed):
        cuts = cut_shards([0, *accumulate(counts)], ROW_NBYTES, shard_rows * ROW_NBYTES)
        return [
            _shard(source, first, counts[first:end], number, len(cuts), attempt, packed)
            for number, (first, end) in enumerate(cuts)
        ]

    @precondition(lambda self: not self.sealed)
    @rule(
        source=st.integers(0, 7),
        counts=row_counts,
        shard_rows=st.integers(1, 6),
        packed=st.booleans(),
        data=st.data(),
    )
    def add(self, source, counts, shard_rows, packed, data):
        if source in self.counts:
            return
        shards = self._cut(source, counts, shard_rows, 1, packed)
        self.rig.store.add(data.draw(st.permutations(shards)))
        self.shards += shards
        self.counts[source] = counts
        self.sent[source] = (counts, shard_rows)

    @precondition(lambda self: self.counts)
    @rule(data=st.data(), attempt=st.integers(1, 2), packed=st.booleans())
    def add_again(self, data, attempt, packed):
        source = data.draw(st.sampled_from(sorted(self.counts)))
        counts, shard_rows = self.sent[source]
        if attempt == 2:
            shard_rows = data.draw(st.integers(1, 6))
        self.rig.store.add(self._cut(source, counts, shard_rows, attempt, packed))

    @rule()
    def seal(self):
        self.rig.store.seal()
        self.sealed = True

    def _expected(self, slot):
        return [r for s in sorted(self.counts) for r in _rows(s, slot, self.counts[s][slot])]

    @precondition(lambda self: self.sealed)
    @rule(slot=st.integers(0, N_SLOTS - 1))
    def pieces(self, slot):
        if slot in self.released:
            with pytest.raises(PartitionReleasedError):
                self.rig.store.pieces(slot)
        else:
            assert _read(self.rig.store, slot) == self._expected(slot)

    @rule(slot=st.integers(0, N_SLOTS - 1))
    def release(self, slot):
        self.rig.store.release(slot)
        if self.sealed:
            self.released.add(slot)

    @rule()
    def make_room(self):
        was_over = self.rig.store.is_over_limit
        self.rig.store.make_room()
        if was_over:
            assert self.rig.budget.used_nbytes <= LOW_WATER * self.rig.budget.limit_nbytes

    @invariant()
    def the_budget_is_what_the_shards_in_memory_take(self):
        resident = sum(shard.nbytes for shard in self.shards if shard.is_resident)
        assert self.rig.budget.used_nbytes == self.rig.store.resident_nbytes == resident
        assert self.rig.budget.least_nbytes == 0

    @invariant()
    def shards_are_there_until_their_last_partition_is_let_go(self):
        for shard in self.shards:
            slots = range(shard.first_slot, shard.end_slot)
            with_rows = {s for s in slots if self.counts[shard.source][s]}
            is_wanted = bool(with_rows - self.released)
            assert (shard.is_resident or shard.on_disk is not None) == is_wanted

    @invariant()
    def no_file_outlives_its_shards(self):
        wanted = {shard.on_disk[0].path for shard in self.shards if shard.on_disk}
        assert {os.readlink(path).removesuffix(" (deleted)") for path in self.rig.files} == wanted

    def teardown(self):
        store = self.rig.store
        store.seal()
        for slot in range(N_SLOTS):
            if slot not in self.released:
                assert _read(store, slot) == self._expected(slot)
        store.close()
        assert self.rig.budget.used_nbytes == 0
        assert not self.rig.directory.exists()
        self.root.cleanup()


def test_random_use_agrees_with_a_dict():
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(derandomize=True, max_examples=120, stateful_step_count=30),
    )

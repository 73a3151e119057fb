"""Shards beyond the limit go to disk and are read back equal, or their reader gets an error."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat

import numpy as np
import pytest

from dask_gpurt.errors import (
    ShardStorageError,
)
from dask_gpurt.shuffle import spill_file
from dask_gpurt.shuffle.shards import LOW_WATER
from dask_gpurt.shuffle.spill_file import SpillFile
from tests.shuffle.shard_rig import (
    ROW_NBYTES,
    Rig,
    TripleFrames,
    WatchedBudget,
    change,
    files_of,
    make_rows,
    make_shard,
    read_slot,
    spread_shards,
)

# ------------------------------------------------------------------ over the limit


@pytest.mark.parametrize("packed", [False, True])
def test_furthest_slots_spill_down_to_the_low_water_mark(tmp_path, packed):
    rig = Rig(tmp_path, limit_nbytes=15 * ROW_NBYTES)
    shards = spread_shards(8, packed=packed)
    rig.store.add([shards[i] for i in (3, 7, 0, 5, 1, 6, 2, 4)])
    assert rig.store.is_over_limit
    rig.store.make_room()
    # 16 rows, and at most 0.8 x 15 = 12 may stay.
    assert LOW_WATER == 0.8
    assert [shard.is_resident for shard in shards] == [True] * 6 + [False] * 2
    assert rig.budget.used_nbytes == rig.store.resident_nbytes == 12 * ROW_NBYTES
    assert rig.store.spilled_nbytes == rig.counted("spilled_nbytes") == 4 * ROW_NBYTES
    assert not rig.store.is_over_limit


@pytest.mark.parametrize("is_closed", [False, True])
def test_bytes_on_disk_are_counted_until_they_are_freed(tmp_path, is_closed):
    rig = Rig(tmp_path, limit_nbytes=15 * ROW_NBYTES)
    shards = spread_shards(8)
    rig.store.add(shards)
    rig.store.make_room()
    assert rig.budget.on_disk_nbytes == 4 * ROW_NBYTES
    rig.store.seal()
    slots = range(shards[0].first_slot, shards[-1].end_slot)
    for slot in slots:
        # A shard that is read back is still on disk.
        rig.store.pieces(slot)
    assert rig.budget.on_disk_nbytes == 4 * ROW_NBYTES
    if is_closed:
        rig.store.close()
    else:
        for slot in slots:
            rig.store.release(slot)
    assert rig.budget.on_disk_nbytes == 0


def test_nothing_is_spilled_at_the_limit(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=4 * ROW_NBYTES)
    rig.store.add(spread_shards(2))
    assert not rig.store.is_over_limit
    rig.store.make_room()
    assert not rig.directory.exists()
    assert rig.store.spilled_nbytes == 0


def test_a_store_does_not_spill_for_another_store(tmp_path):
    budget = WatchedBudget(ROW_NBYTES)
    first, second = (Rig(tmp_path / name, budget=budget) for name in "ab")
    first.store.add(spread_shards(4))
    assert first.store.is_over_limit
    assert not second.store.is_over_limit


@pytest.mark.parametrize("packed", [False, True])
def test_spilled_shards_read_back_equal(tmp_path, packed):
    rig = Rig(tmp_path, limit_nbytes=0)
    for source in (1, 0, 2):
        rig.store.add(spread_shards(5, n_rows=source + 1, source=source, packed=packed))
    rig.store.make_room()
    assert rig.budget.used_nbytes == 0
    rig.store.seal()
    for slot in range(5):
        assert read_slot(rig.store, slot) == [
            r for s in range(3) for r in make_rows(s, slot, s + 1)
        ]
    assert rig.counted("unspilled_nbytes") == rig.counted("spilled_nbytes") == 30 * ROW_NBYTES


def test_read_shard_takes_memory_until_it_is_freed(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add([make_shard(0, 0, [1, 2])])
    rig.store.make_room()
    rig.store.seal()
    read_slot(rig.store, 0)
    read_slot(rig.store, 1)
    assert rig.budget.used_nbytes == 3 * ROW_NBYTES
    assert rig.counted("unspilled_nbytes") == 3 * ROW_NBYTES, "read once for both"
    rig.store.release(0)
    rig.store.release(1)
    assert rig.budget.used_nbytes == 0


def test_a_clean_shard_is_not_written_again(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=0)
    shard = make_shard(0, 0, [1, 2])
    rig.store.add([shard])
    rig.store.make_room()
    rig.store.seal()
    for _ in range(3):
        assert read_slot(rig.store, 1) == make_rows(0, 1, 2)
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
        rig.store.add(spread_shards(2))
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
    monkeypatch.setattr(spill_file, "FILE_NBYTES", 4 * ROW_NBYTES)
    rig = Rig(tmp_path, limit_nbytes=0)
    n_files = []
    for source in range(6):
        rig.store.add([make_shard(source, 0, [1, 1])])
        rig.store.make_room()
        n_files.append(len(rig.files))
    assert n_files == [1, 1, 2, 2, 3, 3]
    rig.store.seal()
    assert read_slot(rig.store, 1) == [
        row for source in range(6) for row in make_rows(source, 1, 1)
    ]
    for slot in range(2):
        rig.store.release(slot)
    assert rig.files == []


def test_spills_after_a_file_was_deleted_get_a_new_one(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add([make_shard(0, 0, [1])])
    rig.store.make_room()
    rig.store.seal()
    rig.store.add([make_shard(1, 5, [1])])
    rig.store.release(0)
    assert rig.files == []
    rig.store.make_room()
    assert len(rig.files) == 1


def test_a_file_is_deleted_with_the_last_of_its_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(spill_file, "FILE_NBYTES", 1)
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add(spread_shards(3))
    rig.store.make_room()
    rig.store.add([make_shard(1, 5, [1])])
    rig.store.make_room()
    rig.store.seal()
    assert len(rig.files) == 2
    n_files = []
    for slot in (1, 0, 5, 2):
        rig.store.release(slot)
        n_files.append(len(rig.files))
    assert n_files == [2, 2, 1, 0]
    assert rig.budget.used_nbytes == 0


def test_file_is_deleted_outside_of_the_releasing_call(tmp_path):
    removals = []
    rig = Rig(tmp_path, limit_nbytes=0, run_later=removals.append)
    rig.store.add(spread_shards(2))
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
    rig.store.add([make_shard(0, 0, [2])])
    rig.store.make_room()
    rig.store.seal()
    read_slot(rig.store, 0)
    rig.store.release(0)
    assert rig.budget.used_nbytes == 0
    assert rig.files == []


def test_freeing_a_shard_on_disk_does_not_change_the_budget(tmp_path):
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add([make_shard(0, 0, [2])])
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
def test_full_disk_loses_no_shard_and_is_logged_once(tmp_path, caplog, n_writes):
    rig = Rig(tmp_path, limit_nbytes=0, open_file=FullDisk.after(n_writes))
    shards = spread_shards(6)
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
    assert [read_slot(rig.store, slot) for slot in range(6)] == [
        make_rows(0, s, 2) for s in range(6)
    ]
    for slot in range(6):
        rig.store.release(slot)
    assert rig.budget.used_nbytes == 0
    assert rig.files == []


@pytest.mark.parametrize("n_writes", range(4))
def test_disk_that_fills_up_within_a_file_loses_no_shard(tmp_path, n_writes):
    rig = Rig(tmp_path, limit_nbytes=0, open_file=FullDisk.after(n_writes))
    shards = spread_shards(4)
    rig.store.add(shards)
    rig.store.make_room()
    # The last slots are spilled first.
    assert [shard.is_resident for shard in shards] == [True] * (4 - n_writes) + [False] * n_writes
    assert len(rig.files) == (n_writes > 0)
    rig.store.seal()
    assert [read_slot(rig.store, slot) for slot in range(4)] == [
        make_rows(0, s, 2) for s in range(4)
    ]
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
    rig.store.add(spread_shards(3))
    for _ in range(2):
        rig.store.make_room()
        assert rig.store.is_over_limit
        assert rig.budget.used_nbytes == 6 * ROW_NBYTES
    rig.store.make_room()
    assert rig.budget.used_nbytes == 0
    (report,) = [r for r in caplog.records if r.name == "dask_gpurt.shuffle"]
    assert (report.levelno, "retried later" in report.message) == (logging.WARNING, True)
    rig.store.seal()
    assert [read_slot(rig.store, slot) for slot in range(3)] == [
        make_rows(0, s, 2) for s in range(3)
    ]


def test_directory_that_cannot_be_made_loses_no_shard(tmp_path, caplog):
    (tmp_path / "run").write_text("in the way")
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add(spread_shards(3))
    rig.store.make_room()
    rig.store.make_room()
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
    rig.store.seal()
    assert [read_slot(rig.store, slot) for slot in range(3)] == [
        make_rows(0, s, 2) for s in range(3)
    ]
    rig.store.close()
    assert (tmp_path / "run").read_text() == "in the way"


def test_partial_write_is_continued(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    file = SpillFile(str(tmp_path / "file"))
    contents = np.arange(100, dtype=np.uint8)
    extents = [file.append(contents), file.append(contents[::-1].copy())]
    assert [extent.position for extent in extents] == [0, 100]
    (path,) = files_of(tmp_path)
    assert path.read_bytes() == contents.tobytes() + contents[::-1].tobytes()
    file.remove()


def test_each_read_may_be_timed(tmp_path):
    log = []

    @contextlib.contextmanager
    def reading():
        log.append("begin")
        yield
        log.append("end")

    file = SpillFile(str(tmp_path / "file"), reading)
    extent = file.append(contents := np.arange(100, dtype=np.uint8))
    assert log == []
    found = np.zeros_like(contents)
    file.read_into(found, extent)
    assert (log, found.tolist()) == (["begin", "end"], contents.tolist())
    file.remove()


def test_partial_read_is_continued(tmp_path, monkeypatch):
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
def test_truncated_file_is_an_error(tmp_path, length):
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add([make_shard(0, 0, [5])])
    rig.store.make_room()
    rig.store.seal()
    os.truncate(rig.files[0], length)
    with pytest.raises(ShardStorageError, match="ended before"):
        rig.store.pieces(0)
    assert rig.budget.used_nbytes == 0


def test_unreadable_file_is_an_error(tmp_path):
    class Broken(SpillFile):
        def read_into(self, buffer, extent):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    rig = Rig(tmp_path, limit_nbytes=0, open_file=Broken)
    rig.store.add([make_shard(0, 0, [5])])
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
def test_changed_bytes_are_an_error_before_they_are_parsed(tmp_path, damage):
    class NothingToParse(TripleFrames):
        def unpack(self, layout_key, packed):
            pytest.fail("damaged bytes were parsed")

    rig = Rig(tmp_path, limit_nbytes=0, adapter=NothingToParse())
    shards = [make_shard(0, 0, [5]), make_shard(1, 1, [5])]
    rig.store.add(shards)
    rig.store.make_room()
    rig.store.seal()
    (path,) = rig.files
    damage(path, *(shard.on_disk[1].position for shard in shards))
    with pytest.raises(ShardStorageError, match="returned other bytes"):
        rig.store.pieces(0)
    assert rig.budget.used_nbytes == 0


@pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, (1 << 20) + 1, (3 << 20) + 65_537])
def test_every_byte_of_a_spill_file_is_checked(tmp_path, nbytes):
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


def test_removing_the_directory_loses_no_shard(tmp_path):
    """A user may clean up the directory."""
    rig = Rig(tmp_path, limit_nbytes=0)
    rig.store.add(spread_shards(3))
    rig.store.make_room()
    shutil.rmtree(tmp_path)
    rig.store.add([make_shard(1, 4, [2])])
    rig.store.make_room()
    rig.store.seal()
    assert [read_slot(rig.store, slot) for slot in range(3)] == [
        make_rows(0, s, 2) for s in range(3)
    ]
    assert read_slot(rig.store, 4) == make_rows(1, 4, 2)
    rig.store.close()
    assert rig.files == []

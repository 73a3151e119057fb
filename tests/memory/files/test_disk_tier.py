"""The disk tier restores values from files, and leaves no file behind."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest

from dask_gpurt.errors import TierFullError
from dask_gpurt.frames.flat.values import Flat, flatten, restore
from dask_gpurt.memory.files.block_io import empty_blocks
from dask_gpurt.memory.files.disk_tier import DiskTier
from tests.conformance.tier_suite import TierSuite, assert_same, flat_of
from tests.memory.faulty_system import Gate, System, without_direct
from tests.memory.files.disk_cases import LARGE, PATIENCE_S, files


class DiskSuite(TierSuite):
    options: ClassVar = {}

    @pytest.fixture(autouse=True)
    def _parent(self, tmp_path):
        self.parent = tmp_path

    def make_tier(self, capacity_nbytes=None):
        return DiskTier(str(self.parent), capacity_nbytes, **self.options)


class TestDisk(DiskSuite):
    pass


class TestDiskThroughThePageCache(DiskSuite):
    options: ClassVar = {"system": System(open=without_direct)}


class TestDiskLZ4(DiskSuite):
    options: ClassVar = {"compression": "lz4"}


class TestDiskZstd(DiskSuite):
    options: ClassVar = {"compression": "zstd"}


class TestDiskIntoMemoryAskew(DiskSuite):
    options: ClassVar = {"empty": lambda nbytes: np.empty(nbytes + 8, np.uint8)[8:]}


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no file system in memory")
class TestDiskInMemory(DiskSuite):
    @pytest.fixture(autouse=True)
    def _parent(self):
        self.parent = pathlib.Path("/dev/shm") / f"test-disk-{os.getpid()}"
        yield
        shutil.rmtree(self.parent, ignore_errors=True)


# ------------------------------------------------------------------ content of the disk


def test_no_directory_is_made_before_the_first_value(parent):
    tier = DiskTier(str(parent))
    tier.close()
    assert not parent.exists()


def test_files_are_private_and_named_by_numbers(parent):
    old = os.umask(0)
    try:
        tier = DiskTier(str(parent))
        for number in range(3):
            tier.put(flat_of(LARGE if number else (10,)))
    finally:
        os.umask(old)
    for path in parent.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    assert [path.name for path in files(parent)] == ["00000000", "00000001", "00000002"]
    tier.close()
    assert not list(parent.iterdir())


def test_size_of_a_place_equals_its_file(parent):
    tier = DiskTier(str(parent))
    for lengths in ((), (10,), (5_000,), (70_000,), LARGE):
        place = tier.put(flat_of(lengths))
        file = pathlib.Path(place.path)
        assert file.stat().st_size <= place.nbytes < file.stat().st_size + 4096
        tier.drop(place)
        assert not file.exists()


def test_frame_is_read_writable_and_without_another_copy(parent):
    tier = DiskTier(str(parent))
    frame = pd.DataFrame(
        {"a": np.arange(1e5), "b": np.arange(100_000), "c": [f"{n:09}" for n in range(100_000)]}
    )
    frame.attrs["unit"] = "m"
    flat = tier.get(tier.put(flatten(frame)))
    got = restore(flat.header, flat.buffers)
    pd.testing.assert_frame_equal(got, frame)
    assert got.attrs == frame.attrs
    (block,) = [b.values for b in got._mgr.blocks if b.dtype == "f8"]
    assert sum(np.shares_memory(block, buffer) for buffer in flat.buffers) == 1
    got.iloc[0, 0] = 5.0
    tier.close()


def test_large_buffers_are_freed_one_by_one(parent):
    """A column that is still in use does not keep the whole frame alive."""
    tier = DiskTier(str(parent))
    got = tier.get(tier.put(flat_of((1_000_000, 1_000_000, 10))))
    roots = [buffer if buffer.base is None else buffer.base for buffer in got.buffers]
    assert len({id(root) for root in roots}) == 3
    assert sum(root.nbytes for root in roots) < 2_100_000
    tier.close()


# ------------------------------------------------------------------ ways of writing


def test_only_large_values_bypass_the_page_cache(parent, has_direct):
    system = System()
    tier = DiskTier(str(parent), system=system)
    tier.put(flat_of((10,)))
    system.log.clear()
    for lengths in ((10, 20_000), LARGE):
        is_large = lengths is LARGE
        place = tier.put(flat_of(lengths))
        tier.get(place)
        opened = [call[2] for call in system.log if call[0] == "open"]
        assert [bool(flags & os.O_DIRECT) for flags in opened] == [is_large, is_large]
        written = [call for call in system.log if call[0] == "pwrite"]
        if is_large:
            assert all(position % 4096 == len(view) % 4096 == 0 for *_, view, position in written)
        else:
            assert len(written) == 1
        system.log.clear()
    tier.close()


def disk_of(direct_s, cached_s):
    """Return a system whose writes take these seconds, and its clock."""
    now_s, takes_s = [0.0], [0.0]

    def opened(real, path, flags, *args):
        takes_s[0] = direct_s if flags & os.O_DIRECT else cached_s
        return real(path, flags, *args)

    def pwrite(real, *args):
        now_s[0] += takes_s[0]
        return real(*args)

    return System(open=opened, pwrite=pwrite), lambda: now_s[0]


@pytest.mark.parametrize(
    ("direct_s", "expected"),
    [(9.0, [True, False, False, True, False]), (0.1, [True, False, *[True] * 3])],
)
def test_values_go_the_faster_way_while_the_cache_has_room(parent, has_direct, direct_s, expected):
    system, clock = disk_of(direct_s, 1.0)
    asked = []

    def takes(nbytes):
        asked.append(nbytes)
        return len(asked) != 3

    tier = DiskTier(str(parent), system=system, clock=clock, cache_takes=takes)
    value = flat_of(LARGE)
    places = [tier.put(value) for _ in expected]
    assert [place.is_direct for place in places] == expected
    assert {*asked} == {places[0].nbytes}
    system.log.clear()
    for place in places:
        assert_same(tier.get(place), value)
    opened = [bool(call[2] & os.O_DIRECT) for call in system.log if call[0] == "open"]
    assert opened == expected
    tier.close()


def test_small_values_say_nothing_of_the_page_cache(parent, has_direct):
    system, clock = disk_of(0.1, 9.0)
    tier = DiskTier(str(parent), system=system, clock=clock, cache_takes=lambda nbytes: True)
    places = [tier.put(flat_of(lengths)) for lengths in ((10,), LARGE, (10,), LARGE, LARGE)]
    assert [place.is_direct for place in places] == [False, True, False, False, True]
    tier.close()


def test_value_is_read_in_one_call(parent):
    system = System()
    tier = DiskTier(str(parent), system=system)
    for lengths in ((), (10,), (60_000, 60_000), LARGE, (100_000,) * 500):
        place = tier.put(flat_of(lengths))
        before = system.counts["preadv"]
        tier.get(place)
        assert system.counts["preadv"] == before + 1
    tier.close()


def test_aligned_memory_is_written_in_place(parent, has_direct):
    system = System()
    tier = DiskTier(str(parent), system=system)
    value = flat_of(((8 << 20) + 100,))
    buffer = empty_blocks(value.buffers[0].nbytes)
    buffer[:] = value.buffers[0]
    place = tier.put(Flat(value.header, (buffer,)))
    views = [call[2] for call in system.log if call[0] == "pwrite"]
    direct = [v for v in views if np.shares_memory(np.asarray(v), buffer)]
    assert sum(map(len, direct)) == 8 << 20
    assert_same(tier.get(place), value)
    tier.close()


def test_direct_io_is_tried_once_per_directory(parent):
    system = System(open=without_direct)
    tier = DiskTier(str(parent), system=system)
    for _ in range(3):
        tier.put(flat_of(LARGE))
    tried = [call for call in system.log if call[0] == "open" and call[2] & os.O_DIRECT]
    assert len(tried) == 1
    assert len(files(parent)) == 3
    tier.close()


@pytest.mark.parametrize("piece", [512, 4096, 100_000 // 512 * 512])
def test_partial_system_calls_are_continued(parent, piece):
    def pwrite(real, fd, view, position):
        return real(fd, view[:piece], position)

    def preadv(real, fd, views, position):
        return real(fd, [views[0][:piece]], position)

    tier = DiskTier(str(parent), system=System(pwrite=pwrite, preadv=preadv))
    for lengths in ((10, 70_000), (200_001, 5, 100_000)):
        value = flat_of(lengths)
        assert_same(tier.get(tier.put(value)), value)
    tier.close()


def test_write_without_progress_is_an_error(parent):
    tier = DiskTier(str(parent), system=System(pwrite=lambda real, fd, view, position: 0))
    with pytest.raises(OSError):
        tier.put(flat_of((10,)))
    assert not files(parent)
    tier.close()


@pytest.mark.parametrize("coder", ["lz4", "zstd"])
def test_compression_is_kept_where_it_saves_bytes(parent, coder):
    tier, plain = DiskTier(str(parent), None, coder), DiskTier(str(parent))
    zeros = Flat(b"", (np.zeros(1 << 20, np.uint8),))
    noise = Flat(b"", (np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8),))
    both = Flat(b"", zeros.buffers + noise.buffers)
    assert tier.put(zeros).nbytes < 32 << 10
    assert tier.put(noise).nbytes == plain.put(noise).nbytes
    place = tier.put(both)
    assert place.nbytes <= tier.put(noise).nbytes + 4096 < plain.put(both).nbytes
    assert_same(tier.get(place), both)
    assert tier.get(place).buffers[0].flags.writeable
    tier.close()
    plain.close()


def test_an_unknown_coder_is_refused(parent):
    with pytest.raises(ValueError, match="snappy"):
        DiskTier(str(parent), None, "snappy")


def test_read_and_written_bytes_are_reported(parent):
    told = []
    ticks = itertools.count()
    tier = DiskTier(
        str(parent), on_io=lambda *event: told.append(event), clock=lambda: float(next(ticks))
    )
    place = tier.put(flat_of(LARGE))
    tier.get(place)
    (write, written_nbytes, write_s), (read, read_nbytes, read_s) = told
    assert (write, read) == ("disk-write", "disk-read")
    assert written_nbytes == read_nbytes == place.nbytes
    assert write_s > 0
    assert read_s > 0
    tier.close()


# ------------------------------------------------------------------ two threads


@pytest.mark.parametrize("ends", ["drop", "close"])
def test_file_may_be_removed_during_a_read(parent, executor, ends):
    gate = Gate()

    def preadv(real, *args):
        gate.wait()
        return real(*args)

    system = System()
    tier = DiskTier(str(parent), system=system)
    value = flat_of(LARGE)
    place = tier.put(value)
    system.hooks["preadv"] = preadv
    reading = executor.submit(tier.get, place)
    assert gate.reached.wait(PATIENCE_S)
    if ends == "drop":
        tier.drop(place)
    else:
        tier.close()
    assert not files(parent)
    gate.open()
    assert_same(reading.result(PATIENCE_S), value)
    tier.close()


def test_tier_may_be_closed_during_a_write(parent, executor):
    gate = Gate()

    def pwrite(real, *args):
        gate.wait()
        return real(*args)

    system = System()
    tier = DiskTier(str(parent), system=system)
    tier.put(flat_of(LARGE))
    system.hooks["pwrite"] = pwrite
    writing = executor.submit(tier.put, flat_of(LARGE))
    assert gate.reached.wait(PATIENCE_S)
    tier.close()
    gate.open()
    with pytest.raises(TierFullError, match="closed"):
        writing.result(PATIENCE_S)
    assert tier.used_nbytes == 0
    assert not list(parent.iterdir())


def test_value_being_written_counts_towards_the_limit(parent, executor):
    gate = Gate()

    def pwrite(real, *args):
        gate.wait()
        return real(*args)

    system = System()
    tier = DiskTier(str(parent), 300_000, system=system)
    tier.drop(tier.put(flat_of((10,))))
    system.hooks["pwrite"] = pwrite
    writing = executor.submit(tier.put, flat_of((200_000,)))
    assert gate.reached.wait(PATIENCE_S)
    # The count of bytes is not locked during a write.
    assert 200_000 < tier.used_nbytes < 300_000
    with pytest.raises(TierFullError, match="do not fit"):
        tier.put(flat_of((200_000,)))
    gate.open()
    assert writing.result(PATIENCE_S).nbytes == tier.used_nbytes
    tier.close()


def test_two_threads_make_one_directory(parent):
    tier = DiskTier(str(parent))
    together = threading.Barrier(2)

    def work(seed):
        together.wait(PATIENCE_S)
        return tier.put(flat_of(LARGE, seed))

    with ThreadPoolExecutor(2) as executor:
        places = list(executor.map(work, range(2)))
    assert len({os.path.dirname(place.path) for place in places}) == 1
    for seed, place in enumerate(places):
        assert_same(tier.get(place), flat_of(LARGE, seed))
    tier.close()


def test_file_names_do_not_contain_keys(parent):
    tier = DiskTier(str(parent))
    tier.put(flat_of((10,)))
    assert all(re.fullmatch(r"\d{8}", path.name) for path in files(parent))
    tier.close()


# ------------------------------------------------------------------ the check of the directory


def test_check_reports_the_directory(parent, has_direct):
    tier = DiskTier(str(parent))
    found = tier.probe()
    assert pathlib.Path(found["directory"]).parent == parent
    assert (found["is_direct"], found["problem"]) == (True, None)
    assert tier.probe() == found
    place = tier.put(flat_of(LARGE))
    assert place.path.startswith(found["directory"])
    tier.close()
    assert not list(parent.iterdir())
    assert tier.probe()["problem"] == "the store was closed"
    assert not list(parent.iterdir())


def test_check_reports_missing_direct_io(parent):
    tier = DiskTier(str(parent), system=System(open=without_direct))
    assert tier.probe()["is_direct"] is False
    tier.close()


def test_check_reports_why_the_directory_is_unusable(tmp_path):
    (tmp_path / "file").touch()
    tier = DiskTier(str(tmp_path / "file" / "spill"))
    assert tier.probe() == {
        "directory": str(tmp_path / "file" / "spill"),
        "is_direct": None,
        "problem": "Not a directory",
    }
    tier.close()

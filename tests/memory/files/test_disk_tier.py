"""The disk tier: values come back from files, or are refused; nothing is left behind."""

from __future__ import annotations

import errno
import itertools
import logging
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

from dask_gpurt.errors import DamagedValueError, TierFullError, ValueRefusedError
from dask_gpurt.frames.flat.values import Flat, flatten, restore
from dask_gpurt.memory.files import block_io, value_io
from dask_gpurt.memory.files.block_io import empty_blocks
from dask_gpurt.memory.files.disk_tier import DiskTier
from tests.conformance.tier_suite import TierSuite, assert_same, flat_of, half_noise
from tests.memory.faulty_system import CALLS, FailingSystem, Gate, System, without_direct

PATIENCE_S = 60.0
LARGE = (1_000_000, 10, 200_001)


@pytest.fixture
def parent(tmp_path):
    return tmp_path / "spill"


@pytest.fixture
def has_direct(tmp_path):
    if not block_io.supports_direct(os, str(tmp_path / "probe")):
        pytest.skip("this file system has no direct I/O")


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


# ------------------------------------------------------------------ what is on the disk


def files(parent):
    return sorted(p for p in pathlib.Path(parent).rglob("*") if p.is_file() and p.suffix != ".lock")


def test_nothing_is_made_before_it_is_needed(parent):
    tier = DiskTier(str(parent))
    tier.close()
    assert not parent.exists()


def test_files_are_for_their_user_alone_and_named_by_numbers(parent):
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


def test_a_place_takes_what_its_file_does(parent):
    tier = DiskTier(str(parent))
    for lengths in ((), (10,), (5_000,), (70_000,), LARGE):
        place = tier.put(flat_of(lengths))
        file = pathlib.Path(place.path)
        assert file.stat().st_size <= place.nbytes < file.stat().st_size + 4096
        tier.drop(place)
        assert not file.exists()


def test_a_frame_comes_back_writable_and_without_another_copy(parent):
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


def test_large_buffers_are_let_go_of_one_by_one(parent):
    """A column that somebody goes on using does not hold on to the whole frame."""
    tier = DiskTier(str(parent))
    got = tier.get(tier.put(flat_of((1_000_000, 1_000_000, 10))))
    roots = [buffer if buffer.base is None else buffer.base for buffer in got.buffers]
    assert len({id(root) for root in roots}) == 3
    assert sum(root.nbytes for root in roots) < 2_100_000
    tier.close()


# ------------------------------------------------------------------ how it gets there


def test_large_values_go_past_the_page_cache_and_small_ones_do_not(parent, has_direct):
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


def test_reading_is_one_call(parent):
    system = System()
    tier = DiskTier(str(parent), system=system)
    for lengths in ((), (10,), (60_000, 60_000), LARGE, (100_000,) * 500):
        place = tier.put(flat_of(lengths))
        before = system.counts["preadv"]
        tier.get(place)
        assert system.counts["preadv"] == before + 1
    tier.close()


def test_memory_on_a_block_boundary_is_written_from_where_it_is(parent, has_direct):
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


def test_direct_io_is_tried_once_a_directory(parent):
    system = System(open=without_direct)
    tier = DiskTier(str(parent), system=system)
    for _ in range(3):
        tier.put(flat_of(LARGE))
    tried = [call for call in system.log if call[0] == "open" and call[2] & os.O_DIRECT]
    assert len(tried) == 1
    assert len(files(parent)) == 3
    tier.close()


@pytest.mark.parametrize("piece", [512, 4096, 100_000 // 512 * 512])
def test_the_system_may_do_less_than_it_is_asked_for(parent, piece):
    def pwrite(real, fd, view, position):
        return real(fd, view[:piece], position)

    def preadv(real, fd, views, position):
        return real(fd, [views[0][:piece]], position)

    tier = DiskTier(str(parent), system=System(pwrite=pwrite, preadv=preadv))
    for lengths in ((10, 70_000), (200_001, 5, 100_000)):
        value = flat_of(lengths)
        assert_same(tier.get(tier.put(value)), value)
    tier.close()


def test_a_write_that_makes_no_headway_is_an_error(parent):
    tier = DiskTier(str(parent), system=System(pwrite=lambda real, fd, view, position: 0))
    with pytest.raises(OSError):
        tier.put(flat_of((10,)))
    assert not files(parent)
    tier.close()


@pytest.mark.parametrize("coder", ["lz4", "zstd"])
def test_compression_is_kept_where_it_saves(parent, coder):
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


def test_what_was_read_and_written_is_told(parent):
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


# ------------------------------------------------------------------ damage


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("lengths", [(10, 500), (300_001, 20, 70_000)])
def test_damage_is_noticed_wherever_it_is(parent, lengths, compression):
    tier = DiskTier(str(parent), None, compression)
    value = flat_of(lengths)
    place = tier.put(value)
    path = pathlib.Path(place.path)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for position in {0, 3, 4, 8, 16, 24, 32, 36, *rng.integers(0, len(good), 100).tolist()}:
        bad = bytearray(good)
        bad[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        try:
            got = tier.get(place)
        except DamagedValueError:
            continue
        assert_same(got, value)  # it was padding
    for end in (0, 1, 39, 40, 100, 4096, len(good) // 2, len(good) - 1):
        path.write_bytes(good[: min(end, len(good) - 1)])
        with pytest.raises(DamagedValueError):
            tier.get(place)
    path.write_bytes(good)
    assert_same(tier.get(place), value)
    tier.close()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_no_decoder_sees_damaged_bytes(parent, compression, monkeypatch):
    tier = DiskTier(str(parent), None, compression)
    place = tier.put(Flat(b"", (half_noise(1 << 20, 0),)))
    assert place.nbytes < 1 << 20, "nothing was compressed"
    path = pathlib.Path(place.path)
    good = path.read_bytes()

    def decompress(*args):
        pytest.fail("damaged bytes were decoded")

    monkeypatch.setattr(value_io, "decompress", decompress)
    for position in (place.lead_nbytes, place.lead_nbytes + 70_001):
        bad = bytearray(good)
        bad[position] ^= 2
        path.write_bytes(bad)
        with pytest.raises(DamagedValueError, match="a buffer is damaged"):
            tier.get(place)
    tier.close()


def test_blocks_that_changed_places_are_noticed(parent):
    tier = DiskTier(str(parent))
    place = tier.put(Flat(b"", (half_noise(1 << 20, 0),)))
    path = pathlib.Path(place.path)
    good = path.read_bytes()
    first, second = good[65536 : 2 * 65536], good[2 * 65536 : 3 * 65536]
    path.write_bytes(good[:65536] + second + first + good[3 * 65536 :])
    with pytest.raises(DamagedValueError, match="damaged"):
        tier.get(place)
    tier.close()


def test_another_value_in_its_place_is_noticed(parent):
    tier = DiskTier(str(parent))
    for lengths in (LARGE, (70_000,)):
        one, other = tier.put(flat_of(LARGE, 1)), tier.put(flat_of(lengths, 2))
        os.replace(other.path, one.path)
        with pytest.raises(DamagedValueError):
            tier.get(one)
    tier.close()


@pytest.mark.parametrize("lengths", [(10,), LARGE])
def test_a_file_that_vanished_is_damage(parent, lengths):
    tier = DiskTier(str(parent))
    place = tier.put(flat_of(lengths))
    os.unlink(place.path)
    with pytest.raises(DamagedValueError, match="gone"):
        tier.get(place)
    tier.drop(place)
    assert tier.used_nbytes == 0
    tier.close()


def test_a_write_that_was_torn_is_no_value(parent, monkeypatch):
    """Everything is there but what is written last."""
    tier = DiskTier(str(parent))
    place = tier.put(flat_of(LARGE))
    with open(place.path, "r+b") as file:
        file.write(bytes(place.lead_nbytes))
    with pytest.raises(DamagedValueError, match="not written to its end"):
        tier.get(place)
    tier.close()


def test_the_lead_is_written_last(parent):
    system = System()
    tier = DiskTier(str(parent), system=system)
    tier.put(flat_of(LARGE))
    system.log.clear()
    tier.put(flat_of(LARGE))
    positions = [call[3] for call in system.log if call[0] == "pwrite"]
    assert positions[-1] == 0
    assert 0 not in positions[:-1]
    tier.close()


def test_an_error_of_the_disk_is_an_error_and_not_damage(parent):
    def preadv(real, *args):
        raise OSError(errno.EIO, "Input/output error")

    system = System()
    tier = DiskTier(str(parent), system=system)
    value = flat_of(LARGE)
    place = tier.put(value)
    system.hooks["preadv"] = preadv
    with pytest.raises(OSError) as caught:
        tier.get(place)
    assert not isinstance(caught.value, DamagedValueError)
    system.hooks.clear()
    assert_same(tier.get(place), value)
    tier.close()


# ------------------------------------------------------------------ failures


def open_files():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return found


SMALL = (100,)


@pytest.mark.parametrize(
    ("lengths", "code"),
    [
        (SMALL, errno.ENOSPC),
        (SMALL, errno.EDQUOT),
        (SMALL, errno.EIO),
        (SMALL, errno.EROFS),
        # More than a bounce buffer holds.
        ((5_000_000, 10, 200_000), errno.ENOSPC),
        ((5_000_000, 10, 200_000), errno.EIO),
    ],
)
def test_every_call_fails_once(tmp_path, lengths, code):
    """Whichever call it is: the value is kept whole or not at all, and then it goes on."""
    value, failed = flat_of(lengths), set()
    for n in itertools.count(1):
        parent = tmp_path / str(n)
        now_s = [0.0]
        system = FailingSystem(n, code)
        tier = DiskTier(str(parent), system=system, clock=lambda now_s=now_s: now_s[0])
        kept = []
        for step in ("put", "get", "put"):
            try:
                if step == "put":
                    kept.append(tier.put(value))
                elif kept:
                    assert_same(tier.get(kept[0]), value)
            except (OSError, TierFullError) as error:
                if step == "put":
                    is_full = code in (errno.ENOSPC, errno.EDQUOT)
                    assert isinstance(error, TierFullError) == is_full
                    assert (error.__cause__ or error).errno == code
            assert tier.used_nbytes == sum(place.nbytes for place in kept)
            assert len(files(parent)) == len(kept)
            now_s[0] += 1_000.0
        system.hooks.clear()
        kept.append(tier.put(value))
        for place in kept:
            assert_same(tier.get(place), value)
        tier.close()
        assert tier.used_nbytes == 0
        assert not parent.exists() or not list(parent.iterdir())
        assert not [path for path in open_files() if str(parent) in path]
        if system.failed is None:
            break
        failed.add(system.failed)
    assert failed == set(CALLS) - ({"ftruncate"} if lengths == SMALL else set())


def failing_pwrite(real, *args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_after_a_failure_it_waits_and_then_tries_again(parent, caplog):
    now_s = [100.0]
    system = System()
    tier = DiskTier(str(parent), system=system, clock=lambda: now_s[0])
    value = flat_of(LARGE)
    kept = tier.put(value)
    system.hooks["pwrite"] = failing_pwrite
    tried = []
    with caplog.at_level(logging.ERROR, logger="dask_gpurt.memory"):
        for _ in range(500):
            before = system.counts["pwrite"]
            with pytest.raises(TierFullError):
                tier.put(value)
            if system.counts["pwrite"] > before:
                tried.append(now_s[0])
            now_s[0] += 0.5
    # One, two, four ... seconds; then once a minute.
    waits = np.diff(tried).tolist()
    assert waits[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(waits[7:]) == {60}
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    # What is there can be read meanwhile; and once there is room again, it goes on at once.
    assert_same(tier.get(kept), value)
    system.hooks.clear()
    now_s[0] += 60.0
    tier.drop(tier.put(value))
    tier.drop(tier.put(value))
    assert tier.used_nbytes == kept.nbytes
    tier.close()


def test_another_reason_is_said_too(parent, caplog):
    now_s = [0.0]
    codes = itertools.cycle([errno.ENOSPC, errno.EROFS])

    def pwrite(real, *args):
        code = next(codes)
        raise OSError(code, os.strerror(code))

    system = System()
    tier = DiskTier(str(parent), system=system, clock=lambda: now_s[0])
    tier.drop(tier.put(flat_of((10,))))
    system.hooks["pwrite"] = pwrite
    with caplog.at_level(logging.ERROR, logger="dask_gpurt.memory"):
        for _ in range(4):
            with pytest.raises((OSError, TierFullError)):
                tier.put(flat_of((10,)))
            now_s[0] += 100.0
        assert len(caplog.records) == 2
        now_s[0] += 600.0
        with pytest.raises(TierFullError):
            tier.put(flat_of((10,)))
        assert len(caplog.records) == 3
    tier.close()


def test_a_full_tier_is_no_failure(parent, caplog):
    tier = DiskTier(str(parent), 300_000)
    place = tier.put(flat_of((200_000,)))
    with pytest.raises(TierFullError, match="do not fit"):
        tier.put(flat_of((200_000,)))
    # Which never will, and is no matter of the others.
    with pytest.raises(ValueRefusedError, match="exceed the disk limit"):
        tier.put(flat_of((400_000,)))
    tier.drop(place)
    tier.put(flat_of((200_000,)))
    assert not caplog.messages
    tier.close()


def test_a_parent_that_is_a_file(parent):
    parent.write_text("not a directory")
    tier = DiskTier(str(parent))
    with pytest.raises(OSError):
        tier.put(flat_of((10,)))
    assert tier.used_nbytes == 0
    tier.close()
    assert parent.read_text() == "not a directory"


@pytest.mark.parametrize("with_parent", [False, True])
def test_a_directory_that_was_deleted_is_made_again(parent, caplog, with_parent):
    tier = DiskTier(str(parent))
    lost = tier.put(flat_of(LARGE, 1))
    shutil.rmtree(parent if with_parent else pathlib.Path(lost.path).parent)
    with caplog.at_level(logging.WARNING, logger="dask_gpurt.memory"):
        place = tier.put(flat_of(LARGE, 2))
    assert len(caplog.records) == 1
    assert_same(tier.get(place), flat_of(LARGE, 2))
    with pytest.raises(DamagedValueError):
        tier.get(lost)
    tier.drop(lost)
    assert tier.used_nbytes == place.nbytes
    tier.close()
    assert not list(parent.iterdir())
    assert not [path for path in open_files() if str(parent) in path]


def test_a_file_that_cannot_be_opened_costs_no_others(parent):
    """Not finding a place to write to does not mean that the directory is gone."""
    system = System()
    tier = DiskTier(str(parent), system=system)
    value = flat_of(LARGE)
    place = tier.put(value)

    def nowhere(real, *args):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    system.hooks["open"] = nowhere
    with pytest.raises(FileNotFoundError):
        tier.put(value)
    system.hooks.clear()
    assert_same(tier.get(place), value)
    tier.close()


def test_a_file_that_does_not_go_is_said_and_goes_with_the_tier(parent, caplog):
    def unlink(real, path):
        if not path.endswith("probe"):
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    tier = DiskTier(str(parent), system=System(unlink=unlink))
    tier.drop(tier.put(flat_of((10,))))
    assert tier.used_nbytes == 0
    assert len(files(parent)) == 1
    assert "cannot remove" in caplog.text
    tier.close()
    assert not list(parent.iterdir())


# ------------------------------------------------------------------ two threads


@pytest.fixture
def executor():
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.mark.parametrize("ends", ["drop", "close"])
def test_a_file_that_is_being_read_may_go(parent, executor, ends):
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


def test_closing_while_somebody_writes(parent, executor):
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


def test_what_is_being_written_counts(parent, executor):
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
    # The account is not locked while somebody writes.
    assert 200_000 < tier.used_nbytes < 300_000
    with pytest.raises(TierFullError, match="do not fit"):
        tier.put(flat_of((200_000,)))
    gate.open()
    assert writing.result(PATIENCE_S).nbytes == tier.used_nbytes
    tier.close()


def test_two_threads_that_begin_make_one_directory(parent):
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


def test_the_name_of_a_key_is_nowhere(parent):
    tier = DiskTier(str(parent))
    tier.put(flat_of((10,)))
    assert all(re.fullmatch(r"\d{8}", path.name) for path in files(parent))
    tier.close()


# ------------------------------------------------------------------ a look before it is needed


def test_a_look_says_where_values_will_go(parent, has_direct):
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


def test_a_look_says_that_there_is_no_direct_io(parent):
    tier = DiskTier(str(parent), system=System(open=without_direct))
    assert tier.probe()["is_direct"] is False
    tier.close()


def test_a_look_says_why_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    tier = DiskTier(str(tmp_path / "file" / "spill"))
    assert tier.probe() == {
        "directory": str(tmp_path / "file" / "spill"),
        "is_direct": None,
        "problem": "Not a directory",
    }
    tier.close()

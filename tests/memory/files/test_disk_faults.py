"""With damaged files or failing disks, values are refused or whole, and no file is left."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import pathlib
import shutil

import numpy as np
import pytest

from dask_gpurt.errors import DamagedValueError, TierFullError, ValueRefusedError
from dask_gpurt.frames.flat.values import Flat
from dask_gpurt.memory.files import value_io
from dask_gpurt.memory.files.disk_tier import DiskTier
from tests.conformance.tier_suite import assert_same, flat_of, half_noise
from tests.memory.faulty_system import CALLS, FailingSystem, System
from tests.memory.files.disk_cases import LARGE, SMALL, failing_pwrite, files

# ------------------------------------------------------------------ damage


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("lengths", [(10, 500), (300_001, 20, 70_000)])
def test_damage_at_any_position_is_noticed(parent, lengths, compression):
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
        assert_same(got, value)  # the damaged byte was padding
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


def test_swapped_blocks_are_noticed(parent):
    tier = DiskTier(str(parent))
    place = tier.put(Flat(b"", (half_noise(1 << 20, 0),)))
    path = pathlib.Path(place.path)
    good = path.read_bytes()
    first, second = good[65536 : 2 * 65536], good[2 * 65536 : 3 * 65536]
    path.write_bytes(good[:65536] + second + first + good[3 * 65536 :])
    with pytest.raises(DamagedValueError, match="damaged"):
        tier.get(place)
    tier.close()


def test_file_replaced_by_another_value_is_noticed(parent):
    tier = DiskTier(str(parent))
    for lengths in (LARGE, (70_000,)):
        one, other = tier.put(flat_of(LARGE, 1)), tier.put(flat_of(lengths, 2))
        os.replace(other.path, one.path)
        with pytest.raises(DamagedValueError):
            tier.get(one)
    tier.close()


@pytest.mark.parametrize("lengths", [(10,), LARGE])
def test_missing_file_counts_as_damage(parent, lengths):
    tier = DiskTier(str(parent))
    place = tier.put(flat_of(lengths))
    os.unlink(place.path)
    with pytest.raises(DamagedValueError, match="gone"):
        tier.get(place)
    tier.drop(place)
    assert tier.used_nbytes == 0
    tier.close()


def test_torn_write_is_not_a_value(parent, monkeypatch):
    """All blocks are written except for the last one."""
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


def test_disk_error_is_not_reported_as_damage(parent):
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


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("lengths", "code"),
    [
        (SMALL, errno.ENOSPC),
        (SMALL, errno.EDQUOT),
        (SMALL, errno.EIO),
        (SMALL, errno.EROFS),
        # These are larger than a bounce buffer.
        ((5_000_000, 10, 200_000), errno.ENOSPC),
        ((5_000_000, 10, 200_000), errno.EIO),
    ],
)
def test_value_is_whole_or_absent_after_any_failed_call(tmp_path, lengths, code):
    """After any failed system call the value is whole or absent, and the tier goes on."""
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


def test_tier_waits_after_a_failure_and_tries_again(parent, caplog):
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
    # Retries come after 1, 2, 4 ... seconds, and then once a minute.
    waits = np.diff(tried).tolist()
    assert waits[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(waits[7:]) == {60}
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    # Existing values can be read meanwhile, and writes work as soon as there is room again.
    assert_same(tier.get(kept), value)
    system.hooks.clear()
    now_s[0] += 60.0
    tier.drop(tier.put(value))
    tier.drop(tier.put(value))
    assert tier.used_nbytes == kept.nbytes
    tier.close()


def test_new_reason_of_failure_is_logged(parent, caplog):
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


def test_full_tier_is_not_logged_as_a_failure(parent, caplog):
    tier = DiskTier(str(parent), 300_000)
    place = tier.put(flat_of((200_000,)))
    with pytest.raises(TierFullError, match="do not fit"):
        tier.put(flat_of((200_000,)))
    # This value can never fit, and must not affect others.
    with pytest.raises(ValueRefusedError, match="exceed the disk limit"):
        tier.put(flat_of((400_000,)))
    tier.drop(place)
    tier.put(flat_of((200_000,)))
    assert not caplog.messages
    tier.close()


def test_parent_that_is_a_file_is_an_error(parent):
    parent.write_text("not a directory")
    tier = DiskTier(str(parent))
    with pytest.raises(OSError):
        tier.put(flat_of((10,)))
    assert tier.used_nbytes == 0
    tier.close()
    assert parent.read_text() == "not a directory"


@pytest.mark.parametrize("with_parent", [False, True])
def test_deleted_directory_is_made_again(parent, caplog, with_parent):
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


def test_file_that_cannot_be_opened_does_not_affect_others(parent):
    """If a file cannot be opened for a write, the directory may still exist."""
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


def test_undeletable_file_is_logged_and_removed_with_the_tier(parent, caplog):
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

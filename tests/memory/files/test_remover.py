"""Files are removed once the disk does not need them, without delay for the caller."""

from __future__ import annotations

import os
import pathlib
import threading

import pytest

from dask_gpurt.memory.files.disk_tier import DiskTier
from dask_gpurt.memory.files.remover import Remover
from tests.conformance.tier_suite import assert_same, flat_of
from tests.failure.gates import until
from tests.memory.faulty_system import System


class SlowDisk:
    """A disk to which pages of some files are on their way."""

    def __init__(self) -> None:
        self.writes: set[str] = set()
        self.asked = threading.Semaphore(0)

    def pending_nbytes(self, fd: int) -> int:
        self.asked.release()
        return int(os.readlink(f"/proc/self/fd/{fd}") in self.writes)

    def asked_again(self) -> None:
        for _ in range(4):
            assert self.asked.acquire(timeout=60)


@pytest.fixture
def disk():
    return SlowDisk()


@pytest.fixture
def remover(disk):
    made = Remover(os.unlink, disk.pending_nbytes)
    yield made
    made.close()


def new(folder: pathlib.Path, name: str) -> str:
    path = folder / name
    path.touch()
    return str(path)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_are_removed(remover, tmp_path):
    for number in range(200):
        remover.submit(new(tmp_path, str(number)))
    remover.wait()
    assert names(tmp_path) == []
    assert not remover.is_busy


def test_file_stays_while_its_pages_are_written(remover, disk, tmp_path):
    first, second = new(tmp_path, "first"), new(tmp_path, "second")
    disk.writes.add(first)
    remover.submit(first)
    remover.submit(second)
    until(lambda: names(tmp_path) == ["first"], "a file waits for another one")
    disk.asked_again()
    assert names(tmp_path) == ["first"]
    disk.writes.clear()
    remover.wait()
    assert names(tmp_path) == []


def test_more_files_than_one_look_takes_all_go(remover, disk, tmp_path):
    paths = [new(tmp_path, f"{number:03}") for number in range(130)]
    disk.writes.update(paths[:64])
    for path in paths:
        remover.submit(path)
    disk.asked_again()
    disk.writes.clear()
    remover.wait()
    assert names(tmp_path) == []


def test_closed_remover_leaves_files(remover, disk, tmp_path):
    path = new(tmp_path, "left")
    disk.writes.add(path)
    remover.submit(path)
    disk.asked_again()
    waiting = threading.Thread(target=remover.wait)
    waiting.start()
    remover.close()
    waiting.join(60)
    assert not waiting.is_alive()
    remover.submit(new(tmp_path, "too late"))
    assert names(tmp_path) == ["left", "too late"]


def test_file_that_is_gone_is_not_waited_for(tmp_path):
    asked = []
    made = Remover(asked.append)
    path = str(tmp_path / "none")
    made.submit(path)
    made.wait()
    assert asked == [path]
    made.close()


def test_caller_removes_files_without_a_thread(tmp_path, monkeypatch, remover):
    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    remover.submit(new(tmp_path, "one"))
    assert names(tmp_path) == []
    monkeypatch.undo()
    remover.submit(new(tmp_path, "two"))
    remover.wait()
    assert names(tmp_path) == []


LARGE = (300_000,)


def cached_tier(parent, **hooks):
    """Return a tier that writes through the cache, as on a file system without direct I/O."""
    tier = DiskTier(str(parent), system=System(**hooks))
    tier._directory.ready()
    tier._directory._is_direct = False
    return tier


def test_full_disk_waits_for_removals(tmp_path, monkeypatch):
    """Files that were dropped before a write make room for it."""
    full = []

    def pwrite(real, fd, view, position):
        if full:
            monkeypatch.setattr(tier._remover, "_pending_nbytes", lambda fd: 0)
            if os.path.exists(full[0]):
                raise OSError(28, "No space left on device")
        return real(fd, view, position)

    tier = cached_tier(tmp_path, pwrite=pwrite)
    tier._remover._pending_nbytes = lambda fd: 1
    old = tier.put(flat_of(LARGE))
    tier.drop(old)
    full.append(old.path)
    assert os.path.exists(old.path)
    assert_same(tier.get(tier.put(flat_of(LARGE))), flat_of(LARGE))
    assert not os.path.exists(old.path)
    tier.close()
    assert names(tmp_path) == []


def test_closed_tier_does_not_wait_for_its_files(tmp_path):
    tier = cached_tier(tmp_path)
    tier._remover._pending_nbytes = lambda fd: 1
    place = tier.put(flat_of(LARGE))
    tier.drop(place)
    assert os.path.exists(place.path) and tier.used_nbytes == 0
    tier.close()
    assert names(tmp_path) == []

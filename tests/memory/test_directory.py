"""Directories of processes: their own while they live, nobody's afterwards."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from dask_gpurt.memory import directory
from dask_gpurt.memory.directory import ValueDirectory, sweep
from dask_gpurt.memory.disk import DiskTier
from tests.conformance.tier_suite import assert_same, flat_of
from tests.memory.faulty_system import System

ROOT = pathlib.Path(__file__).parents[2]
DEADLINE_S = 120.0

#: Writes values for ever and says before the n-th write of a value that it is about to.
WRITER = """
import os, sys
from dask_gpurt.memory.disk import DiskTier
from tests.conformance.tier_suite import flat_of
from tests.memory.faulty_system import System

def pwrite(real, fd, view, position):
    written = real(fd, view[: len(view) // 8192 * 4096 or len(view)], position)
    if len(view) > 100_000:
        print("writing", flush=True)
        sys.stdin.read()
    return written

system = System()
tier = DiskTier(sys.argv[1], system=system)
tier.put(flat_of((1000,)))
tier.put(flat_of((300_000,)))
system.hooks["pwrite"] = pwrite
tier.put(flat_of((900_000, 10)))
"""


@pytest.fixture
def parent(tmp_path):
    return str(tmp_path / "spill")


def inside(parent):
    return sorted(path.name for path in pathlib.Path(parent).iterdir())


def left_by_a_dead_process(parent, name):
    """As the system leaves it: all is there, and nobody has the lock."""
    path = pathlib.Path(parent) / (directory.PREFIX + name)
    path.mkdir(parents=True)
    (path / "00000000").write_bytes(b"value")
    path.with_name(path.name + ".lock").touch()
    return path


def test_a_living_directory_is_not_swept(parent):
    mine = ValueDirectory(parent)
    path, _ = mine.ready()
    assert sweep(parent) == 0
    assert mine.ready()[0] == path
    assert os.path.isdir(path)
    mine.remove()
    assert inside(parent) == []


def test_what_the_dead_left_is_swept_and_nothing_else(parent):
    left_by_a_dead_process(parent, "dead")
    left_by_a_dead_process(parent, "dead too")
    others = pathlib.Path(parent) / "of somebody else"
    others.mkdir()
    (pathlib.Path(parent) / "some.lock").touch()
    # Its lock was lost: there is no telling whether its process lives.
    unlocked = pathlib.Path(parent) / (directory.PREFIX + "unlocked")
    unlocked.mkdir()
    living = ValueDirectory(parent)
    path, _ = living.ready()
    assert sweep(parent) == 2
    assert sweep(parent) == 0
    names = {"of somebody else", "some.lock", unlocked.name, os.path.basename(path)}
    assert set(inside(parent)) == names | {os.path.basename(path) + ".lock"}
    living.remove()


def test_a_lock_whose_directory_never_came_to_be_is_swept(parent):
    os.makedirs(parent)
    pathlib.Path(parent, directory.PREFIX + "early.lock").touch()
    assert sweep(parent) == 1
    assert inside(parent) == []


def test_nowhere_to_sweep(parent):
    assert sweep(parent) == 0


def test_a_link_is_not_followed(parent, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    os.makedirs(parent)
    name = os.path.join(parent, directory.PREFIX + "link")
    os.symlink(elsewhere, name)
    os.symlink(elsewhere / "file", name + ".lock")
    assert sweep(parent) == 0
    os.unlink(name + ".lock")
    pathlib.Path(name + ".lock").touch()
    sweep(parent)
    assert (elsewhere / "file").exists()


def test_what_cannot_be_removed_is_said_and_left_for_the_next(parent, caplog, monkeypatch):
    path = left_by_a_dead_process(parent, "stuck")
    with monkeypatch.context() as patch:
        patch.setattr(directory, "_remove_tree", lambda path: None)
        assert sweep(parent) == 0
    assert str(path) in caplog.text
    assert sweep(parent) == 1
    assert inside(parent) == []


def test_two_that_sweep_at_once_remove_it_once(parent):
    for number in range(20):
        left_by_a_dead_process(parent, str(number))
    together = threading.Barrier(2)
    found = []

    def run():
        together.wait(DEADLINE_S)
        found.append(sweep(parent))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sum(found) == 20
    assert inside(parent) == []


def test_a_sweep_between_a_lock_file_and_its_lock_costs_a_name(parent):
    """The one moment when a living process's lock can be taken by another."""
    names = map((directory.PREFIX + "{}").format, itertools.count())
    swept = []

    def opened(real, path, *args):
        fd = real(path, *args)
        if path.endswith(".lock") and not swept:
            swept.append(sweep(parent))
        return fd

    mine = ValueDirectory(parent, System(open=opened), new_name=lambda: next(names))
    path, _ = mine.ready()
    assert swept == [1]
    assert os.path.basename(path) == directory.PREFIX + "1"
    assert inside(parent) == [directory.PREFIX + "1", directory.PREFIX + "1.lock"]
    assert sweep(parent) == 0
    mine.remove()
    assert inside(parent) == []


def test_a_sweep_at_any_other_moment_changes_nothing(parent):
    def then_sweep(real, *args, **kwargs):
        result = real(*args, **kwargs)
        assert sweep(parent) == 0
        return result

    hooks = dict.fromkeys(("makedirs", "mkdir", "pwrite", "preadv", "close", "unlink"), then_sweep)
    tier = DiskTier(parent, system=System(**hooks))
    value = flat_of((100_000,))
    assert_same(tier.get(tier.put(value)), value)
    tier.close()


def test_a_name_that_is_taken_is_not_taken_again(parent):
    path = left_by_a_dead_process(parent, "taken")
    names = iter([path.name, directory.PREFIX + "free"])
    mine = ValueDirectory(parent, new_name=lambda: next(names))
    assert mine.ready()[0].endswith("free")
    assert (path / "00000000").exists()
    mine.remove()


def test_where_there_are_no_locks_nothing_is_swept(parent, monkeypatch):
    def flock(fd, how):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(directory.fcntl, "flock", flock)
    mine = ValueDirectory(parent)
    path, _ = mine.ready()
    assert sweep(parent) == 0
    assert os.path.isdir(path)
    mine.remove()
    assert inside(parent) == []


def test_a_fork_does_not_remove_what_is_its_parents(parent):
    tier = DiskTier(parent)
    value = flat_of((100_000,))
    place = tier.put(value)
    child = multiprocessing.get_context("fork").Process(target=tier.close)
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == 0
    assert_same(tier.get(place), value)
    assert sweep(parent) == 0
    tier.close()
    assert inside(parent) == []


@pytest.mark.cluster
def test_killed_in_the_middle_of_a_write(parent):
    """Nothing of it is swept while it lives, and everything after it died."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        assert writer.stdout.readline() == "writing\n"
        assert sweep(parent) == 0
        (path,) = [p for p in pathlib.Path(parent).iterdir() if p.is_dir()]
        assert len(list(path.iterdir())) == 3
        # A worker that starts meanwhile has a directory of its own.
        tier = DiskTier(parent)
        place = tier.put(flat_of((100_000,)))
        writer.send_signal(signal.SIGKILL)
        writer.wait(DEADLINE_S)
    finally:
        writer.kill()
        writer.communicate()
    assert sweep(parent) == 1
    assert not path.exists()
    assert_same(tier.get(place), flat_of((100_000,)))
    tier.close()
    assert inside(parent) == []

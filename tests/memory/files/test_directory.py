"""Value directories are kept while their process lives, and removed after its death."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import logging
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import weakref

import psutil
import pytest

from dask_gpurt.memory.files import directory, owner
from dask_gpurt.memory.files.directory import ValueDirectory, sweep
from dask_gpurt.memory.files.disk_tier import DiskTier
from tests.conformance.tier_suite import assert_same, flat_of
from tests.failure.gates import until
from tests.memory.faulty_system import System

ROOT = pathlib.Path(__file__).parents[3]
DEADLINE_S = 120.0
#: This machine, outside of containers, as if it had an identity.
HERE = dataclasses.replace(
    owner.this_place(), machine="an identity", pid_namespace=owner.SYSTEM_NAMESPACE
)

#: A program that writes values forever, and reports before the n-th write of each value.
WRITER = """
import os, sys
from dask_gpurt.memory.files.disk_tier import DiskTier
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


def left_by(parent, name, **changes):
    """Make a directory like that of a dead owner, whose lock no process holds.

    Without `started`, the record has another start time: a later process has the same id.
    """
    path = pathlib.Path(parent) / (directory.PREFIX + name)
    path.mkdir(parents=True)
    (path / "00000000").write_bytes(b"value")
    lock = path.with_name(path.name + ".lock")
    lock.touch()
    me = owner.this_process(True, lock.stat().st_dev)
    changes.setdefault("started", me.started + 1)
    lock.write_bytes(dataclasses.replace(me, **changes).packed())
    return path


def left_by_a_dead_process(parent, name):
    return left_by(parent, name)


def test_a_living_directory_is_not_swept(parent):
    mine = ValueDirectory(parent)
    path, _ = mine.ready()
    assert sweep(parent) == 0
    assert mine.ready()[0] == path
    assert os.path.isdir(path)
    mine.remove()
    assert inside(parent) == []


def test_only_directories_of_dead_processes_are_swept(parent):
    left_by_a_dead_process(parent, "dead")
    left_by_a_dead_process(parent, "dead too")
    others = pathlib.Path(parent) / "of somebody else"
    others.mkdir()
    (pathlib.Path(parent) / "some.lock").touch()
    # Without a lock file, nothing shows whether the process lives.
    unlocked = pathlib.Path(parent) / (directory.PREFIX + "unlocked")
    unlocked.mkdir()
    living = ValueDirectory(parent)
    path, _ = living.ready()
    assert sweep(parent) == 2
    assert sweep(parent) == 0
    names = {"of somebody else", "some.lock", unlocked.name, os.path.basename(path)}
    assert set(inside(parent)) == names | {os.path.basename(path) + ".lock"}
    living.remove()


def test_lock_file_without_a_directory_is_swept(parent):
    shutil.rmtree(left_by_a_dead_process(parent, "early"))
    assert sweep(parent) == 1
    assert inside(parent) == []


def test_sweep_without_directories_does_nothing(parent):
    assert sweep(parent) == 0


def test_sweep_does_not_follow_links(parent, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    os.makedirs(parent)
    name = os.path.join(parent, directory.PREFIX + "link")
    os.symlink(elsewhere, name)
    os.symlink(elsewhere / "file", name + ".lock")
    assert sweep(parent) == 0
    os.unlink(name + ".lock")
    os.rename(left_by_a_dead_process(parent, "other"), tmp_path / "other")
    os.rename(os.path.join(parent, directory.PREFIX + "other.lock"), name + ".lock")
    sweep(parent)
    assert (elsewhere / "file").exists()


def test_failed_removal_is_logged_and_left_for_the_next_sweep(parent, caplog, monkeypatch):
    path = left_by_a_dead_process(parent, "stuck")
    with monkeypatch.context() as patch:
        patch.setattr(directory, "_remove_tree", lambda path: None)
        assert sweep(parent) == 0
    assert str(path) in caplog.text
    assert sweep(parent) == 1
    assert inside(parent) == []


def test_concurrent_sweeps_remove_a_directory_once(parent):
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


def test_sweep_between_lock_and_owner_record_changes_nothing(parent):
    """At this moment, no sweep can know the owner of the directory."""
    swept = []

    def opened(real, path, *args):
        fd = real(path, *args)
        if path.endswith(".lock") and not swept:
            swept.append(sweep(parent))
        return fd

    mine = ValueDirectory(parent, System(open=opened))
    path, _ = mine.ready()
    assert swept == [0]
    assert sorted(inside(parent)) == [os.path.basename(path), os.path.basename(path) + ".lock"]
    mine.remove()
    assert inside(parent) == []


def test_lock_taken_by_an_earlier_version_costs_one_name(parent):
    names = map((directory.PREFIX + "{}").format, itertools.count())
    taken = []

    def opened(real, path, *args):
        fd = real(path, *args)
        if path.endswith(".lock") and not taken:
            taken.append(os.open(path, os.O_RDWR))
            fcntl.flock(taken[0], fcntl.LOCK_EX)
        return fd

    mine = ValueDirectory(parent, System(open=opened), new_name=lambda: next(names))
    path, _ = mine.ready()
    os.close(*taken)
    assert os.path.basename(path) == directory.PREFIX + "1"
    assert inside(parent) == [directory.PREFIX + "1", directory.PREFIX + "1.lock"]
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


def test_existing_directory_name_is_not_reused(parent):
    path = left_by_a_dead_process(parent, "taken")
    names = iter([path.name, directory.PREFIX + "free"])
    mine = ValueDirectory(parent, new_name=lambda: next(names))
    assert mine.ready()[0].endswith("free")
    assert (path / "00000000").exists()
    mine.remove()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS])
def test_without_locks_only_known_dead_owners_are_swept(parent, monkeypatch, code):
    def flock(fd, how):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    mine = ValueDirectory(parent)
    path, _ = mine.ready()
    record = owner.unpacked(pathlib.Path(path + ".lock").read_bytes())
    assert not record.is_locked
    left_by(parent, "dead", is_locked=False)
    left_by(parent, "of another container", is_locked=False, pid_namespace=7)
    assert sweep(parent) == 1
    assert os.path.isdir(path)
    mine.remove()
    assert inside(parent) == [
        directory.PREFIX + "of another container",
        directory.PREFIX + "of another container.lock",
    ]


def test_no_locks_are_taken_when_disabled_in_dask(parent, monkeypatch):
    """The setting is Dask's `distributed.worker.use-file-locking: false`."""

    def flock(fd, how):
        pytest.fail("a lock was asked for")

    monkeypatch.setattr(fcntl, "flock", flock)
    mine = ValueDirectory(parent, locks=False)
    path, _ = mine.ready()
    left_by(parent, "dead")
    left_by(parent, "of another container", pid_namespace=7)
    assert sweep(parent, locks=False) == 1
    assert os.path.isdir(path)
    assert (pathlib.Path(parent) / (directory.PREFIX + "of another container")).exists()
    mine.remove()


# ------------------------------------------------------------------ owners of directories

ELSEWHERE = [
    {"host": "another", "boot": "another"},
    {"host": "another", "boot": "another", "machine": "another"},
    # Two containers with the same name and image, on two machines.
    {"boot": "another", "pid_namespace": 7},
    # Machines without an identity.
    {"boot": "another", "machine": ""},
    # Another container on this machine, with a mount of its own.
    {"pid_namespace": 7, "device": 77},
    {"pid_namespace": 7, "is_locked": False},
]
GONE = [
    {},
    {"pid": 1 << 30},
    {"is_locked": False},
    # The machine was rebooted; setting its clock does not matter.
    {"boot": "another"},
    # The name of a machine may change while it runs.
    {"host": "another"},
    # Another container on this machine, with a mount that both see.
    {"pid_namespace": 7},
]


@pytest.mark.parametrize("changes", ELSEWHERE, ids=str)
def test_directory_of_an_unknown_owner_is_kept(parent, changes, caplog, monkeypatch):
    monkeypatch.setattr(owner, "this_place", lambda: HERE)
    path = left_by(parent, "elsewhere", **changes)
    with caplog.at_level(logging.INFO, "dask_gpurt.memory"):
        assert sweep(parent) == 0
    assert (path / "00000000").exists()
    assert str(path) in caplog.text


@pytest.mark.parametrize("changes", GONE, ids=str)
def test_directory_of_a_known_dead_owner_is_swept(parent, changes, monkeypatch):
    monkeypatch.setattr(owner, "this_place", lambda: HERE)
    left_by(parent, "dead", **changes)
    assert sweep(parent) == 1
    assert inside(parent) == []


@pytest.mark.parametrize("changes", [*ELSEWHERE, *GONE], ids=str)
def test_holder_of_the_lock_counts_as_alive(parent, changes, monkeypatch):
    """Forks of a process hold its lock, too."""
    monkeypatch.setattr(owner, "this_place", lambda: HERE)
    path = left_by(parent, "held", **{**changes, "is_locked": True})
    with open(f"{path}.lock", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep(parent) == 0
    assert (path / "00000000").exists()


def test_directory_is_kept_although_its_lock_can_be_taken(parent, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    mine = DiskTier(parent)
    value = flat_of((100_000,))
    place = mine.put(value)
    assert sweep(parent) == 0
    assert_same(mine.get(place), value)
    mine.close()


def test_directory_of_a_living_process_is_kept_without_a_lock(parent):
    """Some file systems show locks only on one machine or in one mount."""
    path = left_by(parent, "living", started=owner.started(os.getpid()))
    assert sweep(parent) == 0
    assert (path / "00000000").exists()


@pytest.mark.parametrize(
    "record",
    [b"", b"{", b"[]", b"7", b"[" * 4096, b"9" * 4096, b'{"pid": "1"}', bytes(range(256))],
    ids=repr,
)
def test_directory_without_an_owner_is_kept(parent, record):
    """It may be of an earlier version, or its process is about to write the record."""
    path = left_by_a_dead_process(parent, "nobody")
    whole = pathlib.Path(f"{path}.lock").read_bytes()
    for text in (record, whole[: len(whole) // 2]):
        pathlib.Path(f"{path}.lock").write_bytes(text)
        assert sweep(parent) == 0
        assert (path / "00000000").exists()


def test_owner_record_is_restored_unchanged():
    me = owner.this_process(True, 5)
    assert owner.unpacked(me.packed()) == me
    assert owner.started(me.pid) == me.started
    assert len(me.packed()) < owner.MOST_NBYTES


def test_dead_process_has_no_start_time():
    child = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert owner.started(child.pid) is None, "nobody has waited for it yet"
    child.wait(DEADLINE_S)
    assert owner.started(child.pid) is None


# ------------------------------------------------------------------ processes


def test_closed_tier_keeps_no_buffer_for_writes(parent):
    tier = DiskTier(parent)
    bounce = tier._files._bounces.take()
    freed = weakref.ref(bounce.base)
    tier._files._bounces.put_back(bounce)
    del bounce
    tier.close()
    assert freed() is None


def test_fork_does_not_remove_the_directory_of_its_parent(parent):
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


@contextlib.contextmanager
def writing_to(parent):
    """Start a process that stops in the middle of a write; kill it at the end of the block."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        assert writer.stdout.readline() == "writing\n"
        yield writer
    finally:
        writer.kill()
        writer.communicate()


@pytest.mark.cluster
def test_directory_of_a_process_killed_while_writing_is_swept(parent):
    """Nothing is swept while the process lives, and everything after its death."""
    with writing_to(parent) as writer:
        assert sweep(parent) == 0
        (path,) = [p for p in pathlib.Path(parent).iterdir() if p.is_dir()]
        assert len(list(path.iterdir())) == 3
        # A worker that starts meanwhile creates its own directory.
        tier = DiskTier(parent)
        place = tier.put(flat_of((100_000,)))
        writer.send_signal(signal.SIGKILL)
        writer.wait(DEADLINE_S)
    # Its reaper removes the directory. No other process starts here or sweeps.
    until(lambda: len(inside(parent)) == 2, "what the dead process left stays")
    assert not path.exists()
    assert_same(tier.get(place), flat_of((100_000,)))
    tier.close()
    assert inside(parent) == []


@pytest.mark.cluster
def test_directory_is_swept_when_the_reaper_was_killed_too(parent):
    """The end of a container kills both. The next process sweeps."""
    with writing_to(parent) as writer:
        (reaper,) = psutil.Process(writer.pid).children()
        assert "dask-gpurt-reaper" in reaper.cmdline()
        reaper.kill()
        writer.send_signal(signal.SIGKILL)
        writer.wait(DEADLINE_S)
    assert len(inside(parent)) == 2
    assert sweep(parent) == 1
    assert inside(parent) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_reaper_survives_the_end_of_its_process_group(parent, number):
    mine = ValueDirectory(parent)
    mine.ready()
    shell = mine._reaper
    until(lambda: _ignores(shell.pid, number), "it does not ignore the signal")
    os.kill(shell.pid, number)
    assert os.getpgid(shell.pid) != os.getpgid(0)
    # The reaper sees the same as if this process had ended.
    shell.close()
    assert inside(parent) == []


def _ignores(pid, number):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = [line.split()[1] for line in lines if line.startswith("SigIgn:")]
    return int(mask, 16) >> (number - 1) & 1


def test_directory_works_without_a_shell(parent, monkeypatch):
    def refused(*args, **kwargs):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    tier = DiskTier(parent)
    value = flat_of((100_000,))
    assert_same(tier.get(tier.put(value)), value)
    tier.close()
    assert inside(parent) == []

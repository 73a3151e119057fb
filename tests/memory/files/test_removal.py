"""A value directory is removed by its reaper, which a closing worker need not wait for."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil

import psutil
import pytest

from dask_gpurt.memory.files import reaper
from dask_gpurt.memory.files.directory import ValueDirectory
from tests.failure.gates import until

DEADLINE_S = 60.0


@pytest.fixture
def aside(tmp_path):
    return tmp_path / "scratch"


@pytest.fixture
def parent(aside):
    """The directory of a worker, which Dask removes when the worker closes."""
    return aside / "worker-1"


def filled(parent, aside=None):
    """Return a directory with one file, and its path."""
    mine = ValueDirectory(str(parent), aside=None if aside is None else str(aside))
    path = pathlib.Path(mine.ready()[0])
    (path / "00000000").write_bytes(b"value")
    return mine, path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def slow_disk(tmp_path, monkeypatch):
    """Have files removed only after this context."""
    folder = tmp_path / "programs"
    folder.mkdir()
    os.mkfifo(folder / "gate")
    remove = folder / "rm"
    remove.write_text(
        f'#!/bin/sh\n[ "$1" = -f ] || read -r _ < "{folder}/gate"\nexec {shutil.which("rm")} "$@"\n'
    )
    remove.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(reaper, "_PATIENCE_S", 0.01)
    yield
    (folder / "gate").write_text("\n")


def test_directory_is_gone_after_its_removal(parent, aside):
    for elsewhere in (None, aside):
        mine, _ = filled(parent, elsewhere)
        mine.remove()
        assert names(parent) == [] and names(aside) == ["worker-1"]


def test_owner_does_not_wait_for_a_slow_disk(parent, aside, tmp_path, monkeypatch):
    with slow_disk(tmp_path, monkeypatch):
        mine, path = filled(parent, aside)
        mine.remove()
        # Dask can remove the worker's directory at once.
        assert names(parent) == []
        assert names(aside / path.name) == ["00000000"]
        assert names(aside) == [path.name, f"{path.name}.lock", "worker-1"]
    until(lambda: names(aside) == ["worker-1"], "its reaper removed nothing")


def test_directory_that_nobody_else_removes_stays_in_place(parent, aside, tmp_path, monkeypatch):
    with slow_disk(tmp_path, monkeypatch):
        mine, path = filled(parent)
        mine.remove()
        assert names(parent) == [path.name, f"{path.name}.lock"]
    until(lambda: names(parent) == [], "its reaper removed nothing")


@pytest.mark.parametrize("where", ["missing", "line\nbreak"])
def test_directory_that_cannot_be_moved_is_removed_in_place(parent, tmp_path, where):
    if where != "missing":
        (tmp_path / where).mkdir()
    mine, _ = filled(parent, tmp_path / where)
    mine.remove()
    assert names(parent) == []


def test_owner_removes_the_directory_without_its_reaper(parent, aside):
    for elsewhere in (None, aside):
        mine, _ = filled(parent, elsewhere)
        shell = psutil.Process(mine._reaper.pid)
        shell.kill()
        shell.wait(DEADLINE_S)
        mine.remove()
        assert names(parent) == [] and names(aside) == ["worker-1"]


def test_owner_removes_the_directory_without_a_program_for_it(parent, aside, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for elsewhere in (None, aside):
        mine, _ = filled(parent, elsewhere)
        mine.remove()
        assert names(parent) == [] and names(aside) == ["worker-1"]


def test_moved_lock_file_names_its_owner(parent, aside, tmp_path, monkeypatch):
    """The end of a container may kill a reaper at its work. Then a sweep finds the directory."""
    with slow_disk(tmp_path, monkeypatch):
        mine, path = filled(parent, aside)
        before = path.with_name(f"{path.name}.lock").read_bytes()
        mine.remove()
        assert before == (aside / f"{path.name}.lock").read_bytes() != b""
    until(lambda: names(aside) == ["worker-1"], "its reaper removed nothing")

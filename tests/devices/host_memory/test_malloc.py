"""The allocator keeps pages from the first user on, until the last user is done."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from dask_gpurt.devices.host_memory import malloc
from dask_gpurt.devices.host_memory.malloc import PageKeeper

TRIM, MMAP = -1, -3  # as in malloc.h
MIB = 1 << 20

ALL_THAT_COUNTS = [*malloc._SETTINGS, "GLIBC_TUNABLES"]
RAISED = [(MMAP, 32 * MIB), (TRIM, 100 * MIB)]


class FakeMallopt:
    def __init__(self):
        self.calls = []

    def __call__(self, parameter, value):
        self.calls.append((parameter, value))
        return 1

    def taken(self):
        """Return the calls since the last `taken`."""
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def mallopt(monkeypatch):
    """A fake that records calls of `mallopt` and trims, in an environment without thresholds."""
    for name in ALL_THAT_COUNTS:
        monkeypatch.delenv(name, raising=False)
    mallopt = FakeMallopt()
    monkeypatch.setattr(malloc, "trim", lambda: mallopt.calls.append("trim"))
    return mallopt


def test_a_keeper_without_users_calls_nothing(mallopt):
    PageKeeper(100 * MIB, mallopt)
    assert mallopt.taken() == []


def test_first_user_raises_both_thresholds(mallopt):
    PageKeeper(100 * MIB, mallopt).acquire()
    assert sorted(mallopt.taken()) == sorted(RAISED)


def test_the_last_user_sets_glibcs_final_thresholds_and_trims(mallopt):
    keeper = PageKeeper(100 * MIB, mallopt)
    keeper.acquire()
    mallopt.taken()
    keeper.release()
    *thresholds, last = mallopt.taken()
    assert sorted(thresholds) == [(MMAP, 32 * MIB), (TRIM, 64 * MIB)]
    assert last == "trim"


@pytest.mark.parametrize(
    "environment, trim, mmap",
    [
        ({"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "262144"}, 65536, 262144),
        ({"MALLOC_TRIM_THRESHOLD_": "65536"}, 65536, 128 << 10),
        ({"MALLOC_MMAP_THRESHOLD_": "262144"}, 128 << 10, 262144),
        ({"MALLOC_TOP_PAD_": "4096"}, 128 << 10, 128 << 10),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=9"}, 128 << 10, 128 << 10),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, 64 * MIB, 32 * MIB),
        (
            {
                "GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=4096",
                "MALLOC_TRIM_THRESHOLD_": "65536",
            },
            4096,
            128 << 10,
        ),
    ],
)
def test_the_thresholds_of_the_environment_are_restored(
    mallopt, monkeypatch, environment, trim, mmap
):
    for name, said in environment.items():
        monkeypatch.setenv(name, said)
    keeper = PageKeeper(100 * MIB, mallopt)
    keeper.acquire()
    assert sorted(mallopt.taken()) == sorted(RAISED)
    keeper.release()
    assert sorted(mallopt.taken()[:-1]) == [(MMAP, mmap), (TRIM, trim)]


def test_only_the_first_and_last_user_call_the_allocator(mallopt):
    keeper = PageKeeper(100 * MIB, mallopt)
    keeper.acquire()
    mallopt.taken()
    keeper.acquire()
    keeper.acquire()
    keeper.release()
    keeper.release()
    assert mallopt.taken() == []
    keeper.release()
    assert len(mallopt.taken()) == 3


def test_thresholds_are_raised_again_for_the_next_user(mallopt):
    keeper = PageKeeper(100 * MIB, mallopt)
    keeper.acquire()
    keeper.release()
    mallopt.taken()
    keeper.acquire()
    assert sorted(mallopt.taken()) == sorted(RAISED)


@pytest.mark.parametrize("junk", ["", "64 KiB", "many"])
def test_invalid_environment_values_are_ignored(mallopt, monkeypatch, junk):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", junk)
    keeper = PageKeeper(100 * MIB, mallopt)
    keeper.acquire()
    mallopt.taken()
    keeper.release()
    assert (TRIM, 64 * MIB) in mallopt.taken()


def test_values_fit_into_a_c_int(mallopt):
    PageKeeper(1 << 40, mallopt).acquire()
    assert (TRIM, 2**31 - 1) in mallopt.taken()


def test_environment_values_are_limited_to_a_c_int(mallopt, monkeypatch):
    """The C library reads a larger type from the environment than `mallopt` takes."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(1 << 32))
    keeper = PageKeeper(100 * MIB, mallopt)
    keeper.acquire()
    mallopt.taken()
    keeper.release()
    assert (TRIM, 2**31 - 1) in mallopt.taken()


class OtherLibrary:
    """A C library without the functions of glibc."""

    def __getattr__(self, name):
        raise AttributeError(name)


def _no_library(*arguments):
    raise OSError("no such library")


@pytest.mark.parametrize("load", [lambda *_: OtherLibrary(), _no_library])
def test_allocator_is_unchanged_without_glibc(monkeypatch, load):
    monkeypatch.setattr(ctypes, "CDLL", load)
    trimmed = []
    keeper = PageKeeper(100 * MIB)
    monkeypatch.setattr(malloc, "trim", lambda: trimmed.append(True))
    keeper.acquire()
    keeper.release()
    assert trimmed == []


@pytest.mark.parametrize("load", [lambda *_: OtherLibrary(), _no_library])
def test_trimming_without_glibc_is_no_error(monkeypatch, load):
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda *library: asked.append(library) or load(*library))
    malloc.trim()
    assert len(asked) == 1


class GlibcLike:
    """A C library that records calls."""

    def __init__(self, calls):
        self._calls = calls

    def gnu_get_libc_version(self):
        return b"2.40"

    def mallopt(self, parameter, value):
        self._calls.append((parameter, value))
        return 1

    def malloc_trim(self, pad):
        self._calls.append(("malloc_trim", pad))


def test_glibc_is_found_by_itself(monkeypatch):
    calls = []
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: GlibcLike(calls))
    keeper = PageKeeper(100 * MIB)
    keeper.acquire()
    assert sorted(calls) == sorted(RAISED)
    keeper.release()
    assert calls[-1] == ("malloc_trim", 0)


FAULTS = """
import resource
from dask_gpurt.devices.host_memory.malloc import PageKeeper


def faults():
    for _ in range(3):
        bytearray(8 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        bytearray(b"1") * (8 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


before = faults()
keeper = PageKeeper(100 << 20)
keeper.acquire()
keeper.release()
print(before, faults())
"""


def test_memory_is_reused_after_the_last_user():
    """If they were mapped again, 20 times 8 MiB would cost more than 40000 page faults."""
    environment = {key: on for key, on in os.environ.items() if key not in ALL_THAT_COUNTS}
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, check=True, env=environment
    )
    before, after = map(int, ran.stdout.split())
    assert after < before + 10_000


def test_real_allocator_keeps_working():
    keeper = PageKeeper(16 * MIB)
    keeper.acquire()
    blocks = [bytes([number]) * (1 << 20) for number in range(8)]
    keeper.release()
    assert [block[-1] for block in blocks] == list(range(8))

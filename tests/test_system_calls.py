"""Fallbacks for system calls that Python lacks behave like the system calls."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from dask_gpurt import system_calls
from dask_gpurt.devices.host_memory.pages import SharedPages


def lacking(monkeypatch, *names):
    for name in names:
        monkeypatch.delattr(os, name)


def forbidding(monkeypatch, code):
    """Make our system calls fail, as with an old kernel or in a sandbox."""

    def refuse(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(system_calls, "_call", refuse)


def test_memory_files_work_without_the_os_function(monkeypatch):
    lacking(monkeypatch, "memfd_create", "MFD_CLOEXEC")
    fd = system_calls.memory_file("gpurt")
    try:
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:gpurt")
        assert not os.get_inheritable(fd)
        assert system_calls.is_memory_file(fd)
    finally:
        os.close(fd)
    SharedPages().close()


def test_system_without_memory_files_is_recognised(monkeypatch):
    lacking(monkeypatch, "memfd_create")
    forbidding(monkeypatch, errno.ENOSYS)
    with pytest.raises(OSError, match="Function not implemented"):
        system_calls.memory_file("gpurt")
    with pytest.raises(OSError, match="Function not implemented"):
        SharedPages()


def test_numbers_of_linux_are_not_called_on_other_systems(monkeypatch):
    lacking(monkeypatch, "memfd_create")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="Function not implemented"):
        system_calls.memory_file("gpurt")


def test_ordinary_files_are_not_memory_files(tmp_path):
    reader, writer = os.pipe()
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert not any(map(system_calls.is_memory_file, (reader, writer, file)))
    for fd in (reader, writer, file):
        os.close(fd)


def test_process_is_identified_by_its_start_time():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = system_calls.process_start(child.pid)
    assert started == system_calls.process_start(child.pid)
    assert started != system_calls.process_start(os.getpid())
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError):  # the process has ended, but nobody has waited for it
        system_calls.process_start(child.pid)
    child.wait()
    with pytest.raises(ProcessLookupError):
        system_calls.process_start(child.pid)


@pytest.mark.parametrize("is_lacking", [False, True])
def test_buffers_are_filled_from_a_position(monkeypatch, tmp_path, is_lacking):
    if is_lacking:
        lacking(monkeypatch, "preadv")
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    fd = os.open(path, os.O_RDONLY)
    buffers = [bytearray(20), bytearray(30), bytearray(60)]
    try:
        assert system_calls.preadv(fd, [memoryview(one) for one in buffers], 10) == 90
        assert b"".join(buffers)[:90] == bytes(range(10, 100))
        assert system_calls.preadv(fd, [memoryview(buffers[0])], 100) == 0
    finally:
        os.close(fd)


#: A program with one thread. Its arguments are functions that it removes from `os`.
WAKING = """
import os, select, sys
from dask_gpurt import system_calls
for name in sys.argv[1:]:
    delattr(os, name)
before = os.listdir("/proc/self/fd")
wakeup = system_calls.Wakeup()
assert not select.select([wakeup.fd], [], [], 0)[0]
wakeup.clear()  # as often as one likes
for _ in range(20_000):  # more than a pipe holds
    wakeup.set()
assert select.select([wakeup.fd], [], [], 0)[0]
wakeup.clear()
assert not select.select([wakeup.fd], [], [], 0)[0]
wakeup.close()
after = os.listdir("/proc/self/fd")
assert after == before, (before, after)
"""


@pytest.mark.parametrize("missing", [[], ["eventfd", "eventfd_read", "eventfd_write"]])
def test_sleeping_thread_is_woken(missing):
    # A process of its own: garbage of other tests might close files between the two lists.
    subprocess.run([sys.executable, "-c", WAKING, *missing], check=True, timeout=60)


def test_resident_bytes_have_parts() -> None:
    found = system_calls.resident_nbytes()
    assert found["all"] == sum(found[part] for part in ("anonymous", "files", "shared")) > 1 << 20


def test_the_peak_stays_when_memory_is_freed():
    before = system_calls.resident_nbytes()
    nbytes = before["peak"] - before["all"] + (64 << 20)
    block = np.ones(nbytes, np.uint8)
    held = system_calls.resident_nbytes()
    del block
    after = system_calls.resident_nbytes()
    # The kernel rounds its counters by some pages.
    assert min(held["peak"], after["peak"]) > before["peak"] + (32 << 20)
    assert after["all"] < held["all"] - (32 << 20)


def test_the_allocator_knows_what_is_used_and_what_is_free() -> None:
    used, _ = system_calls.allocator_nbytes()
    blocks = [bytes(3000) for _ in range(10_000)]
    last = bytes(3000)
    with_blocks, free = system_calls.allocator_nbytes()
    assert with_blocks - used > 29 << 20
    del blocks
    without, left = system_calls.allocator_nbytes()
    assert with_blocks - without > 25 << 20
    # The heap cannot shrink below the last block.
    assert left - free > 25 << 20
    assert last


def test_a_buffer_is_written_in_as_many_calls_as_needed(tmp_path):
    class Short:
        @staticmethod
        def pwrite(fd, data, position):
            return os.pwrite(fd, data[:3], position)

    path = tmp_path / "file"
    with path.open("w+b") as file:
        system_calls.write_all(file.fileno(), b"0123456789", 2, Short)
    assert path.read_bytes() == b"\0\0" + b"0123456789"


def test_no_call_is_larger_than_every_system_allows(monkeypatch, tmp_path):
    """macOS refuses calls for 2 GiB."""

    class Strict:
        @staticmethod
        def pwrite(fd, data, position):
            assert len(data) <= 5
            return os.pwrite(fd, data, position)

        @staticmethod
        def preadv(fd, buffers, position):
            assert sum(map(len, buffers)) <= 5
            return os.preadv(fd, buffers, position)

    monkeypatch.setattr(system_calls, "_MOST_NBYTES", 5)
    first, second = bytearray(3), bytearray(9)
    with (tmp_path / "file").open("w+b") as file:
        system_calls.write_all(file.fileno(), b"0123456789", 0, Strict)
        buffers = [memoryview(first), memoryview(second)]
        assert system_calls.preadv(file.fileno(), buffers, 0, Strict) == 5
    assert (first, second) == (b"012", b"34" + bytes(7))


def test_a_file_that_may_not_grow_is_an_error(tmp_path):
    """The first call writes some bytes: no error. The next one fails."""
    program = (
        "import os, resource, sys; from dask_gpurt.system_calls import write_all\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))\n"
        "write_all(os.open(sys.argv[1], os.O_CREAT | os.O_RDWR), b'0123456789', 0)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "OSError: [Errno 27] File too large" in ended.stderr
    assert (tmp_path / "file").read_bytes() == b"0123"


def test_pages_on_their_way_to_the_disk_are_counted(monkeypatch, tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(fd, bytes(100_000))
    os.fsync(fd)
    assert system_calls.writeback_nbytes(fd) == 0

    def answered(number, descriptor, whole_file, pages, flags):
        assert (number, descriptor, [*whole_file], flags) == (451, fd, [0, 0], 0)
        pages[:] = 25, 9, 3, 0, 0

    monkeypatch.setattr(system_calls, "_call", answered)
    assert system_calls.writeback_nbytes(fd) == 3 * os.sysconf("SC_PAGE_SIZE")
    for code in (errno.ENOSYS, errno.EPERM):
        forbidding(monkeypatch, code)
        assert system_calls.writeback_nbytes(fd) == 0
    os.close(fd)

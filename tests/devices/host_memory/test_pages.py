"""Joining and splitting pages keeps their contents and leaks nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import pathlib

import numpy as np
import pytest

from dask_gpurt.devices.host_memory import pages
from dask_gpurt.devices.host_memory.pages import PAGE_NBYTES, PrivatePages, SharedPages
from dask_gpurt.devices.host_memory.pool import HostPool


@pytest.fixture(params=[PrivatePages, SharedPages])
def source(request):
    return request.param()


def _bytes_at(address, n_pages=1):
    nbytes = n_pages * PAGE_NBYTES
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _mapped(address, n_pages=1):
    """Return the mapped bytes of a range in this process, including reserved ones."""
    first, end = address, address + n_pages * PAGE_NBYTES
    total = 0
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(bound, 16) for bound in line.split()[0].split("-"))
        total += max(0, min(stop, end) - max(start, first))
    return total


def _address_space_nbytes():
    n_pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    return n_pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def built(source):
    """Return the `build` of a source, and return all built pages at the end of the test."""
    made = []

    def build(n_pages, spare):
        address = source.build(n_pages, spare)
        made.append((address, n_pages))
        return address

    yield build
    for address, n_pages in made:
        source.give_back(address, n_pages)


@pytest.mark.parametrize("n_pages", [1, 2, 5])
def test_fresh_pages_are_aligned_contiguous_and_zero(built, n_pages):
    address = built(n_pages, [])
    assert address % PAGE_NBYTES == 0
    contents = _bytes_at(address, n_pages)
    assert not contents.any()
    contents[:] = 7
    assert contents.sum(dtype=np.int64) == 7 * n_pages * PAGE_NBYTES


def test_one_page_from_one_spare_page_is_that_page(source, built):
    spare = [built(1, []), built(1, [])]
    _bytes_at(spare[1])[:] = 3
    expected = spare[1]
    assert source.build(1, spare) == expected
    assert len(spare) == 1
    assert (_bytes_at(expected) == 3).all()


def test_spare_pages_are_taken_from_the_end_with_their_contents(source, built):
    spare = [source.build(1, []) for _ in range(4)]
    for number, page in enumerate(spare):
        _bytes_at(page)[:] = 10 + number
    left, *taken = spare
    address = built(3, spare)
    assert spare == [left]
    contents = _bytes_at(address, 3).reshape(3, PAGE_NBYTES)
    assert [set(np.unique(page)) for page in contents] == [{13}, {12}, {11}]
    assert (_bytes_at(left) == 10).all(), "the page that was not needed is as it was"
    inside = range(address, address + 3 * PAGE_NBYTES)
    assert all(_mapped(page) == 0 for page in taken if page not in inside)
    source.give_back(left)


def test_missing_spare_pages_come_from_the_system(source, built):
    spare = [source.build(1, []) for _ in range(2)]
    for page in spare:
        _bytes_at(page)[:] = 9
    address = built(5, spare)
    assert spare == []
    contents = _bytes_at(address, 5).reshape(5, PAGE_NBYTES)
    assert contents.any(axis=1).tolist() == [True, True, False, False, False]
    contents[:] = 1
    assert contents.all()


def test_neighbours_of_a_moved_page_stay(source, built):
    first = source.build(3, [])
    _bytes_at(first, 3).reshape(3, PAGE_NBYTES)[:] = [[1], [2], [3]]
    elsewhere = source.build(1, [])
    _bytes_at(elsewhere)[:] = 4
    address = built(2, [first + PAGE_NBYTES, elsewhere])
    assert (_bytes_at(first) == 1).all()
    assert (_bytes_at(first + 2 * PAGE_NBYTES) == 3).all()
    contents = _bytes_at(address, 2).reshape(2, PAGE_NBYTES)
    assert [set(np.unique(page)) for page in contents] == [{4}, {2}]
    source.give_back(first)
    source.give_back(first + 2 * PAGE_NBYTES)


def test_joined_pages_can_become_spare_pages_again(source, built):
    spare = [source.build(1, []) for _ in range(3)]
    address = source.build(3, spare)
    for number in range(3):
        _bytes_at(address + number * PAGE_NBYTES)[:] = number
    again = built(3, [address + number * PAGE_NBYTES for number in range(3)])
    contents = _bytes_at(again, 3).reshape(3, PAGE_NBYTES)
    assert contents[:, 0].tolist() == contents[:, -1].tolist() == [2, 1, 0]


@pytest.mark.parametrize("n_pages", [1, 3])
def test_released_pages_are_unmapped(source, n_pages):
    address = source.build(n_pages, [])
    assert _mapped(address, n_pages) == n_pages * PAGE_NBYTES
    source.give_back(address, n_pages)
    assert _mapped(address, n_pages) == 0


def test_releasing_one_page_leaves_its_neighbours(source, built):
    first = source.build(3, [])
    _bytes_at(first, 3)[:] = 5
    source.give_back(first + PAGE_NBYTES)
    assert _mapped(first, 3) == 2 * PAGE_NBYTES
    assert (_bytes_at(first) == 5).all()
    assert (_bytes_at(first + 2 * PAGE_NBYTES) == 5).all()
    source.give_back(first)
    source.give_back(first + 2 * PAGE_NBYTES)


class UnalignedLibrary:
    """A C library that maps large ranges at any address."""

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        return getattr(self._library, name)

    def mmap(self, address, nbytes, *rest):
        if address is not None:
            return self._library.mmap(address, nbytes, *rest)
        shift = 4 * os.sysconf("SC_PAGE_SIZE")
        start = self._library.mmap(None, nbytes + PAGE_NBYTES, *rest)
        first = -(-start // PAGE_NBYTES) * PAGE_NBYTES - shift
        if first < start:
            first += PAGE_NBYTES
        if first > start:
            self._library.munmap(start, first - start)
        if first < start + PAGE_NBYTES:
            self._library.munmap(first + nbytes, start + PAGE_NBYTES - first)
        return first


@pytest.mark.parametrize("library", [lambda library: library, UnalignedLibrary])
def test_addresses_lost_to_alignment_are_unmapped(source, monkeypatch, library):
    answer = library(pages._library())
    monkeypatch.setattr(pages, "_library", lambda: answer)
    before = _address_space_nbytes()
    addresses = [source.build(2, []) for _ in range(40)]
    taken = _address_space_nbytes() - before
    assert all(address % PAGE_NBYTES == 0 for address in addresses)
    for address in addresses:
        source.give_back(address, 2)
    left = _address_space_nbytes() - before
    assert 40 * 2 * PAGE_NBYTES <= taken < 60 * 2 * PAGE_NBYTES
    assert left < PAGE_NBYTES // 4


def test_request_beyond_the_system_is_a_memory_error(source):
    spare = [source.build(1, [])]
    _bytes_at(spare[0])[:] = 8
    with pytest.raises(MemoryError, match="mmap"):
        source.build(1 << 28, spare)
    assert len(spare) == 1, "nothing was used up"
    assert (_bytes_at(spare[0]) == 8).all()
    source.give_back(spare[0])


class FailingLibrary:
    """A C library with one function that fails at its n-th call."""

    def __init__(self, library, name, nth, code=errno.ENOMEM):
        self._library = library
        self._name = name
        self._left = nth
        self._code = code
        self.reserved = []

    def __getattr__(self, name):
        function = getattr(self._library, name)

        def call(*arguments):
            if name == self._name:
                self._left -= 1
                if not self._left:
                    ctypes.set_errno(self._code)
                    return ctypes.c_void_p(-1).value
            answer = function(*arguments)
            if name == "mmap" and arguments[0] is None:
                self.reserved.append((answer, arguments[1]))
            return answer

        return call


@pytest.mark.parametrize(("function", "nth"), [("mremap", 1), ("mremap", 2), ("mmap", 2)])
def test_failed_build_leaks_nothing(source, monkeypatch, function, nth):
    """This happens if memory is scarce. Every page must stay spare or return to the system."""
    spare = [source.build(1, []) for _ in range(2)]
    before = list(spare)
    library = FailingLibrary(pages._library(), function, nth)
    with monkeypatch.context() as patch:
        patch.setattr(pages, "_library", lambda: library)
        with pytest.raises(MemoryError, match=function):
            source.build(4, spare)
    assert len(set(spare)) == len(spare)
    for page in spare:
        _bytes_at(page)[:] = 1
    ((start, nbytes),) = library.reserved
    inside = range(start, start + nbytes)
    assert _mapped(start, nbytes // PAGE_NBYTES) == PAGE_NBYTES * sum(p in inside for p in spare)
    assert all(_mapped(page) == 0 for page in before if page not in spare)
    for page in spare:
        source.give_back(page)


def test_other_failures_raise_an_os_error(source, monkeypatch):
    library = FailingLibrary(pages._library(), "mmap", 1, code=errno.EPERM)
    monkeypatch.setattr(pages, "_library", lambda: library)
    with pytest.raises(OSError, match=r"mmap failed: .*permitted"):
        source.build(1, [])


@pytest.mark.parametrize(
    ("contents", "policy"),
    [
        ("always [madvise] never\n", "madvise"),
        ("[always] madvise never\n", "always"),
        ("always madvise [never]\n", "never"),
        ("", "unknown"),
    ],
)
def test_huge_page_policy_of_the_system_is_read(monkeypatch, tmp_path, contents, policy):
    path = tmp_path / "enabled"
    path.write_text(contents)
    monkeypatch.setattr(pages, "open", lambda _: path.open(), raising=False)
    assert pages.system_policy() == policy


def test_system_without_a_huge_page_policy_is_accepted(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "open", lambda _: (tmp_path / "none").open(), raising=False)
    assert pages.system_policy() == "unknown"


def _read(source, extents):
    return b"".join(os.pread(source.fd, nbytes, position) for position, nbytes in extents)


def test_extents_locate_the_bytes_in_the_file():
    """This holds after pages were joined, moved, returned and taken again."""
    rng = np.random.default_rng(0)
    source = SharedPages()
    spare = [source.build(1, []) for _ in range(5)]
    source.give_back(spare.pop(1))
    rng.shuffle(spare)
    address = source.build(6, spare)
    contents = _bytes_at(address, 6)
    contents[:] = rng.integers(0, 256, contents.size, dtype=np.uint8)
    for start, nbytes in [(0, contents.size), (100, 17), (PAGE_NBYTES - 5, PAGE_NBYTES + 9)]:
        extents = source.extents(address + start, nbytes)
        assert _read(source, extents) == contents[start : start + nbytes].tobytes()
    assert sum(nbytes for _, nbytes in source.extents(address, contents.size)) == contents.size
    source.give_back(address, 6)
    with pytest.raises(KeyError):
        source.extents(address, 1)


def test_neighbours_in_the_file_are_one_extent():
    source = SharedPages()
    address = source.build(3, [])
    assert source.extents(address + 5, 3 * PAGE_NBYTES - 5) == [
        (PAGE_NBYTES + 5, 3 * PAGE_NBYTES - 5)
    ]
    source.give_back(address, 3)


def test_returned_pages_are_punched_out_of_the_file():
    source = SharedPages()
    address = source.build(4, [])
    _bytes_at(address, 4)[:] = 1
    full = os.fstat(source.fd).st_blocks
    assert full * 512 >= 4 * PAGE_NBYTES
    source.give_back(address, 4)
    assert os.fstat(source.fd).st_blocks * 512 < PAGE_NBYTES
    size = os.fstat(source.fd).st_size
    source.give_back(source.build(4, []), 4)
    assert os.fstat(source.fd).st_size == size, "places in the file are used again"


def test_the_first_page_of_the_file_is_never_handed_out():
    source = SharedPages()
    os.pwrite(source.fd, b"signature", 0)
    address = source.build(2, [])
    _bytes_at(address, 2)[:] = 7
    assert os.pread(source.fd, 9, 0) == b"signature"
    source.give_back(address, 2)


def test_pages_built_after_the_file_was_closed_are_private():
    source = SharedPages()
    kept = source.build(2, [])
    _bytes_at(kept, 2)[:] = 3
    descriptor = source.fd
    source.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    spare = [kept]  # `build` adds new pages to it
    address = source.build(3, spare)
    assert not spare
    assert (_bytes_at(address) == 3).all()
    _bytes_at(address, 3)[:] = 4
    for page in (address, address + PAGE_NBYTES, address + 2 * PAGE_NBYTES, kept + PAGE_NBYTES):
        source.give_back(page)
        assert not _mapped(page)


def test_closing_the_file_leaves_the_memory_in_use():
    source = SharedPages()
    address = source.build(1, [])
    _bytes_at(address)[:] = 3
    descriptor = source.fd
    del source
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert (_bytes_at(address) == 3).all()
    PrivatePages().give_back(address)


def test_a_forked_child_does_not_change_its_parents_pages():
    """A child must not change the bytes of shared pages, even when it exits."""
    pool = HostPool(4 * PAGE_NBYTES, source=SharedPages())
    spare = pool.empty(PAGE_NBYTES)
    buffer = pool.empty(3 * PAGE_NBYTES)
    buffer[:] = 7
    del spare  # the child must not hand these out
    pool.idle_nbytes  # noqa: B018 - accounts for it
    with pool._lock:  # as if another thread held the lock
        pid = os.fork()
        if not pid:
            status = 1
            try:
                pool.trim()
                del buffer
                mine = pool.empty(2 * PAGE_NBYTES)
                mine[:] = 9
                pool.trim()
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (buffer == 7).all()
    position, nbytes = pool._pages.extents(buffer.__array_interface__["data"][0], buffer.nbytes)[0]
    assert os.pread(pool._pages.fd, nbytes, position) == bytes([7]) * nbytes

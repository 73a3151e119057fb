"""Reads of another process's memory give the right bytes, or an error if the peer misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.devices.host_memory.pages import PAGE_NBYTES, SharedPages
from dask_gpurt.devices.host_memory.pool import HostPool
from dask_gpurt.errors import ProtocolError, TransportError
from dask_gpurt.transport import shared
from dask_gpurt.transport.shared import Borrower, Lender
from tests.limits import HANG_S

NBYTES = 3 * PAGE_NBYTES + 77


def content(seed):
    return np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8)


def lent(seed=0):
    """Return a lender and a filled buffer of its memory."""
    memory = SharedPages()
    buffer = HostPool(0, source=memory).empty(NBYTES)
    buffer[:] = content(seed)
    return Lender(memory), buffer


def lend(connection):
    """Lend a buffer until the process is killed."""
    lender, buffer = lent(seed=1)
    connection.send((lender.descriptor, lender.place(buffer)))
    signal.pause()


@pytest.fixture
def other_process():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=lend, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(HANG_S)
    yield (process, *ours.recv())
    process.kill()
    process.join()


def open_files():
    """Count the open files of this process of each kind that a borrower opens.

    Not all open files: objects of earlier tests are collected and clusters close meanwhile.
    """
    found = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return Counter({name: n for name, n in found.items() if "memfd:" in name})


def with_borrower(test):
    """Run a coroutine function with a borrower; check that no file stays open."""

    async def run():
        before = open_files()
        borrower = Borrower(asyncio.get_running_loop())
        try:
            await test(borrower)
        finally:
            borrower.close()
        assert open_files() <= before

    asyncio.run(run())


def fetched(borrower, token, places, nbytes=NBYTES):
    out = np.zeros(nbytes, dtype=np.uint8)
    borrower.read(token, [(borrower.checked(token, places, nbytes), out)])
    return out


class HeldReads:
    """Reads of a peer's memory that stop in the middle, each in its thread, until released."""

    def __init__(self, monkeypatch):
        self._preadv = os.preadv
        self._begun, self._may_go_on = threading.Semaphore(0), threading.Event()
        monkeypatch.setattr(os, "preadv", self._read)

    def _read(self, fd, buffers, position):
        self._begun.release()
        assert self._may_go_on.wait(HANG_S)
        return self._preadv(fd, buffers, position)

    async def begun(self):
        assert await asyncio.to_thread(self._begun.acquire, timeout=HANG_S)

    def let_go(self):
        self._may_go_on.set()


@pytest.fixture
def held_reads(monkeypatch):
    held = HeldReads(monkeypatch)
    yield held
    held.let_go()


def test_memory_of_another_process_is_read(other_process):
    _, descriptor, places = other_process

    async def test(borrower):
        token = borrower.open(descriptor)
        assert token == borrower.open(descriptor), "once is enough"
        np.testing.assert_array_equal(fetched(borrower, token, places), content(seed=1))

    with_borrower(test)


@pytest.fixture
def checks_often(monkeypatch):
    monkeypatch.setattr(shared, "_POLL_S", 0.01)


def test_ended_process_is_forgotten_after_correct_reads(other_process, checks_often):
    process, descriptor, places = other_process

    async def test(borrower):
        token = borrower.open(descriptor)
        process.kill()
        process.join()
        # The loop got no turn yet: the file is still open, with the lent bytes.
        np.testing.assert_array_equal(fetched(borrower, token, places), content(seed=1))
        while borrower._loans:
            await asyncio.sleep(0)
        with pytest.raises(TransportError, match="ended"):
            borrower.checked(token, places, NBYTES)
        with pytest.raises(TransportError, match="not visible here"):
            borrower.open(descriptor)

    with_borrower(test)


def test_a_read_finishes_although_the_lending_process_ends(other_process, held_reads, checks_often):
    process, descriptor, places = other_process

    async def test(borrower):
        token = borrower.open(descriptor)
        reading = asyncio.create_task(asyncio.to_thread(fetched, borrower, token, places))
        await held_reads.begun()
        process.kill()
        process.join()
        while borrower._loans:
            await asyncio.sleep(0)
        held_reads.let_go()
        np.testing.assert_array_equal(await reading, content(seed=1))

    with_borrower(test)


def test_dropped_file_is_closed_by_its_last_reader(held_reads):
    lender, buffer = lent()

    async def test(borrower):
        before = open_files()
        token = borrower.open(lender.descriptor)
        places = lender.place(buffer)
        reads = [
            asyncio.create_task(asyncio.to_thread(fetched, borrower, token, places))
            for _ in range(2)
        ]
        for _ in reads:
            await held_reads.begun()
        borrower.forget(token)
        assert open_files() > before, "it is still read"
        # A second opening is independent of the first.
        assert borrower.open(lender.descriptor) == token
        borrower.forget(token)
        held_reads.let_go()
        for read in reads:
            np.testing.assert_array_equal(await read, content(0))
        assert open_files() <= before

    with_borrower(test)


def test_a_file_that_was_dropped_is_not_read():
    lender, buffer = lent()

    async def test(borrower):
        token = borrower.open(lender.descriptor)
        places = borrower.checked(token, lender.place(buffer), NBYTES)
        borrower.forget(token)
        with pytest.raises(TransportError, match="not offered"):
            borrower.read(token, [(places, np.zeros(NBYTES, dtype=np.uint8))])

    with_borrower(test)


def test_a_file_that_was_dropped_can_be_opened_again():
    lender, buffer = lent()

    async def test(borrower):
        token = borrower.open(lender.descriptor)
        borrower.forget(token)
        borrower.forget(token)
        with pytest.raises(TransportError, match="not offered"):
            borrower.checked(token, lender.place(buffer), NBYTES)
        token = borrower.open(lender.descriptor)
        np.testing.assert_array_equal(fetched(borrower, token, lender.place(buffer)), content(0))

    with_borrower(test)


def test_few_files_stay_open_and_all_peers_are_read(monkeypatch):
    monkeypatch.setattr(shared, "MOST_OPEN", 2)
    lenders = [lent(seed) for seed in range(5)]

    async def test(borrower):
        before = open_files().total()
        tokens = [borrower.open(lender.descriptor) for lender, _ in lenders]
        for _ in range(2):
            for seed, (lender, buffer) in enumerate(lenders):
                found = fetched(borrower, tokens[seed], lender.place(buffer))
                np.testing.assert_array_equal(found, content(seed))
                assert open_files().total() <= before + 2

    with_borrower(test)


def test_a_file_that_is_read_stays_open_until_the_end(monkeypatch, held_reads):
    monkeypatch.setattr(shared, "MOST_OPEN", 1)
    lenders = [lent(seed) for seed in range(2)]

    async def test(borrower):
        tokens = [borrower.open(lender.descriptor) for lender, _ in lenders]
        reads = [
            asyncio.create_task(asyncio.to_thread(fetched, borrower, token, lender.place(buffer)))
            for token, (lender, buffer) in zip(tokens, lenders, strict=True)
        ]
        for _ in reads:
            await held_reads.begun()
        held_reads.let_go()
        for seed, read in enumerate(reads):
            np.testing.assert_array_equal(await read, content(seed))

    with_borrower(test)


def test_a_buffer_outside_the_file_has_no_place():
    lender, _ = lent()
    assert lender.place(np.zeros(100, dtype=np.uint8)) is None


def not_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize("what", ["another lender", "a file", "a pipe", "a socket", "nothing"])
def test_only_a_file_with_the_signature_is_opened(tmp_path, what):
    """In two containers, the same numbers may name different files."""
    lender, _ = lent()
    other, _ = lent()
    reader, writer = os.pipe()
    number = {
        "another lender": other._memory.fd,
        "a file": not_memory(tmp_path),
        "a pipe": reader,
        "a socket": 0,
        "nothing": 10**6,
    }[what]

    async def test(borrower):
        with pytest.raises(TransportError, match="its memory"):
            borrower.open({**lender.descriptor, "fd": number})
        assert not borrower._loans

    with_borrower(test)
    os.close(reader)
    os.close(writer)


def test_a_process_of_another_namespace_is_refused(other_process):
    # There, the number may be that of another process here, whose files are not to be opened.
    _, descriptor, _ = other_process

    async def test(borrower):
        with pytest.raises(TransportError, match="another container, or on another host"):
            borrower.open({**descriptor, "pid_namespace": descriptor["pid_namespace"] + 1})
        assert not borrower._loans

    with_borrower(test)


@pytest.mark.parametrize(
    "descriptor",
    [
        {},
        {"pid": "x", "fd": 3, "token": b"0" * 16},
        {"pid": -1, "fd": 3, "token": b"0" * 16},
        {"pid": 0, "fd": 3, "token": b"0" * 16},
        {"pid": 1, "fd": -3, "token": b"0" * 16},
        {"pid": 1, "fd": 3, "token": b""},
        {"pid": 1, "fd": 3, "token": None},
        {"pid": 1, "fd": 3, "token": 16},
        {"pid": 1, "fd": 3, "token": 1 << 62},
        {"pid": 1, "fd": 3, "token": [0] * 16},
        {"pid": float("inf"), "fd": 3, "token": b"0" * 16},
        {"pid": 10**30, "fd": 3, "token": b"0" * 16},
    ],
)
def test_a_malformed_offer_is_refused(descriptor):
    async def test(borrower):
        with pytest.raises(ProtocolError, match="not an offer"):
            borrower.open({"pid_namespace": 0, **descriptor})

    with_borrower(test)


plain = st.none() | st.integers() | st.floats() | st.binary(max_size=20) | st.text(max_size=5)


@given(
    st.dictionaries(
        st.sampled_from(["pid", "pid_namespace", "fd", "token"]), plain | st.lists(plain)
    )
)
def test_arbitrary_offers_are_refused(descriptor):
    async def test(borrower):
        with pytest.raises((ProtocolError, TransportError)):
            borrower.open(descriptor)

    asyncio.run(_once(test))


@pytest.mark.parametrize(
    "places",
    [
        [],
        None,
        7,
        [(0, NBYTES - 1)],
        [(0, NBYTES + 1)],
        [(-1, NBYTES)],
        [(1 << 62, NBYTES)],
        [(1 << 70, NBYTES)],
        [(0, NBYTES), (0, 0)],
        [(0, NBYTES + 1), (0, -1)],
        [("a", NBYTES)],
        [(float("inf"), NBYTES)],
        [(0, NBYTES, 1)],
    ],
)
def test_places_outside_of_the_memory_are_refused(places):
    lender, _buffer = lent()

    async def test(borrower):
        token = borrower.open(lender.descriptor)
        with pytest.raises(ProtocolError, match="places"):
            borrower.checked(token, places, NBYTES)

    with_borrower(test)


@given(places=st.lists(st.tuples(st.integers(), st.integers()), max_size=5), nbytes=st.integers(0))
def test_arbitrary_places_are_read_or_refused(places, nbytes):
    lender, _buffer = lent()

    async def test(borrower):
        token = borrower.open(lender.descriptor)
        try:
            checked = borrower.checked(token, places, nbytes)
        except ProtocolError:
            return
        assert sum(length for _, length in checked) == nbytes <= 5 * 8 * PAGE_NBYTES
        borrower.read(token, [(checked, np.zeros(nbytes, dtype=np.uint8))])

    asyncio.run(_once(test))


async def _once(test):
    borrower = Borrower(asyncio.get_running_loop())
    try:
        await test(borrower)
    finally:
        borrower.close()


def test_a_truncated_memory_file_is_an_error():
    lender, buffer = lent()

    async def test(borrower):
        token = borrower.open(lender.descriptor)
        places = borrower.checked(token, lender.place(buffer), NBYTES)
        os.ftruncate(lender._memory.fd, PAGE_NBYTES + 10)
        with pytest.raises(TransportError, match="truncated"):
            borrower.read(token, [(places, np.zeros(NBYTES, dtype=np.uint8))])

    with_borrower(test)

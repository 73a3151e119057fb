"""Blocks, checksums and layouts of value files are correct, tested without a tier."""

from __future__ import annotations

import os
import weakref
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.codecs.checksums import STEP_NBYTES, checksum
from dask_gpurt.memory.decisions.backoff import FIRST_S, LONGEST_S, SILENCE_S, Backoff, LogThrottle
from dask_gpurt.memory.files import block_io, value_file
from dask_gpurt.memory.files.block_io import (
    BouncePool,
    empty_blocks,
    is_aligned,
    read_into,
    write_through,
)
from dask_gpurt.memory.files.value_file import BufferEntry, layout_of, padded, read_lead, write_lead
from tests.memory.faulty_system import System, without_direct

deterministic = settings(derandomize=True)


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


# ------------------------------------------------------------------ checksums

LENGTHS = [0, 1, 7, 1024, STEP_NBYTES - 1, STEP_NBYTES, 3 * STEP_NBYTES + 13, 70 * STEP_NBYTES]


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_a_checksum_may_be_taken_piece_by_piece(nbytes):
    data = noise(nbytes)
    whole = checksum(data)
    for step in (STEP_NBYTES, 2 * STEP_NBYTES):
        total = 0
        for start in range(0, nbytes, step):
            total = checksum(data[start : start + step], total)
        assert total == whole


@pytest.mark.parametrize("nbytes", LENGTHS[1:])
def test_checksum_does_not_depend_on_the_address(nbytes):
    data = noise(nbytes)
    askew = np.empty(nbytes + 3, np.uint8)[3:]
    askew[:] = data
    assert checksum(askew) == checksum(data)
    askew.flags.writeable = False
    assert checksum(askew) == checksum(data)


def test_checksum_matches_its_documentation():
    data = noise(2 * STEP_NBYTES + 100)
    sums = b""
    for step in range(2):
        words = data[step * STEP_NBYTES : (step + 1) * STEP_NBYTES].view("<u8").tolist()
        for lane in range(128):
            sums += (sum(words[lane::128]) % 2**64).to_bytes(8, "little")
    assert checksum(data) == zlib.crc32(sums + data[2 * STEP_NBYTES :].tobytes())


@deterministic
@given(st.integers(1, 3 * STEP_NBYTES), st.integers(0, 2**32 - 1), st.integers(0, 7))
def test_changed_bit_is_noticed(nbytes, seed, bit):
    data = noise(nbytes, seed)
    before = checksum(data)
    data[seed % nbytes] ^= 1 << bit
    assert checksum(data) != before


def test_bytes_that_moved_are_noticed():
    data = noise(4 * STEP_NBYTES)
    before = checksum(data)
    for length in (1, 8, 512, STEP_NBYTES):
        assert checksum(np.roll(data, length)) != before
    swapped = data.copy()
    swapped[:4096], swapped[STEP_NBYTES : STEP_NBYTES + 4096] = (
        data[STEP_NBYTES : STEP_NBYTES + 4096],
        data[:4096],
    )
    assert checksum(swapped) != before
    zeros = np.zeros(STEP_NBYTES, np.uint8)
    assert checksum(zeros) != checksum(zeros[:-1]) != checksum(zeros[:-8])


# ------------------------------------------------------------------ layout

SIZES = st.lists(
    st.one_of(st.integers(0, 300), st.integers(50_000, 80_000), st.just(1 << 22)), max_size=60
)


@deterministic
@given(st.integers(0, 3000), SIZES)
def test_a_layout_has_room_for_everything(header_nbytes, sizes):
    layout = layout_of(header_nbytes, sizes)
    blocks = set(layout.blocks)
    assert blocks == {n for n, nbytes in enumerate(sizes) if nbytes >= value_file.SMALL_NBYTES}
    taken = sorted((layout.offsets[n], nbytes) for n, nbytes in enumerate(sizes) if nbytes)
    end = header_nbytes
    for offset, nbytes in taken:
        assert offset >= end
        assert offset % 64 == 0
        end = offset + nbytes
    for number, nbytes in enumerate(sizes):
        if number in blocks:
            assert layout.offsets[number] % 4096 == 0
            assert layout.offsets[number] >= layout.lead_nbytes
        else:
            assert layout.offsets[number] + nbytes <= layout.lead_nbytes
    small_nbytes = sum(nbytes for nbytes in sizes if nbytes < value_file.SMALL_NBYTES)
    # There is an entry and alignment for each buffer, and at most a page before the blocks.
    assert layout.lead_nbytes <= header_nbytes + small_nbytes + 100 * len(sizes) + 5000
    assert layout.nbytes == (padded(end) if blocks else layout.lead_nbytes)


def a_lead(header=b"header", sizes=(5, 0, 70_000, 9)):
    stored = [noise(n) for n in sizes]
    layout = layout_of(len(header), sizes)
    entries = [BufferEntry(layout.offsets[n], size, size, n, 0) for n, size in enumerate(sizes)]
    lead = empty_blocks(layout.lead_nbytes)
    write_lead(lead, layout, 77, header, stored, entries)
    return lead, layout, entries


def test_lead_block_describes_the_written_value():
    lead, layout, entries = a_lead()
    assert read_lead(lead, layout.nbytes, 77) == (b"header", entries)
    assert lead[entries[3].offset : entries[3].offset + 9].tobytes() == noise(9).tobytes()


def test_changed_lead_block_is_refused():
    lead, layout, _ = a_lead()
    for position in range(lead.nbytes):
        damaged = lead.copy()
        damaged[position] ^= 16
        with pytest.raises(ValueError):
            read_lead(damaged, layout.nbytes, 77)
    for wrong in (lead[:0], lead[:31], lead[:-1], np.append(lead, np.uint8(0))):
        with pytest.raises(ValueError):
            read_lead(wrong, layout.nbytes, 77)
    with pytest.raises(ValueError):
        read_lead(lead, layout.nbytes + 4096, 77)
    with pytest.raises(ValueError, match="another file"):
        read_lead(lead, layout.nbytes, 78)


def test_lead_block_that_announces_too_much_is_refused():
    layout = layout_of(6, [])
    lead = np.zeros(layout.lead_nbytes, np.uint8)
    write_lead(lead, layout, 77, b"header", [], [])
    for offset, announced in ((32, 1), (32, 2**31), (36, 7)):
        wrong = lead.copy()
        wrong[offset : offset + 4] = np.array([announced], "<u4").view(np.uint8)
        wrong[4:8] = np.array([zlib.crc32(wrong[8:].data)], "<u4").view(np.uint8)
        with pytest.raises(ValueError, match="contradicts itself"):
            read_lead(wrong, layout.nbytes, 77)


# ------------------------------------------------------------------ in and out


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4096, 65536, 65537, 200_000, (8 << 20) + 5])
def test_bounce_buffer_writes_the_same_bytes(fd, nbytes, aligned):
    data = empty_blocks(nbytes + 16)[: nbytes if aligned else None][0 if aligned else 16 :]
    data[:] = noise(nbytes)
    assert is_aligned(data) == aligned
    total = write_through(os, fd, data, 4096, empty_blocks(1 << 20))
    assert total == checksum(data) == write_through(os, fd, data, 32 << 20, None)
    for position in (4096, 32 << 20):
        assert os.pread(fd, nbytes, position) == data.tobytes()


def test_more_buffers_than_one_call_takes_are_read(fd):
    data = noise(10_000)
    os.pwrite(fd, data.data, 0)
    system = System()
    parts = [np.empty(n % 3, np.uint8) for n in range(10_000)]
    read_into(system, fd, parts)
    assert np.concatenate(parts).tobytes() == data[: sum(p.nbytes for p in parts)].tobytes()
    assert system.counts["preadv"] == -(-sum(p.nbytes > 0 for p in parts) // 1024)


def test_a_file_that_ends_early_is_an_end_of_file(fd):
    os.pwrite(fd, bytes(1000), 0)
    with pytest.raises(EOFError):
        read_into(os, fd, [np.empty(600, np.uint8), np.empty(401, np.uint8)])


def test_bounce_buffers_are_used_again():
    bounces = BouncePool()
    taken = [bounces.take() for _ in range(3)]
    assert len({id(bounce) for bounce in taken}) == 3
    assert all(is_aligned(bounce) for bounce in taken)
    for bounce in taken:
        bounces.put_back(bounce)
    again = [bounces.take() for _ in range(3)]
    assert sum(any(bounce is other for other in taken) for bounce in again) == 2


def test_closed_pool_keeps_no_buffer():
    bounces = BouncePool()
    kept, late = bounces.take(), bounces.take()
    freed = [weakref.ref(kept.base), weakref.ref(late.base)]
    bounces.put_back(kept)
    del kept
    bounces.close()
    assert freed[0]() is None
    bounces.put_back(late)
    del late
    assert freed[1]() is None


def test_trying_direct_io_leaves_nothing_behind(tmp_path):
    path = str(tmp_path / "probe")

    def late(real, fd, *args):
        raise OSError(22, "Invalid argument")

    def broken(real, *args):
        raise OSError(5, "Input/output error")

    assert not block_io.supports_direct(System(open=without_direct), path)
    assert not block_io.supports_direct(System(pwrite=late), path)
    with pytest.raises(OSError, match="Input/output"):
        block_io.supports_direct(System(pwrite=broken), path)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ retries


def test_waits_double_up_to_a_minute():
    backoff, now_s, waits = Backoff(), 50.0, []
    assert not backoff.is_waiting(now_s)
    for _ in range(10):
        backoff = backoff.after_failure(now_s)
        waits.append(backoff.until_s - now_s)
        assert backoff.is_waiting(now_s)
        assert backoff.is_waiting(backoff.until_s - 0.01)
        # A failure of an attempt that began earlier does not extend the wait.
        assert backoff.after_failure(now_s + 0.5) == backoff
        now_s = backoff.until_s
        assert not backoff.is_waiting(now_s)
    assert waits == [FIRST_S * 2**n for n in range(6)] + [LONGEST_S] * 4


def test_same_complaint_is_repeated_after_a_while():
    complaints = LogThrottle()
    assert complaints.is_due("full", 0.0)
    assert not complaints.is_due("full", SILENCE_S - 1)
    assert complaints.is_due("broken", SILENCE_S - 1)
    assert complaints.is_due("full", SILENCE_S)
    assert not complaints.is_due("full", SILENCE_S + 1)

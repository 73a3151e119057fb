"""The pool of pinned memory reuses blocks, keeps values apart, and respects its capacity."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.devices.host_memory.pinned import PinnedPool, plain

PATIENCE_S = 20.0


class Pinner:
    """A fake `pin` that counts calls and fails on request."""

    def __init__(self):
        self.asked = []
        self.fails = False

    def __call__(self, nbytes):
        if self.fails:
            raise MemoryError("cannot pin")
        self.asked.append(nbytes)
        return plain(nbytes)


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8)


def kept(pool, values):
    blocks = pool.take(values.nbytes)
    blocks.write(0, values)
    return blocks


def read(blocks, start=0, nbytes=None):
    out = np.zeros(blocks.nbytes - start if nbytes is None else nbytes, dtype=np.uint8)
    blocks.read(start, out)
    return out


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 640, 1000])
def test_pinned_bytes_are_read_back(nbytes):
    pool = PinnedPool(1024, 64)
    values = noise(nbytes)
    blocks = kept(pool, values)
    np.testing.assert_array_equal(read(blocks), values)
    assert pool.used_nbytes == pool.size_of(nbytes) == -(-nbytes // 64) * 64


@settings(derandomize=True)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 70))
def test_any_part_of_a_pinned_value_can_be_read(start, nbytes, block_nbytes):
    values = noise(300)
    blocks = kept(PinnedPool(1000, block_nbytes), values)
    if start + nbytes > 300:
        with pytest.raises(IndexError, match="of 300"):
            read(blocks, start, nbytes)
    else:
        np.testing.assert_array_equal(read(blocks, start, nbytes), values[start : start + nbytes])


def test_adjacent_blocks_make_one_piece():
    pool = PinnedPool(1000, 100)
    lengths = [piece.nbytes for piece in pool.take(350).stretches(20, 310)]
    assert lengths == [310]


def test_blocks_apart_make_pieces():
    pool = PinnedPool(1000, 100)
    first, second, third = (pool.take(200) for _ in range(3))
    pool.give_back(third)
    pool.give_back(first)
    blocks = pool.take(400)
    assert [piece.nbytes for piece in blocks.stretches(50, 340)] == [150, 190]
    assert [piece.nbytes for piece in blocks.stretches(210, 20)] == [20]
    values = noise(400)
    blocks.write(0, values)
    np.testing.assert_array_equal(read(blocks), values)
    assert second.nbytes == 200


def test_all_blocks_of_a_value_are_pinned_in_one_call():
    pinner = Pinner()
    pool = PinnedPool(1000, 10, pinner)
    assert pinner.asked == [], "nothing before it is needed"
    first = pool.take(95)
    assert pinner.asked == [100]
    pool.give_back(first)
    pool.take(130)
    assert pinner.asked == [100, 30], "only what is missing"
    assert pool.n_allocations == 2


def test_no_allocations_after_the_warm_up():
    pinner = Pinner()
    pool = PinnedPool(1 << 20, 64, pinner)
    rng = np.random.default_rng(1)
    warm = pool.take(20_000)
    pool.give_back(warm)
    before = pool.n_allocations
    held = {}
    for number in range(2000):
        values = noise(int(rng.integers(0, 2000)), number)
        # The last of several blocks is never full, so ten values of 2000 bytes always fit.
        if len(held) == 9:
            oldest = min(held)
            blocks, expected = held.pop(oldest)
            np.testing.assert_array_equal(read(blocks), expected)
            pool.give_back(blocks)
        held[number] = kept(pool, values), values
    assert pool.n_allocations == before == 1
    assert pool.used_nbytes + pool.idle_nbytes == sum(pinner.asked)


def test_live_values_do_not_overlap():
    pool = PinnedPool(4096, 64)
    rng = np.random.default_rng(2)
    held = {}
    for number in range(500):
        if held and rng.random() < 0.45:
            blocks, expected = held.pop(int(rng.choice(list(held))))
            np.testing.assert_array_equal(read(blocks), expected)
            pool.give_back(blocks)
            continue
        values = noise(int(rng.integers(0, 500)), number)
        try:
            held[number] = kept(pool, values), values
        except MemoryError:
            needed = pool.used_nbytes + pool.size_of(values.nbytes)
            assert needed > pool.capacity_nbytes
        assert pool.used_nbytes + pool.idle_nbytes <= pool.capacity_nbytes
    for blocks, expected in held.values():
        np.testing.assert_array_equal(read(blocks), expected)


def test_the_cap_is_whole_blocks():
    pool = PinnedPool(1050, 100)
    assert pool.capacity_nbytes == 1000
    pool.take(950)
    with pytest.raises(MemoryError, match="10 are used of 10"):
        pool.take(1)
    assert pool.used_nbytes == 1000


def test_a_value_that_does_not_fit_takes_no_memory():
    pinner = Pinner()
    pool = PinnedPool(1000, 100, pinner)
    with pytest.raises(MemoryError):
        pool.take(1001)
    assert (pool.used_nbytes, pool.idle_nbytes, pinner.asked) == (0, 0, [])
    pool.take(1000)


def test_failed_pinning_takes_no_block():
    pinner = Pinner()
    pool = PinnedPool(1000, 100, pinner)
    pool.give_back(pool.take(300))
    pinner.fails = True
    with pytest.raises(MemoryError, match="cannot pin"):
        pool.take(400)
    assert (pool.used_nbytes, pool.idle_nbytes) == (0, 300)
    pool.take(300)


def test_released_pinned_memory_cannot_be_used():
    pool = PinnedPool(1000, 100)
    blocks = kept(pool, noise(300))
    pool.give_back(blocks)
    with pytest.raises(IndexError):
        blocks.read(0, np.empty(1, dtype=np.uint8))
    with pytest.raises(IndexError):
        blocks.write(0, noise(1))
    pool.give_back(blocks)
    assert (pool.used_nbytes, pool.idle_nbytes) == (0, 300)


def test_idle_blocks_are_handed_out_while_others_are_pinned():
    """Pinning takes milliseconds. Requests that idle blocks satisfy must not wait for it."""
    entered, go_on = threading.Event(), threading.Event()
    slow = False

    def pin(nbytes):
        if slow:
            entered.set()
            assert go_on.wait(PATIENCE_S)
        return plain(nbytes)

    pool = PinnedPool(1000, 100, pin)
    first, second = pool.take(100), pool.take(100)
    slow = True
    taken = []
    thread = threading.Thread(target=lambda: taken.append(pool.take(800)), daemon=True)
    thread.start()
    assert entered.wait(PATIENCE_S)
    pool.give_back(first)
    pool.give_back(second)
    again = pool.take(200)
    with pytest.raises(MemoryError):
        pool.take(1)
    go_on.set()
    thread.join(PATIENCE_S)
    assert len(taken) == 1
    assert pool.used_nbytes == again.nbytes + taken[0].nbytes == 1000
    assert pool.idle_nbytes == 0

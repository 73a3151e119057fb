"""Buffers of a pool never overlap, and their memory returns to it with the last view."""

from __future__ import annotations

import gc
from itertools import pairwise

import numpy as np
import pytest

from dask_gpurt.devices.host_memory import pages
from dask_gpurt.devices.host_memory.pages import PAGE_NBYTES, PrivatePages, SharedPages, work_here
from dask_gpurt.devices.host_memory.pool import HostPool, Tenant
from tests.devices.host_memory.pool_pages import HALF, MANY, Walk, address_of, pages_of

# ------------------------------------------------------------------ buffers


@pytest.mark.parametrize(
    "nbytes",
    [16 << 10, (16 << 10) + 1, HALF - 1, HALF, HALF + 1, PAGE_NBYTES, PAGE_NBYTES + 1, 5_000_000],
)
def test_buffer_has_its_length_is_aligned_and_writable(pool, nbytes):
    buffers = [pool.empty(nbytes) for _ in range(3)]
    for buffer in buffers:
        assert buffer.dtype == np.uint8
        assert buffer.shape == (nbytes,)
        assert buffer.flags.c_contiguous
        assert buffer.flags.writeable
        assert address_of(buffer) % 64 == 0
        buffer[:] = 1


def test_a_lane_keeps_its_run_if_the_system_has_no_pages(pool, monkeypatch):
    """Otherwise, the lane's run would be released twice, and reused while a buffer is in it."""
    first, second = pool.empty(HALF, "a"), pool.empty(HALF, "a")
    second[:] = 2

    def refuse(n_pages, spare):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(pool._pages, "build", refuse)
        for _ in range(2):
            with pytest.raises(MemoryError):
                pool.empty(HALF, "a")
    del first
    pool.close_lane("a")
    pool.empty(PAGE_NBYTES, "b")[:] = 9
    assert (second == 2).all()
    assert pages_of(pool) == (1, 1)
    del second
    assert pages_of(pool) == (0, 2)


@pytest.mark.parametrize("nbytes", [HALF, PAGE_NBYTES, 5_000_000])
def test_a_system_without_pages_has_buffers(monkeypatch, nbytes):
    """A system that cannot move pages, such as macOS, gives plain memory."""

    def lack():
        raise AttributeError("mremap")

    work_here.cache_clear()
    monkeypatch.setattr(pages, "_library", lack)
    try:
        pool = HostPool(MANY)
    finally:
        work_here.cache_clear()
    for buffer in (pool.empty(nbytes, "a"), pool.empty_alone(nbytes)):
        buffer[:] = 1
        assert buffer.nbytes == nbytes
    pool.close_lane("a")
    pool.trim()
    assert (pool.used_nbytes, pool.idle_nbytes) == (0, 0)
    assert not pool.wastes_more_than(0)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, (16 << 10) - 1])
def test_small_buffers_take_no_pages(pool, nbytes):
    buffer = pool.empty(nbytes, lane="a")
    assert buffer.shape == (nbytes,)
    assert buffer.dtype == np.uint8
    assert pages_of(pool) == (0, 0)


def test_large_buffers_begin_on_pages(pool):
    buffers = [pool.empty(PAGE_NBYTES + 1), pool.empty(HALF + 1)]
    assert [address_of(buffer) % PAGE_NBYTES for buffer in buffers] == [0, 0]
    assert pages_of(pool) == (3, 0)


def test_request_beyond_the_system_is_a_memory_error(pool):
    with pytest.raises(MemoryError):
        pool.empty(1 << 50)
    assert pages_of(pool) == (0, 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keep_pages", [0, 4, 64])
def test_live_buffers_never_overlap(seed, keep_pages):
    pool = HostPool(keep_pages * PAGE_NBYTES, lane_pages=1)
    walk = Walk(pool, seed, ["a", "b", None])
    for _ in range(150):
        walk.step()
        ranges = sorted((address_of(b), address_of(b) + b.nbytes) for b in walk.live.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert pool.used_nbytes >= sum(buffer.nbytes for buffer in walk.live.values())
        assert pool.idle_nbytes <= keep_pages * PAGE_NBYTES
    assert walk.n_made > 50
    walk.drop_all()
    assert pool.used_nbytes == 0
    pool.trim()


# ------------------------------------------------------------------ life


def test_a_view_keeps_its_memory_alive(pool):
    view = pool.empty(PAGE_NBYTES)[100:200].view(np.uint32)
    view[:] = 123456
    assert pages_of(pool) == (1, 0)
    others = [pool.empty(PAGE_NBYTES) for _ in range(3)]
    for other in others:
        other[:] = 0xFF
    assert (view == 123456).all()
    assert pages_of(pool) == (4, 0)
    del view
    assert pages_of(pool) == (3, 1)


def test_a_memoryview_keeps_its_memory_alive(pool):
    view = memoryview(pool.empty(PAGE_NBYTES))[5:]
    assert pages_of(pool) == (1, 0)
    del view
    assert pages_of(pool) == (0, 1)


def test_buffers_of_a_lane_share_pages(pool):
    buffers = [pool.empty(HALF // 2, lane="a") for _ in range(4)]
    assert pages_of(pool) == (1, 0)
    addresses = [address_of(buffer) for buffer in buffers]
    assert addresses == [addresses[0] + number * HALF // 2 for number in range(4)]
    more = pool.empty(HALF // 2, lane="a")
    assert pages_of(pool) == (2, 0)
    del more


def test_lanes_do_not_share_pages(pool):
    buffers = [pool.empty(16 << 10, lane=lane) for lane in ("a", "b", ("a", 1), None)]
    assert len({address_of(buffer) // PAGE_NBYTES for buffer in buffers}) == 4
    assert pages_of(pool) == (4, 0)


def test_odd_lengths_are_rounded_up_within_a_page(pool):
    first, second = pool.empty((16 << 10) + 1, lane="a"), pool.empty(16 << 10, lane="a")
    assert address_of(second) - address_of(first) == (16 << 10) + 64


def test_a_page_is_filled_to_its_last_byte(pool):
    buffers = [pool.empty(64 << 10, lane="a") for _ in range(PAGE_NBYTES // (64 << 10))]
    assert len(buffers) == 32
    assert pages_of(pool) == (1, 0)


def test_a_page_is_freed_with_its_last_buffer(pool):
    first, second = pool.empty(HALF, lane="a"), pool.empty(HALF, lane="a")
    pool.close_lane("a")
    del first
    assert pages_of(pool) == (1, 0)
    second[:] = 1
    del second
    assert pages_of(pool) == (0, 1)


def test_an_open_lane_keeps_a_page_with_a_buffer(pool):
    first, second = pool.empty(HALF // 2, lane="a"), pool.empty(HALF // 2, lane="a")
    del first
    assert pages_of(pool) == (1, 0)
    assert address_of(pool.empty(HALF, lane="a")) == address_of(second) + HALF // 2


@pytest.mark.parametrize("lane", ["a", None])
def test_an_open_lane_keeps_no_page_without_buffers(pool, lane):
    """Otherwise, every open lane pins its last pages until its run is closed."""
    buffers = [pool.empty(HALF, lane) for _ in range(3)]
    large = pool.empty(PAGE_NBYTES, lane)
    del buffers
    assert pages_of(pool) == (1, 2)
    again = pool.empty(HALF, lane)
    again[:] = 7
    pool.close_lane(lane)
    assert pages_of(pool) == (2, 1)
    assert (again == 7).all()
    del again, large
    assert pages_of(pool) == (0, 3)


def test_waste_is_what_no_buffer_uses(pool):
    assert not pool.wastes_more_than(0)
    first, second = pool.empty(HALF, lane="a"), pool.empty(HALF // 2, lane="a")
    large = pool.empty(PAGE_NBYTES + 5)
    alone = pool.empty_alone(PAGE_NBYTES)
    wasted = HALF // 2 + PAGE_NBYTES - 5
    assert pool.wastes_more_than(wasted - 1)
    assert not pool.wastes_more_than(wasted)
    del first
    assert pool.used_nbytes
    assert pool.wastes_more_than(wasted + HALF - 1)
    del large
    pool.close_lane("a")
    assert not pool.wastes_more_than(HALF + HALF // 2)
    del second, alone
    assert not pool.wastes_more_than(0)


def test_trimming_returns_the_empty_page_of_an_open_lane(pool):
    buffer = pool.empty(HALF, lane="a")
    pool.trim()
    del buffer
    assert pages_of(pool) == (0, 0)


def test_a_page_that_is_full_does_not_wait_for_its_lane(pool):
    first = pool.empty(HALF, lane="a")
    second = pool.empty(HALF // 2, lane="a")
    third = pool.empty(HALF, lane="a")
    del first, second
    assert pages_of(pool) == (1, 1)
    del third


def test_closing_a_lane_keeps_other_lanes_and_its_buffers(pool):
    mine, other = pool.empty(HALF, lane="a"), pool.empty(HALF, lane="b")
    mine[:] = 6
    pool.close_lane("a")
    pool.close_lane("a")
    pool.close_lane("never used")
    assert pages_of(pool) == (2, 0)
    assert (mine == 6).all()
    assert address_of(pool.empty(HALF, lane="b")) == address_of(other) + HALF


@pytest.mark.parametrize("source", [PrivatePages, SharedPages])
@pytest.mark.parametrize("lane", ["a", None])
def test_a_closed_lane_gives_pages_without_buffers_back(lane, source):
    """Otherwise, outputs would take new pages while these wait for the last shard."""
    pool = HostPool(MANY, lane_pages=4, source=source())
    full = [pool.empty(PAGE_NBYTES // 4 * 3, lane) for _ in range(3)]
    # The first has a page of its own, the others share a run of four pages.
    assert pages_of(pool) == (5, 0)
    for number, buffer in enumerate(full):
        buffer[:] = number
    pool.close_lane(lane)
    assert pages_of(pool) == (3, 2)
    other = pool.empty(3 * PAGE_NBYTES)
    other[:] = 9
    assert all((buffer == number).all() for number, buffer in enumerate(full))
    del full, other, buffer
    assert pages_of(pool) == (0, 6), "two of its three pages are those of the lane"
    pool.trim()


def test_a_closed_pool_lane_can_be_used_again(pool):
    first = pool.empty(16 << 10, lane="a")
    pool.close_lane("a")
    second = pool.empty(16 << 10, lane="a")
    assert address_of(first) // PAGE_NBYTES != address_of(second) // PAGE_NBYTES


# ------------------------------------------------------------------ tenants


def test_closing_a_tenant_closes_only_its_lanes(pool):
    one, other, pools = Tenant(), Tenant(), (pool, HostPool(1 << 30))
    buffers = [one.empty(each, HALF, lane) for each in pools for lane in "ab"]
    theirs = other.empty(pool, HALF, "a")
    one.close()
    del buffers
    assert [each.used_nbytes for each in pools] == [PAGE_NBYTES, 0]
    assert address_of(other.empty(pool, HALF, "a")) == address_of(theirs) + HALF


def test_a_tenant_may_go_on_after_its_lanes_closed(pool):
    tenant = Tenant()
    first = tenant.empty(pool, HALF, "a")
    tenant.close_lanes()
    second, third = tenant.empty(pool, HALF, "a"), tenant.empty(pool, HALF, "a")
    assert address_of(first) // PAGE_NBYTES != address_of(second) // PAGE_NBYTES
    assert address_of(third) == address_of(second) + HALF


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_while_a_tenant_closes_keeps_no_page(pool, monkeypatch, when):
    tenant, empty = Tenant(), pool.empty

    def leave_meanwhile(nbytes, lane):
        if when == "before":
            tenant.close()
        buffer = empty(nbytes, lane)
        if when == "after":
            tenant.close()
        return buffer

    monkeypatch.setattr(pool, "empty", leave_meanwhile)
    late = [tenant.empty(pool, HALF, "a") for _ in range(2)]
    assert pool.used_nbytes
    del late
    assert pool.used_nbytes == 0


# ------------------------------------------------------------------ reuse


def test_memory_of_small_buffers_becomes_one_large_buffer(pool):
    small = [pool.empty(HALF, lane=number % 3) for number in range(12)]
    for lane in range(3):
        pool.close_lane(lane)
    assert pages_of(pool) == (6, 0)
    del small
    assert pages_of(pool) == (0, 6)
    large = pool.empty(6 * PAGE_NBYTES)
    assert pages_of(pool) == (6, 0), "every page was there already"
    large[:] = 9
    assert large.sum(dtype=np.int64) == 9 * 6 * PAGE_NBYTES


def test_memory_of_a_large_buffer_becomes_small_buffers(pool):
    large = pool.empty(3 * PAGE_NBYTES)
    inside = range(address_of(large), address_of(large) + large.nbytes)
    del large
    small = [pool.empty(HALF, lane="a") for _ in range(6)]
    assert all(address_of(buffer) in inside for buffer in small)
    assert pages_of(pool) == (3, 0)


def test_a_large_buffer_does_not_wait_for_pages_in_use(pool):
    """A large buffer takes idle pages, and gets the rest from the system."""
    first = pool.empty(PAGE_NBYTES)
    second = pool.empty(PAGE_NBYTES)
    second[:] = 2
    del first
    large = pool.empty(3 * PAGE_NBYTES)
    large[:] = 3
    assert pages_of(pool) == (4, 0)
    assert (second == 2).all()


def test_pool_keeps_no_more_than_its_limit():
    pool = HostPool(2 * PAGE_NBYTES + 1, lane_pages=1)
    large, small = pool.empty(4 * PAGE_NBYTES), pool.empty(PAGE_NBYTES)
    del large
    assert pages_of(pool) == (1, 2)
    del small
    assert pages_of(pool) == (0, 2)
    pool.trim()


@pytest.mark.parametrize("keep_nbytes", [0, PAGE_NBYTES - 1, -1])
def test_pool_with_a_limit_of_zero_keeps_nothing(keep_nbytes):
    pool = HostPool(keep_nbytes, lane_pages=1)
    buffer = pool.empty(3 * PAGE_NBYTES)
    buffer[:] = 1
    del buffer
    assert pages_of(pool) == (0, 0)


def test_pages_beyond_the_limit_are_returned(monkeypatch):
    given_back = []
    source = PrivatePages()
    give_back = source.give_back
    monkeypatch.setattr(
        source, "give_back", lambda address: (given_back.append(address), give_back(address))
    )
    pool = HostPool(PAGE_NBYTES, lane_pages=1, source=source)
    buffer = pool.empty(3 * PAGE_NBYTES)
    expected = {address_of(buffer) + number * PAGE_NBYTES for number in range(3)}
    del buffer
    assert pool.idle_nbytes == PAGE_NBYTES
    assert len(given_back) == 2
    pool.trim()
    assert pool.idle_nbytes == 0
    assert len(given_back) == 3
    assert set(given_back) == expected


def test_trimming_returns_only_idle_pages(pool):
    buffers = [pool.empty(PAGE_NBYTES) for _ in range(4)]
    buffers[0][:] = 4
    del buffers[1:]
    pool.trim()
    assert pages_of(pool) == (1, 0)
    assert (buffers[0] == 4).all()
    again = pool.empty(2 * PAGE_NBYTES)
    again[:] = 5
    assert (buffers[0] == 4).all()


def test_two_pools_have_nothing_in_common():
    first, second = HostPool(MANY, lane_pages=1), HostPool(MANY)
    buffer = first.empty(PAGE_NBYTES)
    assert pages_of(first) == (1, 0)
    assert pages_of(second) == (0, 0)
    del buffer
    assert pages_of(second) == (0, 0)
    first.trim()


def test_a_buffer_outlives_its_pool():
    buffer = HostPool(0, lane_pages=1).empty(PAGE_NBYTES)
    gc.collect()
    buffer[:] = 1
    assert buffer.all()

"""A pool stays consistent with many threads, and when garbage collection deletes buffers."""

from __future__ import annotations

import gc
import threading

import pytest

from dask_gpurt.devices.host_memory.pages import PAGE_NBYTES, SharedPages
from dask_gpurt.devices.host_memory.pool import HostPool
from tests.devices.host_memory.pool_pages import HALF, MANY, PATIENCE_S, Walk, pages_of

# ------------------------------------------------------------------ threads and garbage


def test_threads_use_one_pool_at_once(pool):
    def work(number):
        try:
            walk = Walk(pool, number, [number, "shared"])
            for _ in range(150):
                walk.step(largest_nbytes=PAGE_NBYTES + HALF, most=6)
            walk.drop_all()
        except BaseException as error:
            failures.append(error)

    failures = []
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    pool.close_lane("shared")
    assert pool.used_nbytes == 0


def test_a_buffer_may_die_in_another_thread(pool):
    buffers = [pool.empty(PAGE_NBYTES) for _ in range(3)]
    thread = threading.Thread(target=buffers.clear)
    thread.start()
    thread.join()
    assert pages_of(pool) == (0, 3)


def test_a_buffer_may_die_while_another_is_made(pool, monkeypatch):
    """The garbage collector may run at any point, even inside `empty`."""
    source = pool._pages
    build = source.build

    def collect_and_build(n_pages, spare):
        gc.collect()
        return build(n_pages, spare)

    cycle = [pool.empty(PAGE_NBYTES), pool.empty(HALF, lane="a")]
    cycle.append(cycle)
    pool.close_lane("a")
    monkeypatch.setattr(source, "build", collect_and_build)
    gc.disable()
    try:
        del cycle
        assert pages_of(pool) == (2, 0)
        made = []
        thread = threading.Thread(target=lambda: made.append(pool.empty(HALF, "b")), daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "waits for a lock that it holds"
    finally:
        gc.enable()
    assert len(made) == 1
    assert pages_of(pool) == (1, 2)


def test_a_lane_that_continues_gets_more_pages_at_a_time():
    pool = HostPool(1 << 30, lane_pages=4)
    buffers = [pool.empty(PAGE_NBYTES * 5 // 8, lane="a")]
    assert pages_of(pool) == (1, 0)
    buffers += [pool.empty(PAGE_NBYTES * 5 // 8, lane="a") for _ in range(6)]
    # Six of them fill the next four pages except for a quarter of a page.
    assert pages_of(pool) == (5, 0)
    buffers.append(pool.empty(PAGE_NBYTES * 5 // 8, lane="a"))
    assert pages_of(pool) == (9, 0)
    del buffers[1:7]
    assert pages_of(pool) == (5, 4)


@pytest.mark.parametrize(
    ("nbytes", "n_pages"),
    [(PAGE_NBYTES, 1), (PAGE_NBYTES + 1, 0), (PAGE_NBYTES // 2, 0), (10 * PAGE_NBYTES + 1, 11)],
)
def test_unshared_buffer_has_pages_unless_most_are_wasted(nbytes, n_pages):
    pool = HostPool(1 << 30)
    buffer = pool.empty_alone(nbytes)
    buffer[:] = 3
    assert (buffer.nbytes, pages_of(pool)) == (nbytes, (n_pages, 0))
    del buffer
    assert pages_of(pool) == (0, n_pages)


def test_buffers_that_die_after_trimming_are_returned_at_once():
    """A result may outlive its shuffle. The pool gets no request when it dies."""
    pool = HostPool(1 << 30)
    kept = pool.empty_alone(4 * PAGE_NBYTES)
    pool.trim()
    del kept
    assert not pool._dead
    assert pages_of(pool) == (0, 0)


def test_pool_keeps_pages_again_once_it_is_used():
    pool = HostPool(1 << 30)
    pool.trim()
    buffer = pool.empty_alone(4 * PAGE_NBYTES)
    del buffer
    assert pages_of(pool) == (0, 4)


def test_a_destructor_does_not_wait_for_the_lock():
    pool = HostPool(1 << 30)
    buffer = pool.empty_alone(PAGE_NBYTES)
    pool.trim()
    with pool._lock:
        del buffer
    assert len(pool._dead) == 1
    assert pages_of(pool) == (0, 0)


def test_the_page_file_is_closed_under_the_lock():
    """The file's number may be reused at once, and the pool punches holes into the file."""
    seen = []

    class Source(SharedPages):
        def close(self):
            seen.append(pool._lock.locked())
            super().close()

    pool = HostPool(MANY, source=Source())
    kept = pool.empty(PAGE_NBYTES)
    kept[:] = 3
    pool.close()
    assert seen == [True]
    pool.empty(2 * PAGE_NBYTES)[:] = 4
    assert (kept == 3).all()

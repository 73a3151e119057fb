"""`shaped` affects only launches of its own thread or coroutine."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from dask_gpurt.devices.occupancy.architectures import SM90
from dask_gpurt.devices.occupancy.planner import plan
from dask_gpurt.devices.occupancy.resident_blocks import Launch
from dask_gpurt.devices.occupancy.shaping import (
    LaunchHook,
    Planner,
    shaped,
)
from tests.devices.occupancy.fake_driver import TWO, CountingPlanner, FakeDriver, always, launch

# ------------------------------------------------------------------ threads and coroutines


def test_a_thread_that_starts_inside_is_unshaped(hook, driver):
    with shaped(Planner(SM90, 2), always, hook), ThreadPoolExecutor(1) as pool:
        pool.submit(launch, hook).result()
        launch(hook)
    assert driver.carried == [0, TWO]


def test_threads_shape_their_own_launches():
    """All threads are inside at the same time, each with its own number."""
    leaves = [1, 2, 3, 4, 6, 7]
    driver = FakeDriver()
    hook = LaunchHook(driver, enabled=True)
    all_inside = threading.Barrier(len(leaves) + 1, timeout=60)

    def work(number, leave):
        with shaped(Planner(SM90, leave), always, hook):
            all_inside.wait()
            for _ in range(50):
                launch(hook, kernel="shared by all", stream=number)

    def outside():
        all_inside.wait()
        for _ in range(50):
            launch(hook, kernel="shared by all", stream="outside")

    with ThreadPoolExecutor(len(leaves) + 1) as pool:
        futures = [pool.submit(work, *one) for one in enumerate(leaves)]
        futures.append(pool.submit(outside))
        for future in futures:
            future.result()
    carried: dict[object, Counter[int]] = {}
    for made in driver.launches:
        carried.setdefault(made.stream, Counter())[made.shared_nbytes] += 1
    for number, leave in enumerate(leaves):
        planned = plan(SM90, Launch(256, 32), leave, pending=True).dynamic_nbytes
        assert carried[number] == {planned: 50}
    assert carried["outside"] == {0: 50}
    # One question for each number of blocks. The allowance only grew.
    assert driver.asked == {"shared by all": len(leaves)}
    assert driver.allowances == sorted(driver.allowances)
    assert driver.refused == []


class Door:
    """A lock that tells which threads have reached it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.came = threading.Semaphore(0)

    def __enter__(self):
        self.came.release()
        self.lock.acquire()

    def __exit__(self, *exception):
        self.lock.release()


def test_many_threads_decide_a_new_kernel_once(driver, monkeypatch):
    """The first thread stays inside until all others have found no decision."""
    hook = LaunchHook(driver, enabled=True)
    planner = CountingPlanner(2)
    n_threads = 4
    door = Door()
    # Entering takes the lock too, so install the door after all threads have entered.
    entered = threading.Barrier(
        n_threads, timeout=60, action=lambda: monkeypatch.setattr(hook, "_lock", door)
    )

    def attributes(kernel):
        for _ in range(n_threads):
            assert door.came.acquire(timeout=60)
        return FakeDriver.attributes(driver, kernel)

    monkeypatch.setattr(driver, "attributes", attributes)

    def work():
        with shaped(planner, always, hook):
            entered.wait()
            launch(hook)

    with ThreadPoolExecutor(n_threads) as pool:
        for future in [pool.submit(work) for _ in range(n_threads)]:
            future.result()
    assert driver.carried == [TWO] * n_threads
    assert len(planner.asked) == 1
    assert driver.allowances == [("k", TWO)]


def test_coroutines_do_not_shape_each_others_launches(hook, driver):
    async def inside(entered, leave):
        with shaped(Planner(SM90, 2), always, hook):
            entered.set()
            await leave.wait()
            launch(hook, stream="inside")

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(entered, leave))
        await entered.wait()
        launch(hook, stream="outside")
        leave.set()
        await task

    asyncio.run(main())
    assert [(made.stream, made.shared_nbytes) for made in driver.launches] == [
        ("outside", 0),
        ("inside", TWO),
    ]

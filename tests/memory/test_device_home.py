"""The store evicts and restores values of an emulated device, and makes room for allocations."""

from __future__ import annotations

import math
import random
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

from dask_gpurt.errors import TierFullError
from dask_gpurt.memory.device_values import is_on_device
from dask_gpurt.memory.files.disk_tier import DiskTier
from tests.memory.device_setup import DEVICE, PATIENCE_S, Setup, noise


def test_device_values_use_no_tier_that_reads_into_host_memory():
    setup = Setup()
    for key in "abc":
        setup.store[key] = setup.made(noise(400))
        setup.settle()
    ((key, serial), *_) = setup.store.spilled().items()
    before = setup.levels(key)
    setup.store.add_copy_at(3, key, serial)
    setup.settle()
    assert setup.levels(key) == before == ["pinned"]


# ------------------------------------------------------------------ the way down and back


@pytest.mark.parametrize("compressed", [None, 200])
def test_values_spill_through_all_levels_in_order_and_return(tmp_path, compressed):
    with_disk = DiskTier(str(tmp_path))
    setup = Setup(random.Random(3).randrange, disk=with_disk, compressed=compressed)
    # Each value is repetitive, so that the compressed tier accepts it.
    made = {f"device {n}": np.tile(noise(50, n), 4) for n in range(20)}
    made |= {f"host {n}": np.tile(noise(50, n), 4) for n in range(8)}
    assert sum(a.nbytes for k, a in made.items() if "device" in k) == 4 * 1000
    assert sum(a.nbytes for k, a in made.items() if "host" in k) == 4 * 400
    been = {key: [] for key in made}

    def look():
        for key in setup.store:
            been[key] += [level for level in setup.levels(key) if level not in been[key]]
        assert setup.device.used_nbytes <= 1000
        assert setup.pool.used_nbytes <= setup.pool.capacity_nbytes

    for key, array in made.items():
        setup.store[key] = setup.made(array) if "device" in key else array
        look()
        while setup.lanes:
            setup.lanes[0].step()
            look()
    middle = [] if compressed is None else ["compressed"]
    down = {"device": ["device", "pinned", *middle, "disk"], "host": ["memory", *middle, "disk"]}
    for kind, levels in down.items():
        been_there = [been[key] for key in made if kind in key]
        assert levels in been_there
        assert all(way == levels[: len(way)] for way in been_there)
    for level in setup.residency.levels[:3]:
        assert level.used_nbytes <= level.capacity_nbytes
    for key, array in made.items():
        claim, _ = setup.store.claim(key, [key], 0, (), lambda lost: None)
        setup.settle()
        value = setup.store.memory[key]
        assert is_on_device(value) == ("device" in key)
        np.testing.assert_array_equal(setup.host_copy(value), array)
        del value
        setup.store.end(claim)
    assert not setup.lost
    assert not setup.hazards
    setup.store.close()
    setup.store.free_tiers()


def test_warm_pool_allocates_nothing():
    setup = Setup()
    made = [noise(200, n) for n in range(12)]

    def round_trip():
        for number in range(len(made)):
            setup.store[number] = setup.made(made[number])
            setup.settle()
        for number, array in enumerate(made):
            np.testing.assert_array_equal(setup.host_copy(setup.store[number]), array)
            setup.settle()

    round_trip()
    warm = setup.pool.n_allocations
    assert warm
    for _ in range(3):
        round_trip()
    assert setup.pool.n_allocations == warm


def test_clean_copy_in_the_pool_is_dropped_instead_of_written():
    setup = Setup()
    setup.store["a"] = setup.made(noise(200))
    assert setup.store.make_room(DEVICE, 200)
    claim, _ = setup.store.claim("task", ["a"], 0, (), lambda lost: None)
    setup.settle()
    assert setup.levels("a") == ["device", "pinned"]
    setup.residency.levels[2].capacity_nbytes = 0
    setup.store.decide()
    setup.settle()
    assert setup.levels("a") == ["device"]
    setup.store.end(claim)


def test_full_pool_takes_values_again_once_it_has_room():
    setup = Setup()
    setup.store["a"] = setup.made(noise(200))
    setup.store["b"] = setup.made(noise(200, 1))
    setup.tiers[0].fail("put", TierFullError("full"))
    assert setup.store.make_room(DEVICE, 200)
    assert setup.levels("a") == ["disk"]
    assert setup.store.explain("a")["refused_by"] == []
    setup.store.retry()
    assert setup.store.make_room(DEVICE, 200)
    assert setup.levels("b") == ["pinned"]


def test_value_larger_than_the_pool_bypasses_it():
    setup = Setup(pinned=100)
    setup.store["a"] = setup.made(noise(200))
    assert setup.store.make_room(DEVICE, 200)
    assert setup.store.explain("a")["refused_by"] == ["pinned"]
    assert setup.levels("a") == ["disk"]


def test_value_may_be_freed_while_its_copy_is_queued():
    setup = None

    def choose(n):
        # Earlier work of the stream has not run, so the copy is only queued.
        if setup is not None and "a" in setup.store and setup.device_is_copying:
            del setup.store["a"]
        return n - 1

    one = Setup(choose)
    one.device_is_copying = False
    flatten_it = one.packing.flatten
    setup = one

    def flattened(value):
        one.device_is_copying = True
        return flatten_it(value)

    one.store._packings[DEVICE] = replace(one.packing, flatten=flattened)
    one.store["a"] = one.made(noise(200))
    one.store["b"] = one.made(noise(900, 1))
    one.settle()
    assert "a" not in one.store
    assert not one.hazards
    one.device.pump()
    assert one.device.used_nbytes == one.residency.levels[DEVICE].used_nbytes
    assert all(tier.used_nbytes == 0 for tier in one.tiers[1:])


def test_array_of_a_failed_kernel_does_not_block_others():
    setup = Setup()
    bad, good = setup.made(noise(200)), setup.made(noise(200, 1))
    broken = setup.device.stream("broken")
    broken.wait(bad.ready)

    def fails(target):
        raise ArithmeticError("no")

    broken.launch(fails, writes=[bad.buffer])
    bad.ready = broken.record()
    setup.store["bad"] = bad
    del bad
    setup.store["good"] = good
    del good
    assert setup.store.make_room(DEVICE, 400)
    assert setup.levels("bad") == ["device"]
    assert setup.levels("good") == ["pinned"]
    del setup.store["bad"]
    np.testing.assert_array_equal(setup.host_copy(setup.store["good"]), noise(200, 1))


# ------------------------------------------------------------------ allocations


def test_failed_allocation_evicts_and_then_succeeds():
    setup = Setup()
    for number in range(4):
        setup.store[number] = setup.made(noise(250, number))
    # No lane has run yet.
    temporary = setup.device.allocate(400, setup.compute)
    assert [key for key in setup.store if setup.store.is_spilled(key)] == [0, 1]
    temporary.free(setup.compute)
    setup.settle()
    for number in range(4):
        np.testing.assert_array_equal(setup.host_copy(setup.store[number]), noise(250, number))


def test_allocating_thread_runs_queued_copies_itself():
    setup = Setup(pinned=1000)
    for number in range(5):
        setup.residency.levels[DEVICE].capacity_nbytes = 600
        setup.store[number] = setup.made(noise(200, number))
    setup.owner.step()
    assert len(setup.write.calls) == 3
    setup.device.allocate(500, setup.compute)
    assert sum(map(setup.store.is_spilled, range(5))) == 3
    written = setup.pool.used_nbytes
    setup.settle()
    assert setup.pool.used_nbytes == written


def test_allocation_fails_when_only_running_inputs_are_left():
    setup = Setup()
    setup.store["a"] = setup.made(noise(900))
    claim, ready = setup.store.claim("task", ["a"], 0, (), lambda lost: None)
    assert ready
    with pytest.raises(MemoryError, match="no room for 200 bytes"):
        setup.device.allocate(200, setup.compute)
    setup.store.end(claim)
    setup.device.allocate(200, setup.compute)


def test_memory_held_by_others_is_not_counted_on():
    setup = Setup()
    held = setup.store["a"] = setup.made(noise(900))
    with pytest.raises(MemoryError):
        setup.device.allocate(200, setup.compute)
    np.testing.assert_array_equal(setup.host_copy(held), noise(900))
    del held
    setup.device.allocate(200, setup.compute)


def test_room_is_made_for_a_value_being_read_back():
    setup = Setup()
    setup.store["a"] = setup.made(noise(600))
    setup.store["b"] = setup.made(noise(600, 1))
    assert setup.levels("a") == ["pinned"]
    np.testing.assert_array_equal(setup.host_copy(setup.store["a"]), noise(600))
    # The pool has no room for both.
    assert setup.levels("b") == ["disk"]


class Threaded(Setup):
    """A setup on a threaded device, with one value whose copy is blocked until `go` is set."""

    def __init__(self):
        super().__init__(None)
        self.copying, self.go = threading.Event(), threading.Event()
        flatten_it = self.packing.flatten

        def flattened(value):
            self.copying.set()
            assert self.go.wait(PATIENCE_S)
            return flatten_it(value)

        self.store._packings[DEVICE] = replace(self.packing, flatten=flattened)
        self.store["a"] = self.made(noise(600))
        self.residency.levels[DEVICE].capacity_nbytes = 500
        self.store.decide()
        while not self.write.calls:
            self.owner.step()


def test_allocation_waits_for_a_copy_of_another_thread():
    setup = Threaded()
    ended = setup.store._carrier._ended
    wait_for = ended.wait_for

    def waits(predicate):
        setup.go.set()
        return wait_for(predicate)

    ended.wait_for = waits
    lane = threading.Thread(target=setup.write.step, daemon=True)
    lane.start()
    assert setup.copying.wait(PATIENCE_S)
    setup.device.allocate(800, setup.compute)
    assert setup.levels("a") == ["pinned"]
    lane.join(PATIENCE_S)
    setup.device.close()


def test_evicted_value_is_unreferenced_when_its_waiter_wakes():
    setup = Setup()
    array = setup.made(noise(600))
    setup.store["a"] = array
    left = weakref.ref(array)
    del array
    ended = setup.store._carrier._ended
    notify_all = ended.notify_all
    told = []

    def tell():
        told.append(left())
        notify_all()

    ended.notify_all = tell
    setup.residency.levels[DEVICE].capacity_nbytes = 500
    setup.store.decide()
    setup.settle()
    assert setup.store.is_spilled("a")
    assert told and set(told) == {None}


def test_copies_that_need_room_themselves_do_not_deadlock():
    setup = Setup(None)
    together = threading.Barrier(2)
    answers = []

    def flattened(value):
        together.wait(PATIENCE_S)
        answers.append(setup.store.make_room(DEVICE, 10))
        together.wait(PATIENCE_S)
        return setup.packing.flatten(value)

    setup.store._packings[DEVICE] = replace(setup.packing, flatten=flattened)
    for key in "ab":
        setup.store[key] = setup.made(noise(300))
    setup.residency.levels[DEVICE].capacity_nbytes = 0
    setup.store.decide()
    while setup.owner.calls:
        setup.owner.step()
    threads = [threading.Thread(target=setup.write.step, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert answers == [False, False]
    assert [setup.levels(key) for key in "ab"] == [["pinned"], ["pinned"]]
    setup.device.close()


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3)])
@pytest.mark.parametrize("dtype", ["i4", ">f8", "M8[ns]", [("a", "i1"), ("b", "f4")]])
def test_arrays_of_any_type_are_spilled_and_read_back(dtype, shape):
    setup = Setup()
    nbytes = np.dtype(dtype).itemsize * math.prod(shape)
    array = np.frombuffer(noise(nbytes), dtype).reshape(shape)
    setup.store["a"] = setup.made(array)
    setup.store.make_room(DEVICE, 1)
    assert setup.levels("a") == ["pinned"]
    found = setup.host_copy(setup.store["a"])
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    setup.device.close()


# ------------------------------------------------------------------ faults


def test_failed_copy_leaves_no_other_copy_under_way():
    """The memory is given to another value next, and a late copy would overwrite that."""
    setup = Setup()
    array = setup.made(noise(200))
    (buffer,) = setup.packing.flatten(array).buffers
    parts = [np.zeros(100, np.uint8) for _ in range(2)]
    setup.device.left["a copy to the host"] = 1
    with pytest.raises(RuntimeError, match="as it was told to"):
        buffer.copy_into(parts)
    np.testing.assert_array_equal(parts[0], noise(200)[:100])
    assert not parts[1].any()
    setup.device.close()


@pytest.mark.parametrize("n", range(8))
@pytest.mark.parametrize("operation", ["allocate", "a copy to the host", "a copy to the device"])
def test_any_failure_keeps_values_right_and_leaks_nothing(operation, n):
    setup = Setup()
    made = {}
    setup.device.left[operation] = n
    for number in range(8):
        try:
            setup.store[number] = setup.made(noise(200, number))
        except (MemoryError, RuntimeError):
            continue  # the task fails
        made[number] = noise(200, number)
        setup.settle()
    for number, array in made.items():
        claim, _ = setup.store.claim(number, [number], 0, (), lambda lost: None)
        setup.settle()
        setup.store.retry()
        setup.store.decide()
        setup.settle()
        if number in setup.store:
            np.testing.assert_array_equal(setup.host_copy(setup.store[number]), array)
        else:
            assert setup.lost == [number]
            assert operation == "a copy to the device"
        setup.store.end(claim)
    assert not setup.device.left, "nothing failed: the test is too short"
    assert not setup.hazards
    setup.device.pump()
    assert setup.device.used_nbytes == setup.residency.levels[DEVICE].used_nbytes
    for level in setup.residency.levels:
        assert (level.reserved_nbytes, level.leaving_nbytes) == (0, 0)
    for number in list(setup.store):
        del setup.store[number]
    setup.settle()
    setup.device.pump()
    assert setup.device.used_nbytes == 0
    assert all(tier.used_nbytes == 0 for tier in setup.tiers)

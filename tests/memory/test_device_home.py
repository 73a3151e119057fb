"""Values of an emulated device in the store: their way down and back, and room for allocations.

The device is pumped where an order is tried that a seed chooses, and threaded where two threads
meet. A hazard anywhere fails the test: the store itself would take it for an error of one value.
"""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.emulated.emulated_device import EmulatedDevice
from dask_gpurt.devices.host_memory.pinned import PinnedPool
from dask_gpurt.errors import TierFullError
from dask_gpurt.frames.flat.values import flatten, restore
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.residency import Level, Residency
from dask_gpurt.memory.device_values import device_packing, is_on_device
from dask_gpurt.memory.files.disk_tier import DiskTier
from dask_gpurt.memory.host_tiers import CompressedTier, PinnedTier
from dask_gpurt.memory.store import HOST, TieredStore
from dask_gpurt.memory.tiers import Lanes, Packing
from tests.memory.against_a_dict import KEYS, AgainstADict
from tests.memory.stepping import FailingTier, ListLane, watched

DEVICE = 1
PATIENCE_S = 30.0


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class FailingDevice(EmulatedDevice):
    """A device whose n-th allocation, or n-th copy in one direction, fails."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.left = {}

    def _count(self, operation, error):
        # A class: an error that a frame holds which its traceback holds would keep memory alive.
        if operation in self.left:
            self.left[operation] -= 1
            if self.left[operation] < 0:
                del self.left[operation]
                raise error(f"{operation} fails, as it was told to")

    def allocate(self, nbytes, stream):
        self._count("allocate", MemoryError)
        return super().allocate(nbytes, stream)

    def _queue(self, stream, what, *args):
        self._count(what, RuntimeError)
        super()._queue(stream, what, *args)


class Setup:
    """A store with a device of 1000 bytes, and its lanes."""

    def __init__(
        self, choose=lambda n: 0, *, memory=400, pinned=600, disk=None, compressed=None, **options
    ):
        self.device = FailingDevice(1000, choose)
        self.compute = self.device.stream("compute")
        self.write, self.read, self.owner, self.later = (ListLane() for _ in range(4))
        # Tiers have more room than levels may use: copies are begun before others have left.
        self.pool = PinnedPool(pinned * 5 // 4, block_nbytes=20)
        tiers = [PinnedTier(self.pool)]
        if compressed is not None:
            tiers.append(CompressedTier(2 * compressed))
        tiers.append(disk or PinnedTier(PinnedPool(1 << 20, block_nbytes=10)))
        self.tiers = [FailingTier(tier) for tier in tiers]
        names = ["pinned", "compressed", "disk"] if compressed is not None else ["pinned", "disk"]
        capacities = {"pinned": pinned, "compressed": compressed}
        below = tuple(range(2, 2 + len(tiers)))
        self.residency = Residency(
            [
                Level("memory", memory),
                Level("device", self.device.capacity_nbytes),
                *(Level(name, capacities.get(name)) for name in names),
            ],
            {HOST: below[1:], DEVICE: below},
            POLICIES["lru"],
        )
        self.hazards = []
        self.lost = []
        host = Packing(lambda array: array.nbytes, flatten, restore)
        packing = device_packing(self.device)
        self.packing = watched(packing, self.hazards)
        self.store = TieredStore(
            self.residency,
            self.tiers,
            [host, self.packing],
            Lanes(self.write, self.read, self.owner, self.later),
            top_level_of=lambda value: DEVICE if is_on_device(value) else HOST,
            on_lost=self.lost.append,
            **options,
        )
        self.device.on_full(lambda nbytes: self.store.make_room(DEVICE, nbytes))

    @property
    def lanes(self):
        lanes = (self.owner, self.write, self.read, self.later)
        return [lane for lane in lanes if lane.calls]

    def settle(self):
        while lanes := self.lanes:
            lanes[0].step()

    def made(self, array):
        """What a task would make: an array on the device."""
        return DeviceArray.from_host(array, self.device, self.compute)

    def host_copy(self, value):
        if not is_on_device(value):
            return value
        left, self.device.left = self.device.left, {}
        host, event = value.to_host(self.compute)
        event.synchronize()
        self.device.left = left
        return host

    def levels(self, key):
        return list(self.store.explain(key)["levels"])


def test_what_is_at_home_on_the_device_is_left_to_no_tier_that_reads_for_the_host():
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
def test_more_than_every_level_holds_goes_down_in_order_and_comes_back(tmp_path, compressed):
    with_disk = DiskTier(str(tmp_path))
    setup = Setup(random.Random(3).randrange, disk=with_disk, compressed=compressed)
    # Each value repeats itself, so that the compressed tier takes it.
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
    setup.store.clear()


def test_the_pool_allocates_nothing_once_it_is_warm():
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


def test_a_clean_copy_in_the_pool_is_let_go_of_rather_than_written():
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


def test_a_pool_that_is_full_takes_values_again_once_room_came_free():
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


def test_what_is_larger_than_the_pool_goes_past_it():
    setup = Setup(pinned=100)
    setup.store["a"] = setup.made(noise(200))
    assert setup.store.make_room(DEVICE, 200)
    assert setup.store.explain("a")["refused_by"] == ["pinned"]
    assert setup.levels("a") == ["disk"]


def test_freed_while_its_copy_is_queued():
    setup = None

    def choose(n):
        # Work of a stream is about to run, so the copy is queued and has not been made.
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


def test_an_array_that_a_kernel_failed_to_fill_does_not_stop_others():
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


def test_an_allocation_that_does_not_fit_evicts_and_then_succeeds():
    setup = Setup()
    for number in range(4):
        setup.store[number] = setup.made(noise(250, number))
    # No lane has done anything yet.
    temporary = setup.device.allocate(400, setup.compute)
    assert [key for key in setup.store if setup.store.is_spilled(key)] == [0, 1]
    temporary.free(setup.compute)
    setup.settle()
    for number in range(4):
        np.testing.assert_array_equal(setup.host_copy(setup.store[number]), noise(250, number))


def test_copies_that_wait_in_a_lane_are_made_at_once_by_who_needs_the_room():
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


def test_inputs_of_running_tasks_stay_and_the_allocation_fails():
    setup = Setup()
    setup.store["a"] = setup.made(noise(900))
    claim, ready = setup.store.claim("task", ["a"], 0, (), lambda lost: None)
    assert ready
    with pytest.raises(MemoryError, match="no room for 200 bytes"):
        setup.device.allocate(200, setup.compute)
    setup.store.end(claim)
    setup.device.allocate(200, setup.compute)


def test_memory_that_somebody_else_holds_is_not_counted_on():
    setup = Setup()
    held = setup.store["a"] = setup.made(noise(900))
    with pytest.raises(MemoryError):
        setup.device.allocate(200, setup.compute)
    np.testing.assert_array_equal(setup.host_copy(held), noise(900))
    del held
    setup.device.allocate(200, setup.compute)


def test_room_for_a_value_that_is_read_back_is_made_too():
    setup = Setup()
    setup.store["a"] = setup.made(noise(600))
    setup.store["b"] = setup.made(noise(600, 1))
    assert setup.levels("a") == ["pinned"]
    np.testing.assert_array_equal(setup.host_copy(setup.store["a"]), noise(600))
    # The pool has no room for both.
    assert setup.levels("b") == ["disk"]


class Threaded(Setup):
    """On a threaded device, with one value on it whose copy stands still until `go` is set."""

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


def test_a_copy_that_another_thread_makes_is_waited_for():
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


def test_nobody_holds_what_left_when_who_waits_for_its_room_is_told():
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


def test_two_copies_that_need_room_themselves_do_not_wait_for_each_other():
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


# ------------------------------------------------------------------ faults


@pytest.mark.parametrize("n", range(8))
@pytest.mark.parametrize("operation", ["allocate", "a copy to the host", "a copy to the device"])
def test_whatever_fails_no_value_is_wrong_and_nothing_is_leaked(operation, n):
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


# ------------------------------------------------------------------ against a dict


class Arrays(AgainstADict):
    """Random operations, orders of lanes and orders of streams: values are those of a dict."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed):
        self.setup = Setup(random.Random(seed).randrange, upcoming=lambda: self.soon)

    @rule(key=KEYS, nbytes=st.integers(0, 500), on_device=st.booleans(), seed=st.integers(0, 99))
    def put(self, key, nbytes, on_device, seed):
        array = noise(nbytes, seed)
        try:
            self.setup.store[key] = self.setup.made(array) if on_device else array
        except MemoryError:
            # Inputs of tasks that run take the room, or a copy failed that was made to fail.
            return
        self.model[key] = (array, on_device)

    def same(self, value, expected):
        array, on_device = expected
        assert is_on_device(value) == on_device
        np.testing.assert_array_equal(self.setup.host_copy(value), array)

    @rule(key=KEYS)
    def get(self, key):
        if key not in self.model:
            with pytest.raises(KeyError):
                self.setup.store[key]
            return
        try:
            value = self.setup.store[key]
        except MemoryError:
            assert self.model[key][1]
            return
        self.same(value, self.model[key])

    @rule(key=KEYS)
    def use_and_forget(self, key):
        """A kernel is queued on a value that may be deleted or evicted before it runs."""
        value = self.setup.store.memory.get(key)
        if is_on_device(value):
            self.setup.compute.wait(value.ready)
            self.setup.compute.launch(lambda source: None, reads=[value.buffer])
            value.used(self.setup.compute.record())

    @rule(keys=st.lists(KEYS, unique=True, max_size=3), nbytes=st.integers(0, 300))
    def claim(self, keys, nbytes):
        self.ask(keys, nbytes, nbytes % 2)

    @rule(key=KEYS)
    def read_for_send(self, key):
        with contextlib.suppress(MemoryError):
            self.borrow(key)

    @rule(n=st.integers(0, 10))
    def pump(self, n):
        self.setup.device.pump(n)

    @rule(n=st.integers(0, 3))
    def break_an_allocation(self, n):
        self.setup.device.left["allocate"] = n

    @invariant()
    def same_keys(self):
        if hasattr(self, "setup"):
            assert set(self.setup.store) == set(self.model)
            assert not self.setup.hazards

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "setup"):
            return
        levels, store = self.setup.residency.levels, self.setup.store
        for key in self.model:
            assert (key in store.memory) == self.setup.residency.values[key].in_memory
        for top_level in (HOST, DEVICE):
            there = [self.model[key] for key in store.memory if self.model[key][1] == top_level]
            assert levels[top_level].used_nbytes == sum(array.nbytes for array, _ in there)
        assert all(level.reserved_nbytes >= 0 for level in levels)
        assert self.setup.device.used_nbytes <= self.setup.device.capacity_nbytes
        assert self.setup.pool.used_nbytes <= self.setup.pool.capacity_nbytes

    def teardown(self):
        if not hasattr(self, "setup"):
            return
        setup = self.setup
        setup.device.left.clear()
        self.settle()
        for key, expected in self.model.items():
            self.same(setup.store[key], expected)
        setup.settle()
        setup.device.pump()
        assert not setup.hazards
        assert setup.device.used_nbytes == setup.residency.levels[DEVICE].used_nbytes
        for number, tier in enumerate(setup.tiers, 2):
            assert tier.used_nbytes == setup.residency.levels[number].used_nbytes
        for level in setup.residency.levels:
            assert (level.reserved_nbytes, level.leaving_nbytes) == (0, 0)
        for key in list(self.model):
            del setup.store[key]
        setup.settle()
        setup.device.pump()
        assert setup.device.used_nbytes == 0
        assert all(tier.used_nbytes == 0 for tier in setup.tiers)


TestAgainstADict = Arrays.TestCase
TestAgainstADict.settings = settings(max_examples=150, stateful_step_count=50)

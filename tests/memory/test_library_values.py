"""The store spills and restores values of an emulated GPU library, and makes room for it.

All code allocates as CuPy does, through an allocator with the store's hook in front. Every use of
memory without order fails the test; the store itself would treat it as an error of one value.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from dask_gpurt.devices.cuda.out_of_memory import CallWhenFull
from dask_gpurt.devices.host_memory.pinned import PinnedPool
from dask_gpurt.errors import ValueRefusedError
from dask_gpurt.frames.flat.values import flatten, restore
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.levels import Level
from dask_gpurt.memory.decisions.residency import Residency
from dask_gpurt.memory.device_values import LibraryCopies, library_packing
from dask_gpurt.memory.files.disk_tier import DiskTier
from dask_gpurt.memory.host_tiers import PinnedTier
from dask_gpurt.memory.store import HOST, TieredStore
from dask_gpurt.memory.tiers import Lanes, Packing
from dask_gpurt.plugins.patches.values.value_bytes import (
    is_on_device,
    put_together_on_device,
    take_apart_on_device,
)
from tests.memory.emulated_gpu import Gpu, GpuArray
from tests.memory.stepping import SteppedLanes, watched

DEVICE = 1
PATIENCE_S = 30.0


class Setup(SteppedLanes):
    """A store over a GPU of 1000 bytes, and its lanes."""

    def __init__(self, directory, monkeypatch, choose=None):
        self.gpu = Gpu(1000, choose)
        monkeypatch.setitem(sys.modules, "cupy", self.gpu.cupy)
        monkeypatch.setitem(sys.modules, "rmm", None)
        super().__init__()
        self.pool = PinnedPool(1000, block_nbytes=20)
        self.disk = DiskTier(str(directory))
        self.residency = Residency(
            [Level("memory"), Level("device", 1000), Level("pinned", 1000), Level("disk")],
            {HOST: (3,), DEVICE: (2, 3)},
            POLICIES["lru"],
        )
        host = Packing(lambda value: value.nbytes, flatten, restore)
        copies = LibraryCopies(self.gpu)
        self.packing = library_packing(
            lambda: copies, host, take_apart_on_device, put_together_on_device
        )
        self.hazards = []
        self.lost = []
        self.store = TieredStore(
            self.residency,
            [PinnedTier(self.pool), self.disk],
            [host, watched(self.packing, self.hazards)],
            Lanes(self.write, self.read, self.owner, self.later),
            top_level_of=lambda value: DEVICE if is_on_device(value) else HOST,
            on_lost=self.lost.append,
        )
        self.hooks = CallWhenFull(lambda nbytes: self.store.make_room(DEVICE, nbytes))
        assert self.hooks.installed == ["cupy"]

    def pack_with(self, **functions):
        self.store._packings[DEVICE] = watched(replace(self.packing, **functions), self.hazards)

    def allocate(self, nbytes):
        return self.gpu.allocate(nbytes, self.gpu.default_stream)

    def levels(self, key):
        return list(self.store.explain(key)["levels"])

    def assert_right(self, keys):
        for key in keys:
            array = self.store[key]
            assert type(array) is GpuArray
            np.testing.assert_array_equal(array.to_host(), np.full(array.nbytes, key, np.uint8))
            del array
        assert not self.hazards

    def close(self):
        self.hooks.uninstall()
        self.store.close()
        self.store.release_objects()
        self.store.free_tiers()
        gc.collect()
        if self.gpu.is_pumped:
            self.gpu.host.pump()
            assert self.gpu.host.used_nbytes == 0
        self.gpu.host.close()


@pytest.fixture
def setup(tmp_path, monkeypatch):
    setup = Setup(tmp_path, monkeypatch)
    yield setup
    setup.close()


@pytest.fixture(params=[0, 1, 2])
def pumped(request, tmp_path, monkeypatch):
    """Return a GPU that runs work only for a waiting thread, in an order chosen by a seed."""
    setup = Setup(tmp_path, monkeypatch, random.Random(request.param).randrange)
    yield setup
    setup.close()


# ------------------------------------------------------------------ spilling and reading back


def test_library_values_spill_in_order_and_return(pumped):
    for key in range(12):
        pumped.store[key] = pumped.gpu.full(key, 200)
        pumped.settle()
    where = [pumped.levels(key) for key in range(12)]
    assert {"device", "pinned", "disk"} == {level for levels in where for level in levels}
    pumped.assert_right(range(12))
    assert pumped.gpu.most_nbytes <= 1000


def test_copy_runs_after_the_queued_work_of_the_library(pumped):
    """A task's result may be stored while the kernels that fill it are still queued."""
    gpu = pumped.gpu
    value = gpu.full(3, 200)
    with gpu.computing(gpu.default_stream):
        array = gpu.array(value.memory, 0, 200)
        array += 4
    pumped.store[7] = value
    del value, array
    assert pumped.store.make_room(DEVICE, 200)
    assert pumped.levels(7) == ["pinned"]
    pumped.assert_right([7])


def recorded(function, position, found):
    """Return the function, recording one of its arguments."""

    def record(*arguments):
        found.append(arguments[position])
        return function(*arguments)

    return record


def test_pinned_values_are_copied_without_other_host_memory(setup, monkeypatch):
    gpu, pinned, out, back = setup.gpu, [], [], []
    pin = setup.pool._pin
    monkeypatch.setattr(setup.pool, "_pin", lambda nbytes: pinned.append(pin(nbytes)) or pinned[-1])
    setup.store[4] = gpu.full(4, 200)
    monkeypatch.setattr(gpu, "copy_out", recorded(gpu.copy_out, 1, out))
    monkeypatch.setattr(gpu, "copy_in", recorded(gpu.copy_in, 3, back))
    assert setup.store.make_room(DEVICE, 200)
    assert setup.levels(4) == ["pinned"]
    assert setup.store[4].nbytes == 200
    for ends in (out, back):
        assert sum(end.nbytes for end in ends) == 200
        assert all(any(np.shares_memory(end, memory) for memory in pinned) for end in ends)
    setup.assert_right([4])


def test_value_that_cannot_leave_the_gpu_is_logged_once(setup, monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("the kernel that computes it failed")

    with monkeypatch.context() as context:
        context.setattr(setup.gpu, "copy_out", fail)
        for key in range(2):
            setup.store[key] = setup.gpu.full(key, 200)
            assert not setup.store.make_room(DEVICE, 200)
    (message,) = caplog.messages
    assert "cannot spill 0" in message and "the kernel that computes it failed" in message
    assert not setup.pool.used_nbytes
    assert [setup.levels(key) for key in range(2)] == [["device"], ["device"]]
    setup.assert_right(range(2))


def test_empty_array_is_read_back(pumped):
    pumped.store[0] = pumped.gpu.full(0, 0)
    assert pumped.store.make_room(DEVICE, 1)
    assert pumped.levels(0) != ["device"]
    pumped.assert_right([0])


def test_value_managed_by_its_library_stays_silently(setup, caplog):
    def refuse(value):
        raise ValueRefusedError("its library spills by itself")

    setup.pack_with(flatten=refuse)
    setup.store[0] = setup.gpu.full(0, 200)
    assert not setup.store.make_room(DEVICE, 200)
    found = setup.store.explain(0)
    assert found["refused_by"] == ["pinned", "disk"]
    assert "nothing below device takes a value of this kind" in found["reason"]
    assert not caplog.messages


def test_value_of_another_gpu_stays_silently(setup, caplog):
    """It may still be computed, on a stream that no copy of this one waits for."""
    other = Gpu(1000)
    setup.store[0] = value = other.full(5, 200)
    assert not setup.store.make_room(DEVICE, 200)
    assert setup.store.explain(0)["refused_by"] == ["pinned", "disk"]
    assert setup.store[0] is value
    np.testing.assert_array_equal(value.to_host(), np.full(200, 5, np.uint8))
    assert not caplog.messages
    other.host.close()


# ------------------------------------------------------------------ allocations


def test_allocation_evicts_other_values(setup):
    for key in range(4):
        setup.store[key] = setup.gpu.full(key, 250)
    memory = setup.allocate(200)
    assert [key for key in setup.store if setup.store.is_spilled(key)] == [0]
    del memory
    setup.assert_right(range(4))


def test_reading_back_evicts_other_values(setup):
    for key in range(2):
        setup.store[key] = setup.gpu.full(key, 600)
    assert [setup.levels(key) for key in range(2)] == [["pinned"], ["device"]]
    claim, _ = setup.store.claim("task", [0], 0, (), lambda lost: None)
    setup.settle()
    assert setup.levels(0) == ["device", "pinned"]
    assert setup.levels(1) == ["disk"]
    setup.store.end(claim)
    setup.assert_right(range(2))


def test_two_threads_without_room_evict_in_turn(setup):
    """The second one waits for the copy that the first one makes, and then makes its own."""
    copying, go = threading.Event(), threading.Event()

    def flattened(value):
        copying.set()
        assert go.wait(PATIENCE_S)
        return setup.packing.flatten(value)

    setup.pack_with(flatten=flattened)
    ended = setup.store._carrier._ended
    wait_for = ended.wait_for

    def waits(predicate):
        go.set()
        return wait_for(predicate)

    ended.wait_for = waits
    for key in range(2):
        setup.store[key] = setup.gpu.full(key, 500)
    got = []
    threads = [
        threading.Thread(target=lambda: got.append(setup.allocate(400)), daemon=True)
        for _ in range(2)
    ]
    threads[0].start()
    assert copying.wait(PATIENCE_S)
    # The copy pauses until the second thread waits for it, and holds no lock that thread needs.
    threads[1].start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert len(got) == 2
    assert [setup.levels(key) for key in range(2)] == [["pinned"], ["disk"]]
    got.clear()
    setup.assert_right(range(2))
    assert setup.gpu.most_nbytes <= 1000


def test_copy_that_needs_room_itself_fails_without_waiting(setup):
    """An array with gaps, for example, is copied on the device before it leaves."""

    def needs_room(value):
        setup.allocate(value.nbytes)
        return setup.packing.flatten(value)

    setup.pack_with(flatten=needs_room)
    for key in range(2):
        setup.store[key] = setup.gpu.full(key, 500)
    with pytest.raises(MemoryError):
        setup.allocate(400)
    assert [setup.levels(key) for key in range(2)] == [["device"], ["device"]]
    setup.pack_with(flatten=setup.packing.flatten)
    setup.store.retry()
    del setup.store[1]
    setup.store.make_room(DEVICE, 500)
    assert setup.levels(0) != ["device"]


class Wasteful(GpuArray):
    """An array whose destructor allocates."""

    def __del__(self):
        try:
            self.gpu.allocate(900, self.gpu.default_stream)
        except MemoryError:
            self.gpu.n_refused += 1


def test_allocation_inside_the_store_lock_is_refused(setup):
    """The thread holds the lock, and its change is not recorded yet."""
    setup.gpu.n_refused = 0
    setup.store[0] = setup.gpu.full(0, 600)
    memory = setup.gpu.allocate(100, setup.gpu.default_stream)
    setup.store[1] = Wasteful(setup.gpu, memory, 100)
    del memory
    del setup.store[1]
    assert setup.gpu.n_refused == 1
    assert setup.levels(0) == ["device"]
    assert setup.residency.levels[DEVICE].used_nbytes == 600
    # Without the lock, the same thread can make room.
    setup.allocate(900)
    assert setup.levels(0) == ["pinned"]


def test_allocation_waits_for_the_store_lock_of_another_thread(setup):
    setup.store[0] = setup.gpu.full(0, 600)
    got = []
    with setup.store._lock:
        asking = threading.Event()
        make_room = setup.store._carrier.make_room

        def asks(*args):
            asking.set()
            return make_room(*args)

        setup.store._carrier.make_room = asks
        thread = threading.Thread(target=lambda: got.append(setup.allocate(900)), daemon=True)
        thread.start()
        assert asking.wait(PATIENCE_S)
        assert not got
    thread.join(PATIENCE_S)
    assert len(got) == 1


def test_closed_store_makes_no_room(setup, caplog):
    setup.store[0] = held = setup.gpu.full(0, 600)
    setup.store.close()
    setup.store.free_tiers()
    with pytest.raises(MemoryError):
        setup.allocate(900)
    np.testing.assert_array_equal(held.to_host(), np.zeros(600, np.uint8))
    assert not caplog.messages


def test_hooks_removed_below_others_do_nothing(setup):
    """Of two workers in a process, the first to end cannot remove its hook from the middle."""
    other = CallWhenFull(lambda nbytes: False)
    setup.store[0] = setup.gpu.full(0, 600)
    setup.hooks.uninstall()
    with pytest.raises(MemoryError):
        setup.allocate(900)
    assert setup.levels(0) == ["device"]
    other.uninstall()


# ------------------------------------------------------------------ faults


@pytest.mark.share(4)
@pytest.mark.parametrize("n", range(4))
@pytest.mark.parametrize(
    "operation, error",
    [("allocate", MemoryError), ("copy_out", RuntimeError), ("copy_in", RuntimeError)],
)
def test_any_failure_keeps_values_right_and_loses_no_memory(
    setup, monkeypatch, operation, error, n
):
    for key in range(4):
        setup.store[key] = setup.gpu.full(key, 250)
    works, left = getattr(setup.gpu, operation), [n]

    def fails(*args):
        left[0] -= 1
        if left[0] == -1:
            raise error(f"{operation} fails, as it was told to")
        return works(*args)

    monkeypatch.setattr(setup.gpu, operation, fails)
    for _ in range(2):
        while setup.store.make_room(DEVICE, 1000):
            setup.settle()
        for key in range(4):
            claim, _ = setup.store.claim(key, [key], 0, (), lambda lost: None)
            setup.settle()
            setup.store.retry()
            setup.store.end(claim)
            setup.settle()
    assert left[0] < 0, "nothing failed: the test is too short"
    monkeypatch.undo()
    # The copy in the tier is intact, even if reading it back failed.
    assert not setup.lost
    setup.assert_right(range(4))
    for key in list(setup.store):
        del setup.store[key]
    gc.collect()
    assert setup.gpu.host.used_nbytes == 0
    for level in setup.residency.levels:
        assert (level.used_nbytes, level.reserved_nbytes, level.leaving_nbytes) == (0, 0, 0)

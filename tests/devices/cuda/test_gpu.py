"""The logic of the CUDA device passes the conformance suite over an emulated driver."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest

from benchmarks.gpu.tiers import measure
from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.cuda.driver import CupyDriver, why_no_cuda
from dask_gpurt.devices.cuda.gpu import CudaDevice
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.host_memory.pinned import PinnedPool
from dask_gpurt.devices.ledger import Ledger, LedgerEntry
from dask_gpurt.devices.ordering import HazardError
from tests.conformance.device_suite import CAPACITY, DeviceSuite, read
from tests.conformance.stream_programs import double, noise
from tests.devices.emulated_cuda import EmulatedCuda


class TestThreaded(DeviceSuite):
    def make_device(self, capacity_nbytes, seed=0):
        return CudaDevice(EmulatedCuda(2 * capacity_nbytes), capacity_nbytes)


class TestPumped(DeviceSuite):
    n_programs = 300

    def make_device(self, capacity_nbytes, seed=0):
        choose = random.Random(seed).randrange
        return CudaDevice(EmulatedCuda(2 * capacity_nbytes, choose), capacity_nbytes)


def pumped(total_nbytes=CAPACITY, capacity_nbytes=CAPACITY, seed=0):
    """Return a device that runs nothing until the host waits."""
    return CudaDevice(EmulatedCuda(total_nbytes, random.Random(seed).randrange), capacity_nbytes)


@pytest.fixture
def device():
    device = pumped()
    yield device
    device.close()


@pytest.fixture
def stream(device):
    return device.stream("only")


# ------------------------------------------------------------------ immediate effects of calls


def test_only_synchronize_waits(device, stream):
    """The driver runs nothing by itself. If a call waited, the copies would have run."""
    values, out = noise(100), np.zeros(100, dtype=np.uint8)
    buffer = device.allocate(100, stream)
    stream.to_device(buffer, values)
    stream.launch(double, writes=[buffer])
    stream.to_host(out, buffer)
    done = stream.record()
    device.stream("other").wait(done)
    buffer.free(stream)
    assert device.used_nbytes == 100
    assert not done.is_done()
    assert device.driver.host.pump(1) == 1, "all of it is still queued"
    done.synchronize()
    np.testing.assert_array_equal(out, values * 2)


def test_a_kernel_computes_only_on_its_stream(device, stream):
    seen = []

    def kernel(target):
        seen.append(device.driver.current_stream())

    stream.launch(kernel, writes=[device.allocate(8, stream)])
    assert seen == [stream.handle]
    with pytest.raises(AssertionError, match="default stream"):
        device.driver.current_stream()


def test_streams_are_opened_with_their_priority(device):
    assert device.stream("copies", Priority.HIGH).handle.priority == Priority.HIGH


# ------------------------------------------------------------------ memory that is freed


def test_memory_is_not_dropped_before_its_last_use(device):
    """The driver refuses work on dropped memory, which it treats as free."""
    one, other = device.stream("one"), device.stream("other")
    buffer = device.allocate(CAPACITY, one)
    other.wait(one.record())
    other.to_device(buffer, noise(CAPACITY))
    out = np.zeros(CAPACITY, dtype=np.uint8)
    other.to_host(out, buffer)
    buffer.free(other)
    again = device.allocate(CAPACITY, one)
    one.to_device(again, noise(CAPACITY, 1))
    np.testing.assert_array_equal(out, noise(CAPACITY))
    np.testing.assert_array_equal(read(one, again), noise(CAPACITY, 1))


def test_memory_freed_on_one_stream_serves_another():
    """Pools keep memory for the stream that allocated it, so all streams allocate on one."""
    device = pumped(total_nbytes=1000)
    streams = [device.stream(name) for name in ("one", "other")]
    seen = set()
    allocate = device.driver.allocate

    def noted(nbytes, stream):
        seen.add(stream.key)
        return allocate(nbytes, stream)

    device.driver.allocate = noted
    for n in range(4):
        stream = streams[n % 2]
        buffer = device.allocate(600, stream)
        stream.to_device(buffer, noise(600))
        buffer.free(stream)
    assert len(seen) == 1


def test_the_emulated_driver_detects_memory_dropped_too_early(device, monkeypatch):
    """This proves that the test before this one, and the suite, can fail."""

    def at_once(allocation, stream):
        allocation.memory = None
        device._used_nbytes -= allocation.nbytes

    monkeypatch.setattr(device, "_queue_free", at_once)
    one, other = device.stream("one"), device.stream("other")
    buffer = device.allocate(100, one)
    other.wait(one.record())
    other.to_device(buffer, noise(100))
    buffer.free(other)
    with pytest.raises(HazardError, match="not ordered after"):
        device.allocate(100, one)


def test_using_freed_memory_is_refused(device, stream):
    buffer = device.allocate(10, stream)
    part = buffer.part(0, 5)
    buffer.free(stream)
    for refused in (
        lambda: buffer.free(stream),
        lambda: stream.to_device(buffer, noise(10)),
        lambda: stream.to_host(noise(5), part),
        lambda: stream.on_device(buffer.part(0, 5), buffer.part(5, 5)),
        lambda: stream.launch(double, writes=[part]),
    ):
        with pytest.raises(HazardError, match=r"already freed|after it was freed"):
            refused()


def test_dropped_but_unfreed_memory_stays_allocated(device, stream):
    """Work on the memory may be queued on an unknown stream."""
    other = device.stream("other")
    buffer = device.allocate(100, stream)
    other.wait(stream.record())
    other.to_device(buffer, noise(100))
    del buffer
    gc.collect()
    device.allocate(100, stream)
    assert device.used_nbytes == 200


def test_a_dead_array_frees_its_memory_after_its_uses(device, stream):
    other = device.stream("other")
    array = DeviceArray.from_host(noise(CAPACITY), device, stream)
    out, _ = array.to_host(other)
    del array
    gc.collect()
    assert device.used_nbytes == CAPACITY
    buffer = device.allocate(CAPACITY, stream)
    np.testing.assert_array_equal(out, noise(CAPACITY))
    assert device.used_nbytes == buffer.nbytes


@pytest.mark.parametrize("is_read", [False, True])
def test_an_array_in_a_cycle_frees_its_memory(device, stream, is_read):
    """The garbage collector may destroy the events of such an array before the array."""
    array = DeviceArray.from_host(noise(CAPACITY), device, stream)
    array.ready.synchronize()
    if is_read:
        array.to_host(device.stream("other"))[1].synchronize()
    assert device.used_nbytes == CAPACITY, "and the device has forgotten the host memory"
    array.itself = array
    del array
    gc.collect()
    assert device.allocate(CAPACITY, stream).nbytes == CAPACITY


# ------------------------------------------------------------------ host memory


def test_host_memory_lives_until_its_copy_ran(device, stream):
    """CUDA keeps no host memory alive. The driver fails a copy whose host memory is gone."""
    buffer = device.allocate(10, stream)
    stream.to_device(buffer, noise(10))
    stream.record()
    gc.collect()
    np.testing.assert_array_equal(read(stream, buffer), noise(10))


def test_host_memory_of_a_finished_copy_is_released(device, stream):
    buffer = device.allocate(10, stream)
    stream.to_device(buffer, noise(10))
    stream.synchronize()
    assert device.used_nbytes == 10
    assert not stream.held
    assert not device._held


CALLS = {
    "launch": lambda stream, buffer: stream.launch(double, writes=[buffer]),
    "copy": lambda stream, buffer: stream.on_device(buffer.part(0, 5), buffer.part(5, 5)),
    "record": lambda stream, buffer: stream.record(),
    "wait": lambda stream, buffer: stream.wait(stream.record()),
    "free": lambda stream, buffer: buffer.free(stream),
    "allocate": lambda stream, buffer: stream.device.allocate(10, stream),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_releases_finished_work(call):
    device, ledger = timed()
    stream = device.stream("only")
    buffer = device.allocate(10, stream)
    values = noise(10)
    alive = weakref.ref(values)
    stream.to_device(buffer, values)
    array = DeviceArray.from_host(noise(10, 1), device, stream)
    freed = weakref.ref(array.buffer.allocation)
    stream.synchronize()
    del values, array
    gc.collect()
    assert alive() is not None
    assert device._dead
    call(stream, buffer)
    assert alive() is None
    assert not device._dead
    assert [entry.nbytes for entry in ledger.entries()] == [10, 10]
    # To free the memory, its stream must reach the free first.
    stream.synchronize()
    stream.record()
    assert freed() is None
    device.close()


def test_finished_work_does_not_pile_up_behind_a_stalled_stream(monkeypatch):
    device, ledger = timed()
    slow, fast = device.stream("slow"), device.stream("fast")
    buffers = [device.allocate(10, stream) for stream in (slow, fast)]
    queued = []
    record = device.driver.record

    def noted(stream, timed=False):
        event = record(stream, timed)
        if stream is slow.handle:
            queued.append(event)
        return event

    monkeypatch.setattr(device.driver, "record", noted)
    is_done = device.driver.is_done
    monkeypatch.setattr(
        device.driver, "is_done", lambda event: event not in queued and is_done(event)
    )
    slow.launch(double, writes=[buffers[0]])
    for _ in range(1000):
        fast.launch(double, writes=[buffers[1]])
        fast.synchronize()
    entries = ledger.entries()
    assert {entry.lane for entry in entries} == {"fast"}
    assert len(entries) > 900
    device.close()


def test_a_call_does_not_check_all_waiting_work(device, stream, monkeypatch):
    """The cost of a launch must not grow with the queued work."""
    buffer = device.allocate(10, stream)
    for _ in range(1000):
        stream.to_device(buffer, noise(10))
        stream.record()
    asked = []
    monkeypatch.setattr(device.driver, "is_done", lambda event: bool(asked.append(event)))
    for _ in range(100):
        stream.launch(double, writes=[buffer])
    assert len(asked) == 100


def test_an_event_of_another_thread_does_not_release_host_memory(device, stream, monkeypatch):
    """Two threads share a stream, and one records an event during the other's call."""
    buffer = device.allocate(10, stream)
    queue = device.driver.copy_in

    def copy_in(*arguments):
        stream.synchronize()
        queue(*arguments)

    monkeypatch.setattr(device.driver, "copy_in", copy_in)
    stream.to_device(buffer, noise(10))
    gc.collect()
    np.testing.assert_array_equal(read(stream, buffer), noise(10))


# ------------------------------------------------------------------ less memory than the budget


def test_allocation_waits_for_frees_of_a_pool_below_the_budget():
    device = pumped(total_nbytes=1000, capacity_nbytes=4000)
    stream = device.stream("only")
    buffer = device.allocate(800, stream)
    buffer.free(stream)
    assert device.allocate(900, stream).nbytes == 900
    assert device.driver.n_allocations == 3, "once in vain"


def test_the_callback_is_called_if_the_pool_is_full():
    device = pumped(total_nbytes=1000, capacity_nbytes=4000)
    stream = device.stream("only")
    held = [device.allocate(400, stream) for _ in range(2)]
    asked = []

    def make_room(nbytes):
        asked.append(nbytes)
        if held:
            held.pop().free(stream)
            return True
        return False

    device.on_full(make_room)
    device.allocate(600, stream)
    assert asked == [600]
    with pytest.raises(MemoryError, match="no room for 500 bytes"):
        device.allocate(500, stream)
    assert asked == [600, 500, 500]
    stream.synchronize()
    assert device.used_nbytes == 600, "what was refused is not counted"


def test_an_error_of_the_driver_costs_no_budget(device, stream, monkeypatch):
    def lost(nbytes, stream):
        raise OSError("device lost")

    monkeypatch.setattr(device.driver, "allocate", lost)
    with pytest.raises(OSError, match="device lost"):
        device.allocate(10, stream)
    assert device.used_nbytes == 0


# ------------------------------------------------------------------ the ledger


def timed(capacity_nbytes=CAPACITY):
    """Return a device whose ledger clock shows 100 when the device is created."""
    ledger = Ledger(clock=lambda: 100.0)
    driver = EmulatedCuda(2 * capacity_nbytes, random.Random(0).randrange)
    return CudaDevice(driver, capacity_nbytes, ledger), ledger


def test_ledger_entries_have_times_on_the_device():
    device, ledger = timed()
    stream = device.stream("copies")
    buffer = device.allocate(100, stream)
    stream.to_device(buffer, noise(100))
    stream.launch(double, writes=[buffer])
    stream.on_device(buffer.part(0, 50), buffer.part(50, 50))
    stream.to_host(noise(100), buffer)
    assert device.used_nbytes == 100
    assert ledger.entries() == [], "nothing of it has run"
    stream.synchronize()
    assert device.used_nbytes == 100
    # The first tick is the zero point. Each piece lies between two ticks of its own.
    assert ledger.entries() == [
        LedgerEntry("copies", "host to device", 100, 101.0, 102.0),
        LedgerEntry("copies", "device", 0, 103.0, 104.0),
        LedgerEntry("copies", "device", 50, 105.0, 106.0),
        LedgerEntry("copies", "device to host", 100, 107.0, 108.0),
    ]
    device.close()


def test_ledger_entries_follow_the_end_of_the_work():
    device, ledger = timed()
    one, other = device.stream("one"), device.stream("other")
    buffers = [device.allocate(10, stream) for stream in (one, other)]
    one.to_device(buffers[0], noise(10))
    other.to_device(buffers[1], noise(10))
    other.synchronize()
    assert device.used_nbytes == 20
    assert "other" in {entry.lane for entry in ledger.entries()}
    device.close()
    assert {entry.lane for entry in ledger.entries()} == {"one", "other"}


def test_times_use_a_recent_zero_point(monkeypatch):
    """CUDA returns times as floats that are accurate for about a minute."""
    device, ledger = timed()
    stream = device.stream("copies")
    buffer = device.allocate(10, stream)
    asked = []
    between = device.driver.seconds_between

    def seconds_between(first, second):
        asked.append(between(first, second))
        return asked[-1]

    monkeypatch.setattr(device.driver, "seconds_between", seconds_between)
    for _ in range(200):
        stream.to_device(buffer, noise(10))
        stream.synchronize()
        assert device.used_nbytes == 10
    assert max(asked) < 70.0
    starts = [entry.start_s for entry in ledger.entries()]
    assert starts == [101.0 + 2 * n for n in range(200)]
    device.close()


# ------------------------------------------------------------------ errors, and the end


def test_only_events_after_a_failed_kernel_raise_its_error(device):
    stream, before, after = (device.stream(name) for name in ("one", "before", "after"))
    buffer = device.allocate(10, stream)
    before.wait(stream.record())

    def fail(target):
        raise LookupError("not today")

    stream.launch(fail, writes=[buffer])
    after.wait(stream.record())
    before.synchronize()
    with pytest.raises(LookupError):
        after.synchronize()


def test_failed_kernel_keeps_no_memory(device, stream):
    def fail(target):
        raise LookupError("not today")

    buffer = device.allocate(10, stream)
    memory = weakref.ref(buffer.allocation.memory)
    stream.launch(fail, writes=[buffer])
    buffer.free(stream)
    with pytest.raises(LookupError):
        stream.synchronize()
    assert device.used_nbytes == 0
    assert memory() is None


def test_closing_waits_for_queued_gpu_work(device, stream):
    out = np.zeros(10, dtype=np.uint8)
    buffer = device.allocate(10, stream)
    stream.to_device(buffer, noise(10))
    stream.to_host(out, buffer)
    done = stream.record()
    buffer.free(stream)
    device.close()
    assert done.is_done()
    np.testing.assert_array_equal(out, noise(10))
    assert device.used_nbytes == 0


def test_failed_device_can_be_closed(device, stream, monkeypatch):
    def lost(event):
        raise OSError("device lost")

    stream.record()
    monkeypatch.setattr(device.driver, "wait_for", lost)
    device.close()
    with pytest.raises(RuntimeError, match="closed"):
        stream.record()


# ------------------------------------------------------------------ without CUDA


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU")
def test_missing_cuda_is_explained():
    with pytest.raises(RuntimeError, match=r"CuPy|CUDA"):
        CupyDriver()


# ------------------------------------------------------------------ below the store


def test_values_move_from_a_full_device_to_the_host_and_back():
    device = CudaDevice(EmulatedCuda(4 * 8192), 3 * 8192)
    pin = device.driver.pin
    found = measure(device, PinnedPool(1 << 20, 4096, pin), 8, pin(8192), 1)
    device.close()
    assert found["wrong"] == []
    assert found["most_used_nbytes"] <= 3 * 8192
    assert found["cold_at_the_end"] >= 5

"""The emulated device passes the conformance suite, with threads and pumped."""

from __future__ import annotations

import gc
import random
import threading

import numpy as np
import pytest

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.emulated.emulated_device import POISON, EmulatedDevice
from dask_gpurt.devices.emulated.engines import Rate
from dask_gpurt.devices.emulated.queues import Engine
from dask_gpurt.devices.ledger import Ledger, LedgerEntry
from dask_gpurt.devices.ordering import HazardError
from tests.conformance.device_suite import CAPACITY, PATIENCE_S, DeviceSuite, read
from tests.conformance.stream_programs import double, noise
from tests.devices.emulated.pumping import pumped


class TestThreaded(DeviceSuite):
    def make_device(self, capacity_nbytes, seed=0):
        return EmulatedDevice(capacity_nbytes)


class TestPumped(DeviceSuite):
    n_programs = 300

    def make_device(self, capacity_nbytes, seed=0):
        return EmulatedDevice(capacity_nbytes, choose=random.Random(seed).randrange)


# ------------------------------------------------------------------ pumped


def test_no_work_runs_before_it_is_pumped():
    device = pumped()
    stream = device.stream("only")
    ran = []
    buffer = device.allocate(10, stream)

    def note(target):
        ran.append(len(target))

    stream.launch(note, writes=[buffer])
    event = stream.record()
    assert ran == []
    assert not event.is_done()
    assert device.pump(1) == 1
    assert ran == [10]
    assert not event.is_done()
    assert device.pump() == 1
    assert event.is_done()
    assert device.pump() == 0


def test_host_memory_is_poisoned_until_the_event():
    device = pumped()
    stream = device.stream("only")
    buffer = device.allocate(10, stream)
    stream.to_device(buffer, noise(10))
    out = np.zeros(10, dtype=np.uint8)
    stream.to_host(out, buffer)
    event = stream.record()
    assert set(out) == {POISON}
    event.synchronize()
    np.testing.assert_array_equal(out, noise(10))


def test_changes_of_host_memory_before_the_event_are_copied():
    device = pumped()
    stream = device.stream("only")
    buffer = device.allocate(10, stream)
    values = noise(10)
    stream.to_device(buffer, values)
    values[:] = 7
    assert set(read(stream, buffer)) == {7}


def test_fresh_and_freed_memory_is_poisoned():
    device = pumped()
    stream = device.stream("only")
    buffer = device.allocate(10, stream)
    assert set(read(stream, buffer)) == {POISON}
    kept = []
    stream.to_device(buffer, noise(10))
    stream.launch(lambda target: kept.append(target), writes=[buffer])
    buffer.free(stream)
    stream.synchronize()
    assert set(kept[0]) == {POISON}, "a kernel that kept what it was given"


def orders_of(seed):
    """Return the orders in which two streams run if the second waits in the middle."""
    device = pumped(seed)
    one, other = device.stream("one"), device.stream("other")
    done = []

    def note(name):
        return lambda: done.append(name)

    one.launch(note("a1"))
    event = one.record()
    one.launch(note("a2"))
    other.launch(note("b1"))
    other.wait(event)
    other.launch(note("b2"))
    device.pump()
    return tuple(done)


def test_exactly_the_allowed_orders_occur():
    seen = {orders_of(seed) for seed in range(200)}
    assert seen == {
        ("a1", "a2", "b1", "b2"),
        ("a1", "b1", "a2", "b2"),
        ("a1", "b1", "b2", "a2"),
        ("b1", "a1", "a2", "b2"),
        ("b1", "a1", "b2", "a2"),
    }


def test_seed_determines_the_order():
    assert all(orders_of(seed) == orders_of(seed) for seed in range(20))


def test_waiting_pumps_only_the_necessary_work():
    device = EmulatedDevice(CAPACITY, choose=lambda n: 0)
    one, other = device.stream("one"), device.stream("other")
    ran = []
    one.launch(lambda: ran.append("one"))
    other.launch(lambda: ran.append("other"))
    one.synchronize()
    assert ran == ["one"]
    other.synchronize()
    assert ran == ["one", "other"]


def test_kernel_waiting_for_its_own_stream_does_not_hang():
    device = pumped()
    stream = device.stream("only")
    stream.launch(lambda: stream.synchronize())
    with pytest.raises(HazardError, match="no queued work completes"):
        stream.synchronize()


def test_allocation_pumps_queued_frees():
    device = pumped()
    stream = device.stream("only")
    asked = []
    device.on_full(asked.append)
    device.allocate(CAPACITY, stream).free(stream)
    assert device.used_nbytes == CAPACITY
    device.allocate(CAPACITY, stream)
    assert asked == []


def test_a_device_with_threads_is_not_pumped():
    with pytest.raises(RuntimeError, match="not pumped"):
        EmulatedDevice(CAPACITY).pump()


# ------------------------------------------------------------------ threads


class Gate:
    """A kernel that waits until the test opens the gate."""

    def __init__(self):
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, *_):
        self.entered.set()
        assert self.open.wait(PATIENCE_S)


@pytest.fixture
def threaded():
    device = EmulatedDevice(CAPACITY)
    yield device
    device.close()


def test_copies_go_on_while_a_kernel_runs(threaded):
    compute, copies = threaded.stream("compute"), threaded.stream("copies")
    gate = Gate()
    compute.launch(gate)
    assert gate.entered.wait(PATIENCE_S)
    buffer = threaded.allocate(10, copies)
    copies.to_device(buffer, noise(10))
    np.testing.assert_array_equal(read(copies, buffer), noise(10))
    gate.open.set()
    compute.synchronize()


def test_an_urgent_kernel_overtakes_waiting_kernels(threaded):
    """At most one kernel runs before it."""
    compute = threaded.stream("compute")
    urgent = threaded.stream("communication", Priority.HIGH)
    ran = []
    gate = Gate()
    compute.launch(gate)
    assert gate.entered.wait(PATIENCE_S)
    for n in range(10):
        compute.launch(lambda n=n: ran.append(n))
    urgent.launch(lambda: ran.append("urgent"))
    gate.open.set()
    compute.synchronize()
    urgent.synchronize()
    assert ran == ["urgent", *range(10)]


@pytest.mark.parametrize("n_waiting", [0, 1, 100])
def test_urgent_kernel_begins_within_one_step(n_waiting):
    """The number of earlier waiting kernels does not matter. Only steps move the clock."""
    time, ledger, gate = Time(), Ledger(), Gate()
    step_s = 1.0

    def wait(seconds):
        if seconds:
            gate()
        time.wait(seconds)

    device = EmulatedDevice(
        CAPACITY, rates={Engine.COMPUTE: Rate(1e9, step_s)}, ledger=ledger, clock=time, wait=wait
    )
    compute = device.stream("compute")
    urgent = device.stream("communication", Priority.HIGH)
    compute.launch(lambda: None)
    assert gate.entered.wait(PATIENCE_S)
    for _ in range(n_waiting):
        compute.launch(lambda: None)
    urgent.launch(lambda: None)
    asked_s = time()
    gate.open.set()
    compute.synchronize()
    urgent.synchronize()
    device.close()
    (begun_s,) = (entry.start_s for entry in ledger.entries() if entry.lane == urgent.name)
    assert begun_s - asked_s == step_s
    assert len(ledger.entries()) == n_waiting + 2


def test_urgent_copy_does_not_overtake_queued_copies():
    """Copy engines of GPUs ignore priorities, too."""
    ledger, gate = Ledger(), Gate()
    device = EmulatedDevice(CAPACITY, rates={Engine.IN: Rate(1.0)}, ledger=ledger, wait=gate)
    priorities = {"first": Priority.NORMAL, "second": Priority.LOW, "third": Priority.HIGH}
    streams = [device.stream(name, priority) for name, priority in priorities.items()]
    buffers = [device.allocate(10, stream) for stream in streams]
    streams[0].to_device(buffers[0], noise(10))
    assert gate.entered.wait(PATIENCE_S)
    for stream, buffer in zip(streams[1:], buffers[1:], strict=True):
        stream.to_device(buffer, noise(10))
    gate.open.set()
    for stream in streams:
        stream.synchronize()
    assert [entry.lane for entry in ledger.entries()] == ["first", "second", "third"]
    device.close()


def test_closing_drops_queued_work():
    device = EmulatedDevice(CAPACITY)
    stream = device.stream("only")
    gate, ran, heard = Gate(), [], []
    stream.launch(gate)
    stream.launch(lambda: ran.append("second"))
    event = stream.record()
    assert gate.entered.wait(PATIENCE_S)

    def wait():
        try:
            event.synchronize()
        except RuntimeError as error:
            heard.append(str(error))

    threads = [threading.Thread(target=work, daemon=True) for work in (wait, device.close)]
    for thread in threads:
        thread.start()
    threads[0].join(PATIENCE_S)
    assert heard == ["the device is closed"]
    gate.open.set()
    threads[1].join(PATIENCE_S)
    assert not threads[1].is_alive()
    assert ran == []


def test_threads_of_a_closed_device_end():
    def n_threads():
        # Only new threads: threads of earlier tests may still be ending.
        return sum(thread.name.startswith(f"{device.name} ") for thread in threading.enumerate())

    class Counted(EmulatedDevice):
        name = "counted"

    device = Counted(CAPACITY)
    stream = device.stream("only")
    buffer = device.allocate(10, stream)
    stream.to_device(buffer, noise(10))
    stream.launch(double, writes=[buffer])
    read(stream, buffer)
    assert n_threads() == 3
    device.close()
    assert n_threads() == 0


# ------------------------------------------------------------------ rates and the ledger


class Time:
    """A clock that moves only when the device waits."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def wait(self, seconds):
        self.now_s += seconds


def test_work_keeps_the_rate_and_enters_the_ledger():
    time, ledger = Time(), Ledger()
    device = EmulatedDevice(
        CAPACITY,
        choose=lambda n: 0,
        rates={Engine.IN: Rate(100.0, 0.5), Engine.OUT: Rate(50.0)},
        ledger=ledger,
        clock=time,
        wait=time.wait,
    )
    stream = device.stream("copies")
    buffer = device.allocate(200, stream)
    stream.to_device(buffer, noise(200))
    stream.launch(lambda target: time.wait(3.0), writes=[buffer])
    stream.to_host(noise(100), buffer.part(0, 100))
    stream.synchronize()
    assert ledger.entries() == [
        LedgerEntry("copies", "host to device", 200, 100.0, 102.5),
        LedgerEntry("copies", "device", 0, 102.5, 105.5),
        LedgerEntry("copies", "device to host", 100, 105.5, 107.5),
    ]


def test_emulated_rate_never_exceeds_the_machine():
    time = Time()
    device = EmulatedDevice(
        CAPACITY, choose=lambda n: 0, rates={Engine.COMPUTE: Rate(1e9)}, clock=time, wait=time.wait
    )
    stream = device.stream("only")
    stream.launch(lambda: time.wait(5.0))
    stream.synchronize()
    assert time.now_s == 105.0


# ------------------------------------------------------------------ arrays


ARRAYS = [
    np.arange(24.0).reshape(2, 3, 4),
    np.array(5, dtype="i2"),
    np.zeros((0, 3), dtype="f4"),
    np.array(["2020-01-01", "NaT"], dtype="M8[ns]"),
    np.array([b"ab", b"c"]),
]


@pytest.mark.parametrize("values", ARRAYS, ids=lambda values: str(values.dtype))
def test_array_returns_from_the_device_unchanged(device, streams, values):
    one, other = streams
    array = DeviceArray.from_host(values, device, one)
    assert (array.dtype, array.shape, array.nbytes) == (values.dtype, values.shape, values.nbytes)
    assert device.used_nbytes == values.nbytes
    got, event = array.to_host(other)
    event.synchronize()
    assert got.dtype == values.dtype
    np.testing.assert_array_equal(got, values)


def test_an_array_is_read_into_place(device, streams):
    one, _ = streams
    array = DeviceArray.from_host(np.arange(6), device, one)
    out = np.zeros(6, dtype="i8")
    got, event = array.to_host(one, out)
    event.synchronize()
    assert got is out
    assert list(out) == list(range(6))
    for wrong in (np.zeros(5, "i8"), np.zeros(6, "f8"), np.zeros((2, 3), "i8")):
        with pytest.raises(ValueError, match="into"):
            array.to_host(one, wrong)


@pytest.mark.parametrize(
    "values", [np.array(["a", None]), np.arange(10)[::2], np.ones((3, 4)).T], ids=str
)
def test_arrays_that_cannot_be_on_a_device_are_refused(device, streams, values):
    with pytest.raises(ValueError, match=r"objects|contiguous"):
        DeviceArray.from_host(values, device, streams[0])
    assert device.used_nbytes == 0


def test_memory_is_freed_with_the_array_after_its_copies(device, streams):
    one, other = streams
    array = DeviceArray.from_host(np.arange(100), device, one)
    got, event = array.to_host(other)
    del array
    again = DeviceArray.from_host(np.zeros(CAPACITY, dtype=np.uint8), device, one)
    event.synchronize()
    np.testing.assert_array_equal(got, np.arange(100))
    one.synchronize()
    assert device.used_nbytes == again.nbytes


def test_an_array_destructor_does_not_wait_for_the_device(device, streams):
    array = DeviceArray.from_host(np.arange(100), device, streams[0])
    cycle = [array]
    cycle.append(cycle)
    del array
    thread = threading.Thread(target=gc.collect, daemon=True)
    with device._lock:
        del cycle
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a destructor waits for a lock"
    streams[0].synchronize()
    assert device.used_nbytes == 0


def test_an_unknown_use_of_an_array_is_found_when_it_dies(device, streams):
    one, other = streams
    array = DeviceArray.from_host(np.zeros(10, dtype=np.uint8), device, one)
    other.wait(array.ready)
    other.launch(double, writes=[array.buffer])
    del array
    with pytest.raises(HazardError, match="its freeing"):
        device.allocate(1, one)
    device.allocate(1, one)


def test_a_recorded_use_of_an_array_is_ordered(device, streams):
    one, other = streams
    array = DeviceArray.from_host(np.zeros(10, dtype=np.uint8), device, one)
    other.wait(array.ready)
    other.launch(double, writes=[array.buffer])
    array.used(other.record())
    del array
    device.allocate(1, one)
    one.synchronize()
    assert device.used_nbytes == 1

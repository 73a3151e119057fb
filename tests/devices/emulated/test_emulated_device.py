"""The emulated device passes the suite, threaded and pumped, and finds missing order."""

from __future__ import annotations

import gc
import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.emulated.emulated_device import POISON, EmulatedDevice
from dask_gpurt.devices.emulated.engines import Rate
from dask_gpurt.devices.emulated.queues import Engine
from dask_gpurt.devices.ledger import Entry, Ledger
from dask_gpurt.devices.ordering import HazardError
from tests.conformance.device_suite import (
    CAPACITY,
    LENGTH,
    N_BUFFERS,
    PATIENCE_S,
    DeviceSuite,
    add,
    assert_same,
    double,
    expected_of,
    noise,
    programs,
    read,
    run_program,
)


class TestThreaded(DeviceSuite):
    def make_device(self, capacity_nbytes, seed=0):
        return EmulatedDevice(capacity_nbytes)


class TestPumped(DeviceSuite):
    n_programs = 300

    def make_device(self, capacity_nbytes, seed=0):
        return EmulatedDevice(capacity_nbytes, choose=random.Random(seed).randrange)


def pumped(seed=0):
    return EmulatedDevice(CAPACITY, choose=random.Random(seed).randrange)


@pytest.fixture(params=["threaded", "pumped"])
def device(request):
    device = pumped() if request.param == "pumped" else EmulatedDevice(CAPACITY)
    yield device
    device.close()


@pytest.fixture
def streams(device):
    return device.stream("one"), device.stream("other")


# ------------------------------------------------------------------ hazards


def test_memory_that_another_stream_writes_is_not_read(device, streams):
    one, other = streams
    buffer = device.allocate(10, one)
    one.to_device(buffer, noise(10))
    with pytest.raises(HazardError, match=r"copy to the host.*'other.*copy to the device.*'one"):
        other.to_host(noise(10), buffer)
    other.wait(one.record())
    np.testing.assert_array_equal(read(other, buffer), noise(10))


def test_memory_that_another_stream_reads_is_not_written(device, streams):
    one, other = streams
    buffer = device.allocate(10, one)
    other.wait(one.record())
    one.to_host(noise(10), buffer)
    with pytest.raises(HazardError):
        other.launch(double, writes=[buffer])
    other.wait(one.record())
    other.launch(double, writes=[buffer])


def test_memory_is_for_the_stream_it_was_allocated_on(device, streams):
    one, other = streams
    buffer = device.allocate(10, one)
    with pytest.raises(HazardError, match="allocation"):
        other.to_device(buffer, noise(10))
    other.wait(one.record())
    other.to_device(buffer, noise(10))


def test_two_streams_may_read_at_once(device, streams):
    one, other = streams
    buffer = device.allocate(10, one)
    one.to_device(buffer, noise(10))
    other.wait(one.record())
    outs = [noise(10, n) for n in (1, 2)]
    for stream, out in zip(streams, outs, strict=True):
        stream.to_host(out, buffer)
    for stream in streams:
        stream.synchronize()
    assert_same(outs, [noise(10)] * 2)


def test_two_streams_may_write_different_parts_at_once(device, streams):
    one, other = streams
    buffer = device.allocate(20, one)
    other.wait(one.record())
    one.to_device(buffer.part(0, 10), noise(10, 1))
    other.to_device(buffer.part(10, 10), noise(10, 2))
    with pytest.raises(HazardError):
        other.launch(double, writes=[buffer.part(9, 2)])
    one.wait(other.record())
    np.testing.assert_array_equal(read(one, buffer), np.concatenate([noise(10, 1), noise(10, 2)]))


def test_an_event_covers_only_what_came_before_it(device, streams):
    one, other = streams
    buffer = device.allocate(10, one)
    event = one.record()
    one.to_device(buffer, noise(10))
    other.wait(event)
    with pytest.raises(HazardError):
        other.to_host(noise(10), buffer)


def test_order_is_passed_on(device, streams):
    """One, then other, then third: third need not know one."""
    one, other = streams
    third = device.stream("third")
    buffer = device.allocate(10, one)
    one.to_device(buffer, noise(10))
    other.wait(one.record())
    third.wait(other.record())
    np.testing.assert_array_equal(read(third, buffer), noise(10))


def test_a_finished_copy_gives_no_order_until_the_host_checks(device, streams):
    """A copy that happens to be done proves nothing about the next run."""
    one, other = streams
    buffer = device.allocate(10, one)
    one.to_device(buffer, noise(10))
    event = one.record()
    device._engines.until(lambda: event.signal.is_done)
    with pytest.raises(HazardError):
        other.to_host(noise(10), buffer)
    assert event.is_done()
    np.testing.assert_array_equal(read(other, buffer), noise(10))


def test_memory_is_not_freed_while_a_copy_of_another_stream_is_queued(device, streams):
    one, other = streams
    buffer = device.allocate(10, one)
    one.to_device(buffer, noise(10))
    other.wait(one.record())
    out = np.zeros(10, dtype=np.uint8)
    other.to_host(out, buffer)
    with pytest.raises(HazardError, match=r"its freeing on stream 'one.*copy to the host.*'other"):
        buffer.free(one)
    one.wait(other.record())
    buffer.free(one)
    one.synchronize()
    np.testing.assert_array_equal(out, noise(10))


@pytest.mark.parametrize("use", ["copy", "kernel", "part", "free"])
def test_freed_memory_is_not_used(device, streams, use):
    one, _ = streams
    buffer = device.allocate(10, one)
    part = buffer.part(3, 4)
    buffer.free(one)
    with pytest.raises(HazardError, match="freed"):
        if use == "copy":
            one.to_device(buffer, noise(10))
        elif use == "kernel":
            one.launch(add, [buffer], [buffer])
        elif use == "part":
            one.to_host(noise(4), part)
        else:
            buffer.free(one)
    one.synchronize()
    assert device.used_nbytes == 0


def test_a_refused_use_leaves_no_trace(device, streams):
    """A kernel that may use only one of two buffers has used neither."""
    one, other = streams
    mine = device.allocate(10, one)
    other.wait(one.record())
    theirs = device.allocate(10, one)
    with pytest.raises(HazardError):
        other.launch(add, [mine], [theirs])
    mine.free(one)
    theirs.free(one)


def test_a_kernel_cannot_write_what_it_reads(device, streams):
    one, _ = streams
    buffer = device.allocate(10, one)
    one.launch(double, reads=[buffer])
    with pytest.raises(ValueError, match="read-only"):
        one.synchronize()


def test_programs_with_missing_order_are_refused_or_deterministic():
    """All accepted programs give the same result in every order that a device may choose."""
    outcomes = set()

    @settings(derandomize=True, max_examples=600)
    @given(programs(n_most=12), st.integers(0, 2**32))
    def check(steps, seed):
        device = EmulatedDevice(N_BUFFERS * LENGTH, choose=random.Random(seed).randrange)
        try:
            got = run_program(device, steps, in_order=False)
        except HazardError:
            outcomes.add("found")
        else:
            assert_same(got, expected_of(steps))
            outcomes.add("harmless")

    check()
    assert outcomes == {"found", "harmless"}


# A use covered by a later one is forgotten. Other uses must not be forgotten.


def test_a_read_does_not_hide_the_write_before_it(device, streams):
    one, other = streams
    buffer = device.allocate(10, one)
    one.to_host(noise(10), buffer)
    with pytest.raises(HazardError, match="allocation"):
        other.to_host(noise(10), buffer)


def test_a_read_does_not_hide_a_read_of_another_stream(device, streams):
    one, other = streams
    buffer = device.allocate(10, one)
    other.wait(one.record())
    one.to_host(noise(10), buffer)
    other.to_host(noise(10), buffer)
    with pytest.raises(HazardError, match=r"kernel double.*copy to the host.*'one"):
        other.launch(double, writes=[buffer])


@pytest.mark.parametrize("later", [(0, 4), (6, 4), (2, 6)])
def test_a_write_hides_only_uses_of_its_own_bytes(device, streams, later):
    one, other = streams
    buffer = device.allocate(10, one)
    other.wait(one.record())
    one.launch(double, writes=[buffer])
    one.to_device(buffer.part(*later), noise(later[1]))
    hidden = range(later[0], sum(later))
    for n in range(10):
        with pytest.raises(HazardError, match="." if n in hidden else "kernel double"):
            other.to_host(noise(1), buffer.part(n, 1))


def test_notes_of_uses_do_not_pile_up(device, streams):
    one, other = streams
    buffer = device.allocate(100, one)
    for _ in range(100):
        one.launch(double, writes=[buffer])
        other.wait(one.record())
        other.to_host(noise(100), buffer)
        one.wait(other.record())
    assert len(buffer.allocation.uses._uses) <= 3
    for n in range(100):
        one.to_host(noise(1), buffer.part(n, 1))
        one.synchronize()
    assert len(buffer.allocation.uses._uses) <= 3


# ------------------------------------------------------------------ pumped


def test_nothing_runs_before_it_is_pumped():
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


def test_a_seed_is_an_order():
    assert all(orders_of(seed) == orders_of(seed) for seed in range(20))


def test_waiting_pumps_no_more_than_it_takes():
    device = EmulatedDevice(CAPACITY, choose=lambda n: 0)
    one, other = device.stream("one"), device.stream("other")
    ran = []
    one.launch(lambda: ran.append("one"))
    other.launch(lambda: ran.append("other"))
    one.synchronize()
    assert ran == ["one"]
    other.synchronize()
    assert ran == ["one", "other"]


def test_a_kernel_that_waits_for_its_own_stream_does_not_hang():
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
def test_an_urgent_kernel_begins_within_one_step(n_waiting):
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


def test_an_urgent_copy_does_not():
    """As on a GPU, whose copy engines ignore priorities."""
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


def test_rates_are_kept_and_work_is_entered():
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
        Entry("copies", "host to device", 200, 100.0, 102.5),
        Entry("copies", "device", 0, 102.5, 105.5),
        Entry("copies", "device to host", 100, 105.5, 107.5),
    ]


def test_no_rate_is_faster_than_the_machine():
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
def test_an_array_comes_back(device, streams, values):
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

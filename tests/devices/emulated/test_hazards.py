"""The emulated device refuses uses of memory that no event puts in order."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.devices.emulated.emulated_device import EmulatedDevice
from dask_gpurt.devices.ordering import HazardError
from tests.conformance.device_suite import read
from tests.conformance.stream_programs import (
    LENGTH,
    N_BUFFERS,
    add,
    assert_same,
    double,
    expected_of,
    noise,
    programs,
    run_program,
)

# ------------------------------------------------------------------ hazards


def test_read_of_memory_being_written_by_another_stream_is_found(device, streams):
    one, other = streams
    buffer = device.allocate(10, one)
    one.to_device(buffer, noise(10))
    with pytest.raises(HazardError, match=r"copy to the host.*'other.*copy to the device.*'one"):
        other.to_host(noise(10), buffer)
    other.wait(one.record())
    np.testing.assert_array_equal(read(other, buffer), noise(10))


def test_write_to_memory_being_read_by_another_stream_is_found(device, streams):
    one, other = streams
    buffer = device.allocate(10, one)
    other.wait(one.record())
    one.to_host(noise(10), buffer)
    with pytest.raises(HazardError):
        other.launch(double, writes=[buffer])
    other.wait(one.record())
    other.launch(double, writes=[buffer])


def test_memory_is_valid_on_the_stream_of_its_allocation(device, streams):
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


def test_event_covers_only_earlier_work(device, streams):
    one, other = streams
    buffer = device.allocate(10, one)
    event = one.record()
    one.to_device(buffer, noise(10))
    other.wait(event)
    with pytest.raises(HazardError):
        other.to_host(noise(10), buffer)


def test_order_through_events_is_transitive(device, streams):
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


def test_free_during_a_copy_of_another_stream_is_found(device, streams):
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


def test_kernel_cannot_write_its_own_input(device, streams):
    one, _ = streams
    buffer = device.allocate(10, one)
    one.launch(double, reads=[buffer])
    with pytest.raises(ValueError, match="read-only"):
        one.synchronize()


def test_unordered_programs_are_refused_or_deterministic():
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


# The device forgets a use that a later one covers, but must not forget others.


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


def test_records_of_uses_do_not_accumulate(device, streams):
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

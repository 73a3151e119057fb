"""The stand-in for HIP has the documented rules for streams, events and copies."""

from __future__ import annotations

import numpy as np
import pytest

MIB = 1 << 20


@pytest.fixture
def cuda(standin):
    return pytest.importorskip("cupy").cuda


@pytest.fixture
def streams(cuda):
    return [cuda.Stream(non_blocking=True) for _ in range(2)]


@pytest.fixture
def memory(cuda):
    return cuda.Memory(MIB)


def pinned(cuda, value):
    array = np.frombuffer(cuda.PinnedMemoryPointer(cuda.PinnedMemory(MIB), 0), np.uint8, MIB)
    array[:] = value
    return array


def copy_in(cuda, memory, source, stream):
    cuda.runtime.memcpyAsync(memory.ptr, source.ctypes.data, MIB, 1, stream.ptr)


def copy_out(cuda, target, memory, stream):
    cuda.runtime.memcpyAsync(target.ctypes.data, memory.ptr, MIB, 2, stream.ptr)


def recorded(cuda, stream):
    event = cuda.Event(disable_timing=True)
    stream.record(event)
    return event


def test_work_of_a_stream_keeps_its_order(cuda, streams, memory, faults):
    stream, source, out = streams[0], pinned(cuda, 5), pinned(cuda, 0)
    faults.hold_copies()
    copy_in(cuda, memory, source, stream)
    cuda.runtime.memsetAsync(memory.ptr, 7, 10, stream.ptr)
    copy_out(cuda, out, memory, stream)
    done = recorded(cuda, stream)
    assert not done.done and not stream.done
    assert not out.any()
    faults.clear()
    done.synchronize()
    assert set(out[:10]) == {7} and set(out[10:]) == {5}


def test_streams_do_not_wait_for_each_other(cuda, streams, memory, faults):
    one, other = streams
    source, target = pinned(cuda, 3), pinned(cuda, 0)
    faults.stick_event()
    stuck = recorded(cuda, one)
    copy_in(cuda, memory, source, other)
    copy_out(cuda, target, memory, other)
    other.synchronize()
    assert set(target) == {3}
    assert not stuck.done
    faults.clear()
    stuck.synchronize()


def test_waiting_for_an_event_orders_two_streams(cuda, streams, memory, faults):
    one, other = streams
    source = pinned(cuda, 3)
    faults.hold_copies()
    copy_in(cuda, memory, source, one)
    other.wait_event(recorded(cuda, one))
    cuda.runtime.memsetAsync(memory.ptr, 4, 1, other.ptr)
    later = recorded(cuda, other)
    assert not later.done
    faults.clear()
    later.synchronize()
    target = np.empty(MIB, np.uint8)
    copy_out(cuda, target, memory, other)
    assert list(target[:2]) == [4, 3]


def test_event_is_of_its_last_record(cuda, streams, faults):
    event = cuda.Event(disable_timing=True)
    assert event.done, "an event that was never recorded is done"
    streams[0].record(event)
    event.synchronize()
    faults.stick_event()
    streams[0].record(event)
    assert not event.done
    faults.clear()
    event.synchronize()
    assert event.done


def test_times_need_events_that_take_times(cuda, streams):
    first, last = cuda.Event(), cuda.Event()
    for event in (first, last):
        streams[0].record(event)
    last.synchronize()
    assert cuda.get_elapsed_time(first, last) >= 0
    with pytest.raises(cuda.runtime.CUDARuntimeError, match="InvalidHandle"):
        cuda.get_elapsed_time(first, recorded(cuda, streams[0]))


@pytest.mark.parametrize("non_blocking", [False, True])
def test_default_stream_waits_for_blocking_streams(cuda, memory, faults, non_blocking):
    stream = cuda.Stream(non_blocking=non_blocking)
    faults.stick_event()
    recorded(cuda, stream)
    cuda.runtime.memsetAsync(memory.ptr, 1, 1, 0)
    later = recorded(cuda, cuda.Stream.null)
    if non_blocking:
        later.synchronize()
    assert later.done == non_blocking
    faults.clear()
    later.synchronize()


def test_blocking_streams_wait_for_the_default_stream(cuda, faults):
    blocking, other = cuda.Stream(), cuda.Stream(non_blocking=True)
    faults.stick_event()
    recorded(cuda, cuda.Stream.null)
    later, free = recorded(cuda, blocking), recorded(cuda, other)
    free.synchronize()
    assert not later.done
    faults.clear()
    later.synchronize()


def test_pageable_memory_is_copied_at_once(cuda, streams, memory, faults):
    stream, source = streams[0], np.full(MIB, 9, np.uint8)
    faults.stick_event()
    recorded(cuda, stream)
    copy_in(cuda, memory, source, stream)
    source[:] = 0
    faults.clear()
    target = np.empty(MIB, np.uint8)
    copy_out(cuda, target, memory, stream)
    assert set(target) == {9}, "the copy is done on return"


def test_priorities_are_clamped(cuda):
    found = [cuda.Stream(non_blocking=True, priority=wanted).priority for wanted in (-5, 0, 5)]
    assert found == [-1, 0, 1]


def test_stream_and_event_of_two_devices_are_refused(cuda, streams):
    with cuda.Device(1):
        event = cuda.Event()
        assert cuda.runtime.pointerGetAttributes(cuda.Memory(10).ptr).device == 1
    with pytest.raises(cuda.runtime.CUDARuntimeError, match="InvalidHandle"):
        streams[0].record(event)

"""The suite that every device must pass. Subclass it and implement `make_device`.

All work in it is ordered. How a device handles missing order is tested with that device.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.devices.device import Priority
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

PATIENCE_S = 20.0
CAPACITY = 4096


def read(stream, buffer):
    """Return the content of device memory after all queued work of the stream."""
    out = np.zeros(buffer.nbytes, dtype=np.uint8)
    stream.to_host(out, buffer)
    stream.synchronize()
    return out


class DeviceSuite:
    """Implement `make_device` in a subclass."""

    n_programs = 100

    def make_device(self, capacity_nbytes, seed=0):
        """Return a device. If it can run work in several orders, the seed selects one."""
        raise NotImplementedError

    @pytest.fixture
    def device(self):
        device = self.make_device(CAPACITY)
        yield device
        device.close()

    @pytest.fixture
    def stream(self, device):
        return device.stream("only")

    def filled(self, device, stream, values):
        buffer = device.allocate(values.nbytes, stream)
        stream.to_device(buffer, values)
        return buffer

    # ---------------------------------------------------------------- copies and kernels

    @pytest.mark.parametrize("nbytes", [0, 1, 7, 1000, CAPACITY])
    def test_bytes_are_restored(self, device, stream, nbytes):
        values = noise(nbytes)
        buffer = self.filled(device, stream, values)
        assert buffer.nbytes == nbytes
        np.testing.assert_array_equal(read(stream, buffer), values)

    @pytest.mark.parametrize("dtype", ["u1", "i4", "f8", "M8[ns]", "?", "c16", "S3"])
    def test_host_memory_of_any_type_and_shape_is_accepted(self, device, stream, dtype):
        values = np.arange(24).astype("S3" if dtype == "S3" else "i8").astype(dtype).reshape(2, 12)
        values.flags.writeable = False
        buffer = device.allocate(values.nbytes, stream)
        stream.to_device(buffer, values)
        out = np.empty_like(values)
        stream.to_host(out, buffer)
        stream.synchronize()
        np.testing.assert_array_equal(out, values)

    def test_part_of_a_buffer_shares_its_memory(self, device, stream):
        values = noise(100)
        buffer = self.filled(device, stream, values)
        stream.to_device(buffer.part(10, 20), np.zeros(20, dtype=np.uint8))
        inner = buffer.part(5, 50).part(10, 20)
        assert inner.nbytes == 20
        values[10:30] = 0
        np.testing.assert_array_equal(read(stream, inner), values[15:35])
        np.testing.assert_array_equal(read(stream, buffer), values)

    @pytest.mark.parametrize(("start", "nbytes"), [(0, 101), (101, 0), (-1, 2), (60, 41), (5, -1)])
    def test_part_beyond_the_end_is_refused(self, device, stream, start, nbytes):
        with pytest.raises(IndexError):
            device.allocate(100, stream).part(start, nbytes)

    def test_buffer_is_copied_on_the_device(self, device, stream):
        values = noise(100)
        source = self.filled(device, stream, values)
        target = device.allocate(100, stream)
        stream.on_device(target, source)
        stream.on_device(target.part(0, 10), target.part(90, 10))
        values[:10] = values[90:]
        np.testing.assert_array_equal(read(stream, target), values)

    def test_a_kernel_gets_its_inputs_and_then_its_outputs(self, device, stream):
        first, second = (self.filled(device, stream, noise(50, n)) for n in range(2))
        result = device.allocate(50, stream)

        def difference(a, b, out):
            out[:] = a - b

        stream.launch(difference, [first, second], [result])
        np.testing.assert_array_equal(read(stream, result), noise(50, 0) - noise(50, 1))

    def test_a_stream_keeps_its_order(self, device, stream):
        buffer = self.filled(device, stream, np.ones(10, dtype=np.uint8))
        other = device.allocate(10, stream)
        for _ in range(3):
            stream.launch(double, writes=[buffer])
            stream.on_device(other, buffer)
            stream.launch(add, [other], [buffer])
        assert set(read(stream, buffer)) == {64}

    def test_copy_between_different_lengths_is_refused(self, device, stream):
        buffer, longer = device.allocate(10, stream), device.allocate(11, stream)
        with pytest.raises(ValueError, match="11"):
            stream.to_device(buffer, noise(11))
        with pytest.raises(ValueError, match="11"):
            stream.to_host(noise(11), buffer)
        with pytest.raises(ValueError, match="11"):
            stream.on_device(buffer, longer)

    def test_overlapping_copy_is_refused(self, device, stream):
        buffer = device.allocate(100, stream)
        with pytest.raises(ValueError, match="overlap"):
            stream.on_device(buffer.part(0, 10), buffer.part(9, 10))

    def test_host_memory_has_to_be_contiguous_and_writable(self, device, stream):
        buffer = device.allocate(10, stream)
        with pytest.raises(ValueError, match="contiguous"):
            stream.to_device(buffer, noise(20)[::2])
        with pytest.raises(ValueError, match="contiguous"):
            stream.to_host(noise(20)[::2], buffer)
        fixed = noise(10)
        fixed.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            stream.to_host(fixed, buffer)

    # ---------------------------------------------------------------- streams and events

    def test_streams_have_a_name_and_a_priority(self, device):
        stream = device.stream("copies", Priority.HIGH)
        assert (stream.name, stream.priority) == ("copies", Priority.HIGH)
        assert device.stream("copies").priority == Priority.NORMAL

    def test_an_event_orders_two_streams(self, device):
        """Events order the streams in both directions, several times."""
        one, other = device.stream("one"), device.stream("other", Priority.HIGH)
        buffer = self.filled(device, one, np.ones(10, dtype=np.uint8))
        for _ in range(3):
            other.wait(one.record())
            other.launch(double, writes=[buffer])
            one.wait(other.record())
            one.launch(double, writes=[buffer])
        assert set(read(one, buffer)) == {64}

    def test_work_the_host_waited_for_is_ordered(self, device):
        one, other = device.stream("one"), device.stream("other")
        buffer = self.filled(device, one, noise(10))
        event = one.record()
        event.synchronize()
        other.launch(double, writes=[buffer])
        other.synchronize()
        np.testing.assert_array_equal(read(one, buffer), noise(10) * 2)
        assert event.is_done()

    def test_event_of_an_idle_stream_completes(self, stream):
        event = stream.record()
        event.synchronize()
        assert event.is_done()

    def test_a_stream_may_wait_for_itself(self, device, stream):
        buffer = self.filled(device, stream, noise(10))
        stream.wait(stream.record())
        np.testing.assert_array_equal(read(stream, buffer), noise(10))

    def test_programs_give_the_result_of_sequential_steps(self):
        @settings(derandomize=True, deadline=None, max_examples=self.n_programs)
        @given(programs(), st.integers(0, 2**32))
        def check(steps, seed):
            device = self.make_device(N_BUFFERS * LENGTH, seed)
            try:
                assert_same(run_program(device, steps), expected_of(steps))
                assert device.used_nbytes == N_BUFFERS * LENGTH
            finally:
                device.close()

        check()

    def test_threads_queue_at_once(self, device):
        failures = []

        def work(number):
            try:
                stream = device.stream(f"thread {number}")
                for n in range(20):
                    values = noise(100, 100 * number + n)
                    buffer = self.filled(device, stream, values)
                    stream.launch(double, writes=[buffer])
                    np.testing.assert_array_equal(read(stream, buffer), values * 2)
                    buffer.free(stream)
                stream.synchronize()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert failures == []
        assert not any(thread.is_alive() for thread in threads)
        assert device.used_nbytes == 0

    # ---------------------------------------------------------------- a kernel that fails

    def test_waiting_for_a_failed_kernel_raises_its_error(self, device):
        stream, other, third = (device.stream(name) for name in ("one", "other", "third"))
        buffer = self.filled(device, stream, noise(10))
        before = stream.record()

        def fail(target):
            raise LookupError("not today")

        stream.launch(fail, writes=[buffer])
        after = stream.record()
        other.wait(after)
        before.synchronize()
        for wait in (after.synchronize, stream.synchronize, other.synchronize, after.synchronize):
            with pytest.raises(LookupError, match="not today"):
                wait()
        third.synchronize()

    def test_no_work_runs_after_a_failed_kernel(self, device, stream):
        buffer = self.filled(device, stream, noise(10))
        ran = []

        def fail(target):
            raise LookupError("not today")

        def note(target):
            ran.append(target)

        stream.launch(fail, writes=[buffer])
        stream.launch(note, writes=[buffer])
        buffer.free(stream)
        with pytest.raises(LookupError):
            stream.synchronize()
        assert ran == []
        assert device.used_nbytes == 0, "but memory is freed"

    # ---------------------------------------------------------------- memory

    def test_whole_capacity_can_be_allocated_and_no_more(self, device, stream):
        assert device.capacity_nbytes == CAPACITY
        buffer = device.allocate(CAPACITY - 1000, stream)
        device.allocate(1000, stream)
        assert device.used_nbytes == CAPACITY
        with pytest.raises(MemoryError, match=str(CAPACITY)):
            device.allocate(1, stream)
        buffer.free(stream)
        with pytest.raises(MemoryError):
            device.allocate(CAPACITY, stream)
        device.allocate(CAPACITY - 1000, stream)

    def test_freed_memory_is_reused_without_waiting(self, device):
        streams = device.stream("one"), device.stream("other", Priority.HIGH)
        results = []
        for n in range(20):
            stream = streams[n % 2]
            buffer = self.filled(device, stream, noise(CAPACITY * 2 // 3, n))
            results.append(np.zeros(buffer.nbytes, dtype=np.uint8))
            stream.to_host(results[-1], buffer)
            buffer.free(stream)
        for stream in streams:
            stream.synchronize()
        assert_same(results, [noise(CAPACITY * 2 // 3, n) for n in range(20)])
        assert device.used_nbytes == 0

    def test_part_of_a_buffer_cannot_be_freed(self, device, stream):
        buffer = device.allocate(100, stream)
        with pytest.raises(ValueError, match="part"):
            buffer.part(0, 50).free(stream)
        buffer.part(0, 100).free(stream)
        stream.synchronize()
        assert device.used_nbytes == 0

    def test_the_callback_makes_room(self, device, stream):
        """As in the store, the callback copies a value to the host and frees its memory."""
        values = [noise(CAPACITY // 2, n) for n in range(3)]
        held = {n: self.filled(device, stream, values[n]) for n in range(2)}
        asked, evicted = [], {}
        spill = device.stream("spill", Priority.HIGH)

        def make_room(nbytes):
            asked.append(nbytes)
            if not held:
                return False
            oldest = min(held)
            buffer = held.pop(oldest)
            spill.wait(stream.record())
            evicted[oldest] = read(spill, buffer)
            buffer.free(spill)
            return True

        device.on_full(make_room)
        held[2] = self.filled(device, stream, values[2])
        assert asked == [CAPACITY // 2]
        np.testing.assert_array_equal(evicted[0], values[0])
        np.testing.assert_array_equal(read(stream, held[2]), values[2])
        big = device.allocate(CAPACITY, stream)
        assert asked == [CAPACITY // 2, CAPACITY, CAPACITY], "called more often than necessary"
        assert sorted(evicted) == [0, 1, 2]
        big.free(stream)

    def test_a_callback_without_success_is_called_once(self, device, stream):
        asked = []
        device.on_full(lambda nbytes: asked.append(nbytes) or len(asked) < 3)
        device.allocate(CAPACITY, stream)
        with pytest.raises(MemoryError):
            device.allocate(7, stream)
        assert asked == [7, 7, 7]
        device.on_full(None)
        with pytest.raises(MemoryError):
            device.allocate(7, stream)
        assert asked == [7, 7, 7]

    def test_an_oversized_allocation_evicts_nothing(self, device, stream):
        asked = []
        device.on_full(lambda nbytes: asked.append(nbytes) or True)
        with pytest.raises(MemoryError):
            device.allocate(CAPACITY + 1, stream)
        assert asked == []

    def test_an_error_of_the_callback_is_raised(self, device, stream):
        def fail(nbytes):
            raise OSError("no disk")

        device.on_full(fail)
        device.allocate(CAPACITY, stream)
        with pytest.raises(OSError, match="no disk"):
            device.allocate(1, stream)
        assert device.used_nbytes == CAPACITY

    def test_objects_of_another_device_are_refused(self, device, stream):
        other = self.make_device(CAPACITY)
        try:
            theirs = other.stream("theirs")
            buffer = other.allocate(10, theirs)
            for refused in (
                lambda: stream.to_device(buffer, noise(10)),
                lambda: stream.launch(double, writes=[buffer]),
                lambda: stream.wait(theirs.record()),
                lambda: device.allocate(10, theirs),
                lambda: buffer.free(stream),
            ):
                with pytest.raises(ValueError, match="another device"):
                    refused()
        finally:
            other.close()

    # ---------------------------------------------------------------- the end

    def test_closed_device_refuses_work(self, device, stream):
        buffer = self.filled(device, stream, noise(10))
        done = stream.record()
        done.synchronize()
        device.close()
        device.close()
        assert done.is_done()
        done.synchronize()
        for refused in (
            lambda: device.allocate(10, stream),
            lambda: stream.to_device(buffer, noise(10)),
            stream.synchronize,
        ):
            with pytest.raises(RuntimeError, match="closed"):
                refused()

"""A GPU passes the device suite, and tests that only a GPU can run."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.cuda.driver import CupyDriver, why_no_cuda
from dask_gpurt.devices.cuda.gpu import CudaDevice
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.host_memory.pinned import PinnedPool
from dask_gpurt.devices.ledger import Ledger
from tests.conformance.device_suite import DeviceSuite
from tests.conformance.stream_programs import double, noise
from tests.gpu.requirements import needs_gpu

pytestmark = needs_gpu

MIB = 1 << 20


class TestCuda(DeviceSuite):
    def make_device(self, capacity_nbytes, seed=0):
        return CudaDevice(CupyDriver(), capacity_nbytes)


class TestTimedCuda(DeviceSuite):
    """The same with two events around each piece of work."""

    def make_device(self, capacity_nbytes, seed=0):
        return CudaDevice(CupyDriver(), capacity_nbytes, Ledger())


@pytest.fixture
def device(gate):
    device = CudaDevice(CupyDriver(), 64 * MIB)
    yield device
    gate.open()
    device.close()


@pytest.fixture
def stream(device):
    return device.stream("only")


def test_missing_device_number_is_refused():
    assert "999" in why_no_cuda(999)
    with pytest.raises(RuntimeError, match="999"):
        CupyDriver(999)


def test_urgent_streams_come_first(device):
    urgent, usual = device.stream("urgent", Priority.HIGH), device.stream("usual")
    assert urgent.handle.priority < usual.handle.priority == 0
    assert urgent.handle.is_non_blocking


def test_pinned_copies_and_kernels_do_not_block_the_host(device, stream, gate):
    """All work is queued behind a gate that is still closed when the last call returns."""
    source, target = device.driver.pin(MIB), device.driver.pin(MIB)
    source[:] = noise(MIB)
    target[:] = 0
    buffer = device.allocate(MIB, stream)
    stream.launch(double, writes=[buffer])  # compiles, which may wait
    stream.synchronize()
    gate.close(stream)
    stream.to_device(buffer, source)
    stream.launch(double, writes=[buffer])
    stream.to_host(target, buffer)
    done = stream.record()
    assert not done.is_done()
    assert not target.any()
    gate.open()
    done.synchronize()
    np.testing.assert_array_equal(target, noise(MIB) * 2)


def test_blocked_stream_does_not_block_another(device, stream, gate):
    other = device.stream("other", Priority.HIGH)
    target = device.driver.pin(MIB)
    buffer = device.allocate(MIB, other)
    gate.close(stream)
    held_back = stream.record()
    other.to_device(buffer, noise(MIB))
    other.to_host(target, buffer)
    other.synchronize()
    assert not held_back.is_done()
    np.testing.assert_array_equal(target, noise(MIB))
    gate.open()  # the end frees pinned memory, which waits for the device


def test_memory_is_not_reused_before_its_last_use(device, gate):
    """A pool returns memory to the stream that allocated it, which may not be the last user."""
    one, other = device.stream("one"), device.stream("other")
    target = device.driver.pin(MIB)
    # Let the pool grow now: requesting memory from CUDA later may wait for running work.
    for warm in [device.allocate(MIB, one) for _ in range(2)]:
        warm.free(one)
    one.synchronize()
    assert device.used_nbytes == 0
    buffer = device.allocate(MIB, one)
    one.to_device(buffer, noise(MIB))
    other.wait(one.record())
    gate.close(other)
    other.to_host(target, buffer)
    buffer.free(other)
    del buffer
    gc.collect()
    again = device.allocate(MIB, one)
    one.to_device(again, np.zeros(MIB, np.uint8))
    one.synchronize()
    assert device.used_nbytes == 2 * MIB
    gate.open()
    other.synchronize()
    np.testing.assert_array_equal(target, noise(MIB))
    assert device.used_nbytes == MIB


def test_a_dead_array_frees_its_memory_after_its_uses(device, stream, gate):
    other = device.stream("other")
    target = device.driver.pin(MIB)
    array = DeviceArray.from_host(noise(MIB), device, stream)
    array.ready.synchronize()
    gate.close(other)
    _, copied = array.to_host(other, target)
    del array
    gc.collect()
    assert device.used_nbytes == MIB
    gate.open()
    copied.synchronize()
    stream.synchronize()
    assert device.used_nbytes == 0
    np.testing.assert_array_equal(target, noise(MIB))


def test_cuda_recognizes_pinned_memory(device):
    import cupy

    pool = PinnedPool(4 * MIB, MIB, device.driver.pin)
    blocks = pool.take(3 * MIB)
    runtime = cupy.cuda.runtime
    # For AMD's GPUs, CuPy 14 returns other numbers of types: those of ROCm before 6.
    host, unregistered = (2, 1) if runtime.is_hip else (1, 0)
    for block in blocks.stretches(0, 3 * MIB):
        block[:] = 7
        found = runtime.pointerGetAttributes(block.ctypes.data)
        assert (found.type, found.device) == (host, 0)
    plain = np.empty(MIB, np.uint8)
    found = runtime.pointerGetAttributes(plain.ctypes.data)
    assert found.type == unregistered and found.device < 0
    pool.give_back(blocks)


def test_oversized_allocation_is_refused(stream, device):
    huge = CudaDevice(device.driver, 1 << 60)
    with pytest.raises(MemoryError, match="no room"):
        huge.allocate(1 << 50, huge.stream("only"))
    assert huge.used_nbytes == 0
    huge.close()

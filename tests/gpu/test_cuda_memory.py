"""CuPy and RMM call the callback that makes room, on a GPU."""

from __future__ import annotations

import pytest

from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.devices.cuda.out_of_memory import CallWhenFull
from dask_gpurt.devices.device import Priority
from tests.gpu.requirements import needs_gpu

pytestmark = needs_gpu

MIB = 1 << 20


@pytest.fixture
def pool():
    """A CuPy pool of 16 MiB."""
    import cupy

    before = cupy.cuda.get_allocator()
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=16 * MIB)
    cupy.cuda.set_allocator(pool.malloc)
    yield pool
    cupy.cuda.set_allocator(before)


def test_arrays_without_room_evict_others(pool):
    import cupy

    held = [cupy.full(4 * MIB, n, cupy.uint8) for n in range(4)]
    left = {}
    asked = []

    def make_room(nbytes):
        asked.append(nbytes)
        if not held:
            return False
        left[len(left)] = cupy.asnumpy(held.pop(0))
        return True

    hooks = CallWhenFull(make_room)
    try:
        new = cupy.full(8 * MIB, 9, cupy.uint8)
        assert asked == [8 * MIB] * 2
        assert [int(values[0]) for values in left.values()] == [0, 1]
        assert int(new.sum(dtype=cupy.uint64)) == 9 * 8 * MIB
        with pytest.raises(MemoryError):
            cupy.empty(32 * MIB, cupy.uint8)
        assert held == []
    finally:
        hooks.uninstall()
    assert cupy.cuda.get_allocator() == pool.malloc


def test_rmm_without_room_evicts_others():
    rmm = pytest.importorskip("rmm", reason="RMM is not installed")
    before = rmm.mr.get_per_device_resource(0)
    pool = rmm.mr.PoolMemoryResource(before, 16 * MIB, 16 * MIB)
    rmm.mr.set_per_device_resource(0, pool)
    held = [rmm.DeviceBuffer(size=4 * MIB) for _ in range(4)]
    asked = []

    def make_room(nbytes):
        asked.append(nbytes)
        return bool(held) and held.pop() is not None

    hooks = CallWhenFull(make_room)
    try:
        assert "rmm" in hooks.installed
        buffer = rmm.DeviceBuffer(size=8 * MIB)
        assert buffer.size == 8 * MIB
        assert asked and set(asked) == {8 * MIB}
        driver = CupyDriver()
        assert driver.pool == "rmm"
        memory = driver.allocate(1 * MIB, driver.open_stream(Priority.NORMAL))
        assert memory.ptr
        del memory
        with pytest.raises(MemoryError):
            rmm.DeviceBuffer(size=32 * MIB)
        del buffer
    finally:
        hooks.uninstall()
        held.clear()
        rmm.mr.set_per_device_resource(0, before)

"""Memory that CuPy's pools keep is returned to the device before anything is evicted."""

from __future__ import annotations

import pytest

from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.devices.cuda.gpu import CudaDevice
from dask_gpurt.devices.cuda.out_of_memory import CallWhenFull

MIB = 1 << 20


@pytest.fixture
def cupy(standin, monkeypatch):
    """CuPy with 64 MiB left, 48 of which its default pool keeps, and with another pool in use."""
    cupy = pytest.importorskip("cupy")
    cupy.get_default_memory_pool().free_all_blocks()
    free_nbytes, total_nbytes = cupy.cuda.runtime.memGetInfo()
    monkeypatch.setenv("STANDIN_HIP_MEMORY", str(total_nbytes - free_nbytes + 64 * MIB))
    before = cupy.cuda.get_allocator()
    cupy.empty(48 * MIB, "u1")
    assert cupy.get_default_memory_pool().free_bytes() >= 48 * MIB
    cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)
    yield cupy
    cupy.cuda.set_allocator(before)
    cupy.get_default_memory_pool().free_all_blocks()


def test_arrays_get_what_another_pool_keeps(cupy):
    asked = []
    hooks = CallWhenFull(lambda nbytes: asked.append(nbytes))
    try:
        assert cupy.empty(32 * MIB, "u1").nbytes == 32 * MIB
        assert asked == [], "nothing needs to be evicted"
        with pytest.raises(MemoryError):
            cupy.empty(128 * MIB, "u1")
        assert asked == [128 * MIB]
    finally:
        hooks.uninstall()


def test_buffers_get_what_another_pool_keeps(cupy):
    device = CudaDevice(CupyDriver(), 64 * MIB)
    asked = []
    device.on_full(lambda nbytes: asked.append(nbytes))
    stream = device.stream("only")
    buffer = device.allocate(32 * MIB, stream)
    assert asked == []
    buffer.free(stream)
    device.close()

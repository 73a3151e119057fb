"""The runtime's devices and copies meet the faults of a GPU: late, stuck, full and lost."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.devices.cuda.gpu import CudaDevice
from dask_gpurt.memory.device_values import LibraryCopies
from tests.standins.hip_faults import counted, counts

MIB = 1 << 20
PATIENCE_S = 20.0


@pytest.fixture
def cupy(standin):
    return pytest.importorskip("cupy")


@pytest.fixture
def device(cupy, faults):
    device = CudaDevice(CupyDriver(), 64 * MIB)
    yield device
    faults.clear()
    device.close()


def begun(function):
    """Run a function in a thread; return the thread, and what it returned or raised."""
    found = []

    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def on_host(copies, array):
    """Copy an array as an evicted value is copied, into one piece of host memory."""
    host = np.empty(array.nbytes, dtype=np.uint8)
    (buffer,) = copies.leaving([array])
    buffer.copy_into([host])
    return host


def test_late_copies_of_values_are_waited_for(cupy, standin, faults):
    copies = LibraryCopies(CupyDriver())
    array = cupy.arange(MIB, dtype=np.uint8)
    faults.hold_copies()
    n_before = counts(standin)["copies to the host"]
    thread, found = begun(lambda: on_host(copies, array))
    while counts(standin)["copies to the host"] == n_before:
        thread.join(0.001)
    assert thread.is_alive() and not found
    faults.clear()
    thread.join(PATIENCE_S)
    np.testing.assert_array_equal(found[0], np.arange(MIB).astype(np.uint8))


def test_evicted_value_takes_one_copy_on_a_stream_of_ours(cupy, standin):
    copies = LibraryCopies(CupyDriver())
    array = cupy.ones(MIB, np.uint8)
    with counted(standin) as calls:
        host = on_host(copies, array)
    assert calls == {"copies to the host": 1}
    assert host.all()


def test_allocation_that_fails_once_is_tried_again(device, cupy, faults):
    cupy.get_default_memory_pool().free_all_blocks()
    asked = []
    device.on_full(lambda nbytes: not asked.append(nbytes))
    faults.fail_allocation()
    stream = device.stream("only")
    buffer = device.allocate(32 * MIB, stream)
    assert buffer.nbytes == 32 * MIB and device.used_nbytes == 32 * MIB
    assert asked == [], "CuPy itself tries again"
    buffer.free(stream)


def test_lost_device_raises_in_each_call_that_waits(device, faults):
    stream = device.stream("only")
    array = DeviceArray.from_host(np.ones(100), device, stream)
    faults.stick_event()
    done = stream.record()
    thread, found = begun(done.synchronize)
    faults.lose_device()
    thread.join(PATIENCE_S)
    assert "LaunchFailure" in str(found[0])
    with pytest.raises(RuntimeError, match="LaunchFailure"):
        array.to_host(stream)


def test_lost_device_raises_where_values_are_evicted(cupy, faults):
    copies = LibraryCopies(CupyDriver())
    array = cupy.ones(100)
    faults.lose_device()
    with pytest.raises(RuntimeError, match="LaunchFailure"):
        on_host(copies, array)
    faults.clear()
    assert on_host(copies, array).view(np.float64).all()

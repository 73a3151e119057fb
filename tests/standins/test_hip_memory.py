"""The stand-in for HIP has the documented rules for memory and devices, and its faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from dask_gpurt.devices.cuda.driver import why_no_cuda

MIB = 1 << 20


@pytest.fixture
def runtime(standin):
    return pytest.importorskip("cupy").cuda.runtime


def test_new_memory_is_not_zero(runtime):
    memory, out = runtime.malloc(100), np.zeros(100, np.uint8)
    runtime.memcpy(out.ctypes.data, memory, 100, runtime.memcpyDeviceToHost)
    assert out.all()
    runtime.free(memory)
    with pytest.raises(runtime.CUDARuntimeError, match="InvalidValue"):
        runtime.free(memory)


def test_host_cannot_read_device_memory(runtime):
    program = "import cupy, ctypes; ctypes.string_at(cupy.cuda.runtime.malloc(10), 1)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGSEGV


def test_memory_has_a_limit(runtime):
    # In a process of its own: earlier tests of this one may still hold memory.
    program = """
from cupy.cuda import runtime
free_nbytes, total_nbytes = runtime.memGetInfo()
memory = runtime.malloc(free_nbytes)
try:
    runtime.malloc(1)
except runtime.CUDARuntimeError as error:
    print(str(error).split(":")[0])
runtime.free(memory)
print(total_nbytes, runtime.memGetInfo() == (free_nbytes, total_nbytes))
"""
    limited = os.environ | {"STANDIN_HIP_MEMORY": str(64 * MIB)}
    printed = subprocess.check_output([sys.executable, "-c", program], env=limited, text=True)
    assert printed.splitlines() == ["hipErrorOutOfMemory", f"{64 * MIB} True"]


def test_limit_below_what_is_used_leaves_nothing(runtime, monkeypatch):
    memory = runtime.malloc(2 * MIB)
    monkeypatch.setenv("STANDIN_HIP_MEMORY", str(MIB))
    assert runtime.memGetInfo() == (0, MIB)
    with pytest.raises(runtime.CUDARuntimeError, match="OutOfMemory"):
        runtime.malloc(1)
    runtime.free(memory)


@pytest.mark.parametrize("kind", ["HostToDevice", "DeviceToHost"])
def test_copies_are_checked(runtime, kind):
    memory, host = runtime.malloc(4096), np.zeros(8192, np.uint8)
    ends = [memory, host.ctypes.data] if kind == "HostToDevice" else [host.ctypes.data, memory]
    number = getattr(runtime, f"memcpy{kind}")
    runtime.memcpy(*ends, 4096, number)
    with pytest.raises(runtime.CUDARuntimeError, match="InvalidValue"):
        runtime.memcpy(*ends, 4097, number)
    with pytest.raises(runtime.CUDARuntimeError, match="Direction"):
        runtime.memcpy(*reversed(ends), 4096, number)
    runtime.free(memory)


def test_allocation_that_is_to_fail_fails(runtime, faults):
    faults.fail_allocation(2)
    first = runtime.malloc(10)
    with pytest.raises(runtime.CUDARuntimeError, match="OutOfMemory"):
        runtime.malloc(10)
    for memory in (first, runtime.malloc(10)):
        runtime.free(memory)


def test_lost_device_fails_all_work(runtime, faults):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    event = cupy.cuda.Event()
    faults.stick_event()
    stream.record(event)
    faults.lose_device()
    for call in (event.synchronize, stream.synchronize, lambda: runtime.malloc(10)):
        with pytest.raises(runtime.CUDARuntimeError, match="LaunchFailure"):
            call()
    faults.clear()
    stream.synchronize()


def test_strict_threads_choose_their_device(runtime, monkeypatch):
    monkeypatch.setenv("STANDIN_HIP_STRICT", "1")
    found = []

    def work():
        try:
            runtime.malloc(10)
        except runtime.CUDARuntimeError as error:
            found.append(str(error))
        runtime.setDevice(0)
        found.append(runtime.malloc(10))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].startswith("hipErrorInvalidContext") and found[1] > 0
    runtime.setDevice(0)
    runtime.free(found[1])


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_hidden_devices_are_not_there(runtime, monkeypatch, name):
    assert why_no_cuda() is None
    monkeypatch.setenv(name, "-1")
    assert why_no_cuda().startswith("ROCm finds no device: hipErrorNoDevice")

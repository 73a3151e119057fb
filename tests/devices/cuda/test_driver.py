"""The driver makes the right calls to CuPy, on a fake with CuPy's signatures."""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import types
import weakref

import numpy as np
import pytest

from dask_gpurt.devices.cuda.driver import CupyDriver, why_no_cuda
from dask_gpurt.devices.cuda.gpu import CudaDevice
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.vendors import AMD, NVIDIA
from tests.conformance.stream_programs import double, noise


class CUDARuntimeError(RuntimeError):
    pass


class Runtime:
    """A fake `cupy.cuda.runtime`. Copies run at once, between host addresses."""

    CUDARuntimeError = CUDARuntimeError
    is_hip = False
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3

    def __init__(self):
        self.current = 0
        self.n_devices = 2
        self.copies = []
        self.device_of = {}

    def getDeviceCount(self):
        if self.n_devices == 0:
            raise CUDARuntimeError("cudaErrorNoDevice")
        return self.n_devices

    def getDeviceProperties(self, device):
        return {"name": b"Stand-in", "totalGlobalMem": 1 << 30}

    def pointerGetAttributes(self, ptr):
        if self.is_hip and ptr not in self.device_of:
            raise CUDARuntimeError("hipErrorInvalidValue")
        return types.SimpleNamespace(device=self.device_of[ptr])

    def memcpyAsync(self, dst, src, size, kind, stream):
        self.copies.append((size, kind, stream))
        ctypes.memmove(dst, src, size)


class Cuda:
    """A fake `cupy.cuda`. It refuses handles created or used on the wrong device."""

    def __init__(self):
        self.runtime = runtime = Runtime()
        current_stream = self.current_stream = []

        class Device:
            def __init__(self, device=None):
                self.id = device

            def __enter__(self):
                self._before, runtime.current = runtime.current, self.id

            def __exit__(self, *exception):
                runtime.current = self._before

        class Stream:
            def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
                self.ptr = 0 if null else id(self)
                self.device_id = -1 if null else runtime.current
                self.non_blocking, self.priority = non_blocking, priority

            def __enter__(self):
                if self.device_id not in (-1, runtime.current):
                    raise RuntimeError("does not match with the current device")
                current_stream.append(self)

            def __exit__(self, *exception):
                current_stream.pop()

            def record(self, event=None):
                here = runtime.current if self.device_id == -1 else self.device_id
                assert event.device_id == here
                return event

            def wait_event(self, event):
                assert isinstance(event, Event)

        Stream.null = Stream(null=True)

        class Event:
            def __init__(self, block=False, disable_timing=False, interprocess=False):
                self.device_id = runtime.current
                self.block, self.disable_timing = block, disable_timing

            done = True

            def synchronize(self):
                pass

        class MemoryPointer:
            def __init__(self, mem, offset):
                self.mem, self.ptr = mem, mem.ctypes.data + offset
                self.offset = offset

            def __add__(self, offset):
                return MemoryPointer(self.mem, self.offset + offset)

        class PinnedMemory:
            def __init__(self, size, flags=0):
                if size > 1 << 20:
                    raise CUDARuntimeError("cudaErrorMemoryAllocation")
                self.bytes = bytearray(size)

        self.Device, self.Stream, self.Event = Device, Stream, Event
        self.MemoryPointer, self.PinnedMemory = MemoryPointer, PinnedMemory
        self.allocated_on = []

    def get_elapsed_time(self, start_event, end_event):
        assert not (start_event.disable_timing or end_event.disable_timing)
        return 1500.0

    def PinnedMemoryPointer(self, mem, offset):
        return memoryview(mem.bytes)[offset:]

    def alloc(self, size):
        assert size > 0
        self.allocated_on.append((self.runtime.current, self.current_stream[-1]))
        return self.MemoryPointer(np.zeros(size, np.uint8), 0)


def standing_in():
    cupy = types.ModuleType("cupy")
    cupy.cuda = Cuda()
    cupy.uint8 = np.uint8

    def ndarray(shape, dtype, memptr):
        assert cupy.cuda.runtime.current == 1 or cupy.cuda.current_stream == []
        (nbytes,) = shape
        return memptr.mem[memptr.offset : memptr.offset + nbytes]

    cupy.ndarray = ndarray
    return cupy


@pytest.fixture
def cupy(monkeypatch):
    cupy = standing_in()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


def test_device_moves_bytes_through_the_driver(cupy):
    device = CudaDevice(CupyDriver(1), 1 << 20)
    stream = device.stream("copies", Priority.HIGH)
    source, target = noise(100), np.zeros(50, np.uint8)
    buffer, other = device.allocate(100, stream), device.allocate(100, stream)
    stream.to_device(buffer, source)
    stream.on_device(other.part(20, 60), buffer.part(30, 60))
    stream.launch(double, writes=[other.part(25, 10)])
    stream.to_host(target, other.part(20, 50))
    stream.synchronize()
    expected = source[30:80].copy()
    expected[5:15] *= 2
    np.testing.assert_array_equal(target, expected)
    ptr = stream.handle.ptr
    assert cupy.cuda.runtime.copies == [(100, 1, ptr), (60, 3, ptr), (50, 2, ptr)]
    assert cupy.cuda.allocated_on == [(1, device._memory)] * 2
    assert cupy.cuda.runtime.current == 0, "the thread's own device is current again"


def test_streams_are_non_blocking_and_events_untimed(cupy):
    device = CudaDevice(CupyDriver(1), 1 << 20)
    urgent = device.stream("urgent", Priority.HIGH).handle
    usual = device.stream("usual").handle
    assert urgent.non_blocking and usual.non_blocking
    assert (urgent.priority, usual.priority, urgent.device_id) == (-5, 0, 1)
    event = device.stream("any").record().handle
    assert (event.block, event.disable_timing) == (True, True)


def test_events_take_times_on_request(cupy):
    driver = CupyDriver(1)
    stream = driver.open_stream(Priority.NORMAL)
    first, second = (driver.record(stream, timed=True) for _ in range(2))
    assert driver.seconds_between(first, second) == 1.5


def test_kernels_compute_on_the_stream_and_the_device(cupy):
    device = CudaDevice(CupyDriver(1), 1 << 20)
    stream = device.stream("compute")
    seen = []

    def kernel(array):
        seen.append((cupy.cuda.runtime.current, list(cupy.cuda.current_stream)))

    stream.launch(kernel, writes=[device.allocate(10, stream)])
    assert seen == [(1, [stream.handle])]


def test_array_of_pinned_memory_keeps_it_alive(cupy):
    pinned = CupyDriver(1).pin(1000)
    pinned[:] = 7
    assert (pinned.dtype, pinned.nbytes, pinned.flags.writeable) == (np.uint8, 1000, True)
    with pytest.raises(MemoryError, match="cannot be pinned"):
        CupyDriver(1).pin(2 << 20)


def test_memory_comes_from_rmm_if_it_has_a_pool(cupy, monkeypatch):
    """RMM is a fake here; the tests that need a GPU use the real one."""

    class CudaMemoryResource:
        pass

    class FailureCallbackResourceAdaptor:
        upstream_mr = CudaMemoryResource()

    rmm, theirs = types.ModuleType("rmm"), types.ModuleType("rmm.allocators.cupy")
    resources = {0: CudaMemoryResource(), 1: object()}
    rmm.mr = types.SimpleNamespace(
        CudaMemoryResource=CudaMemoryResource,
        FailureCallbackResourceAdaptor=FailureCallbackResourceAdaptor,
        get_per_device_resource=resources.get,
    )
    theirs.rmm_cupy_allocator = lambda nbytes: ("rmm", nbytes, cupy.cuda.current_stream[-1])
    monkeypatch.delitem(sys.modules, "rmm", raising=False)
    assert CupyDriver(1).pool == "cupy"
    for name, module in (("rmm", rmm), ("rmm.allocators", rmm), ("rmm.allocators.cupy", theirs)):
        monkeypatch.setitem(sys.modules, name, module)
    assert CupyDriver(0).pool == "cupy"
    resources[0] = FailureCallbackResourceAdaptor()
    assert CupyDriver(0).pool == "cupy"
    driver = CupyDriver(1)
    stream = driver.open_stream(Priority.NORMAL)
    assert driver.allocate(100, stream) == ("rmm", 100, stream)


def test_the_driver_has_the_default_stream_of_its_device(cupy):
    driver = CupyDriver(1)
    event = driver.record(driver.default_stream)
    assert event.device_id == 1
    memory = driver.allocate(10, driver.default_stream)
    assert cupy.cuda.allocated_on == [(1, cupy.cuda.Stream.null)]
    assert driver.array(memory, 0, 10).nbytes == 10


def test_memory_of_other_libraries_is_copied(cupy):
    class Theirs:
        def __init__(self, array):
            self.array = array
            self.__cuda_array_interface__ = {"data": (array.ctypes.data, False)}

    driver = CupyDriver(1)
    theirs, out = Theirs(noise(100)), np.zeros(30, np.uint8)
    driver.copy_out(driver.open_stream(Priority.HIGH), out, driver.borrow(theirs), 20)
    np.testing.assert_array_equal(out, theirs.array[20:50])


@pytest.mark.parametrize("number, is_elsewhere", [(0, True), (1, False), (-2, False)])
def test_memory_of_another_device_is_recognised(cupy, number, is_elsewhere):
    """For system memory, CUDA reports no device; all devices can use it."""
    driver = CupyDriver(1)
    driver._runtime.device_of[4096] = number
    memory = types.SimpleNamespace(__cuda_array_interface__={"data": (4096, False)})
    assert driver.is_elsewhere(memory) == is_elsewhere


def test_unknown_memory_on_amd_is_not_on_another_device(cupy):
    driver = CupyDriver(1)
    driver._runtime.is_hip = True
    memory = types.SimpleNamespace(__cuda_array_interface__={"data": (4096, False)})
    assert not driver.is_elsewhere(memory)


def test_driver_reports_the_facts_of_the_device(cupy):
    driver = CupyDriver(1)
    assert (driver.name, driver.total_nbytes, driver.number) == ("Stand-in", 1 << 30, 1)


def test_missing_device_is_explained(cupy, monkeypatch):
    monkeypatch.setattr("dask_gpurt.devices.cuda.driver.with_driver", lambda: ())
    assert why_no_cuda(1) is None
    assert why_no_cuda(2) == "CUDA has 2 devices, and none of number 2"
    cupy.cuda.runtime.n_devices = 0
    assert why_no_cuda() == "CUDA finds no device: cudaErrorNoDevice"
    with pytest.raises(RuntimeError, match="NoDevice"):
        CupyDriver()
    cupy.cuda.runtime.is_hip = True
    assert why_no_cuda() == "ROCm finds no device: cudaErrorNoDevice"
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert why_no_cuda() == "CuPy is not installed"


@pytest.mark.parametrize(
    "is_hip, vendors, why",
    [
        (False, (AMD,), "CuPy is built for CUDA, and this machine has an AMD GPU: "),
        (True, (NVIDIA,), "CuPy is built for ROCm, and this machine has an NVIDIA GPU: "),
        (True, (NVIDIA, AMD), "ROCm finds no device: "),
        (False, (NVIDIA,), "CUDA finds no device: "),
    ],
)
def test_gpu_of_another_vendor_is_named(cupy, monkeypatch, is_hip, vendors, why):
    cupy.cuda.runtime.n_devices = 0
    cupy.cuda.runtime.is_hip = is_hip
    monkeypatch.setattr("dask_gpurt.devices.cuda.driver.with_driver", lambda: vendors)
    assert why_no_cuda().startswith(why)


@pytest.mark.parametrize(
    "library, vendors, why",
    [
        ("libamdhip64.so.7", (NVIDIA,), "CuPy is built for ROCm, and this machine has an NVIDIA"),
        ("libamdhip64.so.7", (AMD,), "CuPy cannot be imported: libamdhip64.so.7"),
        ("libcuda.so.1", (AMD,), "CuPy is built for CUDA, and this machine has an AMD"),
    ],
)
def test_missing_library_of_another_vendor_is_named(monkeypatch, library, vendors, why):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "cupy":
                raise ImportError(f"{library}: cannot open shared object file\nadvice")

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.setattr("dask_gpurt.devices.cuda.driver.with_driver", lambda: vendors)
    assert why_no_cuda().startswith(why)


# ------------------------------------------------------------------ the real CuPy


def test_the_default_stream_belongs_to_the_current_device():
    cuda = pytest.importorskip("cupy", reason="CuPy is not installed").cuda
    assert (cuda.Stream.null.ptr, cuda.Stream.null.device_id) == (0, -1)


SIGNATURES = {
    "runtime.memcpyAsync": "dst, src, size, kind, stream",
    "runtime.getDeviceProperties": "device",
    "runtime.getDeviceCount": "",
    "runtime.pointerGetAttributes": "ptr",
    "Stream.__init__": "self, null, non_blocking, ptds, priority",
    "Stream.record": "self, event",
    "Stream.wait_event": "self, event",
    "Event.__init__": "self, block, disable_timing, interprocess",
    "Event.synchronize": "self",
    "PinnedMemory.__init__": "self, size, flags",
    "alloc": "size",
    "get_elapsed_time": "start_event, end_event",
}


def names_of(signature):
    """Return the parameter names of CuPy's signatures, which have types and defaults."""
    inside = signature[signature.index("(") + 1 : signature.index(")")]
    words = [one.partition("=")[0].split() for one in inside.split(",") if one.strip()]
    return ", ".join(one[-1] for one in words)


@pytest.mark.parametrize("name", SIGNATURES)
def test_cupy_has_the_signatures_of_the_stand_in(name):
    real = pytest.importorskip("cupy", reason="CuPy is not installed").cuda
    assert names_of(_found(real, name).__doc__.splitlines()[0]) == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_stand_in_has_the_same_signatures(name):
    found = _found(standing_in().cuda, name)
    assert ", ".join(inspect.signature(found).parameters) == SIGNATURES[name]


def _found(module, name):
    for part in name.split("."):
        module = getattr(module, part)
    return module


class HostMemory:
    """A fake `cupy.cuda.PinnedMemory` of plain memory."""

    def __init__(self, size):
        self._bytes = ctypes.create_string_buffer(size)
        self.ptr, self.size = ctypes.addressof(self._bytes), size


def test_cupy_pinned_memory_lives_as_long_as_its_array():
    cuda = pytest.importorskip("cupy", reason="CuPy is not installed").cuda
    memory = HostMemory(1000)
    is_there = weakref.ref(memory)
    whole = np.frombuffer(cuda.PinnedMemoryPointer(memory, 0), dtype=np.uint8, count=1000)
    whole[:] = 7
    part = whole[10:20]
    del memory, whole
    gc.collect()
    assert is_there() is not None
    assert part.flags.writeable and set(part) == {7}
    del part
    gc.collect()
    assert is_there() is None


def test_cupy_arrays_have_the_address_of_their_pointer():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    memory = cupy.cuda.UnownedMemory(0x1000, 100, None, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    array = cupy.ndarray((10,), dtype=cupy.uint8, memptr=pointer + 20)
    assert (array.data.ptr, array.nbytes) == (0x1000 + 20, 10)

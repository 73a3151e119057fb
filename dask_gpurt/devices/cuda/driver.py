"""The CUDA or HIP calls of `devices.cuda.gpu`, made through CuPy.

The driver makes no decisions. So the code that decides is tested without a GPU, over a driver that
follows the same rules (`tests/devices/emulated_cuda.py`).

CuPy was chosen over cuda-core. Kernels here are functions of CuPy arrays. cuDF depends on CuPy, so
it is installed wherever there are device values. A second library would have its own current device
and current stream, which would have to be kept in step. Other libraries accept CuPy's streams
through the protocol `__cuda_stream__`.

CuPy is imported when a driver is created, not before.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.host_memory.pool import Buffer as Bytes
from dask_gpurt.devices.vendors import AMD, NVIDIA, mismatch, with_driver

#: Smaller numbers run first: from -5 on recent devices of NVIDIA, and from -1 on those of AMD, to
#: 0. Numbers outside the range are clamped. 0 is also the default of other libraries.
_PRIORITIES = {Priority.HIGH: -5, Priority.NORMAL: 0, Priority.LOW: 0}


class Driver(Protocol):
    """The calls to one device. Streams, events and memory are opaque and live until dropped.

    Dropped memory may go to any later allocation, on any stream. So no work on it may be queued
    when it is dropped.
    """

    @property
    def name(self) -> str:
        """Model name of the device."""

    @property
    def total_nbytes(self) -> int: ...

    @property
    def default_stream(self) -> Any:
        """The stream that libraries and programs use by default."""

    def open_stream(self, priority: Priority) -> Any: ...

    def record(self, stream: Any, timed: bool = False) -> Any:
        """Return an event at the end of the work queued so far."""

    def is_done(self, event: Any) -> bool: ...

    def seconds_between(self, first: Any, second: Any) -> float:
        """Return the seconds from the first to the second event; both are timed and done."""

    def wait_for(self, event: Any) -> None:
        """Block the host until the event is done; raise the device's own error if there is one."""

    def make_wait(self, stream: Any, event: Any) -> None:
        """Make a stream wait for an event."""

    def allocate(self, nbytes: int, stream: Any) -> Any:
        """Return at least one byte of memory for use on a stream.

        Raises
        ------
        MemoryError
            The device has no free memory.
        """

    def borrow(self, memory: Any) -> Any:
        """Wrap memory of another library that has `__cuda_array_interface__`.

        The memory must live until no work on it is queued.
        """

    def is_elsewhere(self, memory: Any) -> bool:
        """Return whether memory of another library is known to be on another device."""

    def copy_in(self, stream: Any, memory: Any, start: int, source: Bytes) -> None:
        """Queue a copy to the device. Pinned host memory must live until the copy is done."""

    def copy_out(self, stream: Any, target: Bytes, memory: Any, start: int) -> None:
        """Queue a copy to the host. If the target is not pinned, the copy is done on return."""

    def copy_on(
        self, stream: Any, memory: Any, start: int, source: Any, source_start: int, nbytes: int
    ) -> None: ...

    def array(self, memory: Any, start: int, nbytes: int) -> Any:
        """Return bytes as a one-dimensional array that a kernel can use."""

    def computing(self, stream: Any) -> AbstractContextManager[None]:
        """Queue the computations of a `with` statement on this stream."""

    def pin(self, nbytes: int) -> Bytes:
        """Return host memory that copies at full speed, without blocking the host.

        Raises
        ------
        MemoryError
            The system has no more memory to pin.
        """


class _Borrowed(NamedTuple):
    """Memory of another library, by its address, with the attribute `ptr` of CuPy's memory."""

    ptr: int


class CupyDriver:
    """A GPU of NVIDIA or AMD, called through CuPy.

    Parameters
    ----------
    number
        Device number in CuPy.

    Attributes
    ----------
    pool
        The memory pool: `rmm` if RMM already has a pool, so that cuDF shares it; else `cupy`.

    Raises
    ------
    RuntimeError
        The device does not exist. The message says why.
    """

    def __init__(self, number: int = 0) -> None:
        if (why := why_no_cuda(number)) is not None:
            raise RuntimeError(why)
        import cupy

        self.number = number
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self.pool = "rmm" if _rmm_has_a_pool(number) else "cupy"
        properties = self._runtime.getDeviceProperties(number)
        self.name: str = properties["name"].decode()
        self.total_nbytes: int = properties["totalGlobalMem"]

    def _here(self) -> AbstractContextManager[Any]:
        """Select this device: another library may have set another one for the thread."""
        device: AbstractContextManager[Any] = self._cupy.cuda.Device(self.number)
        return device

    @property
    def default_stream(self) -> Any:
        return self._cupy.cuda.Stream.null

    def open_stream(self, priority: Priority) -> Any:
        # Non-blocking: otherwise the stream would wait for CUDA's default stream, and every task
        # that uses the default stream would wait for copies.
        with self._here():
            return self._cupy.cuda.Stream(non_blocking=True, priority=_PRIORITIES[priority])

    def record(self, stream: Any, timed: bool = False) -> Any:
        # A blocking event frees the processor while the host waits, and tasks need the processor.
        # The default stream belongs to the current device.
        with self._here():
            event = self._cupy.cuda.Event(block=True, disable_timing=not timed)
            stream.record(event)
        return event

    def is_done(self, event: Any) -> bool:
        return bool(event.done)

    def seconds_between(self, first: Any, second: Any) -> float:
        return float(self._cupy.cuda.get_elapsed_time(first, second)) / 1e3

    def wait_for(self, event: Any) -> None:
        event.synchronize()

    def make_wait(self, stream: Any, event: Any) -> None:
        with self._here():
            stream.wait_event(event)

    def allocate(self, nbytes: int, stream: Any) -> Any:
        with self.computing(stream):
            try:
                return self._allocated(nbytes)
            except MemoryError:
                if not free_kept_memory():
                    raise
                return self._allocated(nbytes)

    def _allocated(self, nbytes: int) -> Any:
        if self.pool == "cupy":
            return self._cupy.cuda.alloc(nbytes)
        from rmm.allocators.cupy import rmm_cupy_allocator

        return rmm_cupy_allocator(nbytes)

    def borrow(self, memory: Any) -> Any:
        address, _ = memory.__cuda_array_interface__["data"]
        return _Borrowed(address)

    def is_elsewhere(self, memory: Any) -> bool:
        address, _ = memory.__cuda_array_interface__["data"]
        # Negative for memory that the driver does not know, such as host memory. Some releases of
        # AMD's raise an error instead.
        try:
            number: int = self._runtime.pointerGetAttributes(address).device
        except self._runtime.CUDARuntimeError:
            return False
        return number >= 0 and number != self.number

    def copy_in(self, stream: Any, memory: Any, start: int, source: Bytes) -> None:
        self._copy(memory.ptr + start, source.ctypes.data, source.nbytes, "HostToDevice", stream)

    def copy_out(self, stream: Any, target: Bytes, memory: Any, start: int) -> None:
        self._copy(target.ctypes.data, memory.ptr + start, target.nbytes, "DeviceToHost", stream)

    def copy_on(
        self, stream: Any, memory: Any, start: int, source: Any, source_start: int, nbytes: int
    ) -> None:
        target = memory.ptr + start
        self._copy(target, source.ptr + source_start, nbytes, "DeviceToDevice", stream)

    def _copy(self, target: int, source: int, nbytes: int, kind: str, stream: Any) -> None:
        runtime = self._runtime
        direction = getattr(runtime, f"memcpy{kind}")
        # A thread that has chosen no device would begin to use the first one.
        with self._here():
            runtime.memcpyAsync(target, source, nbytes, direction, stream.ptr)

    def array(self, memory: Any, start: int, nbytes: int) -> Any:
        cupy = self._cupy
        return cupy.ndarray((nbytes,), dtype=cupy.uint8, memptr=memory + start)

    @contextlib.contextmanager
    def computing(self, stream: Any) -> Iterator[None]:
        with self._here(), stream:
            yield

    def pin(self, nbytes: int) -> Bytes:
        cuda = self._cupy.cuda
        # Not `alloc_pinned_memory`: its pool rounds up to a power of two.
        try:
            with self._here():
                memory = cuda.PinnedMemory(nbytes)
        except self._runtime.CUDARuntimeError as error:
            raise MemoryError(f"{nbytes} bytes cannot be pinned: {error}") from error
        return np.frombuffer(cuda.PinnedMemoryPointer(memory, 0), dtype=np.uint8, count=nbytes)


def free_kept_memory() -> bool:
    """Return to the current device what CuPy's pools keep for reuse. False if that was nothing.

    A pool does so before it fails, but only for itself: a program may have several, and RMM.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return False
    # The allocator in use may be a method of a pool, below a hook of ours.
    allocator = inspect.unwrap(cupy.cuda.get_allocator())
    pools = {cupy.get_default_memory_pool(), getattr(allocator, "__self__", None)}
    is_any = False
    for pool in pools:
        if isinstance(pool, cupy.cuda.MemoryPool) and pool.free_bytes():
            before_nbytes = pool.total_bytes()
            pool.free_all_blocks()
            is_any |= pool.total_bytes() < before_nbytes
    return is_any


def _rmm_has_a_pool(number: int) -> bool:
    """Return whether RMM has a pool. Its default resource blocks the device on each allocation."""
    rmm = sys.modules.get("rmm")
    if rmm is None:
        return False
    resource = rmm.mr.get_per_device_resource(number)
    while isinstance(resource, rmm.mr.FailureCallbackResourceAdaptor):
        resource = resource.upstream_mr  # an adaptor, such as ours, is no pool
    return not isinstance(resource, rmm.mr.CudaMemoryResource)


def why_no_cuda(number: int = 0) -> str | None:
    """Return why the device cannot be used through CuPy, or None if it can."""
    try:
        import cupy
    except ImportError as error:
        if error.name == "cupy":
            return "CuPy is not installed"
        # A part of CUDA or ROCm is missing. The first line names it.
        problem = str(error).strip().partition("\n")[0]
        platform = AMD.platform if re.search("amdhip|roc|hip", problem) else NVIDIA.platform
        return mismatch(platform, with_driver()) or f"CuPy cannot be imported: {problem}"
    runtime = cupy.cuda.runtime
    platform = AMD.platform if runtime.is_hip else NVIDIA.platform
    try:
        n_devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return mismatch(platform, with_driver()) or f"{platform} finds no device: {error}"
    if number >= n_devices:
        return f"{platform} has {n_devices} devices, and none of number {number}"
    return None

"""The thin calls: all that `devices.cuda.gpu` asks of CUDA, through CuPy.

Nothing is decided here, so that what decides can be tested without a GPU, over a driver that keeps
the rules of this one (`tests/devices/emulated_cuda.py`).

Why CuPy and not cuda-core: kernels are functions of CuPy arrays here, and cuDF brings it, so it is
there wherever there is something to move. A second library would have a current device and a
current stream of its own, which would have to be kept the same. CuPy's streams are taken by others
through the protocol `__cuda_stream__`.

CuPy is imported when a driver is made, and not before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.host_memory.pool import Buffer as Bytes

#: CUDA takes smaller numbers first, from 0 down to -5 on recent devices, and moves what is beyond a
#: device's range into it. There is nothing below 0, which is also what streams of others have.
_PRIORITIES = {Priority.HIGH: -5, Priority.NORMAL: 0, Priority.LOW: 0}


class Driver(Protocol):
    """One device. Streams, events and memory are whatever it makes them; they live until dropped.

    Memory that is dropped may be given to the next who asks, for whichever stream: nothing may be
    queued on it any more.
    """

    @property
    def name(self) -> str:
        """The model."""

    @property
    def total_nbytes(self) -> int: ...

    @property
    def default_stream(self) -> Any:
        """Where libraries and programs queue their work unless they are told otherwise."""

    def open_stream(self, priority: Priority) -> Any: ...

    def record(self, stream: Any, timed: bool = False) -> Any:
        """An event at the point that has been queued so far."""

    def is_done(self, event: Any) -> bool: ...

    def seconds_between(self, first: Any, second: Any) -> float:
        """Of two events that are timed and done; negative if they came the other way round."""

    def wait_for(self, event: Any) -> None:
        """The host waits. Raises what the device makes of an error of its own."""

    def make_wait(self, stream: Any, event: Any) -> None:
        """A stream waits."""

    def allocate(self, nbytes: int, stream: Any) -> Any:
        """Memory for use on a stream; one byte or more.

        Raises
        ------
        MemoryError
            There is none.
        """

    def borrow(self, memory: Any) -> Any:
        """Somebody else's memory, of any library that has `__cuda_array_interface__`.

        It must live until nothing is queued on it.
        """

    def is_elsewhere(self, memory: Any) -> bool:
        """Whether somebody else's memory is known to be of another device."""

    def copy_in(self, stream: Any, memory: Any, start: int, source: Bytes) -> None:
        """Queue a copy. Host memory that is pinned has to live until it is done."""

    def copy_out(self, stream: Any, target: Bytes, memory: Any, start: int) -> None:
        """Queue a copy, or make it before this returns if the target is not pinned."""

    def copy_on(
        self, stream: Any, memory: Any, start: int, source: Any, source_start: int, nbytes: int
    ) -> None: ...

    def array(self, memory: Any, start: int, nbytes: int) -> Any:
        """Bytes as a one-dimensional array that a kernel can use."""

    def computing(self, stream: Any) -> AbstractContextManager[None]:
        """What is computed inside is queued on this stream."""

    def pin(self, nbytes: int) -> Bytes:
        """Host memory that copies go to and from at full speed, without anybody waiting.

        Raises
        ------
        MemoryError
            The system has none.
        """


class _Borrowed(NamedTuple):
    """An address, where CuPy's own memory has it too."""

    ptr: int


class CupyDriver:
    """A device of CUDA's.

    Parameters
    ----------
    number
        As CuPy counts them.

    Attributes
    ----------
    pool
        Where memory comes from: `rmm` if somebody has given RMM a pool by now, so that there is one
        with cuDF; else `cupy`.

    Raises
    ------
    RuntimeError
        There is no such device; `why_no_cuda` says why.
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
        """Handles are made on the thread's current device, which another library may have set."""
        device: AbstractContextManager[Any] = self._cupy.cuda.Device(self.number)
        return device

    @property
    def default_stream(self) -> Any:
        return self._cupy.cuda.Stream.null

    def open_stream(self, priority: Priority) -> Any:
        # Non-blocking: a stream that waits for CUDA's default stream would have every task that
        # uses that one wait for copies.
        with self._here():
            return self._cupy.cuda.Stream(non_blocking=True, priority=_PRIORITIES[priority])

    def record(self, stream: Any, timed: bool = False) -> Any:
        # A blocking event lets the processor go while somebody waits; tasks need it. The default
        # stream is that of the current device.
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
        stream.wait_event(event)

    def allocate(self, nbytes: int, stream: Any) -> Any:
        with self.computing(stream):
            if self.pool == "cupy":
                return self._cupy.cuda.alloc(nbytes)
            from rmm.allocators.cupy import rmm_cupy_allocator

            return rmm_cupy_allocator(nbytes)

    def borrow(self, memory: Any) -> Any:
        address, _ = memory.__cuda_array_interface__["data"]
        return _Borrowed(address)

    def is_elsewhere(self, memory: Any) -> bool:
        address, _ = memory.__cuda_array_interface__["data"]
        # Below 0 where CUDA knows of no device, as of memory of the system.
        number: int = self._runtime.pointerGetAttributes(address).device
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
        runtime.memcpyAsync(target, source, nbytes, getattr(runtime, f"memcpy{kind}"), stream.ptr)

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


def _rmm_has_a_pool(number: int) -> bool:
    """Not by itself: then it asks CUDA for each piece of memory, which has the device wait."""
    rmm = sys.modules.get("rmm")
    if rmm is None:
        return False
    resource = rmm.mr.get_per_device_resource(number)
    while isinstance(resource, rmm.mr.FailureCallbackResourceAdaptor):
        resource = resource.upstream_mr  # ours, for example, has no pool of its own
    return not isinstance(resource, rmm.mr.CudaMemoryResource)


def why_no_cuda(number: int = 0) -> str | None:
    """Why there is no device of this number to be used; None if there is one."""
    try:
        import cupy
    except ImportError as error:
        if error.name == "cupy":
            return "CuPy is not installed"
        # It wants a part of CUDA that is not there; the first line says which.
        return f"CuPy cannot be imported: {str(error).strip().partition(chr(10))[0]}"
    try:
        n_devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CUDA finds no device: {error}"
    if number >= n_devices:
        return f"CUDA has {n_devices} devices, and none of number {number}"
    return None

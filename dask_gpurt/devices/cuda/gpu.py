"""A GPU as a device of the port: CUDA streams, events and memory, with a budget.

A `Driver` (`devices.cuda.driver`) makes the CUDA calls. This module adds what CUDA lacks: a budget,
reuse of memory only after its last use, reports of failed kernels, and checks of arguments. It does
not detect hazards between streams. The emulated device does (`devices.emulated.emulated_device`).

The port says that copies return at once. A copy of unpinned host memory does not: CUDA copies it
through memory of its own. To avoid this, use a `devices.host_memory.pinned.PinnedPool` with the
driver's `pin`.

An error of the device itself, such as an invalid memory access, ends all work of the process on it.
Every call that waits for such work raises the error of the driver.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from dask_gpurt.devices.allocation_retry import wait_or_make_room
from dask_gpurt.devices.base import (
    BaseDevice,
    BaseStream,
    Span,
    require_copy,
    require_whole,
    source_bytes,
    target_bytes,
)
from dask_gpurt.devices.cuda.driver import Driver
from dask_gpurt.devices.cuda.kernel_times import DeviceTimes, pop_done
from dask_gpurt.devices.device import Buffer, Event, HostMemory, Priority, Stream
from dask_gpurt.devices.emulated.queues import Engine
from dask_gpurt.devices.host_memory.pool import Buffer as Bytes
from dask_gpurt.devices.ledger import Ledger
from dask_gpurt.devices.ordering import HazardError

#: Number of waiting entries below which a brief check suffices. A check costs up to 1 us an entry.
_FEW_WAITING = 64


class CudaEvent:
    """An event of a `CudaStream`.

    Attributes
    ----------
    error
        Error of a kernel before the event.
    """

    def __init__(self, device: CudaDevice, handle: Any, error: Exception | None) -> None:
        self.device = device
        self.handle = handle
        self.error = error

    def is_done(self) -> bool:
        return self.device.driver.is_done(self.handle)

    def synchronize(self) -> None:
        self.device.driver.wait_for(self.handle)
        if self.error is not None:
            raise self.error


class _CudaAllocation:
    """State that all buffers of one allocation share."""

    def __init__(self, device: CudaDevice, memory: Any, nbytes: int) -> None:
        self.device = device
        self.memory = memory
        self.nbytes = nbytes
        self.last_uses: list[Event] = []
        self.is_freed = False


class CudaBuffer(Span[_CudaAllocation]):
    """Memory of a `CudaDevice`, or part of it."""

    def free(self, stream: Stream) -> None:
        self.allocation.device._free(self, stream)


class CudaStream(BaseStream):
    """A stream of a `CudaDevice`.

    Attributes
    ----------
    handle
        The driver's stream: a `cupy.cuda.Stream`, which other libraries accept too.
    """

    def __init__(self, device: CudaDevice, name: str, priority: Priority, handle: Any) -> None:
        self.device: CudaDevice = device
        self.name = name
        self.priority = priority
        self.handle = handle
        #: Error of a kernel. The stream queues nothing after it.
        self.error: Exception | None = None
        #: Host memory of copies that no event follows yet.
        self.held: list[Bytes] = []

    def to_device(self, target: Buffer, source: HostMemory) -> None:
        (into,) = self.device._own_memory([target])
        data = source_bytes(source, into)
        if self._takes_work(data.nbytes):
            with self._timed(Engine.IN, data.nbytes):
                self.device.driver.copy_in(self.handle, into.allocation.memory, into.start, data)
            self.device._hold(self, data)

    def to_host(self, target: HostMemory, source: Buffer) -> None:
        (out_of,) = self.device._own_memory([source])
        data = target_bytes(target, out_of)
        if self._takes_work(data.nbytes):
            memory = out_of.allocation.memory
            with self._timed(Engine.OUT, data.nbytes):
                self.device.driver.copy_out(self.handle, data, memory, out_of.start)
            self.device._hold(self, data)

    def on_device(self, target: Buffer, source: Buffer) -> None:
        into, out_of = self.device._own_memory([target, source])
        require_copy(into, out_of)
        if self._takes_work(into.nbytes):
            with self._timed(Engine.COMPUTE, into.nbytes):
                self.device.driver.copy_on(
                    self.handle,
                    into.allocation.memory,
                    into.start,
                    out_of.allocation.memory,
                    out_of.start,
                    into.nbytes,
                )

    def launch(
        self,
        kernel: Callable[..., None],
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        buffers = self.device._own_memory([*reads, *writes])
        if not self._takes_work():
            return
        driver = self.device.driver
        arrays = [driver.array(one.allocation.memory, one.start, one.nbytes) for one in buffers]
        try:
            with self._timed(Engine.COMPUTE), driver.computing(self.handle):
                kernel(*arrays)
        except Exception as error:
            # Calls that wait raise the error, as on every device. The caller of `launch` may not
            # even know the kernel.
            self.error = error
            # The traceback would keep the memory alive as long as the stream.
            traceback.clear_frames(error.__traceback__)
            arrays.clear()

    def _timed(self, engine: Engine, nbytes: int = 0) -> AbstractContextManager[None]:
        times = self.device.times
        if times is None:
            return contextlib.nullcontext()
        return times.timed(self.handle, self.name, engine.value, nbytes)

    def _takes_work(self, nbytes: int = 1) -> bool:
        with self.device._lock:
            self.device._require_open()
            self.device._tidy_briefly()
        return self.error is None and nbytes > 0


class CudaDevice(BaseDevice):
    """A GPU as a device.

    Parameters
    ----------
    driver
        Makes the CUDA calls: a `CupyDriver`.
    capacity_nbytes
        Most bytes that can be allocated through this object. It is less than the device has,
        because other libraries of the process allocate as well.
    ledger
        Gets an entry for each piece of work, at a later call to the device. An entry may be delayed
        while older work of another stream runs. Entries cost two events for each piece of work.

    Attributes
    ----------
    times
        The object that adds the entries, or None without a ledger.
    """

    name = "cuda"

    def __init__(self, driver: Driver, capacity_nbytes: int, ledger: Ledger | None = None) -> None:
        super().__init__(threading.Lock())
        self.driver = driver
        self.capacity_nbytes = capacity_nbytes
        self._is_closed = False
        #: The stream of all allocations. Pools return memory to the stream that allocated it. With
        #: one stream for all, every stream of the device can reuse the memory.
        self._memory = driver.open_stream(Priority.NORMAL)
        self.times = DeviceTimes(driver, ledger, self._memory) if ledger is not None else None
        self._streams: list[CudaStream] = []
        self._used_nbytes = 0
        #: Live allocations. This reference keeps memory from being reused while work on it is
        #: queued, if its buffer is dropped without being freed.
        self._allocations: set[_CudaAllocation] = set()
        #: Queued frees, oldest first, with the events that complete them.
        self._freeing: deque[tuple[_CudaAllocation, Any]] = deque()
        #: Host memory that copies use, with the events that end the copies.
        self._held: deque[tuple[list[Bytes], Any]] = deque()
        #: Number of waiting entries from which on all of them are checked.
        self._most_waiting = _FEW_WAITING

    # ------------------------------------------------------------------ memory

    @property
    def used_nbytes(self) -> int:
        with self._lock:
            self._tidy()
            return self._used_nbytes

    def allocate(self, nbytes: int, stream: Stream) -> CudaBuffer:
        (mine,) = self._own([stream], CudaStream, "a stream")
        while True:
            with self._lock:
                self._require_open()
                self._tidy()
                missing_nbytes = self._used_nbytes + nbytes - self.capacity_nbytes
                used_nbytes = self._used_nbytes
                if missing_nbytes <= 0:
                    self._used_nbytes += nbytes
            problem: MemoryError | None = None
            if missing_nbytes <= 0:
                try:
                    return self._allocated(nbytes, mine)
                except MemoryError as error:
                    # Other libraries use the same memory, or the free memory is fragmented.
                    problem = error
                    missing_nbytes = nbytes
                    self._give_back(nbytes)
                except BaseException:
                    self._give_back(nbytes)
                    raise
            with self._lock:
                freeing_nbytes = sum(allocation.nbytes for allocation, _ in self._freeing)
                soon = self._freeing[0][1] if self._freeing else None
                callback = self._on_full
            wait = None
            if soon is not None and (problem is not None or missing_nbytes <= freeing_nbytes):
                wait = partial(self.driver.wait_for, soon)
            wait_or_make_room(self, nbytes, used_nbytes, wait, callback, problem)

    def _allocated(self, nbytes: int, stream: CudaStream) -> CudaBuffer:
        allocation = _CudaAllocation(
            self, self.driver.allocate(max(1, nbytes), self._memory), nbytes
        )
        self.driver.make_wait(stream.handle, self.driver.record(self._memory))
        with self._lock:
            self._allocations.add(allocation)
        return CudaBuffer(allocation, 0, nbytes)

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._used_nbytes -= nbytes

    def _free(self, buffer: CudaBuffer, stream: Stream) -> None:
        (mine,) = self._own([stream], CudaStream, "a stream")
        require_whole(buffer)
        with self._lock:
            self._require_open()
            if buffer.allocation.is_freed:
                raise HazardError("the memory is already freed")
            self._queue_free(buffer.allocation, mine)
            self._tidy_briefly()

    def _queue_free(self, allocation: _CudaAllocation, stream: CudaStream) -> None:
        # The host frees the memory after the event, not in stream order. A pool knows the stream
        # that allocated the memory, but not the last stream that used it.
        allocation.is_freed = True
        allocation.last_uses = []
        self._allocations.remove(allocation)
        self._freeing.append((allocation, self.driver.record(stream.handle)))

    def _tidy(self, is_brief: bool = False) -> None:
        """Free what is no longer in use, as `pop_done` finds it. The caller holds the lock."""
        while self._dead and not self._is_closed:
            buffer, stream = self._dead.popleft()
            for event in self._own(buffer.last_uses, CudaEvent, "an event"):
                self.driver.make_wait(stream.handle, event.handle)
            if not buffer.allocation.is_freed:
                self._queue_free(buffer.allocation, stream)
        for allocation in pop_done(self.driver, self._freeing, is_brief):
            allocation.memory = None
            self._used_nbytes -= allocation.nbytes
        for held in pop_done(self.driver, self._held, is_brief):
            held.clear()
        if self.times is not None:
            self.times.collect(is_brief)

    def _tidy_briefly(self) -> None:
        """Free some of what is no longer in use, at little cost. The caller holds the lock.

        It checks all waiting entries only if their number has doubled since the last full check.
        Without full checks, finished work would pile up behind one stalled stream.
        """
        if self._n_waiting() < self._most_waiting:
            self._tidy(is_brief=True)
        else:
            self._tidy()
            self._most_waiting = max(_FEW_WAITING, 2 * self._n_waiting())

    def _n_waiting(self) -> int:
        n_timed = len(self.times) if self.times is not None else 0
        return len(self._freeing) + len(self._held) + n_timed

    # ------------------------------------------------------------------ work

    def stream(self, name: str, priority: Priority = Priority.NORMAL) -> CudaStream:
        self._require_open()
        stream = CudaStream(self, name, priority, self.driver.open_stream(priority))
        with self._lock:
            self._streams.append(stream)
        return stream

    def close(self) -> None:
        """Stop the device. A GPU cannot take back queued work, so this waits for it."""
        with self._lock:
            if self._is_closed:
                return
            self._tidy()
            self._is_closed = True
            streams = self._streams
        for stream in streams:
            # Earlier calls that waited have raised the error of a failed device.
            with contextlib.suppress(Exception):
                self.driver.wait_for(self.driver.record(stream.handle))
        with self._lock, contextlib.suppress(Exception):
            self._tidy()

    def _record(self, stream: CudaStream) -> CudaEvent:
        with self._lock:
            self._require_open()
            event = CudaEvent(self, self.driver.record(stream.handle), stream.error)
            if stream.held:
                self._held.append((stream.held, event.handle))
                stream.held = []
            self._tidy_briefly()
            return event

    def _make_wait(self, stream: CudaStream, event: Event) -> None:
        (mine,) = self._own([event], CudaEvent, "an event")
        with self._lock:
            self._require_open()
            self.driver.make_wait(stream.handle, mine.handle)
            stream.error = stream.error or mine.error
            self._tidy_briefly()

    def _hold(self, stream: CudaStream, data: Bytes) -> None:
        """Keep host memory alive until the copy is done. CUDA does not do this.

        Call this after queueing the copy. Another thread may record an event at any time. Such an
        event must not cover a copy that is queued later.
        """
        with self._lock:
            stream.held.append(data)

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"device {self.name!r} is closed")

    def _own_memory(self, buffers: Iterable[Buffer]) -> list[CudaBuffer]:
        mine = self._own(buffers, CudaBuffer, "memory")
        for buffer in mine:
            if buffer.allocation.is_freed:
                raise HazardError("memory is used after it was freed")
        return mine

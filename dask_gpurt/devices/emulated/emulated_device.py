"""A device emulated in host memory: a budget, streams, copies that really copy, and no luck.

It works in one of two ways. *Threaded*: an engine for each direction of copies and one that
computes are threads, and work goes on while the host does something else. *Pumped*: nothing runs
until `pump` or until somebody waits, and then in an order that the caller chooses among all that
streams and events allow. Pumped memory that has no defined content yet (fresh, freed, or the
target of a copy to the host that has not run) is full of `POISON`.

In both, work that no event orders is a `HazardError` as soon as it is queued (`devices.ordering`).

What this does not emulate: the speed of a kernel, more than one kernel at a time, what memory
costs that is not pinned. Times are those of this machine, unless rates are given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

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
from dask_gpurt.devices.device import Buffer, Event, HostMemory, Priority, Stream
from dask_gpurt.devices.emulated.engines import (
    Engines,
    PumpedEngines,
    Rate,
    Runner,
    ThreadedEngines,
)
from dask_gpurt.devices.emulated.queues import Engine, Queue, Signal, Work
from dask_gpurt.devices.host_memory.pool import Buffer as Bytes
from dask_gpurt.devices.ledger import Ledger
from dask_gpurt.devices.ordering import Clock, HazardError, Use, Uses

#: What is in memory of a pumped device that has no content yet.
POISON = 0xA5


class EmulatedEvent:
    """Made by `EmulatedStream.record`."""

    def __init__(self, device: EmulatedDevice, clock: Clock) -> None:
        self.device = device
        #: What is over once this is done.
        self.clock = clock
        self.signal = Signal()

    def is_done(self) -> bool:
        return self.device._has_seen(self)

    def synchronize(self) -> None:
        self.device._wait_for(self)


class _Allocation:
    """What the buffers of one allocation share."""

    def __init__(self, device: EmulatedDevice, memory: Bytes) -> None:
        self.device = device
        self.memory: Bytes | None = memory
        self.nbytes = memory.nbytes
        self.uses = Uses()


class EmulatedBuffer(Span[_Allocation]):
    """Memory of a `EmulatedDevice`, or a part of it."""

    def free(self, stream: Stream) -> None:
        self.allocation.device._free(self, stream)

    def memory(self) -> Bytes:
        """Its bytes, while work on it runs."""
        memory = self.allocation.memory
        assert memory is not None, "work on memory that is free is refused"
        return memory[self.start : self.start + self.nbytes]


class EmulatedStream(BaseStream):
    """Made by `EmulatedDevice.stream`."""

    def __init__(self, device: EmulatedDevice, key: str, queue: Queue) -> None:
        self.device: EmulatedDevice = device
        #: Its name among clocks: no other stream has it.
        self.key = key
        self.queue = queue
        #: What the next piece of work comes after.
        self.clock = Clock()

    @property
    def name(self) -> str:
        return self.queue.name

    @property
    def priority(self) -> Priority:
        return self.queue.priority

    def to_device(self, target: Buffer, source: HostMemory) -> None:
        (into,) = self.device._own_memory([target])
        data = source_bytes(source, into)
        work = Work(lambda: np.copyto(into.memory(), data), Engine.IN, data.nbytes)
        self.device._queue(self, "a copy to the device", work, (), [into])

    def to_host(self, target: HostMemory, source: Buffer) -> None:
        (out_of,) = self.device._own_memory([source])
        data = target_bytes(target, out_of)
        work = Work(lambda: np.copyto(data, out_of.memory()), Engine.OUT, data.nbytes)
        self.device._queue(self, "a copy to the host", work, [out_of], (), data)

    def on_device(self, target: Buffer, source: Buffer) -> None:
        into, out_of = self.device._own_memory([target, source])
        require_copy(into, out_of)
        work = Work(lambda: np.copyto(into.memory(), out_of.memory()), Engine.COMPUTE, into.nbytes)
        self.device._queue(self, "a copy on the device", work, [out_of], [into])

    def launch(
        self,
        kernel: Callable[..., None],
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        sources, targets = self.device._own_memory(reads), self.device._own_memory(writes)

        def run() -> None:
            arrays = [source.memory() for source in sources]
            for array in arrays:
                array.flags.writeable = False
            kernel(*arrays, *(target.memory() for target in targets))

        name = f"kernel {getattr(kernel, '__name__', repr(kernel))}"
        self.device._queue(self, name, Work(run, Engine.COMPUTE), sources, targets)


class EmulatedDevice(BaseDevice):
    """A device emulated in host memory.

    Parameters
    ----------
    capacity_nbytes
        Most that can be allocated at a time.
    choose
        Makes this a pumped device. Called with the number of streams that could do something now,
        the one that was opened first being 0; returns which of them does. The method `randrange`
        of a random generator makes a seed of it.
    rates
        Of the engines; those not given go as fast as they can.
    ledger
        Where to enter what was done.
    clock, wait
        Seconds, and how to let so many pass: what rates are kept by, and the ledger's times.
    """

    name = "host"

    def __init__(
        self,
        capacity_nbytes: int,
        choose: Callable[[int], int] | None = None,
        rates: Mapping[Engine, Rate] | None = None,
        ledger: Ledger | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.capacity_nbytes = capacity_nbytes
        runner = Runner(rates or {}, ledger, clock, wait)
        self._engines: Engines
        if choose is None:
            self._engines = ThreadedEngines(runner, self.name)
        else:
            self._engines = PumpedEngines(runner, choose)
        self._is_pumped = choose is not None
        super().__init__(self._engines.changed)
        self._n_streams = 0
        self._used_nbytes = 0
        #: Memory whose freeing is queued, and when that is done.
        self._freeing: dict[_Allocation, Signal] = {}
        #: What the host has waited for.
        self._seen = Clock()
        self._late: HazardError | None = None

    # ------------------------------------------------------------------ memory

    @property
    def used_nbytes(self) -> int:
        with self._lock:
            self._free_dead()
            return self._used_nbytes

    def allocate(self, nbytes: int, stream: Stream) -> EmulatedBuffer:
        mine = self._own(stream, EmulatedStream, "a stream")
        while True:
            with self._lock:
                self._begin()
                missing_nbytes = self._used_nbytes + nbytes - self.capacity_nbytes
                if missing_nbytes <= 0:
                    return self._allocated(nbytes, mine)
                freeing_nbytes = sum(allocation.nbytes for allocation in self._freeing)
                soon = next(iter(self._freeing.values()), None)
                callback = self._on_full
                used_nbytes = self._used_nbytes
            wait = None
            if soon is not None and missing_nbytes <= freeing_nbytes:
                wait = partial(self._until, soon)
            wait_or_make_room(self, nbytes, used_nbytes, wait, callback)

    def _allocated(self, nbytes: int, stream: EmulatedStream) -> EmulatedBuffer:
        memory = np.empty(nbytes, dtype=np.uint8)
        if self._is_pumped:
            memory.fill(POISON)
        allocation = _Allocation(self, memory)
        allocation.uses.add(
            self._use(stream, "its allocation", 0, nbytes), stream.clock, self._seen
        )
        self._used_nbytes += nbytes
        return EmulatedBuffer(allocation, 0, nbytes)

    def _free(self, buffer: EmulatedBuffer, stream: Stream) -> None:
        mine = self._own(stream, EmulatedStream, "a stream")
        require_whole(buffer)
        with self._lock:
            self._begin()
            self._queue_free(buffer.allocation, mine)

    def _queue_free(self, allocation: _Allocation, stream: EmulatedStream) -> None:
        def release() -> None:
            with self._lock:
                if self._is_pumped and allocation.memory is not None:
                    allocation.memory.fill(POISON)
                allocation.memory = None
                self._used_nbytes -= allocation.nbytes
                del self._freeing[allocation]

        use = self._use(stream, "its freeing", 0, allocation.nbytes)
        allocation.uses.free(use, stream.clock, self._seen)
        signal = self._freeing[allocation] = Signal()
        self._engines.submit(stream.queue, Work(release, records=signal, always=True))

    def _free_dead(self) -> None:
        while self._dead and not self._engines.is_closed:
            buffer, stream, events = self._dead.popleft()
            for event in events:
                self._queue_wait(stream, event)
            try:
                self._queue_free(buffer.allocation, stream)
            except HazardError as error:
                self._late = self._late or error

    # ------------------------------------------------------------------ work

    def stream(self, name: str, priority: Priority = Priority.NORMAL) -> EmulatedStream:
        with self._lock:
            self._n_streams += 1
            key = f"{name} ({self._n_streams})"
            return EmulatedStream(self, key, self._engines.open(name, priority))

    def pump(self, n_steps: int | None = None) -> int:
        """Let streams do so many steps, or everything that is queued; how many they did.

        Raises
        ------
        RuntimeError
            This is not a pumped device.
        """
        if not isinstance(self._engines, PumpedEngines):
            raise RuntimeError("a device with threads of its own is not pumped")
        with self._lock:
            self._begin()
            n_done = 0
            while n_done != n_steps and self._engines.step():
                n_done += 1
            return n_done

    def close(self) -> None:
        self._engines.close()

    def _begin(self) -> None:
        """What every call does first; the lock is held."""
        self._engines.require_open()
        self._free_dead()
        if self._late is not None:
            late, self._late = self._late, None
            raise late

    def _use(
        self, stream: EmulatedStream, what: str, start: int, stop: int, writes: bool = True
    ) -> Use:
        """The next thing that a stream does."""
        stream.clock.merge(self._seen)
        number = stream.clock.tick(stream.key)
        return Use(what, stream.key, number, start, stop, writes)

    def _queue(
        self,
        stream: EmulatedStream,
        what: str,
        work: Work,
        reads: Sequence[EmulatedBuffer],
        writes: Sequence[EmulatedBuffer],
        undefined: Bytes | None = None,
    ) -> None:
        with self._lock:
            self._begin()
            uses = [
                (
                    buffer.allocation.uses,
                    self._use(stream, what, buffer.start, buffer.start + buffer.nbytes, is_write),
                )
                for buffers, is_write in ((reads, False), (writes, True))
                for buffer in buffers
            ]
            for known, use in uses:
                known.check(use, stream.clock)
            for known, use in uses:
                known.add(use, stream.clock, self._seen)
            if undefined is not None and self._is_pumped:
                undefined.fill(POISON)
            self._engines.submit(stream.queue, work)

    def _record(self, stream: EmulatedStream) -> EmulatedEvent:
        with self._lock:
            self._begin()
            stream.clock.merge(self._seen)
            event = EmulatedEvent(self, stream.clock.copy())
            self._engines.submit(stream.queue, Work(records=event.signal))
            return event

    def _make_wait(self, stream: EmulatedStream, event: Event) -> None:
        mine = self._own(event, EmulatedEvent, "an event")
        with self._lock:
            self._begin()
            self._queue_wait(stream, mine)

    def _queue_wait(self, stream: EmulatedStream, event: EmulatedEvent) -> None:
        stream.clock.merge(event.clock)
        self._engines.submit(stream.queue, Work(needs=event.signal))

    def _has_seen(self, event: EmulatedEvent) -> bool:
        with self._lock:
            if event.signal.is_done:
                self._seen.merge(event.clock)
            return event.signal.is_done

    def _until(self, signal: Signal) -> None:
        self._engines.until(lambda: signal.is_done)

    def _wait_for(self, event: EmulatedEvent) -> None:
        self._until(event.signal)
        with self._lock:
            self._free_dead()
            self._seen.merge(event.clock)
        if event.signal.error is not None:
            raise event.signal.error

    def _own_memory(self, buffers: Iterable[Buffer]) -> list[EmulatedBuffer]:
        return [self._own(buffer, EmulatedBuffer, "memory") for buffer in buffers]

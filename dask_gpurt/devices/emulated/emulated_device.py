"""A device emulated in host memory: a budget, streams, real copies, and detection of hazards.

The device is *threaded* or *pumped*. A threaded device has three threads: one for copies in each
direction and one for kernels. They run while the host does other work. A pumped device runs nothing
until `pump` or until the host waits. It then runs work in an order that the caller chooses, among
the orders that streams and events allow. It fills memory without defined content with `POISON`:
fresh memory, freed memory, and targets of copies to the host that have not run.

Both raise a `HazardError` as soon as work is queued that no event orders (`devices.ordering`).

The device does not emulate the speed of kernels, concurrent kernels, or the cost of unpinned
memory. Times are those of this machine, unless rates are given.
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

#: Content of a pumped device's undefined memory.
POISON = 0xA5


class EmulatedEvent:
    """An event of an `EmulatedStream`."""

    def __init__(self, device: EmulatedDevice, clock: Clock) -> None:
        self.device = device
        #: The work that is finished once the event is done.
        self.clock = clock
        self.signal = Signal()

    def is_done(self) -> bool:
        return self.device._has_seen(self)

    def synchronize(self) -> None:
        self.device._wait_for(self)


class _EmulatedAllocation:
    """State that all buffers of one allocation share."""

    def __init__(self, device: EmulatedDevice, memory: Bytes) -> None:
        self.device = device
        self.memory: Bytes | None = memory
        self.nbytes = memory.nbytes
        self.last_uses: list[Event] = []
        self.uses = Uses()


class EmulatedBuffer(Span[_EmulatedAllocation]):
    """Memory of an `EmulatedDevice`, or part of it."""

    def free(self, stream: Stream) -> None:
        self.allocation.device._free(self, stream)

    def memory(self) -> Bytes:
        """Return the bytes, for running work."""
        memory = self.allocation.memory
        assert memory is not None, "work on memory that is free is refused"
        return memory[self.start : self.start + self.nbytes]


class EmulatedStream(BaseStream):
    """A stream of an `EmulatedDevice`."""

    def __init__(self, device: EmulatedDevice, key: str, queue: Queue) -> None:
        self.device: EmulatedDevice = device
        #: Unique name of the stream in clocks.
        self.key = key
        self.queue = queue
        #: The clock of the next piece of work.
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
        Most bytes that can be allocated at the same time.
    choose
        Makes this a pumped device. It gets the number of streams that can run work now, and returns
        which of them does, counted in the order of opening. Pass `random.Random(seed).randrange`
        for a random order.
    rates
        Speed of the engines. Engines without a rate run as fast as they can.
    ledger
        Gets an entry for each piece of work.
    clock, wait
        Return the time in seconds, and sleep for some seconds. Rates and the ledger use them.
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
        #: Queued frees, with the signals that complete them.
        self._freeing: dict[_EmulatedAllocation, Signal] = {}
        #: The work that the host has waited for.
        self._seen = Clock()
        #: A hazard found by `_free_dead`. The next call to the device raises it.
        self._late: HazardError | None = None

    # ------------------------------------------------------------------ memory

    @property
    def used_nbytes(self) -> int:
        with self._lock:
            self._free_dead()
            return self._used_nbytes

    def allocate(self, nbytes: int, stream: Stream) -> EmulatedBuffer:
        (mine,) = self._own([stream], EmulatedStream, "a stream")
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
        allocation = _EmulatedAllocation(self, memory)
        allocation.uses.add(
            self._use(stream, "its allocation", 0, nbytes), stream.clock, self._seen
        )
        self._used_nbytes += nbytes
        return EmulatedBuffer(allocation, 0, nbytes)

    def _free(self, buffer: EmulatedBuffer, stream: Stream) -> None:
        (mine,) = self._own([stream], EmulatedStream, "a stream")
        require_whole(buffer)
        with self._lock:
            self._begin()
            self._queue_free(buffer.allocation, mine)

    def _queue_free(self, allocation: _EmulatedAllocation, stream: EmulatedStream) -> None:
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
            buffer, stream = self._dead.popleft()
            for event in buffer.last_uses:
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
        """Run up to `n_steps` pieces of queued work, or all of it; return how many ran.

        Raises
        ------
        RuntimeError
            This device is not pumped.
        """
        if not isinstance(self._engines, PumpedEngines):
            raise RuntimeError("a threaded device is not pumped")
        with self._lock:
            self._begin()
            n_done = 0
            while n_done != n_steps and self._engines.step():
                n_done += 1
            return n_done

    def close(self) -> None:
        self._engines.close()

    def _begin(self) -> None:
        """Do what every call does first. The caller holds the lock."""
        self._engines.require_open()
        self._free_dead()
        if self._late is not None:
            late, self._late = self._late, None
            raise late

    def _use(
        self, stream: EmulatedStream, what: str, start: int, stop: int, writes: bool = True
    ) -> Use:
        """Count one more piece of work of a stream and return its use of a buffer."""
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
        (mine,) = self._own([event], EmulatedEvent, "an event")
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
        return self._own(buffers, EmulatedBuffer, "memory")

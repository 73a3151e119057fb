"""An emulated driver for `CudaDevice` that needs no GPU and refuses what CUDA forbids.

Work is queued on the emulated device. So it runs late, and a pumped device runs it in an order that
depends on the seed. The emulated device detects missing order between streams (`devices.ordering`).
This module adds three properties of CUDA. Dropped memory is free at once and counts as used by the
stream that allocated it, as in CuPy's pool. Copies do not keep host memory alive. Kernels are
called at once, with arrays whose arithmetic is queued on the current stream.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref

import numpy as np

from dask_gpurt.devices.emulated.emulated_device import POISON, EmulatedDevice


class Memory:
    """Memory of the driver. Dropped memory is free."""

    def __init__(self, driver, buffer, stream):
        self.driver = driver
        self.buffer = buffer
        self._stream = stream

    def __del__(self):
        self.driver.host.free_later(self.buffer, self._stream)


class LazyArray:
    """An array with the part of CuPy's interface that the tests' kernels use."""

    def __init__(self, memory, start, nbytes):
        self.memory = memory
        self.span = memory.buffer.part(start, nbytes)

    @property
    def nbytes(self):
        return self.span.nbytes

    @property
    def __cuda_array_interface__(self):
        """Enough of the interface to pass for GPU memory."""
        return {"data": (id(self.memory), False), "shape": (self.nbytes,), "typestr": "|u1"}

    def _queue(self, compute, *others):
        arrays = [other for other in others if isinstance(other, LazyArray)]

        def kernel(*memory):
            *sources, target = memory
            values = iter(sources)
            terms = [next(values) if isinstance(one, LazyArray) else one for one in others]
            target[:] = compute(target, *terms)

        stream = self.memory.driver.current_stream()
        stream.launch(kernel, [array.span for array in arrays], [self.span])

    def __iadd__(self, other):
        self._queue(lambda mine, theirs: mine + theirs, other)
        return self

    def __imul__(self, other):
        self._queue(lambda mine, theirs: mine * theirs, other)
        return self

    def __sub__(self, other):
        return lambda target: target._queue(lambda _, a, b: a - b, self, other)

    def __setitem__(self, where, queue_on):
        assert where == slice(None)
        queue_on(self)


class Event:
    """An event of the driver. Its destructor destroys it, as in CuPy.

    The garbage collector may call the destructor of an event in a cycle before any other.
    """

    def __init__(self, event, at):
        self._event = event
        self.at = at

    @property
    def event(self):
        assert self._event is not None, "an event is used after it was destroyed"
        return self._event

    def __del__(self):
        self._event = None


class EmulatedCuda:
    """The emulated driver.

    Parameters
    ----------
    total_nbytes
        Size of the memory. If it is less than the budget of the device above, allocations fail.
    choose
        As in `EmulatedDevice`: which stream runs next.
    """

    name = "emulated"

    def __init__(self, total_nbytes, choose=None):
        self.total_nbytes = total_nbytes
        self.host = EmulatedDevice(total_nbytes, choose=choose)
        self.is_pumped = choose is not None
        self.n_allocations = 0
        self.default_stream = self.host.stream("default")
        self._current = threading.local()
        self._ticks = itertools.count()

    def open_stream(self, priority):
        return self.host.stream("emulated", priority)

    def record(self, stream, timed=False):
        """Record an event. A timed event stores the number of pieces of work before it."""
        at = []
        if timed:
            stream.launch(lambda: at.append(next(self._ticks)))
        return Event(stream.record(), at)

    def is_done(self, event):
        return event.event.is_done()

    def seconds_between(self, first, second):
        done = self.is_done(first) and self.is_done(second)
        assert done, "CUDA tells no time of what is not done"
        return float(second.at[0] - first.at[0])

    def wait_for(self, event):
        event.event.synchronize()

    def make_wait(self, stream, event):
        stream.wait(event.event)

    def allocate(self, nbytes, stream):
        assert nbytes > 0, "CUDA has no memory of no bytes"
        self.n_allocations += 1
        return Memory(self, self.host.allocate(nbytes, stream), stream)

    def borrow(self, memory):
        return memory.memory

    def is_elsewhere(self, memory):
        return memory.memory.driver is not self

    def copy_in(self, stream, memory, start, source):
        assert source.nbytes
        alive = weakref.ref(source)

        def copy_in(target):
            target[:] = _still_there(alive)

        stream.launch(copy_in, writes=[memory.buffer.part(start, source.nbytes)])

    def copy_out(self, stream, target, memory, start):
        assert target.nbytes
        alive = weakref.ref(target)

        def copy_out(source):
            _still_there(alive)[:] = source

        stream.launch(copy_out, [memory.buffer.part(start, target.nbytes)])
        if self.is_pumped:
            target.fill(POISON)

    def copy_on(self, stream, memory, start, source, source_start, nbytes):
        target, source = memory.buffer.part(start, nbytes), source.buffer.part(source_start, nbytes)
        stream.on_device(target, source)

    def array(self, memory, start, nbytes):
        return LazyArray(memory, start, nbytes)

    @contextlib.contextmanager
    def computing(self, stream):
        outer = getattr(self._current, "stream", None)
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = outer

    def current_stream(self):
        stream = getattr(self._current, "stream", None)
        assert stream is not None, "computes on CUDA's default stream"
        return stream

    def pin(self, nbytes):
        return np.empty(nbytes, dtype=np.uint8)


def _still_there(alive):
    array = alive()
    assert array is not None, "the host memory of a copy is gone before the copy ran"
    return array

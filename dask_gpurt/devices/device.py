"""The port of a device: memory of a fixed size, and asynchronous streams of work.

The port has what the store, the shuffle and gathers need of a GPU, and no more. This is memory with
a budget, copies in three directions, kernels, and events that order them. It has no default stream
and no synchronization of the whole device. Callers wait for a stream or an event.

Every device keeps these rules:

- Work on one stream runs in the order in which it was queued. Work on two streams has no order,
  unless one stream waits for an event of the other.
- If two streams use the same memory and one of them writes, an event must order them. Allocating
  counts as a write on the stream of the allocation. Freeing counts as a write too.
- The host memory of a copy belongs to the stream while the copy is in flight. That is from the call
  that queues the copy until an event recorded after it is done.
- After a kernel raises, its stream and all streams that wait for it run nothing more. Queued frees
  still happen.
- The priority of a stream decides which kernel starts next. It never stops a running kernel and
  does not affect copies.

`devices.emulated.emulated_device` emulates a device in host memory. It keeps these rules and
reports programs that break them. Every device must pass `tests/conformance/device_suite.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

#: Host memory that a copy reads or writes: a contiguous array of any dtype.
HostMemory = npt.NDArray[Any]

#: A callback for a full device. It gets the bytes wanted and returns whether to retry.
OnFull = Callable[[int], bool]


class Priority(enum.IntEnum):
    """Which kernel starts first if two could. Smaller numbers go first, as in CUDA."""

    HIGH = -1
    NORMAL = 0
    LOW = 1


class Buffer(Protocol):
    """Memory of a device, or a part of such memory."""

    @property
    def nbytes(self) -> int: ...

    @property
    def last_uses(self) -> list[Event]:
        """Events that `Device.free_later` waits for, of all parts of the memory. Callers fill it.

        The device keeps the list, so that the garbage collector does not. It calls destructors of
        garbage in any order, and that of CuPy's event destroys the event.
        """

    def part(self, start: int, nbytes: int) -> Buffer:
        """Return a view of the memory. The view is valid until the memory is freed.

        Raises
        ------
        IndexError
            The buffer has fewer bytes.
        """

    def free(self, stream: Stream) -> None:
        """Free the memory after the work that is queued on the stream now.

        The buffer and its parts must not be used after this call.
        """


class Event(Protocol):
    """A point in the work of a stream."""

    def is_done(self) -> bool:
        """Return whether the stream has reached the event. Does not wait."""

    def synchronize(self) -> None:
        """Wait until the stream has reached the event.

        Raises
        ------
        Exception
            The error of a kernel before the event.
        """


class Stream(Protocol):
    """A queue of work in order. All methods except `synchronize` return at once."""

    @property
    def name(self) -> str: ...

    @property
    def priority(self) -> Priority: ...

    def to_device(self, target: Buffer, source: HostMemory) -> None:
        """Copy host memory to the device.

        Raises
        ------
        ValueError
            The two differ in length, or the host memory is not contiguous. This applies to
            `to_host` and `on_device` as well.
        """

    def to_host(self, target: HostMemory, source: Buffer) -> None:
        """Copy device memory to the host. Read it after an event recorded later is done."""

    def on_device(self, target: Buffer, source: Buffer) -> None:
        """Copy within the device. The two buffers must not overlap."""

    def launch(
        self,
        kernel: Callable[..., None],
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        """Run a kernel.

        Parameters
        ----------
        kernel
            The function to call. Its arguments are the bytes of each of `reads`, then of each of
            `writes`, as one-dimensional arrays of the device's array library. It must use no other
            device memory and must not write to `reads`. The device decides when it calls the
            kernel, and in which thread. A GPU calls it at once, and the kernel queues its work.
        """

    def record(self) -> Event:
        """Return an event at the end of the work queued so far."""

    def wait(self, event: Event) -> None:
        """Start work that is queued on this stream from now on only after the event is done."""

    def synchronize(self) -> None:
        """Wait for the work queued on this stream; raise the error of a kernel in it."""


class Device(Protocol):
    """Memory and streams. All methods are safe to call from any thread."""

    @property
    def name(self) -> str: ...

    @property
    def capacity_nbytes(self) -> int:
        """Most bytes that can be allocated at the same time."""

    @property
    def used_nbytes(self) -> int:
        """Allocated bytes. A queued free counts until its stream has reached it."""

    def allocate(self, nbytes: int, stream: Stream) -> Buffer:
        """Return uninitialized memory for this stream and for streams that wait for it.

        If queued frees will make enough room, this call waits for them. Otherwise it calls the
        callback of `on_full`, with no lock held, until there is room or the callback returns False.

        Raises
        ------
        MemoryError
            The device has no room.
        """

    def on_full(self, callback: OnFull | None) -> None:
        """Replace the callback that is called when the device has no room."""

    def stream(self, name: str, priority: Priority = Priority.NORMAL) -> Stream:
        """Return a new stream. It lives as long as the device, so open few of them.

        Ledger entries and messages show the name.
        """

    def free_later(self, buffer: Buffer, stream: Stream) -> None:
        """Free memory on a stream after its `last_uses`. For use in destructors.

        This method takes no lock and raises nothing. The next call to the device frees the memory.
        """

    def close(self) -> None:
        """Stop the device.

        An emulated device drops work that has not started; waiting for such work raises
        RuntimeError. A GPU cannot take back queued work, so closing waits for it.
        """

"""The port of a device: memory of a fixed size, and streams of work that the host only queues.

As small as what the store, the shuffle and gathers need of a GPU: memory with a budget, copies in
three directions, kernels, and events that order them. There is no synchronisation of a whole
device, and no default stream: whoever waits says for what.

What holds on every device:

- Work on one stream runs in the order it was queued. Work on two streams has no order, unless the
  one waits for an event of the other.
- Whatever two streams both touch, and one of them writes, has to be ordered by an event. To
  allocate counts as a write on the stream it is done for, and so does to free.
- The memory of a copy's host end belongs to the stream from the moment the copy is queued until an
  event after it is done.
- After a kernel that raised, nothing more of its stream is run, nor of streams that wait for it.
  Memory whose freeing is queued is freed all the same.
- Urgency decides which kernel begins next, never stops one that runs, and means nothing to copies.

`devices.emulated.emulated_device` is a device emulated in host memory, which breaks none of these
and reports whoever does. `tests/conformance/device_suite.py` is the suite every device has to pass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

#: Host memory at one end of a copy: contiguous, of any type.
HostMemory = npt.NDArray[Any]

#: Asked for room of so many bytes when there is none; True if it is worth trying again.
OnFull = Callable[[int], bool]


class Priority(enum.IntEnum):
    """Which of two pieces of work that could begin does; the smaller number, as in CUDA."""

    HIGH = -1
    NORMAL = 0
    LOW = 1


class Buffer(Protocol):
    """Memory of a device, or a part of such memory."""

    @property
    def nbytes(self) -> int: ...

    def part(self, start: int, nbytes: int) -> Buffer:
        """Some of the same memory, as long as it is not freed.

        Raises
        ------
        IndexError
            There are not so many bytes.
        """

    def free(self, stream: Stream) -> None:
        """Let go of the memory once the stream has done what is queued on it now.

        The buffer and its parts cannot be used any more from here on.
        """


class Event(Protocol):
    """A point in the work of a stream."""

    def is_done(self) -> bool:
        """Whether the stream has got there; does not wait."""

    def synchronize(self) -> None:
        """Wait until the stream has got there.

        Raises
        ------
        Exception
            What a kernel before it raised.
        """


class Stream(Protocol):
    """Work in order. Every method returns at once, but for `synchronize`."""

    @property
    def name(self) -> str: ...

    @property
    def priority(self) -> Priority: ...

    def to_device(self, target: Buffer, source: HostMemory) -> None:
        """Copy host memory to the device.

        Raises
        ------
        ValueError
            The two are not of one length, or the host memory is not contiguous. Likewise below.
        """

    def to_host(self, target: HostMemory, source: Buffer) -> None:
        """Copy memory of the device to the host. It is there once an event after this is done."""

    def on_device(self, target: Buffer, source: Buffer) -> None:
        """Copy within the device; the two must not overlap."""

    def launch(
        self,
        kernel: Callable[..., None],
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        """Compute.

        Parameters
        ----------
        kernel
            Called with the bytes of each of `reads`, then of each of `writes`, as one-dimensional
            arrays of the device's array library. It uses nothing else of the device, and leaves
            what it only reads as it is. When it is called, and by which thread, is the device's
            business: on a GPU at once, to queue what it does.
        """

    def record(self) -> Event:
        """The point that has been queued so far."""

    def wait(self, event: Event) -> None:
        """Whatever is queued on this stream from now on begins after the event is done."""

    def synchronize(self) -> None:
        """Wait for what is queued on this stream now; raises what a kernel in it raised."""


class Device(Protocol):
    """Memory and streams. Every method may be called from any thread."""

    @property
    def name(self) -> str: ...

    @property
    def capacity_nbytes(self) -> int:
        """Most bytes that can be allocated at a time."""

    @property
    def used_nbytes(self) -> int:
        """Bytes allocated; those that are freed count until their stream has got there."""

    def allocate(self, nbytes: int, stream: Stream) -> Buffer:
        """Uninitialised memory, for use on this stream and on those that wait for it.

        Waits for memory whose freeing is queued if that will do. If not, what was registered by
        `on_full` is called with no lock held, again and again until there is room or it gives up.

        Raises
        ------
        MemoryError
            There is no room.
        """

    def on_full(self, callback: OnFull | None) -> None:
        """What to call when there is no room, instead of what was registered before."""

    def stream(self, name: str, priority: Priority = Priority.NORMAL) -> Stream:
        """A new stream; they are few, and live as long as the device.

        The name is what ledgers and messages call it.
        """

    def free_later(self, buffer: Buffer, stream: Stream, events: Iterable[Event]) -> None:
        """Free memory on a stream, after some events; for destructors.

        Takes no lock, raises nothing, and happens with the next call to the device.
        """

    def close(self) -> None:
        """Stop. Work that has not begun is dropped, and whoever waits for it gets a RuntimeError;
        or it is waited for, where it cannot be taken back."""

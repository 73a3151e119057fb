"""Queues of the emulated device's streams, and the choice of the work that starts next.

A GPU has an engine for copies in each direction, and one for kernels. Here, each engine does one
thing at a time, and all streams share the engines. Ordering work (record, wait, free) needs no
engine.

This module holds state and makes decisions. `devices.emulated.emulated_device` runs the work and
holds a lock around every call.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dask_gpurt.devices.device import Priority


class Engine(enum.Enum):
    """Engines of a device. The values are the paths of ledger entries."""

    IN = "host to device"
    OUT = "device to host"
    COMPUTE = "device"


@dataclass(eq=False)
class Signal:
    """The state of an event: whether it is done, and the error of earlier work."""

    is_done: bool = False
    error: BaseException | None = None


@dataclass(eq=False)
class Work:
    """A piece of work of a stream.

    Attributes
    ----------
    run
        Does the work.
    engine
        The engine that is busy meanwhile; None if the work takes no time.
    nbytes
        Bytes moved.
    needs
        The stream waits for this signal before the work.
    records
        The work completes this signal.
    always
        Run the work even if earlier work failed.
    number
        Serial number among the work of all streams.
    """

    run: Callable[[], None] = lambda: None
    engine: Engine | None = None
    nbytes: int = 0
    needs: Signal | None = None
    records: Signal | None = None
    always: bool = False
    number: int = 0


@dataclass(eq=False)
class Queue:
    """The queued work of one stream.

    Attributes
    ----------
    is_busy
        The first piece of work is running.
    error
        Error of a kernel. The work queued after it does not run.
    """

    name: str
    priority: Priority
    work: deque[Work] = field(default_factory=deque)
    is_busy: bool = False
    error: BaseException | None = None


class Queues:
    """The queues of a device."""

    def __init__(self) -> None:
        self._queues: list[Queue] = []
        self._n_queued = 0

    def open(self, name: str, priority: Priority) -> Queue:
        queue = Queue(name, priority)
        self._queues.append(queue)
        return queue

    def append(self, queue: Queue, work: Work) -> None:
        self._n_queued += 1
        work.number = self._n_queued
        queue.work.append(work)

    def ready(self) -> list[Queue]:
        """Return the queues whose first piece of work can start, in the order of opening."""
        return [queue for queue in self._queues if _can_begin(queue)]

    def next_for(self, engine: Engine | None) -> Queue | None:
        """Return the queue that an idle engine serves next, or None.

        Kernels of higher priority start first, as on a GPU. Copies start in the order in which they
        were queued.
        """
        best = None
        for queue in self.ready():
            first = queue.work[0]
            if first.engine is not engine:
                continue
            urgency = queue.priority if engine is Engine.COMPUTE else Priority.NORMAL
            if best is None or (urgency, first.number) < best[0]:
                best = (urgency, first.number), queue
        return None if best is None else best[1]

    def begin(self, queue: Queue) -> Work | None:
        """Take the first piece of work of a ready queue. Return None if it must not run."""
        queue.is_busy = True
        work = queue.work[0]
        if work.needs is not None and queue.error is None:
            queue.error = work.needs.error
        return work if queue.error is None or work.always else None

    def finish(self, queue: Queue, error: BaseException | None) -> None:
        """Remove the first piece of work of a queue and complete its signal."""
        queue.is_busy = False
        work = queue.work.popleft()
        if queue.error is None:
            queue.error = error
        if work.records is not None:
            work.records.error = queue.error
            work.records.is_done = True

    def drop(self) -> None:
        """Drop work that has not started."""
        for queue in self._queues:
            begun = list(queue.work)[:1] if queue.is_busy else []
            queue.work = deque(begun)


def _can_begin(queue: Queue) -> bool:
    if queue.is_busy or not queue.work:
        return False
    needs = queue.work[0].needs
    return needs is None or needs.is_done

"""The streams of the emulated device as queues, and which of their work may begin next.

A GPU has an engine for copies in each direction and one that computes; each does one thing at a
time here. Streams share them. What only orders (record, wait, free) needs no engine.

State and decisions only: `devices.emulated.emulated_device` runs the work, and holds a lock around
every call.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dask_gpurt.devices.device import Priority


class Engine(enum.Enum):
    """What does work that takes time; the values are the paths in a ledger."""

    IN = "host to device"
    OUT = "device to host"
    COMPUTE = "device"


@dataclass(eq=False)
class Signal:
    """An event's state: whether it happened, and what went wrong before."""

    is_done: bool = False
    error: BaseException | None = None


@dataclass(eq=False)
class Work:
    """Something a stream does in its turn.

    Attributes
    ----------
    run
        Does it.
    engine
        What it keeps busy; None if it takes no time.
    nbytes
        What it moves.
    needs
        Nothing of this stream goes on before this happens.
    records
        What happens with it.
    always
        Done even if something before it failed.
    number
        In the order in which work of all streams was queued.
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
    """The work of one stream.

    Attributes
    ----------
    is_busy
        The first piece of work has been taken and is not finished.
    error
        Of a kernel that failed. What is queued behind it is not run.
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
        """Those whose first piece of work could begin; the order is that of their opening."""
        return [queue for queue in self._queues if _can_begin(queue)]

    def next_for(self, engine: Engine | None) -> Queue | None:
        """The one that goes first on an idle engine.

        The more urgent first where kernels are concerned, as on a GPU; copies in the order in which
        they were queued.
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
        """Take the first piece of work of a ready queue; None if it must not be run."""
        queue.is_busy = True
        work = queue.work[0]
        if work.needs is not None and queue.error is None:
            queue.error = work.needs.error
        return work if queue.error is None or work.always else None

    def finish(self, queue: Queue, error: BaseException | None) -> None:
        """The first piece of work of a queue is done with."""
        queue.is_busy = False
        work = queue.work.popleft()
        if queue.error is None:
            queue.error = error
        if work.records is not None:
            work.records.error = queue.error
            work.records.is_done = True

    def drop(self) -> None:
        """Forget what has not begun."""
        for queue in self._queues:
            begun = list(queue.work)[:1] if queue.is_busy else []
            queue.work = deque(begun)


def _can_begin(queue: Queue) -> bool:
    if queue.is_busy or not queue.work:
        return False
    needs = queue.work[0].needs
    return needs is None or needs.is_done

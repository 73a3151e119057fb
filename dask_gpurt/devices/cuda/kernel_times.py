"""Start and end times of GPU work, entered into a ledger on the ledger's clock.

Two events around each piece of work give its times. They are read when both are done, so nothing
waits for them. A piece starts when its stream is otherwise idle. So its time includes any wait for
an engine that another stream uses.

This module knows no budgets and no hazards. `devices.cuda.gpu` calls it, and holds its lock when it
collects.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from dask_gpurt.devices.cuda.driver import Driver
from dask_gpurt.devices.cuda.ranges import range_
from dask_gpurt.devices.ledger import Ledger, LedgerEntry

#: CUDA returns times between events in milliseconds as 32-bit floats. After a minute, these are
#: accurate to a few microseconds. After hours, they are useless.
_FAR_S = 60.0

T = TypeVar("T")


class _TimedWork(NamedTuple):
    lane: str
    path: str
    nbytes: int
    began: Any
    ended: Any


def pop_done(driver: Driver, waiting: deque[tuple[T, Any]], is_brief: bool) -> Iterator[T]:
    """Remove and yield the items whose events are done, oldest first.

    Parameters
    ----------
    waiting
        Items with their events. Other threads may append to it, but not remove.
    is_brief
        Stop at the first item whose event is not done.
    """
    for _ in range(len(waiting)):
        if driver.is_done(waiting[0][1]):
            yield waiting.popleft()[0]
        elif is_brief:
            return
        else:
            waiting.rotate(-1)


class DeviceTimes:
    """A recorder of the times of work on the streams of a device.

    Parameters
    ----------
    stream
        An idle stream. The offset between the two clocks is measured on it.
    """

    def __init__(self, driver: Driver, ledger: Ledger, stream: Any) -> None:
        self._driver = driver
        self._ledger = ledger
        self._zero = driver.record(stream, timed=True)
        driver.wait_for(self._zero)
        #: Time of the event `_zero` on the ledger's clock.
        self._zero_s = ledger.clock()
        # A deque, because many threads use streams.
        self._pieces: deque[tuple[_TimedWork, Any]] = deque()

    def __len__(self) -> int:
        """Number of pieces that are not in the ledger yet."""
        return len(self._pieces)

    @contextlib.contextmanager
    def timed(self, stream: Any, lane: str, path: str, nbytes: int = 0) -> Iterator[None]:
        """Time the work that the `with` statement queues on a stream.

        A profiler that listens shows it under a range of the same lane and path.
        """
        began = self._driver.record(stream, timed=True)
        with range_(lane, path):
            yield
        ended = self._driver.record(stream, timed=True)
        self._pieces.append((_TimedWork(lane, path, nbytes, began, ended), ended))

    def collect(self, is_brief: bool = False) -> None:
        """Enter finished pieces into the ledger. Only one thread may call this at a time."""
        for piece in pop_done(self._driver, self._pieces, is_brief):
            since_s = self._driver.seconds_between(self._zero, piece.began)
            start_s = self._zero_s + since_s
            took_s = self._driver.seconds_between(piece.began, piece.ended)
            self._ledger.add(
                LedgerEntry(piece.lane, piece.path, piece.nbytes, start_s, start_s + took_s)
            )
            if since_s > _FAR_S:
                self._zero, self._zero_s = piece.began, start_s

"""Work of a GPU in a ledger: when it began and ended there, in the time of the ledger's clock.

Two events are recorded around each piece of work, and looked at when both are done: nothing waits
for them. A piece begins when its stream has nothing else to do, so the time in which it waits for
an engine that another stream uses is counted with it.

Knows neither budgets nor hazards; `devices.cuda.gpu` calls it, with its lock held where it
collects.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from dask_gpurt.devices.cuda.driver import Driver
from dask_gpurt.devices.ledger import Entry, Ledger

#: CUDA tells times between events in milliseconds as 32-bit floats: after a minute they are good
#: for a few microseconds, after hours for nothing.
_FAR_S = 60.0

T = TypeVar("T")


class _Piece(NamedTuple):
    lane: str
    path: str
    nbytes: int
    began: Any
    ended: Any


def pop_done(driver: Driver, waiting: deque[tuple[T, Any]], is_brief: bool) -> Iterator[T]:
    """What waits for an event that is done, oldest first, and no longer does.

    Parameters
    ----------
    waiting
        With their events. Others may append meanwhile, none may take.
    is_brief
        Look no further than the oldest that is not done.
    """
    for _ in range(len(waiting)):
        if driver.is_done(waiting[0][1]):
            yield waiting.popleft()[0]
        elif is_brief:
            return
        else:
            waiting.rotate(-1)


class DeviceTimes:
    """Enters what was done on the streams of a device.

    Parameters
    ----------
    stream
        One that is idle: what the two clocks have in common is measured on it.
    """

    def __init__(self, driver: Driver, ledger: Ledger, stream: Any) -> None:
        self._driver = driver
        self._ledger = ledger
        self._zero = driver.record(stream, timed=True)
        driver.wait_for(self._zero)
        #: By the ledger's clock.
        self._zero_s = ledger.clock()
        # A deque: streams are used by many threads.
        self._pieces: deque[tuple[_Piece, Any]] = deque()

    def __len__(self) -> int:
        """Pieces that are not entered yet."""
        return len(self._pieces)

    @contextlib.contextmanager
    def timed(self, stream: Any, lane: str, path: str, nbytes: int = 0) -> Iterator[None]:
        """What is queued inside, on a stream of the driver's."""
        began = self._driver.record(stream, timed=True)
        yield
        ended = self._driver.record(stream, timed=True)
        self._pieces.append((_Piece(lane, path, nbytes, began, ended), ended))

    def collect(self, is_brief: bool = False) -> None:
        """Enter what is done by now, as `pop_done` finds it; by one thread at a time."""
        for piece in pop_done(self._driver, self._pieces, is_brief):
            since_s = self._driver.seconds_between(self._zero, piece.began)
            start_s = self._zero_s + since_s
            took_s = self._driver.seconds_between(piece.began, piece.ended)
            self._ledger.add(Entry(piece.lane, piece.path, piece.nbytes, start_s, start_s + took_s))
            if since_s > _FAR_S:
                self._zero, self._zero_s = piece.began, start_s

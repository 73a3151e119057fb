"""Virtual time: a queue of things to do, in an order that is always the same.

Time stands still while something is done and jumps to the next thing when it is done. Two things
at the same time are done in the order in which they were asked for, whatever asked.

Nothing here waits, and nothing reads a real clock. `dask_gpurt.plugins.simulation.virtual_loop` is
the asyncio face of this queue.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Event:
    """Something that will be done at a time, unless it is cancelled before."""

    __slots__ = ("cancelled", "do", "when_s")

    def __init__(self, when_s: float, do: Callable[[], object]) -> None:
        self.when_s = when_s
        self.do = do
        self.cancelled = False

    def cancel(self) -> None:
        """Do nothing when the time comes; harmless afterwards."""
        self.cancelled = True


class VirtualClock:
    """The time of a simulation, and what is still to be done in it.

    Attributes
    ----------
    now_s
        Seconds since the simulation began.
    done_count
        How many events were done so far.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.done_count = 0
        self._queue: list[tuple[float, int, Event]] = []
        self._sequence = itertools.count()

    def call_at(self, when_s: float, do: Callable[[], object]) -> Event:
        """Have something done at a time; what is in the past is done next, at the present time."""
        event = Event(max(when_s, self.now_s), do)
        heapq.heappush(self._queue, (event.when_s, next(self._sequence), event))
        return event

    def call_later(self, delay_s: float, do: Callable[[], object]) -> Event:
        """Have something done after a delay; 0 means after what is already due now."""
        return self.call_at(self.now_s + delay_s, do)

    def step(self) -> bool:
        """Do the next thing; False if there is none, and then time stands still for ever."""
        while self._queue:
            when_s, _, event = heapq.heappop(self._queue)
            if event.cancelled:
                continue
            self.now_s = when_s
            self.done_count += 1
            event.do()
            return True
        return False

"""Virtual time: a deterministic queue of events.

Time stands still during an event, then jumps to the next one. Events at the same time run in the
order in which they were scheduled.

Nothing here waits or reads a real clock. `dask_gpurt.plugins.simulation.virtual_loop` is the
asyncio interface to this queue.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class ClockEvent:
    """A call scheduled for a time, which can be cancelled."""

    __slots__ = ("cancelled", "do", "when_s")

    def __init__(self, when_s: float, do: Callable[[], object]) -> None:
        self.when_s = when_s
        self.do = do
        self.cancelled = False

    def cancel(self) -> None:
        """Skip the call. Harmless after it."""
        self.cancelled = True


class VirtualClock:
    """The time of a simulation, and its queue of events.

    Attributes
    ----------
    now_s
        Seconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, ClockEvent]] = []
        self._sequence = itertools.count()

    def call_at(self, when_s: float, do: Callable[[], object]) -> ClockEvent:
        """Schedule a call for a time. A time in the past means now."""
        event = ClockEvent(max(when_s, self.now_s), do)
        heapq.heappush(self._queue, (event.when_s, next(self._sequence), event))
        return event

    def call_later(self, delay_s: float, do: Callable[[], object]) -> ClockEvent:
        """Schedule a call after a delay; 0 means after all calls that are already due."""
        return self.call_at(self.now_s + delay_s, do)

    def step(self) -> bool:
        """Run the next event. Return False if there is none."""
        while self._queue:
            when_s, _, event = heapq.heappop(self._queue)
            if event.cancelled:
                continue
            self.now_s = when_s
            event.do()
            return True
        return False

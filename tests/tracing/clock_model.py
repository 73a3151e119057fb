"""Clocks that go differently, and exchanges over links with known delays."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dask_gpurt.tracing.clocks import ClockExchange


@dataclass(frozen=True)
class SkewedClock:
    """A clock with an offset and a drift."""

    offset_s: float = 0.0
    drift: float = 0.0

    def read(self, true_s: float) -> float:
        return true_s * (1 + self.drift) + self.offset_s


@dataclass(frozen=True)
class DelayedLink:
    """A link with fixed delays in both directions, and random ones besides."""

    there_s: float
    back_s: float
    jitter_s: float = 0.0

    def exchange(self, clock: SkewedClock, at_s: float, rng: random.Random) -> ClockExchange:
        asked_s = at_s + self.there_s + rng.expovariate(1 / (self.jitter_s or 1e-9))
        answered_s = asked_s + 20e-6
        back_s = answered_s + self.back_s + rng.expovariate(1 / (self.jitter_s or 1e-9))
        return ClockExchange(at_s, clock.read(asked_s), clock.read(answered_s), back_s)

    def rounds(
        self, clock: SkewedClock, begin_s: float, end_s: float, rng: random.Random
    ) -> list[ClockExchange]:
        """Return the quickest exchange of each round, as a trace of this length makes them."""
        times = [begin_s + 5.0 * k for k in range(int((end_s - begin_s) / 5.0) + 1)]
        found = []
        for time_s, n in [*((one, 32 if one == begin_s else 4) for one in times), (end_s, 32)]:
            some = [self.exchange(clock, time_s + 0.01 * k, rng) for k in range(n)]
            found.append(min(some, key=lambda it: it.half_s))
        return found

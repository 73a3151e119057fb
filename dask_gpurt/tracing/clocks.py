"""One clock for all processes of a trace, from exchanges of messages with the scheduler.

In an exchange, the scheduler notes when it asked (t0) and got the answer (t3). The worker notes
when it was asked (t1) and answered (t2). Each reads its own clock. The quicker an exchange, the
less it leaves open. A line through the quick ones tells offset and drift. Messages between workers
then narrow it down: a message arrives after it was sent (`shifts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

#: Exchanges further apart than this belong to two rounds.
_ROUND_GAP_S = 1.0
#: Clocks of computers drift apart by about so much. More is believed if exchanges show it clearly.
_DRIFT = 1e-4
#: Least half round trip that is believed: time within a process is not more exact.
_LEAST_S = 1e-6
#: Rounds of `shifts`.
_MOST_ROUNDS = 1000
#: Most rounds in a row after which the largest contradiction is as large as before.
_MOST_IN_VAIN = 50


class ClockExchange(NamedTuple):
    """Times of one exchange: of the scheduler `t0` and `t3`, of the worker `t1` and `t2`."""

    t0: float
    t1: float
    t2: float
    t3: float

    @property
    def offset_s(self) -> float:
        """How far the worker's clock is ahead, if both ways took the same time."""
        return ((self.t1 - self.t0) + (self.t2 - self.t3)) / 2

    @property
    def half_s(self) -> float:
        """The most by which `offset_s` may be wrong."""
        return max(((self.t3 - self.t0) - (self.t2 - self.t1)) / 2, _LEAST_S)

    @property
    def at_s(self) -> float:
        """The middle of the exchange, on the scheduler's clock."""
        return (self.t0 + self.t3) / 2


class ClockFit(NamedTuple):
    """The clock of a worker, compared with the scheduler's.

    Attributes
    ----------
    offset_s, at_s
        How far the worker's clock is ahead at this time of the scheduler's clock.
    drift
        Seconds by which it gains on the scheduler's clock in each second.
    error_s
        A bound of the error.
    """

    offset_s: float = 0.0
    at_s: float = 0.0
    drift: float = 0.0
    error_s: float = 0.0

    def to_scheduler(self, worker_s: Any) -> Any:
        """Return times of the worker on the scheduler's clock: a number or an array."""
        return self.at_s + (worker_s - self.offset_s - self.at_s) / (1.0 + self.drift)


def clock_later_s(clock: Callable[[], float], other: Callable[[], float], n: int) -> float:
    """Return how much later one clock of this process is than another one.

    They are compared `n` times, and the quickest comparison counts. Between two readings, the
    thread may lose its core for milliseconds.
    """

    def compare() -> tuple[float, float]:
        before_s = clock()
        other_s = other()
        after_s = clock()
        return after_s - before_s, (before_s + after_s) / 2 - other_s

    return min(compare() for _ in range(n))[1]


def fit(exchanges: Sequence[ClockExchange]) -> ClockFit:
    """Fit offset and drift of a worker's clock.

    Raises
    ------
    ValueError
        There is no exchange.
    """
    if not exchanges:
        raise ValueError("no exchange of clocks")
    quickest = [min(one, key=lambda it: it.half_s) for one in _rounds(exchanges)]
    weights = [1.0 / one.half_s**2 for one in quickest]
    total = sum(weights)
    at_s = sum(w * one.at_s for w, one in zip(weights, quickest, strict=True)) / total
    # Offsets may be large, so the mean of their differences from one of them is more exact.
    base_s = quickest[0].offset_s
    mean_s = sum(w * (one.offset_s - base_s) for w, one in zip(weights, quickest, strict=True))
    offset_s = base_s + mean_s / total
    # Without the second term, noise of two close exchanges would look like a large drift.
    spread = sum(w * (one.at_s - at_s) ** 2 for w, one in zip(weights, quickest, strict=True))
    common = sum(
        w * (one.at_s - at_s) * (one.offset_s - offset_s)
        for w, one in zip(weights, quickest, strict=True)
    )
    drift = common / (spread + 1.0 / _DRIFT**2)
    found = ClockFit(offset_s, at_s, drift)
    return found._replace(error_s=_bound(found, quickest, exchanges))


def _rounds(exchanges: Sequence[ClockExchange]) -> list[list[ClockExchange]]:
    """Return exchanges in groups of those that are close to each other."""
    rounds: list[list[ClockExchange]] = []
    for one in sorted(exchanges, key=lambda it: it.at_s):
        if rounds and one.at_s - rounds[-1][-1].at_s < _ROUND_GAP_S:
            rounds[-1].append(one)
        else:
            rounds.append([one])
    return rounds


def _bound(
    found: ClockFit, quickest: Sequence[ClockExchange], exchanges: Sequence[ClockExchange]
) -> float:
    """Return a bound of a fit's error, from the best exchange of each half of the time.

    Errors of a line between two times are at most those at the two times. Before the first and
    after the last one, the drift counts as far as it is unknown.
    """

    def open_s(one: ClockExchange) -> float:
        expected_s = found.offset_s + found.drift * (one.at_s - found.at_s)
        return one.half_s + abs(one.offset_s - expected_s)

    middle = (len(quickest) + 1) // 2
    halves = (quickest[:middle], quickest[middle:])
    best = [min(half, key=open_s) for half in halves if half]
    first_s, last_s = best[0].at_s, best[-1].at_s
    times = [one.at_s for one in exchanges]
    outside_s = max(first_s - min(times), max(times) - last_s)
    unknown = _DRIFT + abs(found.drift)
    if last_s > first_s:
        unknown = min(unknown, sum(map(open_s, best)) / (last_s - first_s))
    return max(map(open_s, best)) + unknown * outside_s


def shifts(
    limits: Mapping[tuple[int, int], tuple[float, float]], errors_s: Sequence[float]
) -> list[float]:
    """Return small shifts of clocks that respect the order of messages as far as possible.

    The clock of process 0, the scheduler, stays.

    Parameters
    ----------
    limits
        By pair of processes (a, b), bounds of the shift of b minus the shift of a: messages from a
        to b show the lower one, answers the upper one. A lower bound above the upper one
        contradicts itself; both count half.
    errors_s
        Bounds of errors of the clocks. The less certain clock moves more.
    """
    found = [0.0] * len(errors_s)
    share = [0.0, *(max(s, _LEAST_S) for s in errors_s[1:])]
    least = inf
    n_in_vain = 0
    for _ in range(_MOST_ROUNDS):
        worst = 0.0
        for (a, b), (low, high) in limits.items():
            low, high = (low, high) if low <= high else ((low + high) / 2,) * 2
            apart = found[b] - found[a]
            missing = low - apart if apart < low else high - apart if apart > high else 0.0
            both = share[a] + share[b]
            if not missing or not both:
                continue
            worst = max(worst, abs(missing))
            found[a] -= missing * share[a] / both
            found[b] += missing * share[b] / both
        # Limits that contradict each other around a circle are never met.
        if worst < 0.999 * least:
            least, n_in_vain = worst, 0
        else:
            n_in_vain += 1
        if worst < _LEAST_S or n_in_vain >= _MOST_IN_VAIN:
            break
    return found

"""Arithmetic with many intervals of time: unions, times at a limit, and amounts over time.

All functions take columns of NumPy, because a trace may have millions of intervals.
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import numpy.typing as npt

#: A column of a trace. The types of its elements are in the docstrings.
Column = npt.NDArray[Any]


def busy_by_group(
    group: Column, start_s: Column, end_s: Column, n_groups: int, weight: Column | None = None
) -> Column:
    """Return for each group the seconds in which at least one of its intervals was open.

    Parameters
    ----------
    group
        Number of the group of each interval, from 0.
    weight
        1 for work, -1 for an interval that suspends one other of its group. Default: all work.
    """
    if weight is None:
        weight = np.ones(len(group), dtype=np.int32)
    groups = np.concatenate([group, group])
    times = np.concatenate([start_s, end_s])
    changes = np.concatenate([weight, -weight])
    order = np.lexsort((changes, times, groups))
    groups, times = groups[order], times[order]
    # Each group ends with none open, so one running total serves all groups.
    is_open = np.cumsum(changes[order]) > 0
    lasting_s = np.diff(times, append=times[-1:])
    return np.bincount(groups[is_open], lasting_s[is_open], minlength=n_groups)


class Coverage:
    """A union of intervals, and how much of any period it covers.

    Parameters
    ----------
    start_s, end_s
        The intervals, in any order. Empty and reversed ones do not count.
    """

    def __init__(self, start_s: Column, end_s: Column) -> None:
        has_length = end_s > start_s
        start_s, end_s = start_s[has_length], end_s[has_length]
        order = np.argsort(start_s, kind="stable")
        start_s, end_s = start_s[order], np.maximum.accumulate(end_s[order])
        is_first = np.ones(len(start_s), dtype=bool)
        is_first[1:] = start_s[1:] > end_s[:-1]
        is_last = np.roll(is_first, -1)
        self.start_s, self.end_s = start_s[is_first], end_s[is_last]
        self._before_s: list[float] = [0.0, *np.cumsum(self.end_s - self.start_s).tolist()]
        # Single times are asked for very often. For them, lists are ten times as fast as NumPy.
        self._starts_s: list[float] = self.start_s.tolist()
        self._ends_s: list[float] = self.end_s.tolist()

    @property
    def total_s(self) -> float:
        """Length of the union."""
        return self._before_s[-1]

    def until(self, time_s: float) -> float:
        """Return how much of the time before `time_s` is covered."""
        i = bisect.bisect_right(self._starts_s, time_s) - 1
        if i < 0:
            return 0.0
        return self._before_s[i] + min(time_s, self._ends_s[i]) - self._starts_s[i]

    def between(self, start_s: float, end_s: float) -> float:
        """Return how much of a period is covered."""
        return max(0.0, self.until(end_s) - self.until(start_s))


def late(times_s: Column) -> Coverage:
    """Return for how long each of some regular events was late.

    An event is late if it comes after more than twice the usual time. It was due at the usual time.
    """
    times_s = np.sort(times_s)
    between_s = np.diff(times_s)
    usual_s = float(np.median(between_s)) if len(between_s) else 0.0
    is_late = between_s > 2 * usual_s
    return Coverage(times_s[:-1][is_late] + usual_s, times_s[1:][is_late])


def crowded(start_s: Column, end_s: Column, at_least: int) -> Coverage:
    """Return the time in which at least `at_least` intervals were open."""
    times = np.concatenate([start_s, end_s])
    changes = np.repeat(np.array([1, -1]), len(start_s))
    order = np.lexsort((changes, times))
    times = times[order]
    is_crowded = np.cumsum(changes[order]) >= max(at_least, 1)
    return Coverage(times[:-1][is_crowded[:-1]], times[1:][is_crowded[:-1]])


def amount_over_time(start_s: Column, end_s: Column, amount: Column, edges_s: Column) -> Column:
    """Return how much of the amounts falls between neighbouring edges.

    Each amount is spread evenly over its interval. An interval without length counts where it is.
    """
    # A shorter interval would have a rate that a float cannot hold beside other rates.
    length_s = np.maximum(end_s - start_s, 1e-6)
    rate = amount / length_s
    return np.diff(_ramps(start_s, rate, edges_s) - _ramps(start_s + length_s, rate, edges_s)).clip(
        min=0.0
    )


def _ramps(since_s: Column, rate: Column, at_s: Column) -> Column:
    """Return the sum of `rate * (at - since)` over all that began before."""
    order = np.argsort(since_s, kind="stable")
    since_s, rate = since_s[order], rate[order]
    rates = np.concatenate([[0.0], np.cumsum(rate)])
    products = np.concatenate([[0.0], np.cumsum(rate * since_s)])
    i = np.searchsorted(since_s, at_s)
    return np.asarray(rates[i] * at_s - products[i])

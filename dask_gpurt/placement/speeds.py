"""Slowness of workers, learned from the durations of their tasks and of similar tasks. Pure.

Dask assumes one duration for all tasks of a kind, on every worker. A worker on a throttled or
shared processor then gets as many tasks as any other. In the end the whole computation waits for
it. This module gives each worker a *slowness*: 1 for almost all workers, 5 for a worker that takes
five times as long.

There are two sources:

- Tasks that ended. An observation is the logarithm of a task's duration, less the mean of the
  logarithms of what its group took on **other** workers. The mean of observations counts each one
  half as much as the next one, since a worker may become slow at any time. It is an exponentially
  weighted moving average (Roberts, 1959), with the variance of such an average. Short tasks are
  averaged over more observations.
- Silence. A worker is silent if it should have ended any of its tasks by now and is not waiting for
  data. It is at least as slow as its silence is long. Without this rule, a worker that became five
  times as slow would first have to end a task that takes five times as long.

Noise has no effect. A worker is slow only if the mean, less `SIGMAS` standard deviations of it, is
still at least `LEAST_SLOWNESS`. Tasks of one group are assumed to scatter by at least
`LEAST_SCATTER`. The slowness is then the mean itself. The lower bound of the mean was rejected: a
task of 0.5 seconds was estimated at 0.2, and the whole computation waited for it. A
worker that has no core for `PAUSE_S` is not slow, however short its tasks are. So if all tasks of
a group take about as long, every slowness is exactly 1 and placement is the same as without this
module. No slowness is below 1: a worker that is faster than others is free sooner, and placement
sees that already.

Memory is bounded: a few numbers per worker, `MAX_GROUPS` groups, and per worker its part of the
last `MAX_OWN_GROUPS` groups of which it ended tasks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import exp, isfinite, log, sqrt

#: Standard deviations that separate the mean of a slow worker from `LEAST_SLOWNESS`.
SIGMAS = 2.0
#: Least standard deviation that is assumed for logarithms within a group: some 28 %. Before
#: durations are known, `_USUAL_SCATTER` is assumed, with the weight of `_USUAL_COUNT` tasks.
LEAST_SCATTER = 0.25
_USUAL_SCATTER = 0.5
_USUAL_COUNT = 4
#: A worker that is less slow than this is treated like all others.
LEAST_SLOWNESS = 1.5
#: Weight of an observation relative to the next one, for tasks of `PAUSE_S` or longer.
_DECAY = 0.5
#: A worker may pause for this long now and then: another process has its core, it collects garbage,
#: its messages are late. When four workers shared two cores, tasks of 3 ms looked three times as
#: slow. They were moved to workers that had none of their data.
PAUSE_S = 0.05
#: Tasks of a group that other workers must have ended before the group counts.
_ENOUGH = 3
#: Upper bound of slowness.
MAX_SLOWNESS = 32.0
#: Durations below this are treated as equal: handling a task takes this long.
_LEAST_S = 0.001
MAX_GROUPS = 2_000
MAX_OWN_GROUPS = 16
_USUAL_SQUARES, _LEAST_VARIANCE = _USUAL_COUNT * _USUAL_SCATTER**2, LEAST_SCATTER**2
_LOG_LEAST, _LOG_PAUSE = log(LEAST_SLOWNESS), log(PAUSE_S)


class _DurationSums:
    """Count, sum, and sum of squares of logarithms of durations."""

    __slots__ = ("count", "part_of", "squares", "total")

    def __init__(self, part_of: _DurationSums | None = None) -> None:
        self.part_of = part_of
        self.count = 0
        self.total = 0.0
        self.squares = 0.0


class _Record:
    """Observations of one worker."""

    __slots__ = ("due_s", "mean", "own", "slowness", "variance", "weight", "working_since_s")

    def __init__(self) -> None:
        self.slowness = 1.0
        #: Weighted mean of the observations, its variance, and the sum of weights.
        self.mean = self.variance = self.weight = 0.0
        self.own: OrderedDict[str, _DurationSums] = OrderedDict()
        #: Time of the last sign of life while it has work, and the time the next one is due.
        self.working_since_s: float | None = None
        self.due_s = 0.0

    def observe(self, value: float, variance: float, usual: float) -> None:
        """Record the logarithm of a task's duration ratio, and of its group's usual duration."""
        share = _DECAY if usual >= _LOG_PAUSE else 0.5 ** (exp(usual) / PAUSE_S)
        # A first short task weighs no more than one of many: assume that the earlier ones were as
        # usual.
        past = share * self.weight if self.weight else 1 / (1 - share) - 1 / (1 - _DECAY)
        self.weight = past + 1
        self.mean = (past * self.mean + value) / self.weight
        self.variance = (past * past * self.variance + variance) / self.weight**2
        # The first comparison is nearly always False, which saves computing the rest.
        mean = self.mean
        is_slow = mean >= _LOG_LEAST and mean - SIGMAS * sqrt(self.variance) >= _LOG_LEAST
        self.slowness = min(exp(min(mean, 9.0)), MAX_SLOWNESS) if is_slow else 1.0


class Speeds:
    """The slowness of each worker of a cluster."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, _DurationSums] = OrderedDict()
        self._records: dict[str, _Record] = {}

    def add(self, worker: str) -> None:
        """Add a worker that joined. Workers that end tasks without this are added then."""
        self._records[worker] = _Record()

    def ended(
        self, worker: str, group: str, seconds: float, now_s: float, is_idle: bool = False
    ) -> None:
        """Record that a worker ended a task of a group.

        Parameters
        ----------
        seconds
            Duration of the task itself.
        is_idle
            Whether the worker has no other task.
        """
        if not isfinite(seconds):
            # Workers report durations. A non-finite one would stay in the mean of its group for
            # good.
            return
        # This runs for every task of a cluster: few calls, to spare the scheduler.
        record = self._records.get(worker)
        if record is None:
            record = self._records[worker] = _Record()
        record.working_since_s = None if is_idle else now_s
        # Until as much time has passed again, the worker's next tasks need not be examined.
        record.due_s = now_s + seconds
        value = log(seconds if seconds > _LEAST_S else _LEAST_S)
        of_all = self._groups.get(group) or _new_entry(self._groups, group, MAX_GROUPS)
        own = record.own.get(group) or _new_entry(record.own, group, MAX_OWN_GROUPS)
        if own.part_of is not of_all:
            # The group was dropped meanwhile, and with it the totals that contained these.
            own = record.own[group] = _DurationSums(of_all)
        n_others = of_all.count - own.count
        if n_others >= _ENOUGH:
            mean, variance = _mean_and_variance(
                n_others, of_all.total - own.total, of_all.squares - own.squares
            )
            record.observe(value - mean, variance, mean)
        square = value * value
        of_all.count += 1
        of_all.total += value
        of_all.squares += square
        own.count += 1
        own.total += value
        own.squares += square

    def learned(self, worker: str) -> float:
        """Return the slowness learned from the tasks that a worker ended."""
        record = self._records.get(worker)
        return 1.0 if record is None else record.slowness

    def is_overdue(self, worker: str, now_s: float) -> bool:
        """Return whether a worker with tasks has been silent for so long that it may be slow."""
        record = self._records.get(worker)
        return record is None or record.working_since_s is None or now_s > record.due_s

    def slowness(self, worker: str, now_s: float, groups: Iterable[str] | None) -> float:
        """Return the slowness of a worker that has tasks.

        Parameters
        ----------
        groups
            Groups of the worker's tasks; only read if the worker has been silent longer than usual.
            None if the worker waits for data.
        """
        record = self._records.get(worker)
        if record is None:
            record = self._records[worker] = _Record()
        since_s = record.working_since_s
        if since_s is None or groups is None:
            record.working_since_s = record.due_s = now_s
            return record.slowness
        if now_s <= record.due_s:
            return record.slowness
        expected_s = self._longest_s(groups)
        if expected_s is None:
            return record.slowness
        record.due_s = since_s + PAUSE_S + expected_s * record.slowness
        silent_s = max(0.0, now_s - since_s - PAUSE_S)
        return max(record.slowness, _if_significant(silent_s / expected_s))

    def _longest_s(self, groups: Iterable[str]) -> float | None:
        """Return the seconds in which nearly all tasks of these groups end; None if unknown."""
        longest_s = None
        for group in groups:
            of_all = self._groups.get(group)
            if of_all is None or of_all.count < _ENOUGH:
                return None
            mean, variance = _mean_and_variance(of_all.count, of_all.total, of_all.squares)
            longest_s = max(longest_s or 0.0, exp(mean + SIGMAS * sqrt(variance)))
        return longest_s

    def forget(self, worker: str) -> None:
        """Remove a worker that left."""
        self._records.pop(worker, None)


def _mean_and_variance(count: int, total: float, squares: float) -> tuple[float, float]:
    """Return mean and variance of `count` logarithms with these sums."""
    mean = total / count
    variance = (squares - count * mean * mean + _USUAL_SQUARES) / (count + _USUAL_COUNT)
    return mean, variance if variance > _LEAST_VARIANCE else _LEAST_VARIANCE


def _if_significant(slowness: float) -> float:
    return min(slowness, MAX_SLOWNESS) if slowness >= LEAST_SLOWNESS else 1.0


def _new_entry(logs: OrderedDict[str, _DurationSums], group: str, most: int) -> _DurationSums:
    """Add an entry for a group and return it; drop the oldest entry if there are too many."""
    found = logs[group] = _DurationSums()
    if len(logs) > most:
        logs.popitem(last=False)
    return found

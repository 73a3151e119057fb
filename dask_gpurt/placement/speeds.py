"""How slow each worker is, by what its tasks took and what others took for their like. Pure.

Dask reckons with one duration for all tasks of a kind, wherever they run. A worker on a throttled
or shared processor then gets as much as any other, and everybody waits for it in the end. Here a
worker has a *slowness*: 1 for almost all of them, 5 for one that takes five times as long.

Two things tell of it:

- Tasks that ended. The logarithm of what one took, less the mean of the logarithms of what its
  group took on **other** workers, is an observation. Their mean counts each half as much as the
  one after it, since a worker may become slow at any time; it is an exponentially weighted moving
  average (Roberts, 1959), with the variance that such a one has. Of short tasks, more count.
- Silence. A worker that should have been done with any of its tasks by now, and is not waiting for
  data, is at least as slow as it has been silent. Without this, a worker that has become five
  times as slow would have to end a task that takes five times as long before anybody knew.

Nothing is concluded from noise: a worker is slow where the mean, less `SIGMAS` standard deviations
of it, is still that of `LEAST_SLOWNESS`, and tasks of one group scatter by `LEAST_SCATTER` at the
least. How slow it is then is the mean itself. The least that it may be, which would do for the
first question, had a worker that was given one more task hold up everybody: that was taken for 0.2
seconds of work and was 0.5. A worker that has no core for `PAUSE_S` is not slow, however short its
tasks are. So where tasks take as long as others of their group, to that extent, every slowness is
exactly 1, and nothing is placed otherwise than without any of this. None is below 1: a worker that
is faster than the others is free sooner, and that shows as it is.

Memory: a few numbers for each worker and `MAX_GROUPS` groups, and of each worker its part in the
`MAX_OWN_GROUPS` groups that it ended tasks of last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import exp, isfinite, log, sqrt

#: Standard deviations that the mean has to be off by for a worker to be slow.
SIGMAS = 2.0
#: Standard deviation of logarithms that tasks of a group are taken to have at the least (some
#: 28 %), and before they are known, which counts for so many of them.
LEAST_SCATTER = 0.25
_USUAL_SCATTER = 0.5
_USUAL_COUNT = 4
#: What is less than this is not worth placing anything otherwise.
LEAST_SLOWNESS = 1.5
#: What an observation counts for by the time of the next one, if that took `PAUSE_S` or more.
_PAST = 0.5
#: So long may a worker be kept from its tasks now and then: another process has its core, it looks
#: for garbage, its messages are late. Tasks that take 3 ms were taken for three times as slow where
#: four workers had two cores, and were moved to where none of their data was.
PAUSE_S = 0.05
#: Tasks of a group that others have to have ended before it tells anything.
_ENOUGH = 3
#: No worker is believed to be further from the others than by this factor.
MAX_SLOWNESS = 32.0
#: Durations are not told apart below this: it is what handling a task takes.
_LEAST_S = 0.001
MAX_GROUPS = 2_000
MAX_OWN_GROUPS = 16
_USUAL_SQUARES, _LEAST_VARIANCE = _USUAL_COUNT * _USUAL_SCATTER**2, LEAST_SCATTER**2
_LOG_LEAST, _LOG_PAUSE = log(LEAST_SLOWNESS), log(PAUSE_S)


class _Logs:
    """Count, sum, and sum of squares of logarithms of durations."""

    __slots__ = ("count", "part_of", "squares", "total")

    def __init__(self, part_of: _Logs | None = None) -> None:
        self.part_of = part_of
        self.count = 0
        self.total = 0.0
        self.squares = 0.0


class _Record:
    """What is known of one worker."""

    __slots__ = ("due_s", "mean", "own", "slowness", "variance", "weight", "working_since_s")

    def __init__(self) -> None:
        self.slowness = 1.0
        #: Of observations: their weighted mean, its variance, and the weights' sum.
        self.mean = self.variance = self.weight = 0.0
        self.own: OrderedDict[str, _Logs] = OrderedDict()
        #: When it was last heard of, or given something to do, and when it should be heard of.
        self.working_since_s: float | None = None
        self.due_s = 0.0

    def observe(self, value: float, variance: float, usual: float) -> None:
        """Take in by what logarithm a task was off; and the one of what its group takes usually."""
        share = _PAST if usual >= _LOG_PAUSE else 0.5 ** (exp(usual) / PAUSE_S)
        # A first short task is no more than one of many, either: as if the others had been usual.
        past = share * self.weight if self.weight else 1 / (1 - share) - 1 / (1 - _PAST)
        self.weight = past + 1
        self.mean = (past * self.mean + value) / self.weight
        self.variance = (past * past * self.variance + variance) / self.weight**2
        # Nearly always the first of these tells, and then there is nothing to be worked out.
        mean = self.mean
        is_slow = mean >= _LOG_LEAST and mean - SIGMAS * sqrt(self.variance) >= _LOG_LEAST
        self.slowness = min(exp(min(mean, 9.0)), MAX_SLOWNESS) if is_slow else 1.0


class Speeds:
    """Slowness of each worker of a cluster."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, _Logs] = OrderedDict()
        self._records: dict[str, _Record] = {}

    def add(self, worker: str) -> None:
        """A worker came. Whoever is heard of without this is taken in then."""
        self._records[worker] = _Record()

    def ended(
        self, worker: str, group: str, seconds: float, now_s: float, is_idle: bool = False
    ) -> None:
        """Take in that a worker ended a task of a group.

        Parameters
        ----------
        seconds
            That the task itself took.
        is_idle
            Whether the worker has nothing else to do.
        """
        if not isfinite(seconds):
            # A worker says so. It would be in the mean of its group from here on.
            return
        # Done for every task of a cluster: few calls, for the sake of its scheduler.
        record = self._records.get(worker)
        if record is None:
            record = self._records[worker] = _Record()
        record.working_since_s = None if is_idle else now_s
        # Before the like of this has passed there is no need to look at what it does next.
        record.due_s = now_s + seconds
        value = log(seconds if seconds > _LEAST_S else _LEAST_S)
        of_all = self._groups.get(group) or _new_entry(self._groups, group, MAX_GROUPS)
        own = record.own.get(group) or _new_entry(record.own, group, MAX_OWN_GROUPS)
        if own.part_of is not of_all:
            # The group was forgotten in between, and with it what this was a part of.
            own = record.own[group] = _Logs(of_all)
        n_others = of_all.count - own.count
        if n_others >= _ENOUGH:
            mean, variance = _of_others(
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
        """Slowness by what a worker ended."""
        record = self._records.get(worker)
        return 1.0 if record is None else record.slowness

    def is_overdue(self, worker: str, now_s: float) -> bool:
        """Whether a worker with something to do might be told to be slow by its silence."""
        record = self._records.get(worker)
        return record is None or record.working_since_s is None or now_s > record.due_s

    def slowness(self, worker: str, now_s: float, groups: Iterable[str] | None) -> float:
        """Seconds that a worker with something to do takes for what takes others one.

        Parameters
        ----------
        groups
            Of the tasks it has been given; only gone through if it has not been heard of for
            longer than usual. None if it waits for data.
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
        return max(record.slowness, _worth_it(silent_s / expected_s))

    def _longest_s(self, groups: Iterable[str]) -> float | None:
        """Seconds in which a task of any of these groups ends, nearly always; None if unknown."""
        longest_s = None
        for group in groups:
            of_all = self._groups.get(group)
            if of_all is None or of_all.count < _ENOUGH:
                return None
            mean, variance = _of_others(of_all.count, of_all.total, of_all.squares)
            longest_s = max(longest_s or 0.0, exp(mean + SIGMAS * sqrt(variance)))
        return longest_s

    def forget(self, worker: str) -> None:
        """A worker left."""
        self._records.pop(worker, None)


def _of_others(count: int, total: float, squares: float) -> tuple[float, float]:
    """Mean and variance of logarithms, of which there are so many with these sums."""
    mean = total / count
    variance = (squares - count * mean * mean + _USUAL_SQUARES) / (count + _USUAL_COUNT)
    return mean, variance if variance > _LEAST_VARIANCE else _LEAST_VARIANCE


def _worth_it(slowness: float) -> float:
    return min(slowness, MAX_SLOWNESS) if slowness >= LEAST_SLOWNESS else 1.0


def _new_entry(logs: OrderedDict[str, _Logs], group: str, most: int) -> _Logs:
    """A new one of a group; the one that was there first goes if there are too many."""
    found = logs[group] = _Logs()
    if len(logs) > most:
        logs.popitem(last=False)
    return found

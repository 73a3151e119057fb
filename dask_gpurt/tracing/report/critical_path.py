"""The critical path: the chain of causes that ends with the last result, and its parts.

The path goes backwards from the end of the trace. A task began when its last input was there, or
when a task ended and left it a thread. The path goes on with the task that came last of these. Each
moment of the trace is in one segment: the parts add up to the wall time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dask_gpurt.tracing.amounts import seconds_text
from dask_gpurt.tracing.report.busy_time import Coverage
from dask_gpurt.tracing.report.event_columns import Columns
from dask_gpurt.tracing.report.task_stories import (
    CLIENT,
    COMPUTING,
    SCHEDULER,
    Backwards,
    PathSegment,
    TaskStories,
)

#: The scheduler makes a task ready this soon after its last input. Later, the client submitted it.
_SOON_S = 0.05
#: Parts that the summary names; the others are added up.
_N_NAMED = 6


class PathPart(NamedTuple):
    """The seconds of the path with one cause."""

    kind: str
    where: str
    seconds: float

    @property
    def text(self) -> str:
        return f"{self.kind} {self.where}".strip()


@dataclass(frozen=True)
class CriticalPath:
    """The longest chain of a trace.

    Attributes
    ----------
    segments
        In order of time, without gaps, from 0 to the end of the trace.
    parts
        Seconds by cause, most first.
    tasks
        Indices of the tasks on the path, first to last.
    crowded_s
        Seconds of computing during which a task of the path waited for a thread.
    """

    segments: list[PathSegment]
    parts: list[PathPart]
    tasks: list[int]
    crowded_s: float

    def seconds(self, kind: str, where: str | None = None) -> float:
        """Return the seconds of a kind, at one place or at all."""
        return sum(p.seconds for p in self.parts if p.kind == kind and where in (None, p.where))

    def computing_by(self, group_of: np.ndarray) -> dict[int, float]:
        """Return the seconds of computing by a group that each task has."""
        found: defaultdict[int, float] = defaultdict(float)
        for one in self.segments:
            if one.kind == COMPUTING:
                found[int(group_of[one.task])] += one.end_s - one.start_s
        return dict(found)

    @property
    def text(self) -> str:
        """Return the summary, such as "of 41.2 s: 18.3 s computing, 4.9 s scheduler"."""
        wall_s = sum(part.seconds for part in self.parts)
        if not self.parts:
            return "the trace is empty"
        named = [part for part in self.parts[:_N_NAMED] if part.seconds >= 0.005 * wall_s]
        said = [f"{seconds_text(part.seconds)} {part.text}" for part in named]
        others_s = sum(part.seconds for part in self.parts[len(named) :])
        if others_s >= 0.005 * wall_s:
            said.append(f"{seconds_text(others_s)} other")
        return f"of {seconds_text(wall_s)}: {', '.join(said)}"


def critical_path(columns: Columns, stories: TaskStories) -> CriticalPath:
    """Return the critical path of a trace."""
    tasks = columns.tasks
    by_end = np.argsort(tasks.known_s, kind="stable")
    ends_s = tasks.known_s[by_end]
    back = Backwards(columns.wall_s)
    path: list[int] = []
    seen: set[int] = set()
    waiting: list[int] = []
    while (task := _last_before(back.now_s, ends_s, by_end, seen)) is not None:
        # A task that was submitted after its inputs were ready waited for the client. The client
        # may have waited for another result.
        back.task = -1
        back.to(tasks.known_s[task], CLIENT)
        for step, is_waiting in chain(columns, stories, task, back, seen):
            path.append(step)
            if is_waiting:
                waiting.append(step)
    back.task = -1
    back.to(0.0, CLIENT)
    segments = back.segments[::-1]
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for one in segments:
        seconds[one.kind, one.where] += one.end_s - one.start_s
    parts = [PathPart(*cause, spent_s) for cause, spent_s in seconds.items()]
    waits = Coverage(tasks.ready_s[waiting], tasks.start_s[waiting])
    crowded_s = sum(
        waits.between(one.start_s, one.end_s) for one in segments if one.kind == COMPUTING
    )
    parts.sort(key=lambda part: -part.seconds)
    return CriticalPath(segments, parts, path[::-1], crowded_s)


def chain(
    columns: Columns, stories: TaskStories, task: int, back: Backwards, seen: set[int]
) -> Iterator[tuple[int, bool]]:
    """Go back over a task and what it waited for, until the client submitted one of them.

    Yield each task after its story, and whether it waited for the thread of the next one.
    """
    tasks = columns.tasks
    while True:
        seen.add(task)
        holder = stories.tell(task, back)
        yield task, holder is not None
        if holder is not None and holder not in seen:
            task = holder
            continue
        last = stories.last_input(task)
        if last is None or last in seen or back.now_s - tasks.known_s[last] > _SOON_S:
            return
        back.to(tasks.known_s[last], SCHEDULER)
        task = last


def _last_before(
    time_s: float, ends_s: np.ndarray, by_end: np.ndarray, seen: set[int]
) -> int | None:
    """Return the unseen task whose result became known last before a time; None without one."""
    i = int(np.searchsorted(ends_s, time_s, side="right")) - 1
    while i >= 0 and int(by_end[i]) in seen:
        i -= 1
    return int(by_end[i]) if i >= 0 else None

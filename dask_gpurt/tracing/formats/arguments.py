"""The fields of an event that its place in the picture does not show, as named arguments.

Both formats hold them beside a slice, and viewers list them when the slice is selected. A field
that has its default is left out. Arguments of other versions are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import LaneWork, TaskTimes
from dask_gpurt.tracing.formats.picture import nanoseconds, seconds

Value = int | float | str


class Unit(NamedTuple):
    """The unit of a format for waits of tasks."""

    name: str
    nanoseconds: int


NANOSECONDS, MICROSECONDS = Unit("ns", 1), Unit("us", 1000)

#: Fields that the picture shows: the process, the row, the name and the length of a slice.
_SHOWN = {"process", "lane", "path", "key", "start_s", "end_s", "thread"}
#: Waits of a task before its start, the last first, each with the time at which it began.
_WAITS = (("for_thread", "here_s"), ("for_data", "assigned_s"), ("for_worker", "ready_s"))
#: How much later than its slice an event ended.
_CUT = "cut_ns"
#: From its end until the scheduler knew of it.
_AFTER = "until_known"

_WORK = {name: LaneWork._field_defaults.get(name, 0) for name in LaneWork._fields}
_TASK = {name: TaskTimes._field_defaults.get(name, 0) for name in TaskTimes._fields}
_IN_WORK = {name: default for name, default in _WORK.items() if name not in _SHOWN}
_IN_TASK = {
    name: default
    for name, default in _TASK.items()
    if name not in _SHOWN | {"number", "needs", "ready_s", "assigned_s", "here_s", "known_s"}
}

#: The most tasks that one range of a damaged file may name.
_LONGEST_RANGE = 10_000_000
_RANGE = re.compile(r"(-?\d+)(?:\.\.(\d+))?")


def of_work(work: LaneWork, cut_ns: int) -> dict[str, Value]:
    """Return the arguments of a piece of work, which ends that much later than its slice."""
    found = {
        name: value
        for name, default in _IN_WORK.items()
        if (value := getattr(work, name)) != default
    }
    if cut_ns:
        found[_CUT] = cut_ns
    return found


def of_task(task: TaskTimes, start_ns: int, end_ns: int, unit: Unit) -> dict[str, Value]:
    """Return the arguments of a task, whose slice has this start and end in the file."""
    found: dict[str, Value] = {"number": task.number}
    if task.needs:
        found["needs"] = as_ranges(task.needs)
    at_ns = start_ns
    for name, field in _WAITS:
        units = round((at_ns - nanoseconds(getattr(task, field))) / unit.nanoseconds)
        found[f"{name}_{unit.name}"] = units
        at_ns -= units * unit.nanoseconds
    after_ns = nanoseconds(task.known_s) - end_ns
    found[f"{_AFTER}_{unit.name}"] = round(after_ns / unit.nanoseconds)
    for name, default in _IN_TASK.items():
        if (value := getattr(task, name)) != default:
            found[name] = value
    return found


def is_task(arguments: Mapping[str, Any]) -> bool:
    """Return whether these are the arguments of a task."""
    return "number" in arguments


def work_of(
    process: int,
    lane: str,
    path: str,
    thread: int,
    start_ns: int,
    end_ns: int,
    arguments: Mapping[str, Any],
) -> LaneWork:
    """Return the piece of work that a slice shows. Inverse of `of_work`."""
    found = _fields(arguments, _IN_WORK)
    return LaneWork(
        process=process,
        lane=lane,
        path=path,
        thread=thread,
        start_s=seconds(start_ns),
        end_s=seconds(end_ns + arguments.get(_CUT, 0)),
        **found,
    )


def _fields(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields, from arguments or else by default."""
    found = dict(defaults)
    for name, value in arguments.items():
        if name in found:
            if type(value) is not type(found[name]):
                raise TraceFileError(f"an event has {value!r} as its {name}")
            found[name] = value
    return found


def task_of(
    process: int,
    key: str,
    thread: int,
    start_ns: int,
    end_ns: int,
    arguments: Mapping[str, Any],
    unit: Unit,
) -> TaskTimes:
    """Return the task that a slice shows. Inverse of `of_task`."""
    times: dict[str, Any] = {}
    at_ns = start_ns
    for name, field in _WAITS:
        at_ns -= arguments[f"{name}_{unit.name}"] * unit.nanoseconds
        times[field] = seconds(at_ns)
    known_ns = end_ns + arguments[f"{_AFTER}_{unit.name}"] * unit.nanoseconds
    return TaskTimes(
        number=arguments["number"],
        key=key,
        process=process,
        needs=from_ranges(arguments.get("needs", "")),
        start_s=seconds(start_ns),
        end_s=seconds(end_ns),
        thread=thread,
        known_s=seconds(known_ns),
        **times,
        **_fields(arguments, _IN_TASK),
    )


def as_ranges(numbers: tuple[int, ...]) -> str:
    """Write numbers in their order, with runs of neighbours as ranges.

    Examples
    --------
    >>> as_ranges((3, 4, 5, 9, 1))
    '3..5 9 1'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1 >= 0:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return " ".join("..".join(map(str, one)) for one in ranges)


def from_ranges(text: str) -> tuple[int, ...]:
    """Return the numbers that `as_ranges` wrote."""
    numbers: list[int] = []
    for word in text.split():
        found = _RANGE.fullmatch(word)
        first = int(found[1]) if found else 0
        last = int(found[2]) if found and found[2] else first
        if not found or not 0 <= last - first < _LONGEST_RANGE:
            raise TraceFileError(f"{word!r} is no range of tasks")
        numbers += range(first, last + 1)
    return tuple(numbers)

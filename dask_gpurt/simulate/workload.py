"""Workloads and their trace format: tasks with priorities, dependencies, durations and sizes.

`Workload.to_json` and `Workload.from_json` are exact inverses, so a recorded workload replays
exactly. `dask_gpurt.simulate.graphs` makes workloads from Dask graphs.

The format is JSON, version 1. Each task is a row of a list, to keep files small::

    {"format": "gpurt-trace", "version": 1, "name": "...",
     "columns": ["key", "dependencies", "duration_s", "nbytes", "produces_data"], "tasks":
     [["('sum-1', 0)", [], 0.5, 8000000, true], ...], "wanted": [12, 13]}

Tasks are in order of priority. Dependencies and wanted tasks are positions in that list. A task may
come before its dependencies. Durations are seconds at speed 1; sizes are bytes of the result.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dask_gpurt.errors import WorkloadError

FORMAT = "gpurt-trace"
VERSION = 1
COLUMNS = ("key", "dependencies", "duration_s", "nbytes", "produces_data")


class StableStr(str):
    """A string whose hash is the same in every process.

    Schedulers keep keys and addresses in sets. The order of a set depends on hashes, which Python
    randomises for strings in each process. With this class, a simulation does not depend on them. A
    `StableStr` equals the plain string but has another hash, so never mix both in one set or dict.
    """

    __slots__ = ("_hash",)
    _hash: int

    def __new__(cls, text: str) -> StableStr:
        self = super().__new__(cls, text)
        self._hash = zlib.crc32(text.encode())
        return self

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[StableStr], tuple[str]]:
        return StableStr, (str(self),)


@dataclass(frozen=True)
class TaskModel:
    """One task.

    Attributes
    ----------
    key
        Key of the task. Dask parses groups and prefixes from it, so keep Dask's form.
    dependencies
        Positions in the workload of the tasks whose results it needs.
    duration_s
        Seconds on a worker of speed 1, with the inputs in memory.
    nbytes
        Size of the result.
    produces_data
        Whether the task reads or creates data. Dask spreads such tasks over workers.
    """

    key: StableStr
    dependencies: tuple[int, ...]
    duration_s: float
    nbytes: int
    produces_data: bool = False


@dataclass(frozen=True)
class Workload:
    """Tasks in order of priority, the most urgent first, and the positions of wanted results.

    Raises
    ------
    WorkloadError
        A position is out of range, a key occurs twice, a number is negative or not finite, or
        dependencies form a cycle.
    """

    name: str
    tasks: tuple[TaskModel, ...]
    wanted: tuple[int, ...]

    def __post_init__(self) -> None:
        count = len(self.tasks)
        if len({task.key for task in self.tasks}) < count:
            raise WorkloadError(f"{self.name}: two tasks have the same key")
        for task in self.tasks:
            if not all(0 <= position < count for position in task.dependencies):
                raise WorkloadError(f"{task.key}: depends on a task that does not exist")
            if not (math.isfinite(task.duration_s) and task.duration_s >= 0 and task.nbytes >= 0):
                raise WorkloadError(f"{task.key}: a duration or size is negative or not finite")
        if not self.wanted or not all(0 <= position < count for position in self.wanted):
            raise WorkloadError(f"{self.name}: no task is wanted, or a wanted task does not exist")
        if sum(1 for _ in inputs_first([task.dependencies for task in self.tasks])) < count:
            raise WorkloadError(f"{self.name}: dependencies form a cycle")

    def to_json(self) -> str:
        """Return the workload as a trace."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "name": self.name,
                "columns": COLUMNS,
                "tasks": [
                    [task.key, task.dependencies, task.duration_s, task.nbytes, task.produces_data]
                    for task in self.tasks
                ],
                "wanted": self.wanted,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Return the workload in a trace.

        Raises
        ------
        WorkloadError
            The text is not a trace of this version.
        """
        try:
            trace = json.loads(text)
            if not isinstance(trace, dict) or trace.get("format") != FORMAT:
                raise WorkloadError(f"not a trace: `format` is not {FORMAT!r}")
            version, columns = trace.get("version"), trace.get("columns")
            if version != VERSION:
                raise WorkloadError(f"version {version!r} of the trace format, not {VERSION}"[:200])
            if columns != list(COLUMNS):
                raise WorkloadError(f"columns {columns!r}, not {COLUMNS}"[:200])
            tasks = tuple(task_of(row) for row in trace["tasks"])
            return cls(str(trace["name"]), tasks, positions(trace["wanted"]))
        except WorkloadError:
            raise
        except json.JSONDecodeError as error:
            raise WorkloadError(f"not JSON: {error}") from error
        except (KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise WorkloadError(f"damaged trace: {error!r}") from error


def inputs_first(dependencies: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield positions of tasks after all their dependencies. Tasks in a cycle are omitted."""
    missing = [len(set(needed)) for needed in dependencies]
    dependents: list[list[int]] = [[] for _ in dependencies]
    for position, needed in enumerate(dependencies):
        for other in set(needed):
            dependents[other].append(position)
    ready = deque(position for position, count in enumerate(missing) if not count)
    while ready:
        position = ready.popleft()
        yield position
        for other in dependents[position]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)


def task_of(row: Sequence[Any]) -> TaskModel:
    """Return the task in a row of a trace."""
    key, dependencies, duration_s, nbytes, produces_data = row
    return TaskModel(
        StableStr(str(key)),
        positions(dependencies),
        float(duration_s),
        int(nbytes),
        bool(produces_data),
    )


def positions(values: Sequence[Any]) -> tuple[int, ...]:
    """Return positions from a trace, after checking their type."""
    if not all(type(value) is int for value in values):
        raise WorkloadError(f"positions must be whole numbers, not {list(values)!r}"[:200])
    return tuple(values)

"""A traced program as one that can be simulated: tasks, shuffles, and the client's submissions.

Graphs that the client submitted within a moment are one. A task that needs others of a later graph
belongs to that one: it was computed again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from dask.order import order
from dask.typing import Key

from dask_gpurt.errors import PredictionError
from dask_gpurt.predict.recorded_cluster import RecordedCluster, recorded_cluster
from dask_gpurt.simulate.program import ExchangeModel, ProgramModel, Submission
from dask_gpurt.simulate.workload import StableStr, TaskModel, Workload
from dask_gpurt.tracing.events import Trace
from dask_gpurt.tracing.lane_names import PHASE, SEND
from dask_gpurt.tracing.report.event_columns import Columns

Policy = Literal["auto", "data-aware", "stock"]

#: Graphs that the client submits within this time are taken as one.
MOMENT_S = 0.05
#: Prefix of the task that ends the transfers of a shuffle.
BARRIER = "shuffle-barrier"


@dataclass(frozen=True)
class RecordedProgram:
    """A traced program.

    Attributes
    ----------
    measured_s
        Seconds from the first submission to the last result, in the trace.
    client_s
        Seconds of `measured_s` in which no task was under way, because the client did other things.
    policy
        The setting `gpurt.placement.policy`; "stock" if the runtime was off.
    """

    program: ProgramModel
    cluster: RecordedCluster
    measured_s: float
    client_s: float
    policy: Policy


class _Batch(NamedTuple):
    """A submission: when it was made, its tasks, and when the last of them was known."""

    at_s: float
    tasks: list[int]
    known_s: float


def recorded_program(trace: Trace, name: str) -> RecordedProgram:
    """Return the program in a trace.

    Raises
    ------
    PredictionError
        The trace has no task.
    """
    columns = Columns(trace)
    n = len(columns.tasks)
    if not n:
        raise PredictionError(f"{name} has no task, so there is nothing to predict")
    needs = _needs(columns)
    batches = _batches(columns, needs)
    batch_of = {task: number for number, batch in enumerate(batches) for task in batch.tasks}
    ranked = _ranked(columns, needs, batches, batch_of)
    position = {task: rank for rank, task in enumerate(ranked)}
    names = _names(columns, needs, batch_of)
    cluster = recorded_cluster(columns)
    tasks = tuple(
        TaskModel(
            names[task],
            tuple(position[one] for one in needs[task]),
            float(columns.working_s[task]) + cluster.turnaround_s,
            int(columns.tasks.nbytes[task]),
            produces_data=not needs[task],
        )
        for task in ranked
    )
    submissions = _submissions(needs, batches, batch_of, position)
    wanted = tuple(one for each in submissions for one in each.wanted)
    program = ProgramModel(
        Workload(name, tasks, wanted),
        submissions,
        _exchanges(columns, needs, position, batch_of),
    )
    began_s = batches[0].at_s
    ended_s = float(columns.tasks.known_s.max())
    return RecordedProgram(
        program, cluster, ended_s - began_s, _idle_s(batches, began_s), _policy(trace)
    )


def _policy(trace: Trace) -> Policy:
    settings = trace.about.get("gpurt")
    placement = settings.get("placement") if isinstance(settings, dict) else None
    if trace.about.get("runtime") != "on" or not isinstance(placement, dict):
        return "stock"
    asked = placement.get("policy") if placement.get("enabled") else "stock"
    known: tuple[Policy, ...] = ("auto", "data-aware")
    return next((policy for policy in known if policy == asked), "stock")


def _needs(columns: Columns) -> list[tuple[int, ...]]:
    """Return the inputs of each task that the trace has, and that were known before it."""
    tasks = columns.tasks
    rank = np.empty(len(tasks), np.int64)
    rank[np.argsort(tasks.known_s, kind="stable")] = np.arange(len(tasks))
    found = []
    for i, needed in enumerate(tasks.needs):
        inputs = dict.fromkeys(tasks.index[one] for one in needed if one in tasks.index)
        found.append(tuple(one for one in inputs if rank[one] < rank[i]))
    return found


def _batches(columns: Columns, needs: list[tuple[int, ...]]) -> list[_Batch]:
    """Return the submissions, in order of time."""
    tasks = columns.tasks
    starts: list[float] = []
    number_of: dict[int, int] = {}
    last_s = -np.inf
    for i in np.argsort(tasks.submitted_s, kind="stable").tolist():
        submitted_s = float(tasks.submitted_s[i])
        if submitted_s - last_s > MOMENT_S:
            starts.append(submitted_s)
        last_s = submitted_s
        number_of[i] = len(starts) - 1
    # This order visits inputs first.
    members: list[list[int]] = [[] for _ in starts]
    for i in np.argsort(tasks.known_s, kind="stable").tolist():
        number_of[i] = max(number_of[i], *(number_of[one] for one in needs[i]), 0)
        members[number_of[i]].append(i)
    return [
        _Batch(at_s, found, float(tasks.known_s[found].max()))
        for at_s, found in zip(starts, members, strict=True)
        if found
    ]


def _ranked(
    columns: Columns,
    needs: list[tuple[int, ...]],
    batches: list[_Batch],
    batch_of: dict[int, int],
) -> list[int]:
    """Return the tasks in order of priority: by submission, then in Dask's own order."""
    ranked: list[int] = []
    for number, batch in enumerate(batches):
        graph: dict[Key, Any] = {
            i: (len, *(one for one in needs[i] if batch_of[one] == number)) for i in batch.tasks
        }
        ranks = order(graph)
        ranked += sorted(batch.tasks, key=ranks.__getitem__)
    return ranked


def _names(
    columns: Columns, needs: list[tuple[int, ...]], batch_of: dict[int, int]
) -> dict[int, StableStr]:
    """Return a key for each task. Tasks of a graph with equal prefixes and inputs are a group."""
    tasks = columns.tasks
    groups: dict[tuple[object, ...], int] = {}
    group_of: dict[int, int] = {}
    counts: defaultdict[int, int] = defaultdict(int)
    found: dict[int, StableStr] = {}
    for i in np.argsort(tasks.known_s, kind="stable").tolist():
        kinds = tuple(sorted({group_of[one] for one in needs[i] if one in group_of}))
        group = groups.setdefault((tasks.prefix[i], batch_of[i], kinds), len(groups))
        group_of[i] = group
        prefix = tasks.prefixes[tasks.prefix[i]]
        found[i] = StableStr(str((f"{prefix}-{group}", counts[group])))
        counts[group] += 1
    return found


def _submissions(
    needs: list[tuple[int, ...]],
    batches: list[_Batch],
    batch_of: dict[int, int],
    position: dict[int, int],
) -> tuple[Submission, ...]:
    used_inside: set[int] = set()
    used_later: set[int] = set()
    for i, needed in enumerate(needs):
        for one in needed:
            (used_inside if batch_of[one] == batch_of[i] else used_later).add(one)
    by_end = sorted(range(len(batches)), key=lambda number: batches[number].known_s)
    n_ended = 0
    found: list[Submission] = []
    for number, batch in enumerate(batches):
        first = n_ended
        while n_ended < len(by_end) and batches[by_end[n_ended]].known_s <= batch.at_s:
            n_ended += 1
        # Those that ended before the previous submission are waited for there.
        ended = by_end[first:n_ended]
        last_s = max(
            (batches[other].known_s for other in ended), default=batches[max(number - 1, 0)].at_s
        )
        wanted = [one for one in batch.tasks if one in used_later or one not in used_inside]
        found.append(
            Submission(
                tuple(position[one] for one in batch.tasks),
                tuple(position[one] for one in wanted),
                tuple(sorted(ended)),
                max(batch.at_s - last_s, 0.0),
            )
        )
    return tuple(found)


def _idle_s(batches: list[_Batch], began_s: float) -> float:
    """Return the seconds between submissions in which none was under way."""
    idle_s, until_s = 0.0, began_s
    for batch in batches:
        idle_s += max(batch.at_s - until_s, 0.0)
        until_s = max(until_s, batch.known_s)
    return idle_s


def _exchanges(
    columns: Columns,
    needs: list[tuple[int, ...]],
    position: dict[int, int],
    batch_of: dict[int, int],
) -> tuple[ExchangeModel, ...]:
    """Return the shuffles: each barrier with the tasks before and after it.

    A shuffle whose tasks seem to be of several graphs is in part in the trace, and left out.
    """
    tasks = columns.tasks
    prefixes = [tasks.prefixes[one] for one in tasks.prefix.tolist()]
    barriers = [i for i, prefix in enumerate(prefixes) if prefix == BARRIER]
    outputs: defaultdict[int, list[int]] = defaultdict(list)
    for i, needed in enumerate(needs):
        for one in needed:
            if prefixes[one] == BARRIER:
                outputs[one].append(i)
    sent = _nbytes_by_transfer(columns)
    found = []
    for barrier in barriers:
        if not outputs[barrier] or not needs[barrier]:
            continue
        if len({batch_of[one] for one in (barrier, *needs[barrier], *outputs[barrier])}) > 1:
            continue
        nbytes = max((sent.get(one, 0.0) for one in needs[barrier]), default=0.0)
        if not nbytes:
            # Stock's shuffles say nothing about their bytes, and one worker sends none.
            nbytes = float(sum(tasks.nbytes[one] for one in outputs[barrier]))
        found.append(
            ExchangeModel(
                tuple(position[one] for one in needs[barrier]),
                position[barrier],
                tuple(position[one] for one in sorted(outputs[barrier])),
                nbytes,
            )
        )
    return tuple(found)


def _nbytes_by_transfer(columns: Columns) -> dict[int, float]:
    """Return for each transfer the bytes of its whole run, with those that stayed in place."""
    sent_nbytes: defaultdict[int, float] = defaultdict(float)
    run_of: dict[int, int] = {}
    for work in columns.trace.work:
        if not work.run:
            continue
        if work.lane == PHASE and work.task in columns.tasks.index:
            run_of[columns.tasks.index[work.task]] = work.run
        elif work.path == SEND:
            sent_nbytes[work.run] += work.encoded_nbytes or work.nbytes
    n = len(columns.places.workers)
    # Each worker owns an equal part of the outputs, and sends itself nothing.
    whole = n / (n - 1) if n > 1 else 0.0
    return {task: sent_nbytes[run] * whole for task, run in run_of.items()}

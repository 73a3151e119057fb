"""Tasks that a scheduler has from earlier graphs, for a graph that needs them.

| what | why | taken back by |
|---|---|---|
| `TaskState.run_spec` | a task that the scheduler has keeps its inputs | |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask._task_spec import GraphNode
    from distributed.scheduler import TaskState

#: Tasks of a program, by key.
Graph = dict[Any, "GraphNode"]


class Forgotten(Exception):
    """The scheduler no longer has all tasks that a known task needs."""


def spec_of(key: Any, known: Mapping[Any, TaskState]) -> GraphNode | None:
    """Return the task that a scheduler has with a key; None if it has none, or only its result."""
    state = known.get(key)
    return state.run_spec if state is not None else None


def with_all_needed(
    specs: Iterable[GraphNode], graph: Graph, known: Mapping[Any, TaskState]
) -> Graph:
    """Return tasks of a scheduler, with all tasks that they need there, by key.

    The scheduler may forget each of them while Dask puts the tasks of the graph in order.

    Raises
    ------
    Forgotten
        It has forgotten one that the graph does not have, either.
    """
    found = {spec.key: spec for spec in specs}
    fresh = [key for spec in found.values() for key in spec.dependencies]
    while fresh:
        key = fresh.pop()
        if key in found:
            continue
        one = spec_of(key, known)
        if one is not None:
            found[key] = one
            fresh += one.dependencies
        elif key not in graph and key not in known:
            raise Forgotten
    return found

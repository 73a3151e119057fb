"""Blockwise layers of DataFrame programs: find them in an expression, put their tasks together.

With `persist`, Dask itself puts them together. Until 2025 it did so with `compute`, too. Now
`compute` leaves each layer its own tasks.

`placement.blockwise_groups` decides which layers go together.

| what | why | taken back by |
|---|---|---|
| `is_valid_blockwise_op` of `dask.dataframe.dask_expr._expr` | a layer that works on each partition
alone, with keys of its name and the number of the partition | |
| `_ExprSequence` of `dask._expr` | all that a program computes at once | |
| `Expr.walk`, `.dependencies`, `._name`, `.npartitions` | the layers of a program | |
| `MapPartitions`, `Map` and `Apply` of `_expr` | layers that run a user's function | |
| `Blockwise._broadcast_dep` | an input of which each partition needs all | |
| `Task.fuse`, `GraphNode.substitute` | tasks are put into one | |
| `_execute_subgraph` of `dask._task_spec`, its second argument | the last task of a group | |
| `TaskState.run_spec` | a task that the scheduler has keeps its inputs | |

Contract tests in `tests/plugins/patches/test_blockwise_layers.py` fail when dask changes any of
these.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dask._expr import _ExprSequence
from dask._task_spec import Task, _execute_subgraph
from dask.utils import key_split

from dask_gpurt.placement.blockwise_groups import Layer
from dask_gpurt.plugins.patches.graphs.known_tasks import Forgotten, Graph, spec_of, with_all_needed
from dask_gpurt.plugins.patches.graphs.transfer_tasks import may_be_fused, token_of

if TYPE_CHECKING:
    from dask._task_spec import GraphNode
    from distributed.scheduler import TaskState

_FRAMES = "dask.dataframe.dask_expr._expr"
#: A task with more layers is named after the first and the last one, as Dask names its own.
_MOST_NAMES = 4


def layers(expr: Any, stays: Callable[[Any], bool]) -> list[Layer]:
    """Return the layers of a program.

    Parameters
    ----------
    expr
        All that a client sent, as an expression of Dask.
    stays
        Returns whether the task of a key stays as it is.

    Returns
    -------
    list of Layer
        Empty if the program has other collections than frames.
    """
    frames = sys.modules.get(_FRAMES)
    roots = expr.operands if isinstance(expr, _ExprSequence) else [expr]
    # Layers of other collections have no names before they are hashed, which takes long.
    if frames is None or not all(isinstance(one, frames.Expr) for one in roots):
        return []
    found = []
    for one in expr.walk():
        needed = one.dependencies()
        inputs = frozenset(each._name for each in needed)
        if not frames.is_valid_blockwise_op(one):
            found.append(Layer(one._name, inputs, 0, may_go_together=False))
            continue
        n_partitions = one.npartitions
        keys = ((one._name, number) for number in range(n_partitions))
        found.append(
            Layer(
                one._name,
                inputs,
                n_partitions,
                may_go_together=not any(map(stays, keys)),
                whole_inputs=frozenset(
                    each._name
                    for each in needed
                    # In this order: writers of files have no meta, which the second one may need.
                    if each.npartitions != n_partitions and one._broadcast_dep(each)
                ),
                runs_user_code=isinstance(one, (frames.MapPartitions, frames.Map, frames.Apply)),
            )
        )
    return found


def put_together(
    graph: Graph, groups: Sequence[Sequence[str]]
) -> tuple[Graph, dict[Any, frozenset[str]]]:
    """Return a graph with one task for each partition of a group of layers.

    Parameters
    ----------
    groups
        Names of layers. A layer comes after its inputs, and a group after those that it needs.

    Returns
    -------
    graph : dict
    made : dict
        By key of each new task, the names of its layers.
    """
    new, made = dict(graph), {}
    n_dependents = Counter(key for task in graph.values() for key in task.dependencies)
    renamed: dict[Any, Any] = {}
    for names in groups:
        group_name = ""
        for number, tasks in _partitions(graph, names, n_dependents):
            for task in tasks:
                del new[task.key]
            named = [_with_new_names(task, renamed) for task in tasks]
            group_name = group_name or _name(named)
            key = renamed[tasks[-1].key] = (group_name, number)
            new[key] = Task.fuse(*named, key=key)
            made[key] = frozenset(names)
    return {key: _with_new_names(task, renamed) for key, task in new.items()}, made


def with_known_groups(graph: Graph, known: Mapping[Any, TaskState]) -> Graph:
    """Return a graph in which known tasks depend on the same groups as in the scheduler.

    Dask warns of a key whose inputs change, and ignores the new ones. If a task came with an
    earlier graph, its inputs may be in groups, and they stay so.

    Returns
    -------
    dict
        The same object, if there is no such task.
    """
    found: Graph = {}
    for key, task in graph.items():
        spec = spec_of(key, known)
        if spec is not None and _needs_groups(spec, task, known):
            # This runs in another thread, and the scheduler may forget a task at any moment.
            with contextlib.suppress(Forgotten):
                found.update(with_all_needed([spec], graph, known))
    return {**graph, **found} if found else graph


def _needs_groups(spec: GraphNode, task: GraphNode, known: Mapping[Any, TaskState]) -> bool:
    """Return whether the scheduler has the same task, but with groups as its inputs.

    For example, the scheduler's needs `part-fused-chunk`, and this one needs `chunk`.
    """
    if spec.dependencies == task.dependencies or len(spec.dependencies) != len(task.dependencies):
        return False
    return {_result_of(key, task, known) for key in spec.dependencies} == {*task.dependencies}


def _result_of(key: Any, task: GraphNode, known: Mapping[Any, TaskState]) -> Any:
    """Return the key of the last task in a group, if this is a group that a task needs."""
    spec = spec_of(key, known) if key not in task.dependencies else None
    if isinstance(spec, Task) and spec.func is _execute_subgraph:
        return spec.args[1]
    return key


def _partitions(
    graph: Graph, names: Sequence[str], n_dependents: Counter[Any]
) -> Iterator[tuple[int, list[GraphNode]]]:
    """Yield the number of each partition, and the tasks of a group for it."""
    number = 0
    while (names[-1], number) in graph:
        tasks = [graph.get((name, number)) for name in names]
        found = [task for task in tasks if task is not None and may_be_fused(task)]
        needed = Counter(key for task in found for key in task.dependencies)
        # A layer may have tasks that its expression does not show, and these may need one of these.
        if len(found) == len(names) and all(
            needed[task.key] == n_dependents[task.key] for task in found[:-1]
        ):
            yield number, found
        number += 1


def _name(tasks: Sequence[GraphNode]) -> str:
    """Return the name of a group with all its partitions, given the tasks of one of them."""
    # Tasks without inputs first: the reading of a file says most of a task, and takes longest.
    sources_first = sorted(tasks, key=lambda task: bool(task.dependencies))
    names = [*dict.fromkeys(key_split(one.key).removesuffix("-fused") for one in sources_first)]
    # Dask ends the name of a task at the first word with other characters.
    names = [names[0], *(name for name in names[1:] if name.replace("-", "").isalpha())]
    if len(names) > _MOST_NAMES:
        names = [names[0], "fused", names[-1]]
    # A key stands for the same task for ever. Two programs may group these layers differently, or
    # the layers that these need. All partitions are grouped like the first.
    own = [task.key for task in tasks]
    needed = {key for task in tasks for key in task.dependencies}.difference(own)
    return "-".join([*names, token_of((own, sorted(map(str, needed))))])


def _with_new_names(task: GraphNode, renamed: dict[Any, Any]) -> GraphNode:
    if renamed.keys().isdisjoint(task.dependencies):
        return task
    return task.substitute(renamed)

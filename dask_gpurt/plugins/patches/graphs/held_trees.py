"""Trees of reductions whose values workers hold: combine the values of each worker first.

`reduction_layers` finds the trees and writes slices; `collectives.regrouping` decides which values
are combined together. A graph that arrives names values of earlier graphs; the scheduler knows
which workers hold them.

| what | why | taken back by |
|---|---|---|
| `Blockwise.indices`, `Blockwise.output_indices` | from which chunks a chunk is made | |
| `TaskState.nbytes` | the largest chunk that a chunk is made of | |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dask.base import tokenize
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_gpurt.collectives.regrouping import TreeLevel, regrouped
from dask_gpurt.plugins.patches.graphs.graph_swap import holding_workers
from dask_gpurt.plugins.patches.graphs.reduction_layers import Tree, mapping_of

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

#: Regrouped levels of each chunk of a result, those of single workers and those across workers.
Levels = dict[tuple[int, ...], tuple[list[TreeLevel], list[TreeLevel]]]


def held_levels(graph: HighLevelGraph, tree: Tree, tasks: Mapping[Any, TaskState]) -> Levels | None:
    """Return the levels of a tree that begins where its values are.

    Parameters
    ----------
    tasks
        The scheduler's tasks. Read from another thread than the scheduler's, one by one.

    Returns
    -------
    Levels or None
        None if workers do not hold all chunks yet, or if there is nothing to combine first.
    """
    if len(tree.levels) < 2:
        return None
    below = mapping_of(graph, tree.levels[0]).values()
    most_inputs = max(len([*flatten(keys)]) for _, keys in below)
    holders = {}
    for block in tree.blocks():
        found = [_holders(graph, tree.leaf, at, tasks) for at in tree.leaves(block)]
        if not all(found):
            return None
        holders[block] = _few(found)
    levels: Levels = {}
    n_local = n_across = 0
    # The second time, each chunk gets as many levels as the one that needs most.
    for _ in range(2):
        for block, chosen in holders.items():
            if (cut := regrouped(chosen, most_inputs, n_local, n_across)) is None:
                return None
            levels[block] = cut
            n_local, n_across = max(n_local, len(cut[0])), max(n_across, len(cut[1]))
    return levels


def _holders(
    graph: HighLevelGraph, name: str, at: tuple[int, ...], tasks: Mapping[Any, TaskState]
) -> set[str]:
    """Return the workers that hold a chunk, or the largest chunk that it is made of."""
    if (held := tasks.get((name, *at))) is not None:
        return holding_workers(held)
    layer = graph.layers.get(name)
    if not isinstance(layer, Blockwise):
        return set()
    numbers = dict(zip(layer.output_indices, at, strict=False))
    largest: set[str] = set()
    most_nbytes = -1
    for source, axes in layer.indices:
        if not isinstance(source, str) or axes is None or not numbers.keys() >= {*axes}:
            continue
        below = tuple(numbers[axis] for axis in axes)
        held = tasks.get((source, *below))
        nbytes = held.nbytes if held is not None else 0
        if nbytes > most_nbytes and (found := _holders(graph, source, below, tasks)):
            largest, most_nbytes = found, nbytes
    return largest


def _few(holders: Sequence[set[str]]) -> list[str]:
    """Return a holder of each value, of several the one that holds most values."""
    n_values = Counter(one for found in holders for one in found)
    return [max(found, key=lambda one: (n_values[one], one)) for found in holders]


def rewritten(graph: HighLevelGraph, tree: Tree, levels: Levels) -> tuple[HighLevelGraph, Tree]:
    """Return a graph with these levels in place of the tree's, and the new tree."""
    combine, _ = next(iter(mapping_of(graph, tree.levels[0]).values()))
    top = mapping_of(graph, tree.name)
    aggregate, _ = next(iter(top.values()))
    said = graph.layers[tree.levels[0]].collection_annotations
    operation = tree.levels[0].rpartition("-")[0]
    n_levels = max(len(local) + len(across) for local, across in levels.values())
    names = [f"{operation}-{tokenize(tree.name, levels, n)}" for n in range(n_levels - 1)]
    written: list[dict[Any, Any]] = [{} for _ in range(n_levels)]
    for block, (local, across) in levels.items():
        keys: list[Any] = [(tree.leaf, *at) for at in tree.leaves(block)]
        for name, tasks, groups in zip(names, written, [*local, *across], strict=False):
            made = {
                (name, *block, number): (combine, [keys[one] for one in group])
                for number, group in enumerate(groups)
            }
            tasks |= made
            keys = [*made]
        written[-1][tree.result_key(block)] = aggregate, keys
    layers, dependencies = dict(graph.layers), dict(graph.dependencies)
    annotations = layers[tree.name].annotations
    for name in tree.levels[:-1]:
        del layers[name], dependencies[name]
    below = tree.leaf
    for name, tasks in zip([*names, tree.name], written, strict=True):
        facts = layers[name].collection_annotations if name == tree.name else said
        layers[name] = MaterializedLayer(tasks, annotations, facts)
        dependencies[name] = {below}
        below = name
    return HighLevelGraph(layers, dependencies), replace(tree, levels=(*names, tree.name))

"""Reductions with large results: trees that combine slices, as the cluster's workers can use them.

The scheduler calls this module for each graph, before it makes tasks of it. Trees with small
results stay as they are, and so does a graph without large ones: the very same object.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask_gpurt.collectives import sliced_trees
from dask_gpurt.collectives.sliced_trees import Slicing
from dask_gpurt.collectives.slicing import ALIGNMENT
from dask_gpurt.plugins.patches.graphs import held_trees
from dask_gpurt.plugins.patches.graphs.graph_swap import GraphSwap
from dask_gpurt.plugins.patches.graphs.reduction_layers import Tree, TreeWriter, trees

if TYPE_CHECKING:
    from dask.highlevelgraph import HighLevelGraph
    from distributed import Scheduler

#: Most trees whose slices are remembered.
_MOST_REMEMBERED = 1000


@dataclass(frozen=True)
class _Written:
    """How a tree was written.

    Attributes
    ----------
    levels
        Levels that begin where its values are; None if it has the levels that Dask gave it.
    level
        The first level that combines slices.
    n_slices
        The number of slices of each chunk of the result.
    """

    levels: held_trees.Levels | None
    level: int
    n_slices: dict[Any, int]


class SlicedReductions:
    """The reductions of one cluster, until `uninstall`.

    Parameters
    ----------
    may_reorder
        Returns whether values may be combined in another order than Dask's where that changes last
        bits.
    """

    def __init__(self, scheduler: Scheduler, may_reorder: Callable[[], bool]) -> None:
        self._scheduler, self._may_reorder = scheduler, may_reorder
        self._chosen: OrderedDict[str, _Written] = OrderedDict()
        self.n_sliced = self.n_piecewise = self.n_slices = self.n_held = 0
        self.seconds = self.whole_s = 0.0
        self._swap = GraphSwap(scheduler, self.rewrite)

    def uninstall(self) -> None:
        """Leave the graphs that arrive from now on to stock Dask."""
        self._swap.uninstall()

    def report(self) -> dict[str, Any]:
        """Return which trees were written anew, and the seconds that were expected."""
        return {
            "sliced": self.n_sliced,
            "slices": self.n_slices,
            "piecewise": self.n_piecewise,
            "held": self.n_held,
            "seconds": self.seconds,
            "stock_seconds": self.whole_s,
        }

    def rewrite(self, graph: HighLevelGraph, keys: Any) -> HighLevelGraph:
        """Return a graph that gives the same results, bit by bit.

        Called in a thread of the scheduler. It reads numbers of the scheduler, each at once.
        """
        for tree in trees(graph, keys, sliced_trees.LEAST_NBYTES):
            graph = self._written(graph, tree)
        return graph

    def _written(self, graph: HighLevelGraph, tree: Tree) -> HighLevelGraph:
        shapes = {block: tree.shape(block) for block in tree.blocks()}
        large = {
            block: shape
            for block, shape in shapes.items()
            if math.prod(shape) * tree.itemsize >= sliced_trees.LEAST_NBYTES
        }
        name = tree.name
        # A task that the scheduler has must keep its inputs. So a tree is always written as it was
        # written first, also if workers came, or hold other values now.
        if (chosen := self._chosen.get(name)) is not None:
            self._chosen.move_to_end(name)
        elif any(tree.result_key(block) in self._scheduler.tasks for block in large):
            chosen = _Written(None, len(tree.levels), dict.fromkeys(large, 1))
        levels = chosen.levels if chosen is not None else self._held_levels(graph, tree)
        if levels is not None:
            graph, tree = held_trees.rewritten(graph, tree, levels)
        if chosen is None:
            chosen = self._chosen[name] = self._choice(graph, tree, levels, large, len(shapes))
            while len(self._chosen) > _MOST_REMEMBERED:
                self._chosen.popitem(last=False)
        writer = TreeWriter(graph, tree, chosen.level)
        for block, shape in large.items():
            writer.write(block, tree.kept[_longest(shape)], chosen.n_slices[block])
        return writer.graph(graph)

    def _held_levels(self, graph: HighLevelGraph, tree: Tree) -> held_trees.Levels | None:
        if not tree.is_exact and not self._may_reorder():
            return None
        return held_trees.held_levels(graph, tree, self._scheduler.tasks)

    def _choice(
        self,
        graph: HighLevelGraph,
        tree: Tree,
        levels: held_trees.Levels | None,
        large: dict[Any, Any],
        n_trees: int,
    ) -> _Written:
        n_values = tree.n_values(graph)
        least_level = len(next(iter(levels.values()))[0]) if levels is not None else 0
        found = {
            block: self._slicing(tree, n_values, n_trees, large[block], least_level)
            for block in large
        }
        level = min(one.level for one in found.values())
        n_slices = {block: one.n_slices for block, one in found.items()}
        self._count(found.values())
        self.n_held += levels is not None
        return _Written(levels, level, n_slices)

    def _slicing(
        self,
        tree: Tree,
        n_values: list[int],
        n_trees: int,
        shape: tuple[int, ...],
        least_level: int,
    ) -> Slicing:
        return sliced_trees.choose(
            n_values,
            n_trees,
            nbytes=math.prod(shape) * tree.itemsize,
            width=shape[_longest(shape)],
            n_workers=len(self._scheduler.workers),
            rate=self._scheduler.bandwidth,
            least_level=least_level,
        )

    def _count(self, found: Any) -> None:
        sliced = [one for one in found if one.n_slices > 1]
        self.n_sliced += bool(sliced)
        self.n_piecewise += not sliced
        self.n_slices += sum(one.n_slices for one in sliced)
        self.seconds += max((one.seconds for one in sliced), default=0.0)
        self.whole_s += max((one.whole_s for one in sliced), default=0.0)


def _longest(shape: tuple[int, ...]) -> int:
    """Return the axis to cut: the first one, where slices are adjacent in memory, if it is long."""
    if shape[0] >= 64 * ALIGNMENT:
        return 0
    return max(range(len(shape)), key=lambda axis: shape[axis])

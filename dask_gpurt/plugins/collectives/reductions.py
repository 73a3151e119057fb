"""Reductions with large results: trees that combine slices, as the cluster's workers can use them.

The scheduler has this look at each graph before it makes tasks of it. Trees with small results stay
as they are, and so does a graph without large ones: the very same object.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from dask_gpurt.collectives import sliced_trees
from dask_gpurt.collectives.sliced_trees import Slicing
from dask_gpurt.collectives.slicing import ALIGNMENT
from dask_gpurt.plugins.patches.graphs.graph_swap import GraphSwap
from dask_gpurt.plugins.patches.graphs.reduction_layers import Tree, TreeWriter, trees

if TYPE_CHECKING:
    from dask.highlevelgraph import HighLevelGraph
    from distributed import Scheduler

#: Most trees whose slices are remembered.
_MOST_REMEMBERED = 1000


class SlicedReductions:
    """The reductions of one cluster, until `uninstall`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._chosen: OrderedDict[str, tuple[int, dict[Any, int]]] = OrderedDict()
        self.n_sliced = self.n_piecewise = self.n_slices = 0
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
        blocks = {block: tree.shape(block) for block in tree.blocks()}
        large = {
            block: shape
            for block, shape in blocks.items()
            if math.prod(shape) * tree.itemsize >= sliced_trees.LEAST_NBYTES
        }
        level, n_slices = self._choice(graph, tree, large, len(blocks))
        writer = TreeWriter(graph, tree, level)
        for block, shape in large.items():
            writer.write(block, tree.kept[_longest(shape)], n_slices[block])
        return writer.graph(graph)

    def _choice(
        self, graph: HighLevelGraph, tree: Tree, large: dict[Any, Any], n_trees: int
    ) -> tuple[int, dict[Any, int]]:
        """Return the first level in slices, and the number of slices of each chunk of the result.

        A task that the scheduler has must keep its inputs. So a tree is always cut as it was cut
        first, also if the number of workers has changed.
        """
        if (chosen := self._chosen.get(tree.name)) is not None:
            self._chosen.move_to_end(tree.name)
            return chosen
        n_values = tree.n_values(graph)
        if any(tree.result_key(block) in self._scheduler.tasks for block in large):
            return len(n_values), dict.fromkeys(large, 1)
        found = {block: self._slicing(tree, n_values, n_trees, large[block]) for block in large}
        level = min(one.level for one in found.values())
        n_slices = {block: one.n_slices for block, one in found.items()}
        self._count(found.values())
        self._chosen[tree.name] = level, n_slices
        while len(self._chosen) > _MOST_REMEMBERED:
            self._chosen.popitem(last=False)
        return level, n_slices

    def _slicing(
        self, tree: Tree, n_values: list[int], n_trees: int, shape: tuple[int, ...]
    ) -> Slicing:
        return sliced_trees.choose(
            n_values,
            n_trees,
            nbytes=math.prod(shape) * tree.itemsize,
            width=shape[_longest(shape)],
            n_workers=len(self._scheduler.workers),
            rate=self._scheduler.bandwidth,
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

"""Fewer tasks for the inputs of shuffles, as the cluster's workers can use them.

The scheduler has this look at each graph before it makes tasks of it. A graph without a shuffle
stays as it is: the very same object.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.input_groups import ShuffleInput, grouped
from dask_gpurt.plugins.patches.graphs.graph_swap import GraphSwap, culled, holding_workers
from dask_gpurt.plugins.patches.graphs.transfer_tasks import (
    Chain,
    ChainFinder,
    Graph,
    barriers,
    keep_known,
    write,
)

if TYPE_CHECKING:
    from distributed import Scheduler


class GroupedInputs:
    """The inputs of one cluster's shuffles, until `uninstall`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._swap = GraphSwap(scheduler, tasks=self.rewrite)

    def uninstall(self) -> None:
        """Leave the graphs that arrive from now on to stock Dask."""
        self._swap.uninstall()

    def rewrite(
        self,
        graph: Graph,
        wanted: Collection[Any],
        annotations: Mapping[str, Mapping[Any, Any]],
        may_fuse: bool,
    ) -> Graph:
        """Return a graph that gives the same results.

        Called in a thread of the scheduler. It reads facts of the scheduler, each at once.
        """
        shuffles = barriers(graph)
        if not shuffles:
            return graph
        new = dict(graph)
        tasks = self._scheduler.tasks
        unknown = [barrier for barrier in shuffles if not keep_known(new, barrier, tasks)]
        if unknown and may_fuse:
            finder = ChainFinder(graph, wanted, tasks, annotations)
            for barrier in unknown:
                if chains := finder.chains(barrier):
                    self._group(new, barrier, chains, finder)
        return new if len(unknown) == len(shuffles) else culled(new, set(wanted))

    def _group(self, new: Graph, barrier: Any, chains: list[Chain], finder: ChainFinder) -> None:
        inputs = [self._input(chain, finder) for chain in chains]
        groups = grouped(inputs, self._scheduler.total_nthreads)
        write(new, barrier, [[chains[number] for number in group] for group in groups])

    def _input(self, chain: Chain, finder: ChainFinder) -> ShuffleInput:
        nbytes, most_nbytes = chain.carried_nbytes, 0
        holder = ""
        for key in chain.inputs:
            task = self._scheduler.tasks.get(key)
            addresses = holding_workers(task)
            if task is None or not addresses:
                return ShuffleInput(is_alone=True)
            if finder.is_shared(key):
                continue  # a small table that all inputs need does not tell where they are
            nbytes += task.nbytes
            if task.nbytes >= most_nbytes:
                most_nbytes, holder = task.nbytes, min(addresses)
        return ShuffleInput(holder, nbytes, is_alone=chain.is_annotated or not nbytes)

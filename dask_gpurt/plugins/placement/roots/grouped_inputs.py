"""Fewer tasks for the inputs of shuffles, as the cluster's workers can use them.

The scheduler has this look at each graph before it makes tasks of it. A graph without a shuffle
stays as it is: the very same object.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.input_groups import ShuffleInput, grouped
from dask_gpurt.plugins.patches.graphs.graph_swap import GraphSwap
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
        self, graph: Graph, wanted: Collection[Any], annotations: Mapping[str, Mapping[Any, Any]]
    ) -> Graph:
        """Return a graph that gives the same results.

        Called in a thread of the scheduler. It reads facts of the scheduler, each at once.
        """
        shuffles = barriers(graph)
        if not shuffles:
            return graph
        new = dict(graph)
        finder = ChainFinder(graph, wanted, annotations)
        n_threads = {ws.address: ws.nthreads for ws in tuple(self._scheduler.workers.values())}
        for barrier in shuffles:
            if keep_known(new, barrier, self._scheduler.tasks):
                continue
            if chains := finder.chains(barrier):
                inputs = [self._input(chain, graph) for chain in chains]
                groups = grouped(inputs, n_threads)
                write(new, barrier, [[chains[number] for number in group] for group in groups])
        return new

    def _input(self, chain: Chain, graph: Graph) -> ShuffleInput:
        if chain.is_annotated:
            return ShuffleInput(is_alone=True)
        nbytes, most_nbytes = chain.carried_nbytes, 0
        holder = None
        for key in chain.inputs:
            task = self._scheduler.tasks.get(key)
            # In two steps: the scheduler's thread may change it in between.
            holders = task.who_has if task is not None and key not in graph else None
            addresses = sorted(one.address for one in tuple(holders or ()))
            if task is None or not addresses:
                return ShuffleInput(is_alone=True)
            nbytes += task.nbytes
            if task.nbytes >= most_nbytes:
                most_nbytes, holder = task.nbytes, addresses[0]
        return ShuffleInput(holder, nbytes)

"""Puts small tasks of frames, and tasks that hand over inputs of shuffles, together.

The scheduler calls this module for each graph, before it makes tasks of it. If there is nothing to
put together, the graph stays as it is: the very same object.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import dask.config

from dask_gpurt.placement import blockwise_groups
from dask_gpurt.placement.blockwise_groups import Layer
from dask_gpurt.placement.input_groups import ShuffleInput, grouped
from dask_gpurt.plugins.patches.graphs.blockwise_layers import (
    layers,
    put_together,
    with_known_groups,
)
from dask_gpurt.plugins.patches.graphs.graph_swap import (
    GraphSwap,
    SentProgram,
    culled,
    holding_workers,
)
from dask_gpurt.plugins.patches.graphs.known_tasks import Graph
from dask_gpurt.plugins.patches.graphs.transfer_tasks import (
    Barrier,
    Chain,
    ChainFinder,
    barriers,
    keep_known,
    with_own_keys,
    write,
)

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dask_gpurt")


class FewerTasks:
    """Tasks put together on one cluster, until `uninstall`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: By key of each task of several layers that the scheduler may still have, their names.
        self._made: dict[Any, frozenset[str]] = {}
        #: Keys of the barriers of shuffles whose inputs are in tasks that were made here.
        self._shuffles: set[Any] = set()
        self._is_ending = False
        self._swap = GraphSwap(scheduler, tasks=self.rewrite)

    def uninstall(self) -> None:
        """Leave later graphs to stock Dask, except for tasks that the scheduler has already.

        A later graph may have layers, or inputs of a shuffle, that are in such tasks. As Dask
        ignores new inputs of a task, it would never forget them.
        """
        self._is_ending = True
        if self._forget():
            self._swap.uninstall()

    def _forget(self) -> bool:
        """Forget tasks that the scheduler has forgotten; return whether none is left."""
        tasks = self._scheduler.tasks
        # Copied at once: this runs on the event loop as well as in its thread.
        self._made = {key: names for key, names in [*self._made.items()] if key in tasks}
        self._shuffles = {key for key in [*self._shuffles] if key in tasks}
        return not self._made and not self._shuffles

    def rewrite(self, graph: Graph, program: SentProgram) -> Graph:
        """Return a graph that gives the same results.

        Called in a thread of the scheduler. It reads facts of the scheduler, each at once.
        """
        graph = with_own_keys(graph)
        new = with_known_groups(graph, self._scheduler.tasks) if self._made else graph
        if new is not graph:
            new = culled(new, {*program.wanted})
        if self._is_ending:
            new, _ = self._with_known_inputs(new, program)
            if self._forget():
                self._scheduler.loop.add_callback(self._swap.uninstall)
            return new
        if program.may_fuse and program.is_awaited and not program.annotations:
            try:
                new = self._with_blockwise_groups(new, program)
            except Exception:
                # The rest goes on, or shuffles would lose the tasks that the scheduler has.
                logger.exception("the layers of a program could not be examined; they stay apart")
        return self._with_grouped_inputs(new, program)

    # ------------------------------------------------------------------ layers of frames

    def _with_blockwise_groups(self, graph: Graph, program: SentProgram) -> Graph:
        # Dask's own switch for this.
        if dask.config.get("optimization.fuse.active", None) is False:
            return graph
        tasks, wanted = self._scheduler.tasks, program.wanted
        # Another program may need a task that the scheduler has, or it may be done.
        found = layers(program.expr, lambda key: key in wanted or key in tasks)
        groups = blockwise_groups.grouped(found)
        if not groups or self._hides_layers_of(found, groups):
            return graph
        new, made = put_together(graph, groups)
        self._made.update(made)
        return new

    def _hides_layers_of(self, found: list[Layer], groups: list[list[str]]) -> bool:
        """Return whether an earlier program has layers of this one in groups of its own.

        If so, this program repeats the work of these layers, so that later programs can share it.
        """
        self._forget()
        names = {layer.name for layer in found}
        same = {frozenset(group) for group in groups}
        return any(one & names for one in {*self._made.values()} - same)

    # ------------------------------------------------------------------ inputs of shuffles

    def _with_known_inputs(self, graph: Graph, program: SentProgram) -> tuple[Graph, list[Barrier]]:
        """Return a graph in which shuffles keep the tasks that the scheduler has for them.

        Returns
        -------
        graph, unknown
            The second are the shuffles that the scheduler does not have.
        """
        shuffles = barriers(graph)
        if not shuffles:
            return graph, []
        new, tasks = dict(graph), self._scheduler.tasks
        unknown = [barrier for barrier in shuffles if not keep_known(new, barrier, tasks)]
        if len(unknown) == len(shuffles):
            return graph, unknown
        return culled(new, {*program.wanted}), unknown

    def _with_grouped_inputs(self, graph: Graph, program: SentProgram) -> Graph:
        new, unknown = self._with_known_inputs(graph, program)
        if not unknown or not program.may_fuse:
            return new
        finder = ChainFinder(new, program.wanted, self._scheduler.tasks, program.annotations)
        shuffles = [
            (barrier, self._groups(chains, finder))
            for barrier in unknown
            if (chains := finder.chains(barrier))
        ]
        new = dict(new)
        write(new, shuffles)
        self._forget()
        self._shuffles.update(barrier.key for barrier, _ in shuffles)
        return new

    def _groups(self, chains: list[Chain], finder: ChainFinder) -> list[list[Chain]]:
        inputs = [self._input(chain, finder) for chain in chains]
        groups = grouped(inputs, self._scheduler.total_nthreads)
        return [[chains[number] for number in group] for group in groups]

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

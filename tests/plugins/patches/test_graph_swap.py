"""Contract tests of the place where a scheduler makes tasks of a graph."""

from __future__ import annotations

import inspect
from unittest import mock

import dask
import dask.array as da
import dask.dataframe as dd
import distributed.scheduler
import numpy as np
import pandas as pd
import pytest
from dask._expr import HLGExpr, HLGFinalizeCompute, _HLGExprSequence
from dask._task_spec import Task
from dask.array.optimization import optimize
from distributed import Client, Scheduler, wait
from distributed.client import FutureCancelledError
from distributed.utils_test import captured_logger, gen_cluster

from dask_gpurt.plugins.patches.graphs import graph_swap
from dask_gpurt.plugins.patches.graphs.graph_swap import GraphSwap
from dask_gpurt.process_patch import ProcessPatch


def test_names_are_as_expected():
    function = inspect.unwrap(distributed.scheduler._materialize_graph)
    assert list(inspect.signature(function).parameters) == ["expr", "validate"]
    assert "low_level_optimizer" in HLGExpr._parameters
    assert issubclass(HLGFinalizeCompute, HLGExpr)
    assert inspect.iscoroutinefunction(Scheduler.update_graph)
    source = inspect.getsource(Scheduler.update_graph)
    assert "await offload(\n                _materialize_graph,\n" in source


class Seen:
    """A rewrite that records what it is called with."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def __call__(self, graph, keys):
        self.calls.append((graph, keys))
        if self.error is not None:
            raise self.error
        return graph


def sums():
    array = da.from_array(np.arange(12.0), chunks=3)
    return array.sum(), array.max()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_layers_of_a_program_are_seen_once(c, s, a):
    seen = Seen()
    swap = GraphSwap(s, seen)
    assert await c.compute(sums()[0]) == 66
    ((graph, keys),) = seen.calls
    assert sums()[0].name in graph.layers and len(keys) == 1
    swap.uninstall()
    swap.uninstall()
    assert s.stream_handlers["update-graph"] == s.update_graph
    assert await c.compute(sums()[1]) == 11
    assert len(seen.calls) == 1


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_all_kinds_of_collections_are_computed(c, s, a):
    seen = Seen()
    swap = GraphSwap(s, seen)
    total, largest = sums()
    both = dask.delayed(lambda one, other: [one, other])(total, largest)
    assert await c.gather(c.compute([total, largest, both])) == [66, 11, [66, 11]]
    assert await c.compute(await_all(c.persist([total, largest]))) == 77
    assert isinstance(dask.base.collections_to_expr([total, both]).optimize(), _HLGExprSequence)
    assert len(seen.calls) >= 3
    swap.uninstall()


def await_all(arrays):
    return arrays[0] + arrays[1]


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_the_optimiser_of_the_program_runs_too(c, s, a):
    called = []

    def mine(graph, keys, **kwargs):
        called.append(keys)
        return optimize(graph, keys, **kwargs)

    MINE.append(mine)
    seen = Seen()
    swap = GraphSwap(s, seen)
    with dask.config.set(array_optimize=program_optimize):
        assert await c.compute(sums()[0]) == 66
    assert len(called) == len(seen.calls) == 1
    assert await c.compute(sums()[1], optimize_graph=False) == 11
    assert len(called) == len(seen.calls) == 1, "the program wants its graph as it is"
    swap.uninstall()


#: The optimiser is pickled by its name.
MINE: list = []


def program_optimize(graph, keys, **kwargs):
    return MINE[-1](graph, keys, **kwargs)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_an_error_leaves_the_graph_as_it_is(c, s, a):
    seen = Seen(ValueError("of ours"))
    swap = GraphSwap(s, seen)
    assert await c.compute(sums()[0]) == 66
    assert len(seen.calls) == 1
    swap.uninstall()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_other_schedulers_of_the_process_are_untouched(c, s, a):
    async with Scheduler(port=0, dashboard_address=":0") as other:
        seen, others = Seen(), Seen()
        swap, second = GraphSwap(s, seen), GraphSwap(other, others)
        assert await c.compute(sums()[0]) == 66
        assert (len(seen.calls), len(others.calls)) == (1, 0)
        swap.uninstall()
        second.uninstall()


class SeenTasks:
    """A change of tasks that records what it is called with."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def __call__(self, tasks, program):
        self.calls.append((dict(tasks), program))
        if self.error is not None:
            raise self.error
        return {key: Task(key, lambda: 5) for key in program.wanted}


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_tasks_of_all_graphs_are_seen(c, s, a):
    seen = SeenTasks()
    swap = GraphSwap(s, tasks=seen)
    with dask.annotate(priority=3):
        total = sums()[0]
    assert await c.compute(total, optimize_graph=False) == 5
    frame = dd.from_pandas(pd.DataFrame({"x": [1]}), npartitions=1)
    assert await c.compute(frame.x.sum()) == await c.submit(int) == 5
    assert [program.wanted <= tasks.keys() for tasks, program in seen.calls] == [True] * 3
    assert {*seen.calls[0][1].annotations["priority"].values()} == {3}
    assert all(program.may_fuse for _, program in seen.calls)
    swap.uninstall()
    assert await c.submit(str) == ""


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_programs_that_name_single_tasks_are_told_apart(c, s, a):
    seen = SeenTasks()
    swap = GraphSwap(s, tasks=seen)
    with dask.annotate(priority=lambda key: 1):
        await c.compute(sums()[0])
    await c.compute(sums()[1], retries=2)
    await c.submit(dict, actor=True)
    with dask.annotate(priority=1):
        await c.compute(sums()[0])
    assert [program.may_fuse for _, program in seen.calls] == [False, False, False, True]
    swap.uninstall()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_only_a_program_that_waits_is_said_to_wait(c, s, a):
    seen = SeenTasks()
    swap = GraphSwap(s, tasks=seen)
    total = sums()[0]
    await c.compute(total)
    await wait(c.persist(total))
    await c.submit(int)
    await wait(c.map(int, range(2)))
    expr = dask.base.collections_to_expr([total]).optimize()
    keys = [*dask.core.flatten(expr.__dask_keys__())]
    assert await c.get(expr, keys, sync=False)[0] == 5
    assert [program.is_awaited for _, program in seen.calls] == [False] * 4 + [True]
    assert {*seen.calls[-1][1].expr.__dask_graph__()} == {*expr.__dask_graph__()}
    swap.uninstall()


def test_a_computed_collection_waits():
    seen = SeenTasks()
    with Client(n_workers=1, processes=False, dashboard_address=":0") as client:
        swap = client.sync(_swapped, client.cluster.scheduler, seen)
        assert sums()[0].compute() == 5
        assert [program.is_awaited for _, program in seen.calls] == [True]
        client.sync(_ended, swap)


async def _swapped(scheduler, tasks):
    return GraphSwap(scheduler, tasks=tasks)


async def _ended(swap):
    swap.uninstall()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_graph_is_changed_after_the_one_before_is_there(c, s, a):
    seen = []

    def known(tasks, program):
        seen.append({*s.tasks})
        return tasks

    swap = GraphSwap(s, tasks=known)
    async with Client(s.address, asynchronous=True) as other:
        futures = [one.submit(int, n, pure=False) for n, one in enumerate([c, other] * 3)]
        await wait(futures)
    assert [len(one) for one in seen] == [*range(6)]
    swap.uninstall()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_an_error_leaves_tasks_as_they_are(c, s, a):
    seen = SeenTasks(ValueError("of ours"))
    swap = GraphSwap(s, tasks=seen)
    assert await c.compute(sums()[0]) == 66
    assert len(seen.calls) == 1
    swap.uninstall()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_graph_is_handled_once_it_is_taken_or_refused(c, s, a):
    seen = []
    swap = GraphSwap(s, handled=lambda keys: seen.extend((key, key in s.tasks) for key in keys))
    taken = c.submit(int, 1, key="taken")
    assert await taken == 1
    await taken.cancel()
    with pytest.raises(FutureCancelledError):
        await c.submit(int, taken, key="refused")
    assert seen == [("taken", True), ("refused", False)]
    swap.uninstall()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_an_error_of_the_one_who_is_told_harms_no_client(c, s, a):
    swap = GraphSwap(s, handled=lambda keys: 1 / 0)
    with captured_logger("dask_gpurt") as log:
        assert await c.submit(int, 1) == 1
    assert "ZeroDivisionError" in log.getvalue()
    swap.uninstall()
    assert await c.submit(int, 2) == 2


@pytest.mark.parametrize("first", [0, 1])
def test_several_functions_change_a_graph(first):
    @gen_cluster(client=True, nthreads=[("", 1)])
    async def test(c, s, a):
        layers, tasks = Seen(), SeenTasks()
        swaps = [GraphSwap(s, layers), GraphSwap(s, tasks=tasks)]
        assert await c.compute(sums()[0]) == 5
        assert len(layers.calls) == len(tasks.calls) == 1
        swaps.pop(first).uninstall()
        await c.compute(sums()[1])
        assert (len(layers.calls), len(tasks.calls)) == ((1, 2), (2, 1))[first]
        swaps.pop().uninstall()
        assert s.stream_handlers["update-graph"] == s.update_graph

    test()


@gen_cluster(nthreads=[])
async def test_the_function_of_the_process_is_restored(s):
    stock = distributed.scheduler._materialize_graph
    # Schedulers of other tests in this process may still use the patch.
    with mock.patch.object(graph_swap, "_patch", ProcessPatch(graph_swap._replace)):
        swaps = [GraphSwap(s, Seen()) for _ in range(2)]
        for swap in swaps:
            assert distributed.scheduler._materialize_graph is not stock
            swap.uninstall()
    assert distributed.scheduler._materialize_graph is stock


@gen_cluster(nthreads=[])
async def test_a_scheduler_that_ends_gives_the_function_back(s):
    swap = GraphSwap(s, Seen())
    release = swap._release
    assert release.alive and release.peek()[0] is s
    swap.uninstall()
    assert not release.alive


@pytest.mark.parametrize("kind", ["threads", "sync"])
def test_local_computations_are_untouched(kind):
    assert sums()[0].compute(scheduler=kind) == 66

"""Reductions with large results move few bytes, and placement keeps Dask's queueing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import random
import weakref
from collections import Counter

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Event, Worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.utils_test import async_poll_for, gen_cluster

from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import ChangesSpeed, Dies
from dask_gpurt.simulate.example_clusters import cpu_hosts
from tests.simulate.flat import task, workload

MIB = 2**20
NBYTES = 64 * MIB
FAN_IN, N_BLOCKS, N_WORKERS = 4, 32, 8
MACHINES = [
    cpu_hosts(hosts, N_WORKERS // hosts, nthreads=nthreads)
    for hosts in (1, 4)
    for nthreads in (1, 2)
]


def reduction(n_blocks=N_BLOCKS, *, partial=1, persisted=False, centred=False, s=0.1):
    """Return the workload of a reduction of blocks of `NBYTES`.

    Parameters
    ----------
    partial
        Size of a partial result, in blocks.
    persisted
        Whether blocks are tasks of their own.
    centred
        Whether the result is subtracted from each block.
    """
    tasks = [task(f"('load-0', {n})", s=s, nbytes=NBYTES) for n in range(n_blocks)]
    level = list(range(n_blocks))
    if persisted or centred:
        tasks += [task(f"('chunk-0', {n})", n, s=s / 2, nbytes=NBYTES) for n in range(n_blocks)]
        level = list(range(n_blocks, 2 * n_blocks))
    depth = 0
    while len(level) > 1:
        parts = [level[i : i + FAN_IN] for i in range(0, len(level), FAN_IN)]
        nbytes = NBYTES * (partial if len(parts) > 1 else 1)
        level = list(range(len(tasks), len(tasks) + len(parts)))
        tasks += [
            task(f"('combine-{depth}', {n})", *part, s=s, nbytes=nbytes)
            for n, part in enumerate(parts)
        ]
        depth += 1
    if not centred:
        return workload(*tasks)
    subtracted = [task(f"('sub-0', {n})", n, level[0], s=s, nbytes=NBYTES) for n in range(n_blocks)]
    n_before = len(tasks)
    return workload(*tasks, *subtracted, wanted=range(n_before, n_before + n_blocks))


def data_aware(machine, *plugins):
    """Return an installer of placement that knows the machine, and of plugins."""

    def install(scheduler):
        clock = asyncio.get_running_loop().time
        Placement(scheduler, "data-aware", machine.network.topology, clock=clock)
        for plugin in plugins:
            plugin.scheduler = scheduler
            scheduler.add_plugin(plugin, name=type(plugin).__name__)

    return install


def both(model, machine, **options):
    """Return the runs with stock Dask and with placement, in which the same tasks end."""
    stock = simulate(model, machine, **options)
    ours = simulate(model, machine, data_aware(machine), **options)
    assert {run.key for run in ours.tasks} == {run.key for run in stock.tasks}
    return stock, ours


def moved(result):
    return result.moved_nbytes / NBYTES


@pytest.mark.parametrize("machine", MACHINES, ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("least", "options"),
    [
        pytest.param(7, {}, id="sum"),
        pytest.param(14, {"partial": 2}, id="mean"),
        pytest.param(21, {"partial": 2, "centred": True}, id="x - mean"),
    ],
)
def test_blocks_are_made_where_they_are_combined(machine, least, options):
    stock, ours = both(reduction(**options), machine)
    assert moved(ours) <= 1.3 * least
    assert moved(ours) <= 0.5 * moved(stock)
    assert ours.makespan_s <= stock.makespan_s
    blocks = Counter(run.worker for run in ours.tasks if "load" in run.key)
    assert set(blocks.values()) == {N_BLOCKS // N_WORKERS}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda one: one.name)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("seed", [None, 1])
def test_held_blocks_move_no_more_than_in_stock(machine, centred, seed):
    model = reduction(persisted=True, centred=centred)
    addresses = [one.address for one in machine.workers] * (N_BLOCKS // N_WORKERS)
    if seed is not None:
        random.Random(seed).shuffle(addresses)
    held = {model.tasks[n].key: address for n, address in enumerate(addresses)}
    stock, ours = both(model, machine, held=held)
    assert moved(ours) <= 1.06 * moved(stock)
    assert ours.makespan_s <= 1.1 * stock.makespan_s
    combined = Counter(run.worker for run in ours.tasks if "combine-0" in run.key)
    # In the order of the scheduler, neighbours are on different workers.
    assert max(combined.values()) <= (1 if seed is None else 2)


class Fullness(SchedulerPlugin):
    """The most tasks that a worker had been given when it was given another source."""

    most = 0

    def transition(self, key, start, finish, *args, **kwargs):
        if finish == "processing" and "load" in key:
            ws = self.scheduler.tasks[key].processing_on
            self.most = max(self.most, len(ws.processing))


@pytest.mark.parametrize("n_blocks", [33, 100])
def test_no_worker_gets_more_sources_than_queueing_allows(n_blocks):
    machine = cpu_hosts(2, 4)
    fullness = Fullness()
    with dask.config.set({"distributed.scheduler.work-stealing": False}):
        simulate(reduction(n_blocks), machine, data_aware(machine, fullness))
        saturation = dask.config.get("distributed.scheduler.worker-saturation")
    assert fullness.most == math.ceil(saturation)


@pytest.mark.parametrize("n_blocks", [33, 40, 100])
def test_uneven_numbers_of_blocks_are_spread_evenly(n_blocks):
    machine = cpu_hosts(2, 4)
    stock, ours = both(reduction(n_blocks), machine)
    blocks = Counter(run.worker for run in ours.tasks if "load" in run.key)
    assert max(blocks.values()) <= math.ceil(n_blocks / N_WORKERS)
    assert ours.makespan_s <= 1.02 * stock.makespan_s
    assert moved(ours) <= 0.6 * moved(stock)


def test_two_reductions_at_once_move_little():
    machine = cpu_hosts(2, 4)
    one, other = reduction(), reduction(40)
    shifted = [
        task(
            model.key.replace("-", "-other-"),
            *(needed + len(one.tasks) for needed in model.dependencies),
            s=model.duration_s,
            nbytes=model.nbytes,
        )
        for model in other.tasks
    ]
    last = len(one.tasks) - 1
    model = workload(*one.tasks, *shifted, wanted=(last, last + len(shifted)))
    stock, ours = both(model, machine)
    assert moved(ours) <= 0.6 * moved(stock)
    assert ours.makespan_s <= 1.1 * stock.makespan_s


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_runs_of_a_lost_worker_are_made_by_others(share, validate):
    machine = cpu_hosts(2, 4)
    model = reduction(64)
    healthy = simulate(model, machine, data_aware(machine))
    bad = machine.with_incidents(Dies(machine.workers[0].address, share * healthy.makespan_s))
    ours = simulate(model, bad, data_aware(bad), validate=validate)
    assert {run.key for run in ours.tasks} == {run.key for run in healthy.tasks}
    assert ours.makespan_s < 2 * healthy.makespan_s


def test_others_take_over_the_run_of_a_slow_worker():
    machine = cpu_hosts(2, 4)
    model = reduction(64)
    healthy = simulate(model, machine, data_aware(machine))
    slow = machine.workers[0].address
    bad = machine.with_incidents(ChangesSpeed(slow, 0.05, speed=0.05))
    ours, stock = simulate(model, bad, data_aware(bad)), simulate(model, bad)
    assert sum(run.worker == slow for run in ours.tasks) < 4
    assert ours.makespan_s <= stock.makespan_s
    assert ours.makespan_s < healthy.makespan_s + 3 * 0.1 / 0.05


def test_a_run_behind_a_task_that_hardly_ends_is_taken():
    """Nothing is known of durations: the first task of a worker takes longer than all others."""
    machine = cpu_hosts(1, 2)
    model = reduction(12)
    stuck = model.tasks[0]
    tasks = [task(stuck.key, s=60.0, nbytes=NBYTES), *model.tasks[1:]]
    ours = simulate(workload(*tasks), machine, data_aware(machine))
    loads = [run for run in ours.tasks if "load" in run.key and run.key != stuck.key]
    assert max(run.stop_s for run in loads) < 30.0


def late(block, event):
    event.wait()
    return block


def first_of(first, *others):
    return first


@gen_cluster(client=True)
async def test_tasks_of_a_cancelled_tree_are_let_go(c, s, a, b):
    placement = Placement(s, "data-aware")
    event = Event()
    blocks = da.from_array(np.ones(64), chunks=1).map_blocks(late, event, dtype=float)
    result = c.compute(blocks.sum(split_every=4))
    await async_poll_for(lambda: s.queued, timeout=60)
    queued = weakref.WeakSet(s.queued)
    (runs,) = placement._roots._trees._trees.values()
    assert not runs.is_empty
    await result.cancel()
    await event.set()
    await async_poll_for(lambda: not s.tasks, timeout=60)
    gc.collect()
    assert not queued


def tree_over(level):
    """Combine tasks by fours."""
    for depth in range(3):
        parts = [level[n : n + 4] for n in range(0, len(level), 4)]
        level = [
            dask.delayed(first_of)(*part, dask_key_name=(f"part-{depth}", n))
            for n, part in enumerate(parts)
        ]
    return level[0]


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_later_graphs_of_one_function_have_runs(c, s, a, b):
    """Their leaves have the same group, whose first graph is done."""
    placement = Placement(s, "data-aware")
    for graph in range(3):
        event = Event()
        level = [
            dask.delayed(late)(1, event, dask_key_name=f"load-{graph:08x}{n:024x}")
            for n in range(64)
        ]
        result = c.compute(tree_over(level), optimize_graph=False)
        await async_poll_for(lambda: s.queued, timeout=60)
        await event.set()
        assert await result == 1
        (runs,) = placement._roots._trees._trees.values()
        owners = Counter(runs._owners.values())
        assert sum(owners.values()) == 64, "those of earlier graphs are forgotten"
        assert all(24 <= n <= 40 for n in owners.values())
        del result, level
        await async_poll_for(lambda: not s.tasks, timeout=60)


@pytest.mark.parametrize("event", ["a worker leaves", "another tree begins"])
@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_trees_that_ended_are_forgotten(c, s, a, b, event):
    placement = Placement(s, "data-aware")

    async def run(name):
        level = [dask.delayed(abs)(1, dask_key_name=(name, n)) for n in range(64)]
        assert await c.compute(tree_over(level), optimize_graph=False) == 1

    await run("load-1")
    await async_poll_for(lambda: not s.tasks, timeout=60)
    trees = placement._roots._trees._trees
    assert set(trees) == {"load-1"}
    if event == "a worker leaves":
        placement.remove_worker(b.address)
        assert not trees
    else:
        await run("load-2")
        assert set(trees) == {"load-2"}


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_workers_that_join_get_tasks_of_which_none_has_ended(c, s, a):
    """The runs of earlier workers have all tasks, and nobody knows how long these take."""
    placement = Placement(s, "data-aware")

    class Joins(SchedulerPlugin):
        def add_worker(self, scheduler, worker):
            placement.add_worker(scheduler.workers[worker])

    s.add_plugin(Joins(), name="joins")
    event = Event()
    level = [dask.delayed(late)(1, event, dask_key_name=("load-1", n)) for n in range(64)]
    result = c.compute(tree_over(level), optimize_graph=False)
    await async_poll_for(lambda: s.queued, timeout=60)
    async with contextlib.AsyncExitStack() as stack:
        new = [await stack.enter_async_context(Worker(s.address, nthreads=1)) for _ in range(3)]
        # Not after half a second for each queued task.
        await async_poll_for(
            lambda: all(s.workers[one.address].processing for one in new), timeout=8
        )
        await event.set()
        assert await result == 1

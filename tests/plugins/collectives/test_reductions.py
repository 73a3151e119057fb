"""Reductions with large results on real clusters: bits, places, and what is left to stock Dask."""

from __future__ import annotations

import asyncio
import logging
import pickle
import subprocess
import sys

import dask
import dask.array as da
import numpy as np
import pytest
from dask.core import flatten
from distributed import Worker, futures_of, wait
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt.collectives import sliced_trees
from dask_gpurt.collectives.slicing import Cut
from dask_gpurt.command.status import as_text
from dask_gpurt.plugins.collectives.shipped import Shipped

N_WORKERS = 4
CONFIG = {"gpurt.enabled": True, "distributed.scheduler.bandwidth": 1e6}
N = 100_000


@pytest.fixture(autouse=True)
def small_results(monkeypatch):
    monkeypatch.setattr(sliced_trees, "LEAST_NBYTES", N)
    monkeypatch.setattr(sliced_trees, "LEAST_SLICE_NBYTES", 1000)


def on_cluster(n_workers=N_WORKERS, **settings):
    config = {**CONFIG, **settings}
    return gen_cluster(client=True, nthreads=[("", 1)] * n_workers, config=config)


def report(s):
    return s.plugins["gpurt"].collectives.reductions.report()


def blocks(n_blocks=N_WORKERS, width=N):
    values = np.random.default_rng(1).random((n_blocks, width))
    return da.from_array(values, chunks=(1, -1))


def held_blocks(c, workers):
    """Return blocks of which each worker holds one."""
    addresses = [one.address for one in workers]
    with dask.annotate(workers=lambda key: addresses[key[1] if isinstance(key, tuple) else 0]):
        array = blocks()
    return c.persist(array, optimize_graph=False)


def prefixes(s):
    return {name for name in s.task_prefixes if name.endswith(("-cut", "-slice"))}


async def forgotten(s):
    while s.tasks:
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", ["sum", "mean", "std", "max", "nanvar"])
def test_results_have_the_bits_of_stock_dask(name):
    @on_cluster()
    async def test(c, s, *workers):
        array = getattr(da, name)(blocks(), axis=0)
        found = await c.compute(array)
        assert found.tobytes() == array.compute(scheduler="sync").tobytes()
        assert report(s)["sliced"] == 1 and report(s)["slices"] == 4
        assert len(prefixes(s)) == 2

    test()


@on_cluster()
async def test_contractions_and_what_follows(c, s, *workers):
    x = da.from_array(np.random.default_rng(1).random((20, 400)), chunks=(5, -1))
    gram = x.T @ x
    centred = blocks() - blocks().mean(axis=0)
    products, rest = await c.gather(c.compute([gram, centred]))
    assert products.tobytes() == gram.compute(scheduler="sync").tobytes()
    assert rest.tobytes() == centred.compute(scheduler="sync").tobytes()
    assert report(s)["sliced"] == 2


@on_cluster()
async def test_no_worker_receives_whole_values(c, s, *workers):
    array = held_blocks(c, workers)
    await wait(array)
    for worker in workers:
        worker.transfer_incoming_log.clear()
    await c.compute(array.sum(axis=0))
    received = [
        {key: nbytes for one in worker.transfer_incoming_log for key, nbytes in one["keys"].items()}
        for worker in workers
    ]
    assert all(max(one.values(), default=0) <= 8 * N / 3 for one in received)


@on_cluster(**{"gpurt.placement.policy": "data-aware"})
async def test_each_worker_combines_one_slice(c, s, *workers):
    array = held_blocks(c, workers)
    await wait(array)
    await c.compute(array.sum(axis=0))
    slices = {key for key, *_ in s.transition_log if "sum-slice" in str(key)}
    said = [s.plugins["gpurt"].placement.explain(key) for key in slices]
    assert {one["worker"] for one in said} == {worker.address for worker in workers}
    assert all(one["reason"].startswith("combines a slice") for one in said)


@on_cluster()
async def test_small_results_are_left_alone(c, s, *workers):
    array = blocks(width=N // 100).sum(axis=0)
    graph = array.dask
    assert s.plugins["gpurt"].collectives.reductions.rewrite(graph, array.__dask_keys__()) is graph
    assert (await c.compute(array)).shape == (N // 100,)
    assert report(s)["sliced"] == report(s)["piecewise"] == 0 and not prefixes(s)


@on_cluster()
async def test_status_counts_reductions(c, s, *workers):
    assert "reductions" not in as_text({**await dask_gpurt.status(c), "scheduler": s.address})
    await c.gather(c.compute([blocks().sum(axis=0), blocks(2).max(axis=0)]))
    text = as_text({**await dask_gpurt.status(c), "scheduler": s.address})
    assert "1 in 4 slices, 1 of whole values" in text


async def received_of_sum(c, s, workers, dtype):
    """Return the bytes that a sum of 16 held blocks moves, in blocks, and the blocks' sum."""
    values = np.random.default_rng(2).normal(size=(16, N)).cumsum(axis=0) * 1e3
    array = da.from_array(values.astype(dtype), chunks=(1, -1))
    # Neighbours are on different workers.
    keys = [*flatten(array.__dask_keys__())]
    at = {key: workers[number % N_WORKERS].address for number, key in enumerate(keys)}
    with dask.annotate(workers=lambda key: [at[key]]):
        array = array.map_blocks(np.copy, name="held")
    at |= {("held", *key[1:]): address for key, address in at.items()}
    array = c.persist(array, optimize_graph=False)
    await wait(array)
    assert all(s.tasks[key].who_has == {s.workers[at[key]]} for key in at if key[0] == "held")
    for worker in workers:
        worker.transfer_incoming_log.clear()
    total = array.sum(axis=0)
    found = await c.compute(total)
    moved = sum(one["total"] for worker in workers for one in worker.transfer_incoming_log)
    assert np.allclose(found, values.astype(dtype).sum(axis=0))
    return moved / found.nbytes


@on_cluster()
async def test_integers_are_combined_where_they_are(c, s, *workers):
    """One value of each worker crosses a link, in slices, and then the result."""
    assert await received_of_sum(c, s, workers, "i8") <= N_WORKERS
    assert report(s)["held"] == 1
    text = as_text({**await dask_gpurt.status(c), "scheduler": s.address})
    assert "1 begin where workers hold the chunks" in text


@on_cluster()
async def test_floats_are_combined_in_the_order_of_stock_dask(c, s, *workers):
    assert await received_of_sum(c, s, workers, "f8") > 2 * N_WORKERS
    assert report(s)["held"] == 0


@on_cluster(n_workers=2)
async def test_a_tree_stays_as_it_was_written_first(c, s, *workers):
    array = c.persist(da.ones((6, N), chunks=(1, -1), dtype="i8"))
    await wait(array)
    total = array.sum(axis=0)
    rewrite = s.plugins["gpurt"].collectives.reductions.rewrite
    first = rewrite(total.dask, total.__dask_keys__())
    await c.replicate(futures_of(array), n=2)
    again = rewrite(total.dask, total.__dask_keys__())
    assert again.keys() == first.keys() and report(s)["held"] == 1


@on_cluster(**{"gpurt.collectives.order": "any"})
async def test_floats_are_combined_where_they_are_if_allowed(c, s, *workers):
    assert await received_of_sum(c, s, workers, "f8") <= N_WORKERS
    assert report(s)["held"] == 1


@on_cluster(n_workers=2)
async def test_few_workers_combine_whole_values(c, s, *workers):
    array = blocks(32).sum(axis=0)
    found = await c.compute(array)
    assert found.tobytes() == array.compute(scheduler="sync").tobytes()
    assert (report(s)["sliced"], report(s)["piecewise"]) == (0, 1) and not prefixes(s)


@on_cluster(**{"gpurt.collectives.enabled": False})
async def test_the_setting_leaves_reductions_to_stock_dask(c, s, *workers):
    await c.compute(blocks().sum(axis=0))
    assert s.plugins["gpurt"].collectives is None and not prefixes(s)


@on_cluster()
async def test_disable_leaves_reductions_to_stock_dask(c, s, *workers):
    assert (await dask_gpurt.status(c))["reductions"]["sliced"] == 0
    await dask_gpurt.disable(c)
    await c.compute(blocks().sum(axis=0))
    assert not prefixes(s)
    await dask_gpurt.enable(c)
    await c.compute(blocks().max(axis=0))
    assert prefixes(s) == {"max-cut", "max-slice"}
    assert (await dask_gpurt.status(c))["reductions"]["sliced"] == 1


@on_cluster()
async def test_a_tree_is_always_cut_in_the_same_way(c, s, *workers):
    """The number of workers may change while the scheduler has some of a tree's tasks."""
    array = blocks().sum(axis=0)
    future = c.compute(array)
    kept = c.persist(array)
    await c.gather([future])
    async with Worker(s.address, nthreads=1), Worker(s.address, nthreads=1):
        with LogOf("distributed.scheduler") as log:
            again = await c.compute(array + 1)
        assert log.messages == []
    assert again.tobytes() == (array + 1).compute(scheduler="sync").tobytes()
    assert report(s)["sliced"] == 1
    del kept


@on_cluster()
async def test_a_tree_that_the_scheduler_has_already_stays(c, s, *workers):
    """The tree was sent before the runtime was on."""
    await dask_gpurt.disable(c)
    array = blocks().sum(axis=0)
    kept = c.persist(array)
    await c.compute(kept)
    await dask_gpurt.enable(c)
    with LogOf("distributed.scheduler") as log:
        assert (await c.compute(array + 1)).shape == (N,)
    assert log.messages == [] and not prefixes(s)


class LogOf:
    """Collects the warnings of a logger."""

    def __init__(self, name):
        self._logger, self.messages = logging.getLogger(name), []
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: self.messages.append(record.getMessage())

    def __enter__(self):
        self._logger.addHandler(self._handler)
        return self

    def __exit__(self, *error):
        self._logger.removeHandler(self._handler)


@on_cluster()
async def test_a_lost_worker_does_not_change_the_bits(c, s, *workers):
    array = blocks().std(axis=0)
    future = c.compute(array)
    while not any(key[0].startswith("var-cut") for key in s.tasks if isinstance(key, tuple)):
        await asyncio.sleep(0)
    await workers[0].close()
    assert (await future).tobytes() == array.compute(scheduler="sync").tobytes()


def test_workers_without_this_package_run_the_tasks():
    program = """
import pickle, sys
sys.modules["dask_gpurt"] = None
cut = pickle.load(sys.stdin.buffer)
import numpy
sys.stdout.write(repr(cut(numpy.arange(5)).tolist()))
"""
    task = pickle.dumps(Shipped(Cut, 0, 1, 3))
    run = subprocess.run([sys.executable, "-c", program], input=task, capture_output=True)
    assert run.stdout.decode() == "[1, 2]", run.stderr.decode()
    assert pickle.loads(task)(np.arange(5)).tolist() == [1, 2]


def test_computations_elsewhere_are_untouched():
    array = blocks().sum(axis=0)
    (optimised,) = dask.optimize(array)
    assert not any("-cut" in str(key) for key in dict(optimised.dask))

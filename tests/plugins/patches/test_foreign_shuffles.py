"""Contract tests of Dask's graphs of delayed functions and bags, and tests of the patches."""

from __future__ import annotations

import inspect

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import pandas as pd
import pytest
from dask._expr import ProhibitReuse
from dask.bag import core as bags
from dask.base import collections_to_expr
from distributed import Client, SubprocessCluster
from distributed.client import FutureCancelledError
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt.plugins.patches.graphs import foreign_shuffles
from dask_gpurt.process_patch import ProcessPatch

STOCK_GRAPH = inspect.unwrap(ProhibitReuse.__dask_graph__)
STOCK_LAYER = inspect.unwrap(ProhibitReuse._layer)
STOCK_LAZIFY = inspect.unwrap(bags.lazify)

pytestmark = pytest.mark.filterwarnings("ignore:Cannot block reusing for graphs")


def delayed_sum(value):
    return dask.delayed(lambda array: int(array.sum()))(value)


def rechunked():
    with dask.config.set({"array.rechunk.method": "p2p"}):
        return da.arange(64, chunks=16).reshape(8, 8).rechunk((8, 2)).rechunk((2, 8))


def shuffled():
    frame = dd.from_pandas(pd.DataFrame({"a": range(64)}), npartitions=4)
    return frame.shuffle("a", shuffle_method="p2p")


#: By name, a lazy program whose result is 2016.
PROGRAMS = {
    "delayed, of an array": lambda: delayed_sum(rechunked()),
    "delayed, of a sum": lambda: delayed_sum(rechunked().sum()),
    "delayed, of two arrays": lambda: dask.delayed(lambda a, b: int((b - a).sum()))(
        rechunked(), 2 * rechunked()
    ),
    "delayed, of a frame's values": lambda: delayed_sum(shuffled().values),
    "an array of a delayed one": lambda: da.from_delayed(
        dask.delayed(abs)(rechunked()), (8, 8), int
    ).sum(),
    "a bag of a frame": lambda: shuffled().to_bag().map(lambda row: row[0]).sum(),
    "a bag of a delayed array": lambda: db.from_delayed(
        [dask.delayed(lambda array: array.ravel().tolist())(rechunked())]
    ).sum(),
}


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    """Install Dask's functions; clients and schedulers of this process may still hold the patches.

    They may release them at any time. The fixture holds them too, so that the last release does not
    restore Dask's functions in the middle of a test.
    """
    release = foreign_shuffles._patch.hold(nobody_else)
    monkeypatch.setattr(ProhibitReuse, "__dask_graph__", STOCK_GRAPH)
    monkeypatch.setattr(ProhibitReuse, "_layer", STOCK_LAYER)
    monkeypatch.setattr(bags, "lazify", STOCK_LAZIFY)
    monkeypatch.setattr(foreign_shuffles, "_patch", ProcessPatch(foreign_shuffles._replace))
    yield
    monkeypatch.undo()
    release()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_stock_loses_the_keys_of_a_rechunk(c, s, a):
    with pytest.raises(FutureCancelledError):
        await c.compute(delayed_sum(rechunked()))


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_stock_loses_the_barrier_in_a_bag(c, s, a):
    with pytest.raises(RuntimeError, match="failed during transfer"):
        await c.compute(shuffled().to_bag().count())


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_client_and_scheduler_hold_and_release(c, s, a):
    await dask_gpurt.enable(c)
    await dask_gpurt.enable(c)
    assert await c.compute(delayed_sum(rechunked())) == 2016
    await dask_gpurt.disable(c)
    assert ProhibitReuse.__dask_graph__ is STOCK_GRAPH
    assert ProhibitReuse._layer is STOCK_LAYER
    assert bags.lazify is STOCK_LAZIFY
    foreign_shuffles.release(c)  # a second one does nothing


def test_graphs_without_a_shuffle_stay_as_they_are():
    class Holder:
        pass

    expr = ProhibitReuse(collections_to_expr(da.ones(4, chunks=2)).finalize_compute())
    bag = dict(db.from_sequence(range(4)).map(str).dask)
    stock, stock_bag = expr.__dask_graph__(), bags.lazify(bag)
    foreign_shuffles.hold(holder := Holder())
    assert expr.__dask_graph__() == stock
    assert bags.lazify(bag) == stock_bag
    foreign_shuffles.release(holder)


def test_the_flag_lets_delayed_functions_and_bags_shuffle():
    with (
        dask.config.set({"gpurt.enabled": True}),
        SubprocessCluster(n_workers=2, worker_kwargs={"nthreads": 1}) as cluster,
        Client(cluster) as client,
    ):
        results = {name: client.compute(make(), sync=True) for name, make in PROGRAMS.items()}
        n_runs = len(dask_gpurt.status(client)["shuffles"])
    assert results == dict.fromkeys(PROGRAMS, 2016)
    assert n_runs

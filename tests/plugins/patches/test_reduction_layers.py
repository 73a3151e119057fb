"""Contract tests of the layers of reductions, and which of them are found."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array import _reductions_generic, chunk
from dask.array.core import _concatenate2
from dask.array.optimization import optimize
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.highlevelgraph import MaterializedLayer
from tlz import compose

from dask_gpurt.plugins.patches.graphs.reduction_layers import TreeWriter, trees

LEAST = 16 << 20
N = 3_000_000


def found(array, least_nbytes=LEAST):
    return trees(array.dask, array.__dask_keys__(), least_nbytes)


def ones(*chunks):
    return da.ones(tuple(map(sum, chunks)), chunks=chunks)


TALL = ones((1,) * 20, (N,))


def test_layers_are_as_expected():
    array = TALL.sum(axis=0)
    layers = array.dask.layers
    level = next(one for name, one in layers.items() if name.startswith("sum-partial"))
    key, (function, below) = next(iter(level.mapping.items()))
    assert type(level) is MaterializedLayer and key[1:] == (0, 0)
    assert isinstance(function, type(compose(len, str)))
    assert function.first.func is _concatenate2 and function.first.keywords == {"axes": [0]}
    (plain,) = function.funcs
    assert plain.func is chunk.sum and plain.keywords["axis"] == (0,) and plain.keywords["keepdims"]
    assert isinstance(below, list) and len(below) == 4
    leaf = layers[below[0][0]]
    assert isinstance(leaf, Blockwise) and leaf.task.func.func is chunk.sum
    said = layers[array.name].collection_annotations
    assert said["chunksize"] == (N,) and said["chunk_type"] == "numpy.ndarray"
    assert said["type"] == "dask.array.core.Array" and said["dtype"] == "f8"
    assert callable(_reductions_generic._tree_reduce)
    assert callable(_reductions_generic.partial_reduce)


OPERATIONS = ["sum", "prod", "min", "max", "any", "all", "mean", "var", "std"]
OPERATIONS += [f"nan{name}" for name in ("sum", "prod", "min", "max", "mean", "var", "std")]


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_found(name):
    tall = ones((1,) * 20, (8 * N,))
    (tree,) = found(getattr(da, name)(tall, axis=0))
    assert len(tree.levels) == 3 and tree.axes == (0,) and not tree.keepdims
    array = getattr(da, name)(tall, axis=0)
    assert tree.n_values(array.dask) == [20, 5, 2, 1]
    assert tree.shape((0,)) == (8 * N,) and list(tree.blocks()) == [(0,)]


def test_contractions_are_found():
    x = ones((10,) * 20, (3000,))
    for array in (x.T @ x, da.tensordot(x, x, axes=((0,), (0,)))):
        (tree,) = found(array)
        assert tree.n_values(array.dask) == [20, 5, 2, 1]
        assert tree.shape((0, 0)) == (3000, 3000)


def test_several_axes_and_chunks_of_the_result():
    x = ones((5,) * 3, (1000, 2000), (2,) * 4, (3000,))
    array = x.sum(axis=(0, 2), keepdims=True)
    (tree,) = found(array)
    assert tree.axes == (0, 2) and tree.keepdims and tree.kept == [1, 3]
    assert [tree.shape(block) for block in tree.blocks()] == [(1000, 3000), (2000, 3000)]
    assert tree.result_key((1, 0)) == (array.name, 0, 1, 0, 0)
    assert tree.n_values(array.dask)[0] == 12


def test_two_trees_of_one_graph_are_found():
    array = TALL.sum(axis=0) - TALL.mean(axis=0)
    assert {tree.axes for tree in found(array)} == {(0,)} and len(found(array)) == 2


def custom():
    def half(values, axis, keepdims):
        return np.sum(values, axis=axis, keepdims=keepdims) / 2

    return da.reduction(TALL, half, half, axis=0, dtype="f8", meta=np.ones(0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ones((1,) * 20, (1000,)).sum(axis=0),
        lambda: TALL.sum(),
        lambda: TALL.sum(axis=1),
        lambda: TALL.argmax(axis=0),
        lambda: TALL.cumsum(axis=0),
        lambda: TALL + 1,
        lambda: TALL.astype(object).sum(axis=0),
        lambda: da.ma.masked_equal(TALL, 1).sum(axis=0),
        lambda: TALL[:, da.ones(N, chunks=N) > 0].sum(axis=0),
        custom,
        lambda: dask.optimize(TALL.sum(axis=0))[0],
    ],
)
def test_others_are_left_alone(make):
    assert found(make()) == []


def test_a_tree_with_wanted_values_inside_is_left_alone():
    array = TALL.sum(axis=0)
    inside = next(name for name in array.dask.layers if name.startswith("sum-partial"))
    keys = [array.__dask_keys__(), list(array.dask.layers[inside])]
    assert trees(array.dask, keys, LEAST) == []


def test_annotations_are_kept():
    with dask.annotate(retries=3):
        array = TALL.sum(axis=0)
    (tree,) = found(array)
    writer = TreeWriter(array.dask, tree, 1)
    writer.write((0,), 1, 4)
    graph = writer.graph(array.dask)
    assert all(graph.layers[name].annotations == {"retries": 3} for name in tree.levels[:1])
    assert graph.layers[array.name].annotations == {"retries": 3}
    with dask.annotate(priority=lambda key: 1):
        array = TALL.sum(axis=0)
    assert found(array) == []


@pytest.mark.parametrize("fuse", [None, False])
def test_tasks_of_slices_are_few_and_named(fuse):
    """Level 0 is whole. Levels 1 and 2 have a task for each slice."""
    array = ones((1,) * 20, (600, 150)).sum(axis=0)
    (tree,) = found(array, 0)
    writer = TreeWriter(array.dask, tree, 1)
    writer.write((0,), 1, 4)
    graph = writer.graph(array.dask)
    with dask.config.set({"optimization.fuse.active": fuse}):
        tasks = dict(optimize(graph, array.__dask_keys__()))
    named = [key[0].rpartition("-")[0] for key in tasks if isinstance(key, tuple)]
    assert named.count("sum-cut") >= 4 * 4
    assert named.count("sum-slice") == 4 * (2 + 1)
    assert {key for key in tasks if key[0] == array.name} == set(flatten(array.__dask_keys__()))
    assert set(graph.layers) == set(array.dask.layers)
    result = dask.get(tasks, array.__dask_keys__())
    assert [len(one) for one in result] == [600, 150]
    assert all((one == 20).all() for one in result)


def test_trees_cut_in_other_ways_have_other_keys():
    """Two programs may have the same reduction while the number of workers changes."""
    array = ones((1,) * 4, (600,)).sum(axis=0)
    keys = []
    for n_slices in (2, 3):
        writer = TreeWriter(array.dask, found(array, 0)[0], 0)
        writer.write((0,), 1, n_slices)
        layer = writer.graph(array.dask).layers[array.name]
        keys.append(set(layer) - set(flatten(array.__dask_keys__())))
    assert len(keys[0]) == 10 and not keys[0] & keys[1]

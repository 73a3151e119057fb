"""Reductions of held chunks: exact ones in another order have the same bits."""

from __future__ import annotations

from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
from dask.core import flatten
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.plugins.patches.graphs import held_trees
from dask_gpurt.plugins.patches.graphs.reduction_layers import TreeWriter, trees
from tests.plugins.collectives.test_reduction_bits import numbers, order_of, run
from tests.thoroughness import RUNS_ALL

EXACT = ["sum", "prod", "min", "max", "any", "all"]
OTHERS = ["mean", "std", "nansum", "nanmax"]


def held(array, holders):
    """Return tasks that say which of these workers hold the chunks of an array, in turns."""
    keys = flatten(array.__dask_keys__())
    return {
        key: SimpleNamespace(
            who_has=[SimpleNamespace(address=holders[number % len(holders)])], nbytes=8
        )
        for number, key in enumerate(keys)
    }


def only_tree(array):
    (tree,) = trees(array.dask, array.__dask_keys__(), 0)
    return tree


@st.composite
def persisted(draw, types):
    """Return an array of chunks that exist already, and the axes to reduce."""
    n_dims = draw(st.integers(2, 3))
    axes = tuple(sorted(draw(st.permutations(range(n_dims)))[: draw(st.integers(1, n_dims - 1))]))
    chunks = []
    for axis in range(n_dims):
        sizes = st.lists(st.integers(1, 3), min_size=2, max_size=7 if axis in axes else 2)
        chunks.append(tuple(draw(sizes)))
    values = numbers(draw(st.integers(0, 99)), [*map(sum, chunks)], draw(st.sampled_from(types)))
    array = da.from_array(values, chunks=tuple(chunks))
    if draw(st.booleans()):
        array = array.map_blocks(np.asfortranarray)
    return array.persist(scheduler="sync"), axes


def reordered(array, tasks):
    """Return the graph of a reduction with its tree regrouped and cut in slices, and the tree."""
    tree = only_tree(array)
    levels = held_trees.held_levels(array.dask, tree, tasks)
    if levels is None:
        return None
    graph, tree = held_trees.rewritten(array.dask, tree, levels)
    writer = TreeWriter(graph, tree, len(next(iter(levels.values()))[0]))
    for block in tree.blocks():
        writer.write(block, tree.kept[0], 2)
    return writer.graph(graph)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=500 if RUNS_ALL else 60)
@given(
    name=st.sampled_from(EXACT),
    case=persisted(["i1", "i8", "u2", "?"]),
    holders=st.lists(st.sampled_from("abcd"), min_size=1, max_size=9),
    keepdims=st.booleans(),
    split_every=st.sampled_from([None, 2, 3]),
    steps=st.integers(0, 2),
)
def test_exact_reductions_keep_their_bits(name, case, holders, keepdims, split_every, steps):
    x, axes = case
    made = x
    for _ in range(steps):
        made = ~made
    array = getattr(da, name)(made, axis=axes, keepdims=keepdims, split_every=split_every)
    if not trees(array.dask, array.__dask_keys__(), 0):
        return  # no level of whole values
    assert only_tree(array).is_exact
    if (graph := reordered(array, held(x, holders))) is None:
        return
    keys = [*flatten(array.__dask_keys__())]
    ours, stock = run(graph, keys, moves=True), run(array.dask, keys, moves=True)
    for one, other in zip(ours, stock, strict=True):
        assert (type(one), one.dtype, one.shape) == (type(other), other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
        assert order_of(one) == order_of(other)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=300 if RUNS_ALL else 40)
@given(
    name=st.sampled_from(EXACT + OTHERS),
    case=persisted(["f4", "f8", "c16"]),
    holders=st.lists(st.sampled_from("abcd"), min_size=1, max_size=9),
)
def test_floats_differ_in_last_digits_at_most(name, case, holders):
    x, axes = case
    array = getattr(da, name)(x, axis=axes)
    if array.dtype.kind == "b" or not trees(array.dask, array.__dask_keys__(), 0):
        return
    assert not only_tree(array).is_exact
    if (graph := reordered(array, held(x, holders))) is None:
        return
    keys = [*flatten(array.__dask_keys__())]
    ours, stock = run(graph, keys, moves=False), run(array.dask, keys, moves=False)
    for one, other in zip(ours, stock, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def ones(n=8):
    return da.ones((n, 5), chunks=(1, -1), dtype="i8").persist(scheduler="sync")


def test_a_mean_of_integers_is_not_exact():
    assert only_tree(ones().sum(0)).is_exact
    assert not only_tree(ones().mean(0)).is_exact
    assert not only_tree(ones().mean(0, dtype="i8")).is_exact


def test_chunks_without_a_holder_leave_the_tree_alone():
    x = ones()
    array = x.sum(0)
    tasks = held(x, "ab")
    tree = only_tree(array)
    assert held_trees.held_levels(array.dask, tree, tasks) is not None
    next(iter(tasks.values())).who_has = []
    assert held_trees.held_levels(array.dask, tree, tasks) is None
    assert held_trees.held_levels(array.dask, tree, {}) is None


def test_one_chunk_a_worker_leaves_the_tree_alone():
    x = ones()
    array = x.sum(0)
    assert held_trees.held_levels(array.dask, only_tree(array), held(x, "abcdefgh")) is None


def test_the_largest_input_says_where_a_chunk_is():
    x = ones()
    y = (x + 1).persist(scheduler="sync")
    array = (x + y).sum(0)
    tasks = {**held(x, "ab"), **held(y, "c")}
    levels = held_trees.held_levels(array.dask, only_tree(array), tasks)
    assert len(levels[(0,)][0][-1]) == 2
    for ts in tasks.values():
        ts.nbytes += 1 if ts.who_has[0].address == "c" else 0
    levels = held_trees.held_levels(array.dask, only_tree(array), tasks)
    assert len(levels[(0,)][0][-1]) == 1 and not levels[(0,)][1]

"""Reductions in slices have the bits, the memory order and the type of stock Dask's."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import convert_legacy_graph
from dask.core import flatten, toposort
from dask.utils import ensure_dict
from distributed.protocol import deserialize, serialize
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.collectives import slicing
from dask_gpurt.plugins.patches.graphs.reduction_layers import TreeWriter, trees
from tests.thoroughness import RUNS_ALL

OPERATIONS = ["sum", "prod", "min", "max", "any", "all", "mean", "var", "std"]
OPERATIONS += ["moment"]
OPERATIONS += [f"nan{name}" for name in ("sum", "prod", "min", "max", "mean", "var", "std")]
TYPES = ["f2", "f4", "f8", "c8", "c16", "i1", "i8", "u2", "?"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(slicing, "PIECE_NBYTES", 600)


def run(graph, keys, *, moves):
    """Run a graph, and return its results; with `moves`, each value is sent to another worker."""
    tasks = convert_legacy_graph(ensure_dict(graph))
    values = {}
    for key in toposort(tasks, {key: task.dependencies for key, task in tasks.items()}):
        task = tasks[key]
        values[key] = task({one: values[one] for one in task.dependencies})
        if moves:
            values[key] = deserialize(*serialize(values[key]))
    return [values[key] for key in keys]


def rewritten(array, level, n_slices, axis):
    """Return the graph of an array with slices in all of its trees, and the number of trees."""
    graph, keys = array.dask, array.__dask_keys__()
    found = trees(graph, keys, 0)
    for tree in found:
        writer = TreeWriter(graph, tree, min(level, len(tree.levels) - 1))
        for block in tree.blocks():
            writer.write(block, tree.kept[axis % len(tree.kept)], n_slices)
        graph = writer.graph(graph)
    return graph, len(found)


def assert_same_bits(array, level, n_slices, axis=0):
    graph, n_trees = rewritten(array, level, n_slices, axis)
    assert n_trees
    keys = list(flatten(array.__dask_keys__()))
    for moves in (False, True):
        ours, stock = run(graph, keys, moves=moves), run(array.dask, keys, moves=moves)
        for one, other in zip(ours, stock, strict=True):
            assert (type(one), one.dtype, one.shape) == (type(other), other.dtype, other.shape)
            assert one.tobytes() == other.tobytes()
            assert order_of(one) == order_of(other)


def order_of(array):
    """Return the axes as they are in memory. An axis of one element is nowhere."""
    long = [axis for axis in range(array.ndim) if array.shape[axis] > 1]
    return sorted(long, key=lambda axis: array.strides[axis])


def numbers(seed, shape, dtype):
    """Return an array with ordinary numbers, zeros of both signs and, in floats, no numbers."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.normal(size=shape)
    if np.dtype(dtype).kind in "fc":
        values[rng.random(shape) < 0.05] = np.nan
        values[rng.random(shape) < 0.1] = -0.0
        values[rng.random(shape) < 0.1] = 0.0
        return values.astype(dtype)
    return (values * 10).astype("i8").astype(dtype)


def in_memory_order(values, chunks, order):
    """Return an array whose chunks have a memory order. Dask copies chunks of NumPy in C order."""
    array = da.from_array(values, chunks=tuple(chunks))
    return array.map_blocks(np.asfortranarray) if order == "F" else array


@st.composite
def reductions(draw):
    """Return an array and the axes to reduce; one of the other axes is long enough for slices."""
    n_dims = draw(st.integers(2, 4))
    n_reduced = draw(st.integers(1, n_dims - 1))
    axes = tuple(sorted(draw(st.permutations(range(n_dims)))[:n_reduced]))
    kept = [axis for axis in range(n_dims) if axis not in axes]
    cut = draw(st.sampled_from(kept))
    shape, chunks = [], []
    for axis in range(n_dims):
        if axis == cut:
            shape.append(draw(st.integers(130, 400)))
            chunks.append(draw(st.sampled_from([(shape[-1],), (shape[-1] - 3, 3)])))
        elif axis in axes:
            parts = draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
            shape.append(sum(parts))
            chunks.append(tuple(parts))
        else:
            shape.append(draw(st.integers(1, 4)))
            chunks.append((shape[-1],))
    values = numbers(draw(st.integers(0, 99)), shape, draw(st.sampled_from(TYPES)))
    return in_memory_order(values, chunks, draw(st.sampled_from("CF"))), axes, kept.index(cut)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::numpy.exceptions.ComplexWarning")
@settings(max_examples=2000 if RUNS_ALL else 100)
@given(
    name=st.sampled_from(OPERATIONS),
    case=reductions(),
    keepdims=st.booleans(),
    split_every=st.sampled_from([None, 2, 3, 9]),
    level=st.integers(0, 2),
    n_slices=st.integers(1, 5),
)
def test_bits_of_reductions(name, case, keepdims, split_every, level, n_slices):
    array, axes, cut = case
    options = {"axis": axes, "keepdims": keepdims, "split_every": split_every}
    options |= {"order": 3} if name == "moment" else {}
    assert_same_bits(getattr(da, name)(array, **options), level, n_slices, cut)


def contractions(left, right):
    """Return products that sum over the first axis of two arrays."""
    axes = ((0,), (0,))
    found = {"tensordot": da.tensordot(left, right, axes=axes)}
    if left.ndim == right.ndim == 2:
        found |= {"matmul": left.T @ right, "dot": da.dot(left.T, right)}
    if left.ndim == right.ndim == 3:
        stacked = left.transpose((1, 2, 0)), right.transpose((1, 0, 2))
        found["stacked matmul"] = da.matmul(*(one[:2] for one in stacked))
        found["two axes"] = da.tensordot(left[:, :2], right[:, :2], axes=((0, 1), (0, 1)))
    return list(found.values())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=200 if RUNS_ALL else 10)
@given(data=st.data(), n_slices=st.integers(1, 4), level=st.integers(0, 1))
def test_bits_of_contractions(data, n_slices, level):
    parts = data.draw(st.lists(st.integers(1, 3), min_size=5, max_size=7))
    n_dims = data.draw(st.integers(2, 3))
    arrays = []
    for _ in range(2):
        shape = [sum(parts), data.draw(st.integers(130, 200)), 2][:n_dims]
        chunks = [tuple(parts), *((one,) for one in shape[1:])]
        values = numbers(data.draw(st.integers(0, 9)), shape, data.draw(st.sampled_from(TYPES)))
        arrays.append(in_memory_order(values, chunks, data.draw(st.sampled_from("CF"))))
    for array in contractions(*arrays):
        for axis in range(array.ndim):
            assert_same_bits(array, level, n_slices, axis)

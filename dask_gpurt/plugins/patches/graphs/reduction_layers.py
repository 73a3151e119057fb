"""Layers of array reductions: recognise a tree of them, and write one that combines slices.

A reduction of Dask is a layer of chunk results, and a layer of tasks for each level of a tree. All
of a tree's tasks are pairs of a function and a nested list of keys. Array expressions
(`array.query-planning`) have no such layers; they are left alone.

| what | why | taken back by |
|---|---|---|
| `dask.array._reductions_generic._tree_reduce`, `.partial_reduce` | the layers of a tree: their
tasks, and the functions in them, `partial` or `compose` of two | |
| `dask.array.core._concatenate2` | joins values in tasks of trees; joins slices | |
| `mean_chunk`, `mean_combine`, `mean_agg`, `moment_chunk`, `moment_combine`, `moment_agg`,
`chunk_min`, `chunk_max`, `_nanmin_skip`, `_nanmax_skip` of `dask.array.reductions`; `_chunk_sum` of
`dask.array.routines` | functions that combine element by element | |
| `Blockwise.task` | the function of a layer of chunk results | |
| `TaskState.run_spec`, `Task.func` | whether a task combines slices | |
| `Layer.collection_annotations` | chunks and types of an array's layer | |

Contract tests in `tests/plugins/patches/test_reduction_layers.py` fail when Dask changes any of
these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from dask.base import tokenize
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_gpurt.collectives.slicing import Cut, Piecewise, bounds
from dask_gpurt.plugins.collectives.shipped import Shipped

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

#: Types of numbers whose combination was compared bit by bit: booleans, integers, floats, complex.
_KINDS = "biufc"


@functools.cache
def _functions() -> tuple[frozenset[Any], frozenset[Any], Any]:
    """Return the functions of chunks, those that combine their results, and `_concatenate2`.

    An element of their results depends only on elements at the same place, along all kept axes.
    """
    # Imported late: not every scheduler has NumPy, and graphs with arrays have imported this.
    from dask.array import chunk, reductions, routines
    from dask.array.core import _concatenate2

    both = {chunk.sum, chunk.prod, chunk.any, chunk.all, routines._chunk_sum}
    both |= {reductions.chunk_min, reductions.chunk_max}
    both |= {reductions._nanmin_skip, reductions._nanmax_skip}
    chunks = {chunk.nansum, chunk.nanprod, reductions.mean_chunk, reductions.moment_chunk}
    combines = {chunk.min, chunk.max, reductions.mean_combine, reductions.mean_agg}
    combines |= {reductions.moment_combine, reductions.moment_agg}
    return frozenset(both | chunks), frozenset(both | combines), _concatenate2


@dataclass(frozen=True)
class Tree:
    """The layers of a reduction, as Dask made them.

    Attributes
    ----------
    leaf
        Name of the layer of chunk results.
    levels
        Names of the layers that combine them. The last one has the keys of the result.
    axes
        The reduced axes.
    keepdims
        Whether the result has these axes.
    chunks
        Chunks of the array of chunk results.
    itemsize
        Bytes of an element of the result.
    is_exact
        Whether values combined in another order give the same bits.
    """

    leaf: str
    levels: tuple[str, ...]
    axes: tuple[int, ...]
    keepdims: bool
    chunks: tuple[tuple[int, ...], ...]
    itemsize: int
    is_exact: bool

    @property
    def name(self) -> str:
        """Name of the result."""
        return self.levels[-1]

    @property
    def kept(self) -> list[int]:
        """The axes that are not reduced."""
        return [axis for axis in range(len(self.chunks)) if axis not in self.axes]

    @property
    def n_blocks(self) -> int:
        """Number of chunks of the result."""
        return math.prod(len(self.chunks[axis]) for axis in self.kept)

    def result_axis(self, axis: int) -> int:
        """Return the number of an axis in the result."""
        return axis if self.keepdims else self.kept.index(axis)

    def blocks(self) -> Iterator[tuple[int, ...]]:
        """Yield the number of each chunk of the result along the axes that are not reduced."""
        yield from product(*(range(len(self.chunks[axis])) for axis in self.kept))

    def leaves(self, block: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the number along each axis of all values that make a chunk of the result."""
        at = dict(zip(self.kept, block, strict=True))
        yield from product(
            *(
                [at[axis]] if axis in at else range(len(lengths))
                for axis, lengths in enumerate(self.chunks)
            )
        )

    def shape(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a chunk of the result, without the reduced axes."""
        return tuple(self.chunks[axis][one] for axis, one in zip(self.kept, block, strict=True))

    def result_key(self, block: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the key of a chunk of the result."""
        if not self.keepdims:
            return (self.name, *block)
        numbers = dict(zip(self.kept, block, strict=True))
        return (self.name, *(numbers.get(axis, 0) for axis in range(len(self.chunks))))

    def n_values(self, graph: HighLevelGraph) -> list[int]:
        """Return the number of values before each level, for one chunk of the result; then 1."""
        below = [len(mapping_of(graph, name)) // self.n_blocks for name in self.levels]
        return [math.prod(len(self.chunks[axis]) for axis in self.axes), *below]


def trees(graph: HighLevelGraph, keys: Any, least_nbytes: int) -> list[Tree]:
    """Find the reductions whose largest result chunk has at least `least_nbytes`.

    This reads each layer, and one task of each layer that may be part of a tree.

    Parameters
    ----------
    keys
        What the program wants, as nested lists. Trees whose inner keys are wanted are not found.
    """
    levels = {name: level for name, one in graph.layers.items() if (level := _level(one))}
    if not levels:
        return []
    wanted = {key[0] if isinstance(key, tuple) else key for key in flatten(keys)}
    inner = {}
    for name, (axes, _) in levels.items():
        below = _only(graph.dependencies[name])
        if below in levels and below not in wanted and levels[below] == (axes, True):
            if graph.dependents[below] == {name}:
                inner[name] = below
    found = []
    for name in levels.keys() - set(inner.values()):
        if (tree := _tree(graph, name, inner, levels[name], least_nbytes)) is not None:
            found.append(tree)
    return found


def _tree(
    graph: HighLevelGraph,
    name: str,
    inner: Mapping[str, str],
    level: tuple[tuple[int, ...], bool],
    least_nbytes: int,
) -> Tree | None:
    said = graph.layers[name].collection_annotations or {}
    nbytes = math.prod(said["chunksize"]) * said["dtype"].itemsize
    # An unknown size is nan, which is not larger.
    if not nbytes >= least_nbytes:
        return None
    names = [name]
    while names[0] in inner:
        names.insert(0, inner[names[0]])
    leaf = _only(graph.dependencies[names[0]])
    # A function that annotates by key does not know the keys of slices.
    if leaf is None or any(_has_annotation_by_key(graph.layers[one]) for one in names):
        return None
    below = graph.layers[leaf]
    if not isinstance(below, Blockwise) or _function(below.task.func)[0] not in _functions()[0]:
        return None
    chunks = (below.collection_annotations or {}).get("chunks")
    axes, keepdims = level
    if chunks is None or not all(axis < len(chunks) for axis in axes):
        return None
    is_exact = all(_is_exact(graph.layers[one]) for one in names)
    tree = Tree(leaf, tuple(names), axes, keepdims, chunks, said["dtype"].itemsize, is_exact)
    # The program may want values of an inner level, which are not results.
    return tree if len(mapping_of(graph, name)) == tree.n_blocks else None


def _only(names: Any) -> str | None:
    return next(iter(names)) if len(names) == 1 else None


def mapping_of(graph: HighLevelGraph, name: str) -> Mapping[Any, Any]:
    """Return the tasks of a level of a tree, by key."""
    layer = graph.layers[name]
    assert isinstance(layer, MaterializedLayer)
    return layer.mapping


def _has_annotation_by_key(layer: Any) -> bool:
    return any(callable(one) for one in (layer.annotations or {}).values())


def _level(layer: Any) -> tuple[tuple[int, ...], bool] | None:
    """Return the axes of a level of a tree and whether its results keep them; else None."""
    said = getattr(layer, "collection_annotations", None) or {}
    if type(layer) is not MaterializedLayer or said.get("type") != "dask.array.core.Array":
        return None
    # Arrays of other libraries may combine in another order if they are narrower.
    if said["chunk_type"] != "numpy.ndarray" or said["dtype"].kind not in _KINDS:
        return None
    task = next(iter(layer.mapping.values()), None)
    if type(task) is not tuple or len(task) != 2 or not isinstance(task[1], list):
        return None
    plain, options = _combining(task[0])
    axes = options.get("axis")
    if plain not in _functions()[1] or not isinstance(axes, tuple) or not axes:
        return None
    return tuple(sorted(axes)), bool(options.get("keepdims"))


def _combining(function: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function of a task of a tree, without the join before it, and its keywords."""
    if (first := getattr(function, "first", None)) is not None:
        if _function(first)[0] is not _functions()[2] or len(function.funcs) != 1:
            return None, {}
        function = function.funcs[0]
    return _function(function)


def _is_exact(layer: Any) -> bool:
    """Return whether the order in which a level combines values changes no bit."""
    from dask.array import reductions

    # A mean and moments have floats inside.
    averages = {reductions.mean_combine, reductions.mean_agg}
    averages |= {reductions.moment_combine, reductions.moment_agg}
    plain, _ = _combining(next(iter(layer.mapping.values()))[0])
    return layer.collection_annotations["dtype"].kind in "biu" and plain not in averages


def _function(function: Any) -> tuple[Any, dict[str, Any]]:
    """Return a function and the keywords that are bound to it; (None, {}) if it has no hash."""
    options: dict[str, Any] = {}
    if isinstance(function, partial):
        if function.args:
            return None, {}
        function, options = function.func, function.keywords
    try:
        hash(function)
    except TypeError:
        return None, {}
    return function, options


class TreeWriter:
    """Writes the layers of a tree anew.

    Below `level`, tasks have the same keys and inputs, and combine whole values piece by piece.
    From there up, a task for each slice takes the place of a task.

    Parameters
    ----------
    level
        The first level that combines slices.
    """

    def __init__(self, graph: HighLevelGraph, tree: Tree, level: int) -> None:
        self._tree, self._level = tree, level
        self._old = [mapping_of(graph, name) for name in tree.levels]
        self._whole: list[dict[Any, Any]] = [dict(one) for one in self._old]
        self._sliced: dict[Any, Any] = {}
        self._operation = tree.name.rpartition("-")[0].removesuffix("-aggregate")

    def write(self, block: tuple[int, ...], axis: int, n_slices: int) -> None:
        """Write the part of the tree that makes a chunk of the result.

        Parameters
        ----------
        axis
            The axis that is cut.
        n_slices
            1 leaves all levels with whole values.
        """
        tree = self._tree
        width = tree.chunks[axis][block[tree.kept.index(axis)]]
        starts = bounds(width, n_slices)
        top = tree.result_key(block)
        pending, n_levels = [top], len(tree.levels)
        self._token = tokenize(top, axis, starts, self._level)
        for number in reversed(range(n_levels)):
            inputs: list[Any] = []
            for key in pending:
                function, below = self._old[number][key]
                is_top = number == n_levels - 1
                out_axis = tree.result_axis(axis) if is_top else axis
                combine = Shipped(Piecewise, function, axis, out_axis)
                inputs += flatten(below)
                if len(starts) == 1 or number < self._level:
                    self._whole[number][key] = combine, below
                    continue
                if not is_top:
                    del self._whole[number][key]
                for one in range(len(starts)):
                    named = partial(self._name, one, number == self._level)
                    self._sliced[self._name(one, False, key)] = combine, _mapped(below, named)
            if len(starts) > 1 and number == self._level:
                self._cut(inputs, axis, starts)
            pending = inputs
        if len(starts) > 1:
            slices = [self._name(one, False, top) for one in range(len(starts))]
            join = partial(_functions()[2], axes=[tree.result_axis(axis)])
            self._whole[-1][top] = join, slices

    def _cut(self, keys: Sequence[Any], axis: int, starts: Sequence[int]) -> None:
        for one, (start, stop) in enumerate(zip(starts, [*starts[1:], None], strict=True)):
            cut = Shipped(Cut, axis, start, stop)
            for key in keys:
                self._sliced[self._name(one, True, key)] = cut, key

    def _name(self, number: int, is_cut: bool, key: Any) -> tuple[Any, ...]:
        """Return the key of a slice of a value."""
        if is_cut:
            # A group for each value: the scheduler spreads large groups with few inputs over
            # workers, wherever the inputs are.
            return (f"{self._operation}-cut-{tokenize(self._token, key)}", number)
        return (f"{self._operation}-slice-{self._token}", *key, number)

    def graph(self, graph: HighLevelGraph) -> HighLevelGraph:
        """Return a graph with the new layers in place of the old ones."""
        layers, dependencies = dict(graph.layers), dict(graph.dependencies)
        written = [self._tree.leaf]
        for name, tasks in zip(self._tree.levels, self._whole, strict=True):
            old = layers.pop(name)
            del dependencies[name]
            if tasks:
                is_top = name == self._tree.name
                tasks |= self._sliced if is_top else {}
                said = old.collection_annotations
                layers[name] = MaterializedLayer(tasks, old.annotations, said)
                dependencies[name] = set(written if is_top else written[-1:])
                written.append(name)
        return HighLevelGraph(layers, dependencies)


def slice_number(ts: TaskState) -> int | None:
    """Return which slice of values a task combines; None if it does something else."""
    function = getattr(ts.run_spec, "func", None)
    if type(function) is not Shipped or function.kind is not Piecewise:
        return None
    key: Any = ts.key
    return int(key[-1]) if "-slice-" in key[0] else None


def _mapped(keys: Any, function: Any) -> Any:
    if isinstance(keys, list):
        return [_mapped(one, function) for one in keys]
    return function(keys)

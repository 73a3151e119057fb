"""DataFrames, Series and indexes as nodes and buffers.

A frame is written in the blocks that pandas holds. The two-dimensional memory of a block is one
buffer and becomes one block again. `frames.columns` decomposes single extension arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from pandas.tseries.frequencies import to_offset

from dask_gpurt.frames.columns import (
    Layout,
    compose,
    compose_categorical,
    decompose,
    np_or_extension,
)
from dask_gpurt.frames.flat.flat_arrays import array_node, is_plain
from dask_gpurt.frames.flat.flattening import Into, LibraryNodes, Node, OutOf, is_scalar
from dask_gpurt.frames.joining import frame_of_blocks

_INDEXES = (
    pd.Index,
    pd.RangeIndex,
    pd.MultiIndex,
    pd.DatetimeIndex,
    pd.TimedeltaIndex,
    pd.PeriodIndex,
    pd.CategoricalIndex,
    pd.IntervalIndex,
)
#: Longest index of objects to check object by object. Most are names of columns.
_MOST_LABELS = 4096
#: Arrow columns with more chunks than this are combined if the chunks are small.
_FEW_CHUNKS = 8
_SMALL_CHUNK_NBYTES = 1 << 16


def is_pandas(value: Any) -> bool:
    """Return whether `pandas_node` accepts this value. It does not know subclasses."""
    return type(value) in (pd.DataFrame, pd.Series) or type(value) in _INDEXES


def pandas_node(value: Any, into: Into) -> Node:
    if isinstance(value, pd.DataFrame):
        return _frame_node(value, into)
    if isinstance(value, pd.Series):
        return _series_node(value, into)
    return _index_node(value, into)


def _frame_node(frame: pd.DataFrame, into: Into) -> Node:
    blocks = [[_column_node(v, into), _placement_node(p)] for v, p in _blocks_of(frame)]
    axes = [into.node(frame.index), into.node(frame.columns)]
    return ["frame", *axes, blocks, _extras(frame, into)]


def frame_of(node: Node, out_of: OutOf) -> pd.DataFrame:
    _, index, columns, blocks, extras = node
    made = [(_as_block(_column_of(v, out_of)), _placement_of(p)) for v, p in blocks]
    index, columns = out_of.value(index), out_of.value(columns)
    for values, placement in made:
        if values.shape[-1] != len(index) or (values.ndim == 2 and len(values) != len(placement)):
            raise ValueError(f"a block of shape {values.shape} in a frame of {len(index)} rows")
    placed = np.sort(np.concatenate([np.empty(0, np.intp), *(p for _, p in made)]))
    if not np.array_equal(placed, np.arange(len(columns))):
        raise ValueError(f"the blocks of a frame do not make its {len(columns)} columns")
    frame = frame_of_blocks(made, index, columns)
    _put_extras(frame, extras, out_of)
    return frame


def _series_node(series: pd.Series, into: Into) -> Node:
    manager = _manager_of(series)
    # The public methods return read-only memory, and wrap naive datetimes.
    values = manager.blocks[0].values if manager is not None else np_or_extension(series)
    return [
        "series",
        _column_node(values, into),
        into.node(series.index),
        into.node(series.name),
        _extras(series, into),
    ]


def series_of(node: Node, out_of: OutOf) -> pd.Series:
    _, column, index, name, extras = node
    values = _column_of(column, out_of)
    # The explicit dtype keeps pandas from inferring one from the objects.
    series = pd.Series(
        values,
        index=out_of.value(index),
        name=out_of.value(name),
        dtype=values.dtype,
        copy=False,
    )
    _put_extras(series, extras, out_of)
    return series


def _extras(value: Any, into: Into) -> Node:
    attrs = into.node(value.attrs) if value.attrs else None
    return [attrs, value.flags.allows_duplicate_labels]


def _put_extras(value: Any, extras: Node, out_of: OutOf) -> None:
    attrs, allows_duplicates = extras
    if attrs is not None:
        value.attrs = out_of.value(attrs)
    if not allows_duplicates:
        value.flags.allows_duplicate_labels = False


def _manager_of(value: Any) -> Any:
    """Return the manager of the blocks of a frame or series, or None if pandas has none."""
    manager = getattr(value, "_mgr", None)
    return manager if hasattr(manager, "blocks") else None


def _blocks_of(frame: pd.DataFrame) -> list[tuple[Any, npt.NDArray[Any]]]:
    """Return the arrays of a frame and the positions of their columns."""
    manager = _manager_of(frame)
    if manager is not None:
        return [(block.values, block.mgr_locs.as_array) for block in manager.blocks]
    return [
        (np_or_extension(frame.iloc[:, position]), np.array([position], dtype=np.intp))
        for position in range(frame.shape[1])
    ]


def _as_block(values: Any) -> Any:
    # pandas stores only these two kinds in two-dimensional blocks.
    if values.ndim == 1 and (
        isinstance(values, np.ndarray) or isinstance(values.dtype, pd.DatetimeTZDtype)
    ):
        return values.reshape(1, -1)
    return values


def _placement_node(placement: npt.NDArray[Any]) -> Node:
    """Encode positions of columns; as first, step and count if they are evenly spaced."""
    steps = np.diff(placement)
    if len(steps) > 1 and (steps == steps[0]).all():
        return [int(placement[0]), int(steps[0]), len(placement), True]
    return [placement.tolist(), False]


def _placement_of(node: Node) -> npt.NDArray[np.intp]:
    *numbers, is_even = node
    if is_even:
        first, step, count = numbers
        return np.arange(first, first + step * count, step, dtype=np.intp)
    return np.array(numbers[0], dtype=np.intp)


# ------------------------------------------------------------------ one column


def _column_node(values: Any, into: Into) -> Node:
    dtype = values.dtype
    if isinstance(dtype, np.dtype):
        # Blocks of datetimes hold an array of pandas over plain memory.
        plain = np.asarray(values) if dtype.kind in "mM" else values
        if not is_plain(plain):
            return into.pickled(values)
        return array_node(plain, into, may_be_read_only=False)
    if type(values).__module__.partition(".")[0] != "pandas":
        return into.pickled(values)
    if isinstance(dtype, pd.CategoricalDtype):
        codes = getattr(values, "_ndarray", values.codes)
        return [
            "categorical",
            array_node(codes, into, may_be_read_only=False),
            into.node(dtype.categories),
            bool(dtype.ordered),
        ]
    column = decompose(values)
    if column.objects is not None:
        return into.pickled(values)
    # Only an index can have a `RowCounts` part, so these are arrays.
    parts = [array_node(np.asarray(p), into, may_be_read_only=False) for p in column.parts]
    arrow = None if column.arrow is None else into.node(_in_fewer_chunks(column.arrow))
    return ["column", column.layout.to_plain(), parts, arrow]


def _in_fewer_chunks(array: pa.ChunkedArray) -> pa.ChunkedArray:
    """Combine many small chunks: each chunk would take two or three buffers."""
    n_chunks = array.num_chunks
    if n_chunks > _FEW_CHUNKS and array.nbytes < n_chunks * _SMALL_CHUNK_NBYTES:
        return pa.chunked_array([array.combine_chunks()], type=array.type)
    return array


def _column_of(node: Node, out_of: OutOf) -> Any:
    if node[0] == "categorical":
        _, codes, categories, ordered = node
        dtype = pd.CategoricalDtype(out_of.value(categories), ordered=ordered)
        return compose_categorical(out_of.value(codes), dtype)
    if node[0] != "column":
        return out_of.value(node)
    _, layout, parts, arrow = node
    made = [out_of.value(part) for part in parts]
    return compose(Layout.from_plain(layout), made, out_of.value(arrow), None)


# ------------------------------------------------------------------ indexes


def _index_node(index: pd.Index, into: Into) -> Node:
    if isinstance(index, pd.RangeIndex):
        return ["range", index.start, index.stop, index.step, into.node(index.name)]
    if isinstance(index, pd.MultiIndex):
        codes = [array_node(np.asarray(c), into, may_be_read_only=False) for c in index.codes]
        return [
            "multi",
            [into.node(level) for level in index.levels],
            codes,
            [into.node(name) for name in index.names],
            index.sortorder,
        ]
    if index.dtype == object and _are_labels(index):
        return ["labels", list(index), into.node(index.name)]
    # The same order as in `index_of`, because an object in both parts is shared.
    column = _column_node(np_or_extension(index), into)
    name = into.node(index.name)
    freq = getattr(index, "freq", None) if _has_freq(index) else None
    # A string if it is complete. Some offsets are more than their name, such as those with
    # holidays.
    if freq is not None:
        freq = freq.freqstr if _is_named(freq) else into.pickled(freq)
    return ["index", column, name, freq]


def range_of(node: Node, out_of: OutOf) -> pd.RangeIndex:
    _, start, stop, step, name = node
    return pd.RangeIndex(start, stop, step, name=out_of.value(name))


def multi_of(node: Node, out_of: OutOf) -> pd.MultiIndex:
    _, levels, codes, names, sortorder = node
    return pd.MultiIndex(
        levels=[out_of.value(level) for level in levels],
        codes=[out_of.value(one) for one in codes],
        names=[out_of.value(name) for name in names],
        sortorder=sortorder,
        copy=False,
        verify_integrity=False,
    )


def labels_of(node: Node, out_of: OutOf) -> pd.Index:
    _, labels, name = node
    values = np.empty(len(labels), dtype=object)
    values[:] = labels
    return pd.Index(values, dtype=object, name=out_of.value(name), copy=False)


def index_of(node: Node, out_of: OutOf) -> pd.Index:
    _, column, name, freq = node
    values = _column_of(column, out_of)
    index = pd.Index(values, dtype=values.dtype, name=out_of.value(name), copy=False)
    freq = to_offset(freq) if isinstance(freq, str) else out_of.value(freq)
    if freq is not None:
        _set_freq(index, freq)
    return index


def _has_freq(index: pd.Index) -> bool:
    return isinstance(index, (pd.DatetimeIndex, pd.TimedeltaIndex))


def _set_freq(index: Any, freq: Any) -> None:
    inner: Any = getattr(index, "_data", None)
    if hasattr(inner, "_freq"):
        inner._freq = freq
    else:
        index.freq = freq  # the public setter validates against the whole index


def _is_named(freq: Any) -> bool:
    try:
        return bool(to_offset(freq.freqstr) == freq)
    except ValueError:
        return False


def _are_labels(index: pd.Index) -> bool:
    if len(index) > _MOST_LABELS:
        return False
    return all(is_scalar(label) for label in index)


NODES = LibraryNodes(
    is_pandas,
    pandas_node,
    {
        "frame": frame_of,
        "series": series_of,
        "range": range_of,
        "multi": multi_of,
        "labels": labels_of,
        "index": index_of,
    },
)

"""Joins of the pieces of one column from several shards, and of columns to a frame.

If input partitions differ in their categories, this module unites the categories as stock Dask
does. `frames.reconciling` handles columns whose type differs from the promised one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from dask_gpurt.frames.adapter import Piece
from dask_gpurt.frames.columns import Categories, Part, compose_categorical

try:
    from pandas.api.internals import create_dataframe_from_blocks
except ImportError:  # pandas before 3
    create_dataframe_from_blocks = None  # type: ignore[assignment]


def runs_of_one_shape(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Divide one or more pieces into runs that can be joined column by column."""
    first = pieces[0].body.layout
    if all(piece.body.layout is first for piece in pieces):
        yield list(pieces)
        return
    run: list[Piece] = []
    for piece in pieces:
        if run:
            ours, theirs = run[-1].body.layout, piece.body.layout
            if ours is not theirs and ours.shape != theirs.shape:
                yield run
                run = []
        run.append(piece)
    yield run


def join_arrow(name: str, arrays: list[pa.Array], pieces: list[Piece]) -> pa.Array:
    slices = [a.slice(p.start, p.stop - p.start) for a, p in zip(arrays, pieces, strict=True)]
    if len(slices) == 1:
        # Arrow returns a single array unchanged, with a reference to the memory of the whole shard.
        slices.append(slices[0].slice(0, 0))
    try:
        return pa.concat_arrays(slices)
    except pa.ArrowInvalid as error:
        # Chunks are no alternative: the result could be neither sorted nor sent to another worker.
        raise ValueError(
            f"pieces of column {name!r}, {slices[0].type}, do not fit into one array: {error} "
            "Give it a wider type before the shuffle, such as dictionaries with int32 indices."
        ) from error


def join_objects(arrays: list[Any], pieces: list[Piece]) -> Any:
    return joined_objects([a[p.start : p.stop] for a, p in zip(arrays, pieces, strict=True)])


def joined_objects(arrays: list[Any]) -> Any:
    if all(isinstance(one, np.ndarray) for one in arrays):
        return np.concatenate(arrays)
    return type(arrays[0])._concat_same_type(arrays)


def join_categorical(
    number: int, codes: Part, pieces: list[Piece], expected: Any, known: Categories
) -> pd.Categorical:
    """Compose a categorical from joined codes, over the union of the pieces' categories.

    Categories that only some partitions have are appended in the order of the input partitions.
    Stock Dask appends them in the order in which shards arrive.
    """
    details = [piece.body.layout.all[number].detail for piece in pieces]
    layouts = [piece.body.layout.all[number] for piece in pieces]
    if all(detail == details[0] for detail in details):
        categories = known.of(layouts[0], expected)
        dtype = pd.CategoricalDtype(categories, ordered=details[0][0])
        return compose_categorical(codes, dtype)
    first = 0
    same: list[pd.Categorical] = []
    for piece, layout in zip(pieces, layouts, strict=True):
        last = first + piece.stop - piece.start
        dtype = pd.CategoricalDtype(known.of(layout, expected), ordered=layout.detail[0])
        same.append(compose_categorical(codes[first:last], dtype))
        first = last
    return _union(same)


def _union(categoricals: Sequence[pd.Categorical]) -> pd.Categorical:
    from pandas.api.types import union_categoricals
    from pandas.core.dtypes.cast import find_common_type

    ordered = all(c.ordered for c in categoricals)
    dtypes = [c.categories.dtype for c in categoricals]
    if any(dtype != dtypes[0] for dtype in dtypes):
        # The categories of partitions with only missing values have an arbitrary type. Ignore it.
        used = [c.categories.dtype for c in categoricals if len(c.categories)]
        common = find_common_type(used or dtypes)
        categoricals = [
            pd.Categorical.from_codes(c.codes, categories=c.categories.astype(common))
            for c in categoricals
        ]
    merged = union_categoricals(categoricals, ignore_order=True)
    if ordered:
        merged = merged.as_ordered()
    return merged


def with_common_categories(frames: list[pd.DataFrame]) -> list[pd.DataFrame]:
    """Unite the categories of categorical columns, so that pandas does not turn them to objects."""
    n_columns = frames[0].shape[1]
    for position in range(n_columns):
        dtypes = [frame.dtypes.iloc[position] for frame in frames]
        if not all(isinstance(dtype, pd.CategoricalDtype) for dtype in dtypes):
            continue
        if all(dtype == dtypes[0] for dtype in dtypes):
            continue
        dtype = _union([pd.Categorical(frame.iloc[:, position]) for frame in frames]).dtype
        for number, frame in enumerate(frames):
            frame = frame.copy(deep=False)
            frame.isetitem(position, frame.iloc[:, position].astype(dtype))
            frames[number] = frame
    return frames


def with_common_index(frames: list[pd.DataFrame]) -> list[pd.DataFrame]:
    """Unite the categories of categorical levels of the index, as `with_common_categories` does."""
    dtypes = [frame.index.dtype for frame in frames]
    if frames[0].index.nlevels == 1 and not isinstance(dtypes[0], pd.CategoricalDtype):
        return frames
    levels = [_levels_of(frame.index) for frame in frames]
    united = with_common_categories([*levels])
    return [
        frame
        if one is before
        else frame.set_axis(index_of([one[n].array for n in one], frame.index.names))
        for frame, before, one in zip(frames, levels, united, strict=True)
    ]


def _levels_of(index: pd.Index) -> pd.DataFrame:
    numbers = range(index.nlevels)
    return pd.DataFrame({number: index.get_level_values(number) for number in numbers}, copy=False)


def index_of(levels: Sequence[Any], names: Sequence[Any]) -> pd.Index:
    """Return the index with these levels."""
    if len(levels) > 1:
        return pd.MultiIndex.from_arrays(levels, names=names)
    # The explicit type keeps pandas from inferring one from the objects.
    return pd.Index(levels[0], dtype=levels[0].dtype, name=names[0], copy=False)


def frame_of_blocks(
    blocks: list[tuple[Any, npt.NDArray[np.intp]]], index: pd.Index, columns: pd.Index
) -> pd.DataFrame:
    if create_dataframe_from_blocks is not None:
        return create_dataframe_from_blocks(blocks, index=index, columns=columns)
    arrays: dict[int, Any] = {}
    for values, placement in blocks:
        rows = values if getattr(values, "ndim", 1) == 2 else [values]
        arrays.update(zip(placement.tolist(), rows, strict=True))
    frame = pd.DataFrame({i: arrays[i] for i in range(len(columns))}, index=index, copy=False)
    frame.columns = columns
    return frame

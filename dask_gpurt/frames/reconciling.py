"""Conversion of columns whose type differs from the one that the meta promises.

Partitions may disagree with their meta and with each other. Examples are a missing value among
integers, a partition without any string, or objects instead of values. The result has the type that
stock Dask produces from the same input, as long as all values keep their meaning. If the promised
type cannot hold the values, the column keeps its own type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_gpurt.frames.columns import is_masked

_OBJECT = np.dtype(object)
#: The category that Dask writes into a meta with unknown categories.
UNKNOWN_CATEGORIES = "__UNKNOWN_CATEGORIES__"
#: Errors of a cast if the type cannot hold a value.
_NO_PLACE = (pa.ArrowException, OverflowError, TypeError, ValueError)


def casts_between(actual: pd.Series, expected: pd.Series) -> dict[int, Any]:
    """Return the expected type of each column that has another type, by position."""
    pairs = enumerate(zip(actual, expected, strict=True))
    return {
        position: wanted for position, (found, wanted) in pairs if not _are_alike(found, wanted)
    }


def with_casts(frame: pd.DataFrame, casts: dict[int, Any]) -> pd.DataFrame:
    """Convert the columns in `casts` to the types that stock Dask produces.

    This is not always the expected type. A partition may have a wider type than the plan knew, such
    as integers with a missing value. Then the column gets the common type of both.
    """
    frame = frame.copy(deep=False)
    for position, expected in casts.items():
        frame.isetitem(position, _reconciled(frame.iloc[:, position], expected))
    return frame


def with_missing_like_meta(
    frames: Sequence[pd.DataFrame], expected: pd.Series
) -> list[pd.DataFrame]:
    """Give object columns with only missing values the type of the other frames' columns.

    Such a partition carries no type information. Left as objects, it would turn the whole column to
    objects.
    """
    frames = list(frames)
    types = [frame.dtypes.tolist() for frame in frames]
    for position, (wanted, *dtypes) in enumerate(zip(expected, *types, strict=True)):
        if all(dtype == dtypes[0] for dtype in dtypes):
            continue
        if isinstance(wanted, pd.CategoricalDtype):
            # The meta may not know the categories.
            wanted = next((one for one in dtypes if isinstance(one, pd.CategoricalDtype)), wanted)
        for number, dtype in enumerate(dtypes):
            column = frames[number].iloc[:, position]
            if dtype == _OBJECT and column.isna().all():
                frame = frames[number] = frames[number].copy(deep=False)
                frame.isetitem(position, _missing(column, wanted))
    return frames


def _are_alike(found: Any, expected: Any) -> bool:
    both = (found, expected)
    # The meta may not know the categories.
    return found == expected or all(isinstance(dtype, pd.CategoricalDtype) for dtype in both)


def _reconciled(column: pd.Series, expected: Any) -> pd.Series:
    if column.dtype == _OBJECT and column.isna().all():
        return _missing(column, expected)
    if isinstance(expected, pd.ArrowDtype):
        return _as_arrow(column, expected)
    if isinstance(expected, pd.StringDtype):
        if _is_text(column):
            return _cast(column, expected)
        return column if column.dtype == _OBJECT else _widened(column, expected)
    if column.dtype == _OBJECT:
        # One partition has objects and others have values. Stock Dask converts through Arrow, which
        # infers the type from the remaining values.
        found = _arrow_of(column)
        if found is None:
            return column
        if pa.types.is_decimal(found.type) and expected.kind == "f":
            return _cast(column, expected)
        column = pd.Series(found.to_pandas().array, index=column.index, copy=False)
    if isinstance(column.dtype, pd.ArrowDtype) and expected.kind == "f":
        if pa.types.is_decimal(column.dtype.pyarrow_dtype):
            return _cast(column, expected)
    values: Any = column.array
    if is_masked(values) and not column.hasnans and values.dtype.numpy_dtype == expected:
        return column.astype(expected)
    return _widened(column, expected)


def _is_text(column: pd.Series) -> bool:
    """Return whether a column has strings and missing values alone. `astype` takes any object."""
    dtype: Any = column.dtype
    if isinstance(dtype, pd.ArrowDtype):
        return _kind(dtype.pyarrow_dtype) == "text"
    if dtype == _OBJECT:
        return bool(pd.api.types.infer_dtype(column, skipna=True) == "string")
    return isinstance(dtype, pd.StringDtype)


def _missing(column: pd.Series, expected: Any) -> pd.Series:
    """Convert a column without values to the expected type, if it can hold missing values."""
    if isinstance(expected, np.dtype) and expected.kind in "iu":
        expected = np.dtype(np.float64)
    if expected == np.dtype(bool):
        return column
    if isinstance(expected, pd.CategoricalDtype) and _is_unknown(expected):
        nothing = pd.Index([], dtype=expected.categories.dtype)
        expected = pd.CategoricalDtype(nothing, expected.ordered)
    return _cast(column, expected)


def _is_unknown(dtype: pd.CategoricalDtype) -> bool:
    return dtype.categories is not None and list(dtype.categories) == [UNKNOWN_CATEGORIES]


def _arrow_of(column: pd.Series) -> pa.Array | None:
    """Return the values as an Arrow array, or None if Arrow cannot hold all of them exactly.

    Arrow would accept some mixed objects and change them. Times with and without a zone would
    become one kind, and times among dates would lose their hours.
    """
    try:
        found = pa.array(column, from_pandas=True)
        if isinstance(found, pa.ChunkedArray):
            found = found.combine_chunks()
        if column.dtype == _OBJECT:
            pairs = zip(found.to_pylist(), column, strict=True)
            if not all(one is None or one == other for one, other in pairs):
                return None
    except _NO_PLACE:
        return None
    return found


def _as_arrow(column: pd.Series, expected: pd.ArrowDtype) -> pd.Series:
    """Convert a column to an Arrow type of the same kind of values, if nothing is lost."""
    source, target = _arrow_of(column), expected.pyarrow_dtype
    if source is None:
        return column
    says_nothing = pa.types.is_null(source.type)
    if not says_nothing and _kind(source.type) != _kind(target):
        return column
    try:
        found = source.cast(target)
        if not says_nothing and not found.cast(source.type).equals(source):
            return column
    except _NO_PLACE:
        return column
    array = pd.arrays.ArrowExtensionArray(found)
    return pd.Series(array, index=column.index, copy=False)


def _kind(type_: pa.DataType) -> str:
    """Return the kind of values of a type. Types of one kind hold the same values."""
    kinds = {
        "number": (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
        "text": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        "bytes": (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary),
        "date": (pa.types.is_date,),
        "time": (pa.types.is_time,),
        "span": (pa.types.is_duration,),
    }
    if pa.types.is_timestamp(type_):
        return "moment" if type_.tz is not None else "timestamp"
    if pa.types.is_dictionary(type_):
        return f"dictionary of {_kind(type_.value_type)}"
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return f"list of {_kind(type_.value_type)}"
    return next((kind for kind, tests in kinds.items() if any(t(type_) for t in tests)), str(type_))


def _cast(column: pd.Series, expected: Any) -> pd.Series:
    try:
        return column.astype(expected)
    except _NO_PLACE:
        return column


def _widened(column: pd.Series, expected: Any) -> pd.Series:
    from pandas.core.dtypes.cast import find_common_type

    common = find_common_type([column.dtype, expected])
    return column if common == column.dtype else column.astype(common)

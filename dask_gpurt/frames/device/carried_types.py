"""Column types of cuDF that a shuffle can carry in device memory.

A shard has the buffers of its columns, and an output casts the library's type for those buffers to
the type in the meta. A type is carried if that cast exists and keeps the values. All other types go
to stock Dask, before a run begins: a cast that fails would fail each output task.

This module imports no GPU library, because a scheduler may have none. It recognises cuDF's types by
name. `frames.device.cudf_` does the casts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

#: Units of time that device columns have.
_UNITS = ("s", "ms", "us", "ns")
#: Dtypes of cuDF that cast from any column with the same buffers.
_DECIMALS = ("Decimal32Dtype", "Decimal64Dtype", "Decimal128Dtype")


def is_carried(dtype: Any) -> bool:
    """Return whether a column or index level of this type can be shuffled in device memory."""
    if isinstance(dtype, np.dtype):
        return dtype.kind == "O" or _has_column(dtype)
    if isinstance(dtype, pd.DatetimeTZDtype):
        return dtype.unit in _UNITS
    if isinstance(dtype, pd.StringDtype):
        return True
    if isinstance(dtype, pd.ArrowDtype):
        return _is_plain_arrow(dtype)
    if isinstance(dtype, pd.api.extensions.ExtensionDtype) and hasattr(dtype, "numpy_dtype"):
        return _has_column(dtype.numpy_dtype)
    name = type(dtype).__name__
    if name == "CategoricalDtype":
        return _has_carried_categories(dtype)
    if name == "ListDtype":
        return _is_carried_in_lists(dtype.element_type)
    return name in _DECIMALS


def _has_column(dtype: np.dtype[Any]) -> bool:
    """Return whether a NumPy type is the library's own type for some buffers."""
    if dtype.kind in "Mm":
        return np.datetime_data(dtype) in [(unit, 1) for unit in _UNITS]
    # Device columns have no half floats and no floats of more than 8 bytes.
    return dtype.kind in "iub" or (dtype.kind == "f" and dtype.itemsize in (4, 8))


def _is_plain_arrow(dtype: pd.ArrowDtype) -> bool:
    import pyarrow as pa

    arrow = dtype.pyarrow_dtype
    if pa.types.is_string(arrow) or pa.types.is_large_string(arrow):
        return True
    # Days, times, decimals and zones cast to something else, or not at all.
    is_time = (pa.types.is_timestamp(arrow) and arrow.tz is None) or pa.types.is_duration(arrow)
    is_number = pa.types.is_integer(arrow) or pa.types.is_boolean(arrow)
    return is_time or is_number or pa.types.is_float32(arrow) or pa.types.is_float64(arrow)


def _has_carried_categories(dtype: Any) -> bool:
    """Return whether categories survive the way through Arrow that they take in a layout."""
    categories = getattr(dtype, "categories", None)
    if categories is None:
        return True
    of = categories.dtype
    return isinstance(of, pd.StringDtype) or (
        isinstance(of, np.dtype) and (of.kind == "O" or _has_column(of))
    )


def _is_carried_in_lists(dtype: Any) -> bool:
    """Return whether the library derives this type of elements from their buffers.

    No cast of a list exists, so its elements need the library's own type for their buffers.
    """
    while type(dtype).__name__ == "ListDtype":
        dtype = dtype.element_type
    if isinstance(dtype, pd.StringDtype):
        # The library's default for strings; a list of `object` or of another string type is not.
        return bool(dtype == pd.StringDtype(na_value=np.nan))
    return isinstance(dtype, np.dtype) and _has_column(dtype)

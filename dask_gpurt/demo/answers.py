"""Comparison of two answers to one query, with the first difference as one sentence.

Two engines add floats in different orders and return tied rows in any order. So equal answers
have the same columns and the same rows, in any order, with numbers within a tolerance. The sort
columns have the same sequence. :mod:`dask_gpurt.demo.runner` runs the queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

#: Sums of six million floats in another order differ by a few parts in 10**13.
_RTOL = 1e-9

#: Sums near zero, such as of profits and losses, have the rounding error of their large terms.
_ATOL = 1e-6


def first_difference(
    got: pd.DataFrame,
    expected: pd.DataFrame,
    ordered_by: Sequence[str] | None = None,
    *,
    exact_dtypes: bool = False,
) -> str | None:
    """Return a sentence on the first difference of two answers, or None if they are the same.

    Parameters
    ----------
    got, expected
        The answers. Their indexes are ignored.
    ordered_by
        Columns whose sequence of values must be the same in both. Rows that agree in all of them
        may be in any order. None or empty allows any order.
    exact_dtypes
        Compare dtypes instead of kinds of dtypes. Right for two runs of Dask, too strict for Dask
        and SQL.

    Returns
    -------
    str or None
        The sentence names a column and one pair of values, never whole frames.
    """
    if list(got.columns) != list(expected.columns):
        return f"columns are {list(got.columns)}, expected {list(expected.columns)}"
    for name in got.columns:
        # An answer without rows has no values of a wrong dtype, and engines differ in the dtype of
        # an empty column.
        if not len(got) and not len(expected) and not exact_dtypes:
            break
        left, right = _kind(got[name], exact_dtypes), _kind(expected[name], exact_dtypes)
        if left != right:
            return f"column {name!r} holds {left}, expected {right}"
    if len(got) != len(expected):
        return f"{len(got)} rows, expected {len(expected)}"
    for name in ordered_by or ():
        row = _first_unequal(got[name], expected[name])
        if row is not None:
            return _sentence(f"in order, row {row}", got[name], expected[name], row)
    left_rows, right_rows = _canonical(got), _canonical(expected)
    for name in got.columns:
        row = _first_unequal(left_rows[name], right_rows[name])
        if row is not None:
            return _sentence(f"row {row} once sorted", left_rows[name], right_rows[name], row)
    return None


def _kind(column: pd.Series, exact: bool) -> str:
    """Return the kind of a column: its dtype, or one word that pandas and SQL agree on."""
    if exact:
        return str(column.dtype)
    if pd.api.types.is_bool_dtype(column):
        return "booleans"
    # DuckDB sums integers in 128 bits, which become floats in pandas.
    if pd.api.types.is_numeric_dtype(column):
        return "numbers"
    if pd.api.types.is_datetime64_any_dtype(column):
        return "times"
    if isinstance(column.dtype, pd.CategoricalDtype) or pd.api.types.is_string_dtype(column):
        return "text"
    return str(column.dtype)


def _values(column: pd.Series) -> np.ndarray:
    """Return a column's values with missing ones as NaN, NaT or None."""
    values: np.ndarray
    if pd.api.types.is_datetime64_any_dtype(column):
        values = column.to_numpy(dtype="datetime64[us]")
    elif pd.api.types.is_integer_dtype(column) and not column.hasnans:
        values = column.to_numpy()
    elif pd.api.types.is_numeric_dtype(column):
        values = column.to_numpy(dtype="float64", na_value=np.nan)
    else:
        values = column.astype(object).where(column.notna(), None).to_numpy(dtype=object)
    return values


def _first_unequal(left: pd.Series, right: pd.Series) -> int | None:
    """Return the position of the first pair of unequal values, or None."""
    a, b = _values(left), _values(right)
    if "f" in (a.dtype.kind, b.dtype.kind):
        one, other = a.astype("float64"), b.astype("float64")
        equal = np.isclose(one, other, rtol=_RTOL, atol=_ATOL, equal_nan=True)
    else:
        equal = np.asarray(a == b, dtype=bool)
        if a.dtype.kind == "M":
            equal |= np.isnat(a) & np.isnat(b)
    if equal.all():
        return None
    return int(np.argmin(equal))


def _canonical(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in an order that depends only on their values.

    Floats come last, and rounded: two sums of the same terms must not swap rows.
    """
    keys: dict[str, pd.Series] = {}
    floats: dict[str, pd.Series] = {}
    for name in frame.columns:
        values = _values(frame[name])
        if values.dtype.kind == "f" and not _is_whole(values):
            floats[name] = pd.Series([float(f"{value:.6g}") for value in values])
        elif values.dtype.kind in "fiub":
            floats_or_ints = pd.Series(values.astype("float64"))
            keys[name] = floats_or_ints
        else:
            keys[name] = pd.Series(values)
    order = pd.DataFrame({**keys, **floats}, index=range(len(frame)))
    positions = order.sort_values(list(order.columns), kind="stable").index.to_numpy()
    return frame.iloc[positions].reset_index(drop=True)


def _is_whole(values: np.ndarray) -> bool:
    """Return whether all floats are whole numbers, which compare exactly."""
    present = values[~np.isnan(values)]
    return bool(np.all(present == np.floor(present)))


def _sentence(where: str, got: pd.Series, expected: pd.Series, row: int) -> str:
    """Return the sentence on one pair of unequal values."""
    left, right = (_shortened(column.iloc[row]) for column in (got, expected))
    return f"{where}: {got.name!r} is {left}, expected {right}"


def _shortened(value: object) -> str:
    """Return a value's text, cut so that a long comment does not fill the screen."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else text[:57] + "..."

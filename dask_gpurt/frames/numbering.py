"""Partition numbers of rows, computed from the columns of a shuffle.

Dask hashes whole columns in a dozen operations, each of which reads, writes and allocates all rows.
This module takes one block of rows through all operations in place, so that the block stays in the
processor's cache. It contains the hash of a value and the combination of the hashes of several
columns. `agrees_with` compares the result with Dask's before first use.

It handles numbers only. Dask itself hashes strings, categories and times. The patch in
`plugins.patches.dataframe` makes Dask call this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.util import hash_array

Column = npt.NDArray[Any]

#: Rows of a block. Temporary data of 24 bytes a row fits the second-level cache.
BLOCK_ROWS = 1 << 15

#: Constants of Python's tuple hash, with which pandas combines the columns of a row.
_START, _FACTOR, _FACTOR_STEP, _END = 0x345678, 1000003, 82520, np.uint64(97531)
#: Constants of the hash of a number: the finisher of SplitMix64, in pandas' variant.
_STEPS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), None),
)
_ONE = np.uint64(1)
_MINUS_ZERO = np.uint64(1 << 63)
#: Both zeros have one hash, and so do all bit patterns of NaN. True from pandas 3.1 on.
_EQUALS_MEET = bool(np.equal(*hash_array(np.array([0.0, -0.0]))))


def partition_numbers(columns: Sequence[Column], n_partitions: int) -> Column:
    """Return the output partition of each row.

    Parameters
    ----------
    columns
        At least one column of numbers, all of one length. They are hashed as float64, as Dask
        does, so that equal whole numbers of any width and kind get one hash.
    n_partitions
        Number of output partitions.

    Returns
    -------
    array of the narrowest signed integer type that holds `n_partitions`
    """
    n_rows = len(columns[0])
    numbers = np.empty(n_rows, dtype=np.min_scalar_type(-n_partitions - 1))
    scratch = np.empty((3, min(n_rows, BLOCK_ROWS)), dtype=np.uint64)
    divisor = np.uint64(n_partitions)
    is_power_of_two = n_partitions & (n_partitions - 1) == 0
    for begin in range(0, n_rows, BLOCK_ROWS):
        end = min(begin + BLOCK_ROWS, n_rows)
        combined, hashes, spare = scratch[:, : end - begin]
        combined.fill(_START)
        factor = _FACTOR
        for number, column in enumerate(columns):
            floats = hashes.view(np.float64)
            np.copyto(floats, column[begin:end])
            if _EQUALS_MEET and column.dtype.kind == "f":
                missing = np.isnan(floats)
                if missing.any():
                    floats[missing] = np.nan
                # Compare bits. Arithmetic would take denormal numbers for zeros in threads that
                # flush them to zero, and would warn of some NaNs.
                np.equal(hashes, _MINUS_ZERO, out=missing)
                if missing.any():
                    hashes[missing] = 0
            _mix(hashes, spare)
            combined ^= hashes
            combined *= np.uint64(factor)
            factor += _FACTOR_STEP + 2 * (len(columns) - number)
        combined += _END
        if is_power_of_two:
            combined &= divisor - _ONE
        else:
            # Several times faster than the remainder, which NumPy computes one element at a time.
            np.floor_divide(combined, divisor, out=spare)
            spare *= divisor
            combined -= spare
        numbers[begin:end] = combined
    return numbers


def _mix(values: Column, spare: Column) -> None:
    """Hash 64-bit values in place, block by block; pandas does the same for whole columns."""
    for shift, factor in _STEPS:
        np.right_shift(values, shift, out=spare)
        values ^= spare
        if factor is not None:
            values *= factor


def columns_to_hash(frame: Any, index: Any, meta: pd.DataFrame) -> list[Column] | None:
    """Return the columns that a frame is shuffled on, or None unless all are plain numbers.

    Parameters
    ----------
    frame
        A partition of any kind.
    index
        A label, a list of labels, or any other key that Dask shuffles on.
    meta
        The meta in the graph: Dask casts to its types.
    """
    labels = index if isinstance(index, list) else [index]
    if type(frame) is not pd.DataFrame or not all(isinstance(one, (str, int)) for one in labels):
        return None
    # Dask resolves labels that the index or two columns share.
    if not frame.columns.is_unique or frame.index.name in labels:
        return None
    # With several levels, a label may stand for several columns.
    if frame.columns.nlevels > 1:
        return None
    if not labels or len(set(labels)) < len(labels):
        return None
    columns = []
    for label in labels:
        if label not in frame.columns or label not in meta.columns:
            return None
        column = frame[label]
        if not (_is_number(column.dtype) and _is_number(meta[label].dtype)):
            return None
        columns.append(column.to_numpy())
    return columns


def columns_hashed(keys: Any) -> list[Column] | None:
    """Return the columns of a frame that is hashed whole, or None unless all are float64."""
    if type(keys) is not pd.DataFrame or not keys.shape[1]:
        return None
    if not all(isinstance(dtype, np.dtype) and dtype == np.float64 for dtype in keys.dtypes):
        return None
    return [keys.iloc[:, place].to_numpy() for place in range(keys.shape[1])]


def _is_number(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "iufb"


def agrees_with(stock: Callable[[pd.DataFrame, int], Column]) -> bool:
    """Return whether rows get the same numbers as from `stock`, for a set of edge cases."""
    odd = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.5, -7.0, 2.0**53, 5e-324])
    columns = [odd, np.arange(len(odd)) * 1.0, odd[::-1]]
    for width in range(1, len(columns) + 1):
        frame = pd.DataFrame(dict(enumerate(columns[:width])))
        for n_partitions in (1, 32, 1000):
            ours = partition_numbers(columns[:width], n_partitions)
            theirs = stock(frame, n_partitions)
            if ours.dtype != theirs.dtype or not np.array_equal(ours, theirs):
                return False
    return True

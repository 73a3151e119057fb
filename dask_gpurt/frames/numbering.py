"""Numbers of the output partitions that rows belong to, from the columns a shuffle is on.

Dask hashes whole columns: a dozen operations, each of which reads and writes all rows and takes
memory for them. Here a block of rows goes through all of them before the next, in place, and stays
in the processor's cache. The hash of a value, and how the hashes of several columns become one, are
written out below, and compared with what Dask makes of them before they are used.

Numbers alone: strings, categories and times are hashed by Dask, as without us. Dask is made to ask
here by `plugins.patches.dataframe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.util import hash_array

Column = npt.NDArray[Any]

#: Rows of a block: what is made on the way, 24 bytes a row, fits the second level of a cache.
BLOCK_ROWS = 1 << 15

#: As of the hash of a tuple, which is how pandas combines the columns of a row.
_START, _FACTOR, _FACTOR_STEP, _END = 0x345678, 1000003, 82520, np.uint64(97531)
#: As of the hash of a number: the finisher of SplitMix64, in the variant that pandas uses.
_STEPS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), None),
)
_ONE = np.uint64(1)
_MINUS_ZERO = np.uint64(1 << 63)
#: Whether both zeros have one hash, and all bit patterns of NaN: not before pandas 3.1.
_EQUALS_MEET = bool(np.equal(*hash_array(np.array([0.0, -0.0]))))


def partition_numbers(columns: Sequence[Column], n_partitions: int) -> Column:
    """Number the output partition of each row.

    Parameters
    ----------
    columns
        At least one, of numbers, of equal length. Hashed as float64, as Dask does it, so that
        whole numbers of any width and kind meet.
    n_partitions
        Number of output partitions.

    Returns
    -------
    array of the narrowest signed integers that `n_partitions` fits
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
                # By its bits: arithmetic would take numbers that are almost zero for zeros where a
                # thread was told to, and warn of NaNs of some kinds.
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
            # Several times as fast as the remainder, which NumPy takes one element at a time.
            np.floor_divide(combined, divisor, out=spare)
            spare *= divisor
            combined -= spare
        numbers[begin:end] = combined
    return numbers


def _mix(values: Column, spare: Column) -> None:
    """Hash 64-bit values in place, as pandas does in whole columns."""
    for shift, factor in _STEPS:
        np.right_shift(values, shift, out=spare)
        values ^= spare
        if factor is not None:
            values *= factor


def columns_to_hash(frame: Any, index: Any, meta: pd.DataFrame) -> list[Column] | None:
    """The columns that a frame is shuffled on; None unless they are plain numbers throughout.

    Parameters
    ----------
    frame
        A partition, of any kind.
    index
        A label or a list of them, or anything else that Dask shuffles on.
    meta
        As the graph has it: Dask casts by its types.
    """
    labels = index if isinstance(index, list) else [index]
    if type(frame) is not pd.DataFrame or not all(isinstance(one, (str, int)) for one in labels):
        return None
    # A label that is the index's as well, or two columns', means something that Dask finds out.
    if not frame.columns.is_unique or frame.index.name in labels:
        return None
    # With several levels, a label stands for several columns.
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
    """The columns of a frame that is hashed whole; None unless they were cast to float64."""
    if type(keys) is not pd.DataFrame or not keys.shape[1]:
        return None
    if not all(isinstance(dtype, np.dtype) and dtype == np.float64 for dtype in keys.dtypes):
        return None
    return [keys.iloc[:, place].to_numpy() for place in range(keys.shape[1])]


def _is_number(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "iufb"


def agrees_with(stock: Callable[[pd.DataFrame, int], Column]) -> bool:
    """Whether rows get the numbers that `stock` gives them, tried on values that are odd."""
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

"""Rows of each output partition, counted where the partition numbers are.

A worker counts the rows of its first input partition, and the scheduler balances the outputs by
them. Numbers in device memory are counted on the device: only the counts come to the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def partition_sizes(numbers: Any) -> list[int] | None:
    """Return the number of rows of each output partition.

    Parameters
    ----------
    numbers
        Series of pandas or cuDF with the partition number of each row. Rows with negative numbers
        do not count.

    Returns
    -------
    list of int, or None
        None if the numbers are not plain integers, for example because some are missing.
    """
    is_on_device = hasattr(type(numbers), "__cuda_array_interface__")
    values = numbers.values if is_on_device else numbers.to_numpy()
    dtype = getattr(values, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iu":
        return None
    numbers = values[values >= 0].astype(np.intp, copy=False)  # NumPy before 2.1 counts no others
    # NumPy passes an array of a device to its own library.
    counts: list[int] = np.bincount(numbers).tolist()
    return counts

"""Faster row numbering for DataFrame shuffles and merges.

In a shuffle on columns, Dask spends a third of a sending task on selecting, casting and hashing
the columns, with passes over all rows. While shuffles run, `frames.numbering` does this for numeric
columns, with equal results.

| what | why | taken back by |
|---|---|---|
| `AssignPartitioningIndex.operation` | numbers the rows of a frame for a shuffle |
`RowNumbers.uninstall` |
| `dask.dataframe.shuffle.partitioning_index`, also by its name in `.dask_expr._merge` | numbers the
rows of a frame for a merge | `RowNumbers.uninstall` |

Both patches are global to the process. The first of its workers that asks installs them, and the
last one to release them restores Dask's functions. This module never imports dask.dataframe: a
program that shuffles frames has imported it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from dask_gpurt.process_patch import ProcessPatch

logger = logging.getLogger("dask_gpurt")

_NUMBERS = "dask.dataframe.shuffle"
_SHUFFLE = "dask.dataframe.dask_expr._shuffle"
_MERGE = "dask.dataframe.dask_expr._merge"


@functools.cache
def _agrees() -> bool:
    # Imported here: pandas takes time to import, and not every worker has it by now.
    from dask_gpurt.frames.numbering import agrees_with

    if not (found := agrees_with(sys.modules[_NUMBERS].partitioning_index)):
        logger.info("Dask numbers the rows: this version of pandas hashes differently")
    return found


def _replace() -> Callable[[], None]:
    owner = sys.modules[_SHUFFLE].AssignPartitioningIndex
    operation = owner.operation
    owner.operation = staticmethod(_named_like(operation, _operation(operation)))
    # Tasks of a merge carry a function with pickled globals, among them this one by name.
    modules = [vars(sys.modules[name]) for name in (_NUMBERS, _MERGE)]
    numbers = modules[0]["partitioning_index"]
    ours = _named_like(numbers, _partitioning_index(numbers))
    for names in modules:
        names["partitioning_index"] = ours

    def restore() -> None:
        owner.operation = staticmethod(operation)
        for names in modules:
            names["partitioning_index"] = numbers

    return restore


_patch = ProcessPatch(_replace)


class RowNumbers:
    """One worker's request for faster row numbering.

    Holds until `uninstall` is called or the worker is garbage collected. Repeated calls do nothing.
    """

    def __init__(self) -> None:
        self._release: Callable[[], object] | None = None

    def install(self) -> None:
        """Install the patches, unless an earlier call did or Dask's functions have to stay."""
        if self._release is None and {_NUMBERS, _SHUFFLE, _MERGE} <= sys.modules.keys():
            if _agrees():
                self._release = _patch.hold(self)

    def uninstall(self) -> None:
        """Withdraw the request."""
        if self._release is not None:
            self._release()
            self._release = None


def _named_like(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return our function under the stock function's name.

    If this process builds a graph, pickle stores tasks by that name, and readers get stock's
    function.
    """
    return functools.wraps(stock)(ours)


def _operation(stock: Callable[..., Any]) -> Callable[..., Any]:
    from dask_gpurt.frames.numbering import columns_to_hash, partition_numbers

    def operation(
        df: Any, index: Any, name: str, npartitions: int, meta: Any, index_shuffle: bool
    ) -> Any:
        columns = None if index_shuffle else columns_to_hash(df, index, meta)
        if columns is None:
            return stock(df, index, name, npartitions, meta, index_shuffle)
        return df.assign(**{name: partition_numbers(columns, npartitions)})

    return operation


def _partitioning_index(stock: Callable[..., Any]) -> Callable[..., Any]:
    from dask_gpurt.frames.numbering import columns_hashed, partition_numbers

    def partitioning_index(df: Any, npartitions: int, cast_dtype: Any = None) -> Any:
        # A merge casts its keys before it calls this.
        columns = columns_hashed(df) if cast_dtype is None else None
        if columns is None:
            return stock(df, npartitions, cast_dtype)
        return partition_numbers(columns, npartitions)

    return partitioning_index

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
import threading
import weakref
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("dask_gpurt")

_NUMBERS = "dask.dataframe.shuffle"
_SHUFFLE = "dask.dataframe.dask_expr._shuffle"
_MERGE = "dask.dataframe.dask_expr._merge"


class _ReplacedFunctions:
    """The patches of this process, and the number of workers that use them."""

    def __init__(self) -> None:
        # Reentrant: garbage collection may finalize a worker while this thread holds the lock.
        self._lock = threading.RLock()
        self._users = 0
        self._undo: list[Callable[[], None]] = []
        self._agrees: bool | None = None

    def acquire(self) -> bool:
        """Count one more user. Return False, without counting, if Dask's functions stay."""
        with self._lock:
            if not {_NUMBERS, _SHUFFLE, _MERGE} <= sys.modules.keys():
                return False
            if self._agrees is None:
                # Imported here: pandas takes time to import, and not every worker has it by now.
                from dask_gpurt.frames.numbering import agrees_with

                self._agrees = agrees_with(sys.modules[_NUMBERS].partitioning_index)
                if not self._agrees:
                    logger.info("Dask numbers the rows: this version of pandas hashes differently")
            if not self._agrees:
                return False
            self._users += 1
            if self._users == 1:
                self._replace()
            return True

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                while self._undo:
                    self._undo.pop()()

    def _replace(self) -> None:
        owner = sys.modules[_SHUFFLE].AssignPartitioningIndex
        operation = owner.operation
        owner.operation = staticmethod(_named_like(operation, _operation(operation)))
        self._undo = [functools.partial(setattr, owner, "operation", staticmethod(operation))]
        # Tasks of a merge carry a function with pickled globals, among them this one by name.
        numbers = sys.modules[_NUMBERS].partitioning_index
        ours = _named_like(numbers, _partitioning_index(numbers))
        for name in (_NUMBERS, _MERGE):
            module = sys.modules[name]
            vars(module)["partitioning_index"] = ours
            self._undo.append(functools.partial(setattr, module, "partitioning_index", numbers))


_replaced = _ReplacedFunctions()


class RowNumbers:
    """One worker's request for faster row numbering.

    Holds until `uninstall` is called or the worker is garbage collected. Repeated calls do nothing.
    """

    def __init__(self) -> None:
        self._finalizer: weakref.finalize[[], RowNumbers] | None = None

    def install(self) -> None:
        """Install the patches, unless an earlier call did."""
        if self._finalizer is None and _replaced.acquire():
            self._finalizer = weakref.finalize(self, _replaced.release)

    def uninstall(self) -> None:
        """Withdraw the request."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None


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

"""Private names of dask.dataframe that this package touches.

Of a shuffle on columns, a third of the time of a task that sends is Dask's own: it selects the
columns, casts them and hashes them, each in passes over all rows. While shuffles run,
`frames.numbering` does that for columns of numbers, with equal results.

| what | why |
|---|---|
| `AssignPartitioningIndex.operation` | numbers the rows of a frame for a shuffle |
| `dask.dataframe.shuffle.partitioning_index`, also by its name in `.dask_expr._merge` | numbers the
rows of a frame for a merge |

Both belong to the process, not to a worker of it: they are replaced when the first of its workers
asks, and put back when the last has let go (`RowNumbers`). dask.dataframe is not imported for it;
who shuffles frames has it.
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


class _Replaced:
    """What the process has instead of Dask's functions, and how many workers want it so."""

    def __init__(self) -> None:
        # Of one thread's as often as it likes: a worker may be found to be gone in the midst of it.
        self._lock = threading.RLock()
        self._users = 0
        self._undo: list[Callable[[], None]] = []
        self._agrees: bool | None = None

    def acquire(self) -> bool:
        """Count one more who wants it. False if Dask's stay, which are not counted then."""
        with self._lock:
            if not {_NUMBERS, _SHUFFLE, _MERGE} <= sys.modules.keys():
                return False
            if self._agrees is None:
                # Here, since pandas takes time to import and not every worker has it by now.
                from dask_gpurt.frames.numbering import agrees_with

                self._agrees = agrees_with(sys.modules[_NUMBERS].partitioning_index)
                if not self._agrees:
                    logger.info("rows are numbered by Dask: this pandas hashes in another way")
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
        # Tasks of a merge come with a function that has its globals pickled, this one by name.
        numbers = sys.modules[_NUMBERS].partitioning_index
        ours = _named_like(numbers, _partitioning_index(numbers))
        for name in (_NUMBERS, _MERGE):
            module = sys.modules[name]
            vars(module)["partitioning_index"] = ours
            self._undo.append(functools.partial(setattr, module, "partitioning_index", numbers))


_replaced = _Replaced()


class RowNumbers:
    """One worker's wish to have rows numbered in blocks.

    Until `release` is called, once or more often, or the worker is gone without a word.
    """

    def __init__(self) -> None:
        self._let_go: weakref.finalize[[], RowNumbers] | None = None

    def acquire(self) -> None:
        """Ask for it, if that did not succeed before."""
        if self._let_go is None and _replaced.acquire():
            self._let_go = weakref.finalize(self, _replaced.release)

    def release(self) -> None:
        if self._let_go is not None:
            self._let_go()
            self._let_go = None


def _named_like(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Ours under stock's name.

    Where a graph is made in this process, tasks are pickled by that name, and are stock's for
    whoever reads them.
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
        # A merge casts its keys before it asks.
        columns = columns_hashed(df) if cast_dtype is None else None
        if columns is None:
            return stock(df, npartitions, cast_dtype)
        return partition_numbers(columns, npartitions)

    return partitioning_index

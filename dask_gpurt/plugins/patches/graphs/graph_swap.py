"""The place where a scheduler makes tasks of a program's graph.

In all supported versions, a client sends layers of collections, and the scheduler optimises them.
The function that optimises is the client's: `array_optimize` of its configuration, or Dask's.

| what | why | taken back by |
|---|---|---|
| stream handler `update-graph` | tells for which scheduler a graph is made into tasks
| `GraphSwap.uninstall` |
| `distributed.scheduler._materialize_graph` | layers can be changed before they are optimised
| `GraphSwap.uninstall`, or the end of the last scheduler of the process that uses it |
| `HLGExpr`, `_HLGExprSequence` and `low_level_optimizer` of `dask._expr` | where the layers are,
and the function that optimises them; the function is wrapped in the scheduler's copy | |

Contract tests in `tests/plugins/patches/test_graph_swap.py` fail when dask or distributed changes
any of these.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import distributed.scheduler
from dask._expr import HLGExpr, _HLGExprSequence

if TYPE_CHECKING:
    from dask.highlevelgraph import HighLevelGraph
    from distributed import Scheduler

logger = logging.getLogger("dask_gpurt")

#: Returns layers to use in place of these, for such keys; may be called in another thread.
Rewrite = Callable[["HighLevelGraph", Sequence[Any]], "HighLevelGraph"]

#: In the context of a graph that arrives: what its scheduler makes of layers.
_rewrite: ContextVar[Rewrite | None] = ContextVar("_rewrite", default=None)


class _RewritingOptimizer:
    """A program's function that optimises layers, after another function has changed them."""

    def __init__(self, stock: Callable[..., Any], rewrite: Rewrite) -> None:
        self._stock, self._rewrite = stock, rewrite

    def __call__(self, dsk: Any, keys: Any, **kwargs: Any) -> Any:
        try:
            dsk = self._rewrite(dsk, keys)
        except Exception:
            logger.exception("a graph could not be examined; it runs as it is")
        return self._stock(dsk, keys, **kwargs)


def _prepare(expr: Any, rewrite: Rewrite) -> None:
    for one in expr.operands if isinstance(expr, _HLGExprSequence) else [expr]:
        if isinstance(one, HLGExpr):
            stock = one.low_level_optimizer
            # None: the program asked for its graph as it is. A client may have optimised already.
            if stock is not None and "_optimized_dsk" not in vars(one):
                one.low_level_optimizer = _RewritingOptimizer(stock, rewrite)


class _ReplacedFunction:
    """The patch of this process, and the number of schedulers that use it."""

    def __init__(self) -> None:
        # Reentrant: garbage collection may finalize a scheduler while this thread holds the lock.
        self._lock = threading.RLock()
        self._users = 0
        self._stock: Callable[..., Any] | None = None

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._stock = stock = distributed.scheduler._materialize_graph

                @functools.wraps(stock)
                def materialize(expr: Any, validate: bool) -> Any:
                    if (rewrite := _rewrite.get()) is not None:
                        _prepare(expr, rewrite)
                    return stock(expr=expr, validate=validate)

                distributed.scheduler._materialize_graph = materialize

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                distributed.scheduler._materialize_graph = self._stock  # type: ignore[assignment]


_replaced = _ReplacedFunction()


class GraphSwap:
    """The patch that lets a function change the layers of programs, until `uninstall`."""

    def __init__(self, scheduler: Scheduler, rewrite: Rewrite) -> None:
        self._handlers: dict[str, Any] = scheduler.stream_handlers
        self._stock = stock = self._handlers["update-graph"]

        async def update_graph(**message: Any) -> None:
            token = _rewrite.set(rewrite)
            try:
                await stock(**message)
            finally:
                _rewrite.reset(token)

        self._ours = self._handlers["update-graph"] = update_graph
        _replaced.acquire()
        # A scheduler that closes does not uninstall.
        self._finalizer = weakref.finalize(scheduler, _replaced.release)

    def uninstall(self) -> None:
        """Restore stock Dask's functions."""
        if self._handlers.get("update-graph") is self._ours:
            self._handlers["update-graph"] = self._stock
        self._finalizer()

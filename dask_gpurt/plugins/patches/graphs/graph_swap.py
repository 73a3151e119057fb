"""The place where a scheduler makes tasks of a program's graph.

In all supported versions, a client sends layers of collections, and the scheduler optimises them.
The function that optimises is the client's: `array_optimize` of its configuration, or Dask's.

| what | why | taken back by |
|---|---|---|
| stream handler `update-graph` | tells for which scheduler a graph is made into tasks
| `GraphSwap.uninstall` |
| `distributed.scheduler._materialize_graph` | layers can be changed before they are optimised, and
tasks before the scheduler has them | `GraphSwap.uninstall`, or the end of the last scheduler of the
process that uses it |
| `span_metadata` in the message `update-graph` | tells whether the program waits for this graph
alone | |
| `distributed.scheduler._cull` | leaves out tasks that nothing needs after a change | |
| `TaskState.who_has` | which workers hold a value that a graph names | |
| `HLGExpr`, `_HLGExprSequence` and `low_level_optimizer` of `dask._expr` | where the layers are,
and the function that optimises them; the function is wrapped in the scheduler's copy | |

Contract tests in `tests/plugins/patches/test_graph_swap.py` fail when dask or distributed changes
any of these.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import distributed.scheduler
from dask._expr import HLGExpr, _HLGExprSequence

from dask_gpurt.process_patch import ProcessPatch

if TYPE_CHECKING:
    from dask._task_spec import GraphNode
    from dask.highlevelgraph import HighLevelGraph
    from distributed import Scheduler
    from distributed.scheduler import TaskState

logger = logging.getLogger("dask_gpurt")

#: Returns the tasks of a graph that some keys need.
culled = distributed.scheduler._cull

#: Returns the layers to use in place of a graph's, given the wanted keys. May run in any thread.
Rewrite = Callable[["HighLevelGraph", Sequence[Any]], "HighLevelGraph"]


class SentProgram(NamedTuple):
    """Facts of a program whose graph arrives, beside its tasks.

    Attributes
    ----------
    wanted
        Keys that its client wants.
    may_fuse
        Whether tasks may be fused. Not if the program treats single tasks differently: by retries,
        actors, or annotations that are functions of a key.
    is_awaited
        Whether the program waits for the results, as `compute` of a collection does. If not, it
        may send another graph with some of the same tasks, to share their results.
    expr
        The expression that the tasks are made of.
    annotations
        By kind, the values of keys.
    """

    wanted: frozenset[Any]
    may_fuse: bool
    is_awaited: bool
    expr: Any = None
    annotations: Mapping[str, Mapping[Any, Any]] = MappingProxyType({})


#: Returns tasks to use in place of these; may be called in another thread.
TaskRewrite = Callable[[dict[Any, "GraphNode"], SentProgram], dict[Any, "GraphNode"]]

#: In the context of a graph that arrives: functions that may change it, and facts of it.
_arriving: ContextVar[tuple[tuple[GraphSwap, ...], SentProgram] | None] = ContextVar(
    "_arriving", default=None
)


def holding_workers(task: TaskState | None) -> set[str]:
    """Return the workers that hold a value. Another thread than the scheduler's may call this."""
    who_has = task.who_has if task is not None else None
    # Copied at once: the scheduler may change the set during a loop.
    return {one.address for one in tuple(who_has or ())}


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


def _changed(tasks: Any, swaps: tuple[GraphSwap, ...], program: SentProgram) -> Any:
    """Return the tasks after all changes. A change that fails has no effect."""
    for swap in swaps:
        if swap.tasks is not None:
            try:
                tasks = swap.tasks(tasks, program)
            except Exception:
                logger.exception("the tasks of a graph could not be examined; they run as they are")
    return tasks


def _replace() -> Callable[[], None]:
    stock = distributed.scheduler._materialize_graph

    @functools.wraps(stock)
    def materialize(expr: Any, validate: bool) -> Any:
        if (arriving := _arriving.get()) is None:
            return stock(expr=expr, validate=validate)
        swaps, program = arriving
        for swap in swaps:
            if swap.layers is not None:
                _prepare(expr, swap.layers)
        tasks, annotations = stock(expr=expr, validate=validate)
        program = program._replace(expr=expr, annotations=annotations)
        return _changed(tasks, swaps, program), annotations

    distributed.scheduler._materialize_graph = materialize
    return functools.partial(setattr, distributed.scheduler, "_materialize_graph", stock)


_patch = ProcessPatch(_replace)


def _is_awaited(message: Mapping[str, Any]) -> bool:
    collections = (message.get("span_metadata") or {}).get("collections", ())
    # Only `Client.get` gives its collections this type.
    return any(one.get("type") == "low-level-graph" for one in collections)


class _Handler:
    """Takes graphs from clients in place of a scheduler's handler, for all its swaps."""

    def __init__(self, stock: Callable[..., Any]) -> None:
        self.stock = stock
        self.swaps: list[GraphSwap] = []
        self._one_by_one = asyncio.Lock()

    async def update_graph(self, **message: Any) -> None:
        said = message.get("annotations") or {}
        may_fuse = not (
            "retries" in said or message.get("actors") or any(map(callable, said.values()))
        )
        # One graph after the other: changes depend on the tasks that the scheduler has, and these
        # must include the tasks of earlier graphs.
        async with self._one_by_one:
            program = SentProgram(frozenset(message["keys"]), may_fuse, _is_awaited(message))
            token = _arriving.set((tuple(self.swaps), program))
            try:
                await self.stock(**message)
            finally:
                _arriving.reset(token)
                self._tell(program.wanted)

    def _tell(self, keys: frozenset[Any]) -> None:
        for swap in tuple(self.swaps):
            if swap.handled is not None:
                try:
                    swap.handled(keys)
                except Exception:  # it would end the connection of the client
                    logger.exception("the end of a graph's arrival could not be noted")


class GraphSwap:
    """The patch that lets functions change the graphs of programs, until `uninstall`.

    Parameters
    ----------
    layers
        Changes layers of collections before they are optimised.
    tasks
        Changes tasks before the scheduler has them.
    handled
        Called with the wanted keys once the scheduler has their tasks, or has refused the graph.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        layers: Rewrite | None = None,
        tasks: TaskRewrite | None = None,
        handled: Callable[[frozenset[Any]], None] | None = None,
    ) -> None:
        self.layers, self.tasks, self.handled = layers, tasks, handled
        self._handlers: dict[str, Any] = scheduler.stream_handlers
        stock = self._handlers["update-graph"]
        owner = getattr(stock, "__self__", None)
        self._handler = owner if isinstance(owner, _Handler) else _Handler(stock)
        # distributed awaits functions only, so this is a method of the object.
        self._handlers["update-graph"] = self._handler.update_graph
        self._handler.swaps.append(self)
        # A scheduler that closes does not uninstall.
        self._release = _patch.hold(scheduler)

    def uninstall(self) -> None:
        """Restore stock Dask's functions, unless others change graphs as well."""
        if self in self._handler.swaps:
            self._handler.swaps.remove(self)
        ours = self._handlers.get("update-graph") == self._handler.update_graph
        if ours and not self._handler.swaps:
            self._handlers["update-graph"] = self._handler.stock
        self._release()

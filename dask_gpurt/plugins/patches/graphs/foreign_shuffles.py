"""Shuffles and rechunks by `p2p` in graphs of delayed functions and of bags.

Stock Dask 2026.7 and 2026.8 fails on a cluster in two cases:

- `delayed(f)(x.rechunk(...))` ends in "lost dependencies". So does everything that calls `delayed`,
  such as `to_zarr(compute=False)` of xarray. Dask gives the collection new keys there, so that
  nobody else shares its values. It does not rename the tasks of a shuffle, because a barrier's key
  is fixed, and returns a graph without the new keys. Here, each new key gets the old one's value.
- `df.shuffle(...).to_bag()` ends in "failed during transfer phase". Bags make each task anew, and
  a barrier loses its type and the shuffle's description. Here, barriers stay as they are.

| what | why | taken back by |
|---|---|---|
| `dask._expr.ProhibitReuse.__dask_graph__`, `._layer` | adds a task for each key that the
collection has and its graph has not | `release` |
| `dask.bag.core.lazify` | lets barriers of shuffles stay as they are | `release` |
| `distributed.shuffle._core.P2PBarrierTask` | tells the barrier of a shuffle | |

Both patches are global to the process. A client makes graphs of delayed functions, and a scheduler
optimises graphs of bags, so both hold the patches.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from dask import _expr
from dask._task_spec import Task, TaskRef
from dask.core import flatten
from distributed.shuffle._core import P2PBarrierTask

from dask_gpurt.process_patch import ProcessPatch


def _with_all_keys(stock: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    @functools.wraps(stock)
    def graph(self: Any) -> dict[Any, Any]:
        tasks = stock(self)
        keys = zip(flatten(self.__dask_keys__()), flatten(self.expr.__dask_keys__()), strict=True)
        missing = {
            new: Task(new, self._identity, TaskRef(old)) for new, old in keys if new not in tasks
        }
        return {**tasks, **missing} if missing else tasks

    return graph


def _with_barriers(stock: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    @functools.wraps(stock)
    def lazify(dsk: Mapping[Any, Any]) -> dict[Any, Any]:
        barriers = {key: task for key, task in dsk.items() if isinstance(task, P2PBarrierTask)}
        return {**stock(dsk), **barriers}

    return lazify


def _replace() -> Callable[[], None]:
    # Imported here: workers import this module through `patches.p2p`, and make no graphs.
    import dask.bag.core

    graphs: Any = _expr.ProhibitReuse
    bags: Any = dask.bag.core
    graph, layer, lazify = graphs.__dask_graph__, graphs._layer, bags.lazify
    graphs.__dask_graph__ = graphs._layer = _with_all_keys(graph)
    bags.lazify = _with_barriers(lazify)

    def restore() -> None:
        graphs.__dask_graph__, graphs._layer, bags.lazify = graph, layer, lazify

    return restore


_patch = ProcessPatch(_replace)
_releases: weakref.WeakKeyDictionary[object, Callable[[], object]] = weakref.WeakKeyDictionary()


def hold(holder: object) -> None:
    """Keep both patches until this holder releases them or is garbage collected."""
    if holder not in _releases:
        _releases[holder] = _patch.hold(holder)


def release(holder: object) -> None:
    """Let stock's functions come back, if nobody else holds the patches."""
    if done := _releases.pop(holder, None):
        done()

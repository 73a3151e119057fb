"""Shards of shuffles in a worker's memory metrics: those of its heartbeat, and Prometheus's.

| what | why | taken back by |
|---|---|---|
| `Worker.get_metrics`, its `spilled_bytes` | the scheduler counts shards in memory as managed, and
shards on disk as spilled | `CountedShards.uninstall` |
| `WorkerState.memory` of the scheduler | computes the managed memory as the bytes of task outputs,
less `spilled_bytes["memory"]` | |
| `distributed.http.worker.prometheus.core.WorkerMetricCollector.collect`, its family `memory_bytes`
| Prometheus gets the same figures as the scheduler | `CountedShards.uninstall` |

Stock counts the buffers of its shuffles as unmanaged memory, which a dashboard draws as a warning.
The scheduler knows two figures of managed memory: bytes of task outputs, by its own books, and how
many of these are spilled. Only the second one comes from the worker, so bytes of shards are
subtracted from it. `spilled_bytes["memory"]` may thus be negative. Only the scheduler reads it, in
two places: for managed memory, and for the lowest unmanaged memory lately. Both come out right.

Stock has one collector for the process, which shows the worker that was asked last. So the method
of its class is replaced, from the first worker of the process until the last one's `uninstall`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from dask_gpurt.process_patch import ProcessPatch

if TYPE_CHECKING:
    from distributed import Worker


class _Shards(NamedTuple):
    """How to read the bytes of a worker's shards."""

    in_memory: Callable[[], int]
    on_disk: Callable[[], int]


class CountedShards:
    """Has a worker report its shards, until `uninstall`.

    Parameters
    ----------
    in_memory, on_disk
        Return the bytes of shards now.
    """

    def __init__(
        self, worker: Worker, in_memory: Callable[[], int], on_disk: Callable[[], int]
    ) -> None:
        self._worker = worker
        stock = worker.get_metrics

        async def gpurt_get_metrics() -> dict[str, Any]:
            found: dict[str, Any] = await stock()
            spilled = found["spilled_bytes"]
            found["spilled_bytes"] = {
                "memory": spilled["memory"] - in_memory(),
                "disk": spilled["disk"] + on_disk(),
            }
            return found

        worker.get_metrics = gpurt_get_metrics  # type: ignore[method-assign]
        _shards_of[worker] = _Shards(in_memory, on_disk)
        self._release = _patch.hold(worker)

    def uninstall(self) -> None:
        vars(self._worker).pop("get_metrics", None)
        _shards_of.pop(self._worker, None)
        self._release()


_shards_of: WeakKeyDictionary[Worker, _Shards] = WeakKeyDictionary()


def _replace() -> Callable[[], None]:
    """Count shards in Prometheus's gauge; do nothing without `prometheus_client`."""
    try:
        from distributed.http.worker.prometheus.core import WorkerMetricCollector
    except ImportError:
        return lambda: None
    kind: Any = WorkerMetricCollector
    stock = kind.collect
    kind.collect = _counting(stock)
    return partial(setattr, kind, "collect", stock)


_patch = ProcessPatch(_replace)


def _counting(stock: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """Return stock's method with shards counted."""

    def gpurt_collect(self: Any) -> Iterator[Any]:
        shards = _shards_of.get(self.server)
        memory = self.build_name("memory_bytes")
        for family in stock(self):
            if shards is not None and family.name == memory:
                _count(family, shards)
            yield family

    return gpurt_collect


def _count(family: Any, shards: _Shards) -> None:
    """Move the shards in memory from unmanaged to managed, and add those on disk."""
    found = {one.labels["type"]: one.value for one in family.samples}
    moved = min(found["unmanaged"], shards.in_memory())
    counted = {
        "managed": found["managed"] + moved,
        "unmanaged": found["unmanaged"] - moved,
        "spilled": found["spilled"] + shards.on_disk(),
    }
    family.samples = [one._replace(value=counted[one.labels["type"]]) for one in family.samples]

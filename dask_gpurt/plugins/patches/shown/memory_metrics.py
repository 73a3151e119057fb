"""Shards of shuffles in the memory metrics of a worker, which its heartbeat carries.

| what | why | taken back by |
|---|---|---|
| `Worker.get_metrics`, its `spilled_bytes` | the scheduler counts shards in memory as managed, and
shards on disk as spilled | `CountedShards.uninstall` |
| `WorkerState.memory` of the scheduler | computes the managed memory as the bytes of task outputs,
less `spilled_bytes["memory"]` | |

Stock counts the buffers of its shuffles as unmanaged memory, which a dashboard draws as a warning.
The scheduler knows two figures of managed memory: bytes of task outputs, by its own books, and how
many of these are spilled. Only the second one comes from the worker, so bytes of shards are
subtracted from it. `spilled_bytes["memory"]` may thus be negative. Only the scheduler reads it, in
two places: for managed memory, and for the lowest unmanaged memory lately. Both come out right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Worker


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

    def uninstall(self) -> None:
        vars(self._worker).pop("get_metrics", None)

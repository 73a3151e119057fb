"""The broadcasts of one worker: it serialises a value for others, or gets one from another worker.

The scheduler calls `gpurt_broadcast` on a worker that has the value. That worker serialises it once
and tells the others about it (`gpurt_broadcast_join`). When all have memory for it, slices go their
way (`gpurt_broadcast_slice`), and each worker says how it ended (`gpurt_broadcast_end`).

A broadcast goes on without a worker that fails. Each worker tells the scheduler of its copy: the
sender may be gone by then, or the key used anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import DamagedError, ProtocolError, TransportError
from dask_gpurt.memory.store import TieredStore
from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.collectives.broadcasts.awaited_values import AwaitedValues
from dask_gpurt.plugins.collectives.broadcasts.broadcast_run import (
    PATIENCE_S,
    BroadcastRun,
    broadcast_value,
)
from dask_gpurt.plugins.patches.connections import LostPeers
from dask_gpurt.plugins.patches.values.replicate import Received, serialize, take_replica
from dask_gpurt.plugins.patches.values.value_bytes import safe_sizeof
from dask_gpurt.plugins.shuffle.peer_links import DAMAGED, RELINK
from dask_gpurt.plugins.tracing.ledger_hook import enter_receipt
from dask_gpurt.tracing.lane_names import COLLECTIVE

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.plugins.worker.worker_runtime import WorkerRuntime

logger = logging.getLogger("dask_gpurt")


class WorkerBroadcasts:
    """The handlers of one worker. On the event loop."""

    def __init__(self, worker: Worker, runtime: WorkerRuntime, *, is_on: bool) -> None:
        self._worker = worker
        self._runtime = runtime
        self.awaited = AwaitedValues(worker, is_on=is_on)
        self._runs: dict[str, BroadcastRun] = {}
        #: The end of each broadcast: the size of the value here, or the reason why it is missing.
        self._ends: dict[str, asyncio.Task[int | str]] = {}

    def handlers(self) -> list[Callable[..., Awaitable[Any]]]:
        return [
            self.gpurt_broadcast,
            self.gpurt_broadcast_join,
            self.gpurt_broadcast_leave,
            self.gpurt_broadcast_slice,
            self.gpurt_broadcast_end,
        ]

    async def gpurt_broadcast(
        self, key: Any, workers: Sequence[str], n_slices: int, version: int
    ) -> dict[str, Any]:
        """Handler: send a value of this worker to others.

        Returns
        -------
        dict
            As from `broadcast_value`.
        """
        try:
            value = await self._value(key)
        except KeyError:
            return {"reached": {}, "failed": {self._worker.address: "it has no such value"}}
        header, stretches = await asyncio.to_thread(serialize, value)
        del value
        return await broadcast_value(
            self._runtime.links,
            self._worker.rpc,
            self._worker.address,
            key,
            header,
            stretches,
            workers,
            n_slices,
            version,
        )

    async def _value(self, key: Any) -> Any:
        """Return a value of this worker. The event loop does not wait for its disk.

        Raises
        ------
        KeyError
            It is not here.
        """
        data = self._worker.data
        if isinstance(data, TieredStore):
            return await asyncio.to_thread(data.__getitem__, key)
        return data[key]  # Dask's own store may be used on the event loop alone

    async def gpurt_broadcast_join(
        self,
        name: str,
        key: Any,
        workers: Sequence[str],
        header: Any,
        lengths: Sequence[int],
        n_slices: int,
        version: int = 0,
    ) -> dict[str, Any]:
        """Handler: prepare for the slices of a value; answer when there is memory for them."""
        request_checks.name("name", name)
        request_checks.key(key)
        request_checks.serial("version", version)
        nbytes = sum(request_checks.lengths(lengths))
        if not 0 < request_checks.count("n_slices", n_slices) <= max(1, nbytes):
            raise ProtocolError(f"{n_slices} slices of {nbytes} bytes")
        if nbytes > self._runtime.memory_nbytes:
            return {"why_not": f"{nbytes} bytes are more than the worker's memory"}
        if not isinstance(workers, (list, tuple)) or not isinstance(header, Mapping):
            raise ProtocolError("a broadcast without a list of workers, or without a header")
        if name in self._runs or self._worker.address not in workers:
            raise ProtocolError("a worker joins a broadcast once, and only its own")
        try:
            received = Received(header, lengths, self._runtime.pool.empty_alone)
        except MemoryError as error:
            return {"why_not": str(error)}
        rank = list(workers).index(self._worker.address)
        run = BroadcastRun(self._runtime.links, name, workers, rank, received.stretches, n_slices)
        self._runs[name] = run
        lost = LostPeers(self._worker.rpc, run.lose)

        async def to_its_end() -> int | str:
            try:
                await run.run()
                value = await asyncio.to_thread(received.value)
                if await self.awaited.offer(key, version, value):
                    return safe_sizeof(value)
                size = await take_replica(self._worker, key, value, version)
                return "it does not need the value from here" if size is None else size
            except Exception as error:
                # As text: an error would keep the memory of the value.
                logger.warning("a broadcast failed here: %s", error)
                return str(error) or type(error).__name__
            finally:
                del self._runs[name]
                lost.uninstall()
                # The sender may be gone, and never ask.
                asyncio.get_running_loop().call_later(PATIENCE_S, self._ends.pop, name, None)

        self._ends[name] = asyncio.create_task(to_its_end())
        return {"why_not": None}

    async def gpurt_broadcast_leave(self, name: str) -> dict[str, Any]:
        """Handler: forget a broadcast that does not take place, or goes on without this worker."""
        if (task := self._ends.pop(request_checks.name("name", name), None)) is not None:
            task.cancel()
        return {"why_not": None}

    async def gpurt_broadcast_end(self, name: str) -> dict[str, Any]:
        """Handler: answer when this worker has the value, or will not get it."""
        task = self._ends.get(request_checks.name("name", name))
        if task is None:
            return {"why_not": "it has left the broadcast"}
        await asyncio.wait({task})
        self._ends.pop(name, None)
        end = "it has left the broadcast" if task.cancelled() else task.result()
        return {"why_not": end} if isinstance(end, str) else {"why_not": None, "nbytes": end}

    async def gpurt_broadcast_slice(
        self,
        name: str,
        sender: Any = None,
        message: Any = None,
        header: Any = None,
        payload: Any = None,
        offers: Any = None,
    ) -> dict[str, Any]:
        """Handler: take in a slice, or a peer's offer of a path."""
        if offers is not None:
            return await self._runtime.links.accept(offers)
        request_checks.message(sender, message)
        run = self._runs.get(request_checks.name("name", name))
        start_s = self._runtime.ledger.clock()
        if run is None and name not in self._ends:
            raise OSError("the broadcast is over here")
        try:
            # Without a run, two peers have sent the slice, one in the place of another.
            nbytes = await run.take(header, payload) if run is not None else 0
        except DamagedError as error:
            logger.warning("%s; the peer sends it again", str(error))
            return {"status": DAMAGED}
        except TransportError:
            return {"status": RELINK}
        enter_receipt(self._runtime.ledger, nbytes, start_s, sender, 0, message, COLLECTIVE)
        return {"status": "OK"}

    def close(self) -> None:
        """Leave all broadcasts."""
        for task in self._ends.values():
            task.cancel()
        self._ends.clear()

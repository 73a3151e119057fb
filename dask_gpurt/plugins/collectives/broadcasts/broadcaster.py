"""The scheduler's side of broadcasts: who gets a value from whom, and retries without lost workers.

Stock Dask copies a value in rounds: each worker that has it gives it to two others, as a whole, and
serialises it again. Here one worker serialises it once. Slices go from host to host, so each passes
a network card once, and inside a host through its shared memory.

Stock Dask then makes the copies that are still missing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed.metrics import time

from dask_gpurt.collectives.choice import LinkCosts, chain_slices
from dask_gpurt.collectives.stock_time import card_seconds, fetch_units, replicate_units
from dask_gpurt.errors import DamagedError
from dask_gpurt.plugins.collectives.broadcasts.wide_values import WideValues
from dask_gpurt.plugins.patches.p2p import to_serialize
from dask_gpurt.plugins.patches.values.replicate import (
    CopyReports,
    KeptReplicas,
    ReplicateSwap,
    TaskVersions,
    stretches_of,
)
from dask_gpurt.shuffle.routing import host_of

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.protocol.serialize import Serialized
    from distributed.scheduler import TaskState, WorkerState

logger = logging.getLogger("dask_gpurt")

#: Smaller values are left to stock Dask: a copy takes less than the preparation.
LEAST_NBYTES = 1 << 20
#: Fewer copies are left to stock Dask, which makes two at once.
LEAST_COPIES = 2
#: Number of tries, each without the workers that failed before.
N_TRIES = 3
#: Broadcasts that are remembered for `explain` and `status`.
N_RECENT = 32
#: Costs of messages of Dask, between hosts of an ordinary network. They decide about slices only.
_COSTS = LinkCosts(hop_s=2e-3, message_s=1e-3, rate=1.25e9, inside_rate=5e9)


class Broadcaster:
    """The broadcasts of one cluster, until `uninstall`.

    Parameters
    ----------
    ready
        Addresses of workers that run the runtime.
    """

    def __init__(self, scheduler: Scheduler, ready: Collection[str]) -> None:
        self._scheduler = scheduler
        self._ready = ready
        self._kept = KeptReplicas(scheduler)
        self._swap = ReplicateSwap(scheduler, self.broadcast, self.scatter, self._kept.keep)
        needed = partial(self.broadcast, stock_units=fetch_units)
        #: Tell tasks of the same key apart.
        self.versions = TaskVersions()
        self._copies = CopyReports(scheduler, self.versions)
        self._wide = WideValues(scheduler, needed, self.versions.of, ready)
        self.n_values = self.n_copies = self.nbytes = 0
        self.seconds = 0.0
        self._recent: deque[dict[str, Any]] = deque(maxlen=N_RECENT)

    def uninstall(self) -> None:
        """Restore stock Dask's replication."""
        self._wide.uninstall()
        self._swap.uninstall()
        self._kept.uninstall()

    def close(self) -> None:
        """Remove the handlers of workers."""
        self._wide.close()
        self._copies.close()

    def report(self) -> dict[str, Any]:
        """Return what was broadcast."""
        return {
            "values": self.n_values,
            "copies": self.n_copies,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "recent": list(self._recent),
        }

    def explain(self, key: Any) -> dict[str, Any] | None:
        """Return how a value was last broadcast, or None if that is not known.

        Returns
        -------
        dict
            `nbytes`, `copies`, `hosts`, `slices` and `seconds`. `stock_s` is the time that stock
            Dask would have taken at least; None if no network card was used.
        """
        return next((one for one in reversed(self._recent) if one["key"] == str(key)), None)

    async def broadcast(
        self,
        ts: TaskState,
        targets: Collection[WorkerState],
        stock_units: Callable[[int], int] = replicate_units,
    ) -> None:
        """Copy a value to workers that lack it, as far as that works.

        Parameters
        ----------
        stock_units
            The time of stock Dask, as in `collectives.stock_time`, given the number of copies for
            other hosts.
        """
        if ts.get_nbytes() < LEAST_NBYTES:
            return
        failed: set[str] = set()
        #: These report their copies themselves, on the stream of their other messages. To add them
        #: here could be after Dask has removed them, and nothing would notice that they are gone.
        reached: set[str] = set()
        for _ in range(N_TRIES):
            holders = [ws for ws in ts.who_has or () if self._can(ws, failed)]
            missing = [
                ws
                for ws in targets
                if ws not in (ts.who_has or ()) and self._can(ws, failed | reached)
            ]
            if not holders or len(missing) < LEAST_COPIES:
                return
            root = min(holders, key=lambda ws: ws.address)
            answer = await self._try(ts, root, missing, stock_units)
            reached.update(answer["reached"])
            failed.update(answer["failed"])
            if not failed:
                return

    def _can(self, ws: WorkerState, excluded: Collection[str]) -> bool:
        return ws.address in self._ready and ws.address not in excluded

    async def _try(
        self,
        ts: TaskState,
        root: WorkerState,
        missing: list[WorkerState],
        stock_units: Callable[[int], int],
    ) -> dict[str, Any]:
        """Broadcast once; return the addresses that it `reached`, and those that `failed`."""
        others, n_slices = self._way(root.address, missing, nbytes := ts.get_nbytes())
        began_s = time()
        try:
            answer: dict[str, Any] = await self._scheduler.rpc(root.address).gpurt_broadcast(
                key=ts.key,
                workers=others,
                n_slices=n_slices,
                version=self.versions.of(ts),
            )
        except Exception as error:
            # The value cannot be pickled, or the worker is gone: stock Dask says so in its way.
            logger.info("a broadcast of %r failed: %r; stock Dask copies it", ts.key, error)
            return {"reached": {}, "failed": {root.address: str(error)}}
        way = [root.address, *others], n_slices
        self._count(ts.key, nbytes, way, answer, time() - began_s, stock_units)
        return answer

    async def scatter(
        self, key: Any, value: Serialized, targets: Collection[WorkerState]
    ) -> dict[str, int]:
        """Send a client's value to workers; return those that have it, with its size there."""
        stretches = stretches_of(value.frames)
        nbytes = sum(one.nbytes for one in stretches)
        workers = [ws for ws in targets if ws.address in self._ready]
        if nbytes < LEAST_NBYTES or len(workers) <= LEAST_COPIES:
            return {}
        # The scheduler counts as a host of its own, because it lends no shared memory.
        name = "scheduler://"
        others, n_slices = self._way(name, workers, nbytes)
        began_s, links = time(), _SchedulerLinks(self._scheduler)
        # Not at import: it needs what runs of shuffles need, and few programs broadcast.
        from dask_gpurt.plugins.collectives.broadcasts.broadcast_run import broadcast_value

        answer = await broadcast_value(
            links,  # type: ignore[arg-type]
            self._scheduler.rpc,
            name,
            key,
            value.header,
            stretches,
            others,
            n_slices,
        )
        way = [name, *others], n_slices
        self._count(key, nbytes, way, answer, time() - began_s, replicate_units)
        return answer["reached"]

    def _way(
        self, root: str, workers: Collection[WorkerState], nbytes: int
    ) -> tuple[list[str], int]:
        """Return the workers in the order in which slices reach them, and the number of slices."""
        here = host_of(root)
        others = sorted((ws.address for ws in workers), key=lambda one: (host_of(one) != here, one))
        n_hosts = len({host_of(one) for one in [root, *others]})
        return others, chain_slices(n_hosts, nbytes, _COSTS)

    def _count(
        self,
        key: Any,
        nbytes: int,
        way: tuple[list[str], int],
        answer: dict[str, Any],
        seconds: float,
        stock_units: Callable[[int], int],
    ) -> None:
        addresses, n_slices = way
        hosts = list(map(host_of, addresses))
        card_s = card_seconds(seconds, n_hosts := len(set(hosts)), n_slices)
        n_away = sum(one != hosts[0] for one in hosts)
        self._recent.append(
            {
                "key": str(key),
                "nbytes": nbytes,
                "copies": len(answer["reached"]),
                "hosts": n_hosts,
                "slices": n_slices,
                "seconds": seconds,
                "stock_s": card_s and card_s * stock_units(n_away),
            }
        )
        self.n_values += 1
        self.n_copies += len(answer["reached"])
        self.nbytes += nbytes * len(answer["reached"])
        self.seconds += seconds
        for address, why in answer["failed"].items():
            logger.warning("a broadcast of %r did not reach %s: %s", key, address, why)


class _SchedulerLinks:
    """The links of the scheduler: Dask's own connections. As `Links`, for a `BroadcastRun`."""

    is_local = False
    transport = "comm"
    ledger = None

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.connections = self

    async def call(self, address: str, handler: str, **message: Any) -> Any:
        return await getattr(self._scheduler.rpc(address), handler)(**message)

    async def deliver(self, address: str, transport: str, compose: Any, call: Any) -> Any:
        message = await compose(self)
        payload = [to_serialize(buffer.data) for buffer in message.buffers]
        for _ in range(N_TRIES):
            answer = await call({"header": message.header, "payload": payload})
            if answer["status"] == "OK":
                return message
        raise DamagedError(f"{N_TRIES} times in a row a slice to {address} arrived damaged")

"""The hooks of the runtime into one worker, while the plugin is registered.

`plugins.bootstrap` has the plugin that attaches it, and `worker_runtime` the state behind it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from dask_gpurt.config import Settings
from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.collectives.broadcasts.wide_values import LEAST_WIDE_NBYTES
from dask_gpurt.plugins.collectives.broadcasts.worker_broadcasts import WorkerBroadcasts
from dask_gpurt.plugins.dashboard.glance import WorkerGlance
from dask_gpurt.plugins.memory import cupy_messages, gpu_level
from dask_gpurt.plugins.memory.gc_freeze import GcFreeze
from dask_gpurt.plugins.memory.manager import ManagedMemory, obstacle
from dask_gpurt.plugins.memory.shard_relief import ShardRelief
from dask_gpurt.plugins.patches import connections
from dask_gpurt.plugins.patches.connections import ShortTurns, forget_handlers
from dask_gpurt.plugins.patches.gather_dep import ValueTransfers
from dask_gpurt.plugins.patches.p2p import RunLookup
from dask_gpurt.plugins.patches.shown.memory_metrics import CountedShards
from dask_gpurt.plugins.patches.shown.prometheus import ShownShuffles
from dask_gpurt.plugins.patches.values.geometry_sizes import geometry_sizes
from dask_gpurt.plugins.patches.worker_close import WholeClose
from dask_gpurt.plugins.patches.worker_memory import is_closing
from dask_gpurt.plugins.shielding import DEADLINE_S
from dask_gpurt.plugins.shuffle.peer_connections import allow_open_files
from dask_gpurt.plugins.sketching import sketch
from dask_gpurt.plugins.time_spent import worker_load
from dask_gpurt.plugins.topology.host_report import HostReporter
from dask_gpurt.plugins.weak_handlers import Handler, remove_handlers, weak_handlers
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.plugins.worker_counters import CounterSender

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt")


def _is_ours(run: Any) -> bool:
    """Return whether a run of a shuffle is one of the runtime."""
    # Imported here: a worker starts sooner without it.
    from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun

    return isinstance(run, ExchangeRun)


class Attachment:
    """The runtime's hooks on one worker, while the plugin is registered."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self._worker = worker
        self.runtime = runtime = runtime_of(worker)
        self._memory: ManagedMemory | None = None
        self._relief: ShardRelief | None = None
        self._unmanaged_reason = obstacle(worker, settings.memory)
        self._broadcasts = WorkerBroadcasts(worker, runtime, is_on=settings.collectives.enabled)
        self._counter_sender = CounterSender(worker, runtime)
        self._handlers: dict[str, Handler] = {}
        #: Removes the hooks that need no wait.
        self._hooks = ExitStack()
        self._whole_close: WholeClose | None = None
        self._detaching: asyncio.Task[None] | None = None

    @classmethod
    async def to(cls, worker: Worker, settings: Settings) -> Attachment:
        """Attach the runtime to a worker. If this fails, the worker stays as it was."""
        attachment = cls(worker, settings)
        try:
            attachment._attach(settings)
        except BaseException:
            await attachment.detach()
            raise
        return attachment

    def _attach(self, settings: Settings) -> None:
        worker, runtime, hooks = self._worker, self.runtime, self._hooks
        gpu_level.register_sizeof()
        cupy_messages.register()
        allow_open_files()
        runtime.attach()
        runtime.links.transport = settings.shuffle.transport
        self._counter_sender.enter()
        hooks.callback(self._counter_sender.leave)
        hooks.callback(RunLookup(worker, _is_ours, partial(sketch, worker)).uninstall)

        if self._unmanaged_reason is None:
            self._memory = ManagedMemory(worker, settings.memory, runtime)
        else:
            self._relief = ShardRelief(worker, runtime)
            logger.info("this worker keeps Dask's own store: %s", self._unmanaged_reason)

        glance = WorkerGlance(worker, runtime, self._memory, self._unmanaged_reason)
        host = HostReporter(worker)
        self._handlers = weak_handlers(
            *self._broadcasts.handlers(),
            *runtime.groups.handlers(),
            self.gpurt_report,
            self.gpurt_explain,
            glance.gpurt_glance,
            host.gpurt_machine,
            host.gpurt_probe,
            host.gpurt_probe_data,
        )
        worker.handlers.update(self._handlers)
        # Handlers do not keep their owners alive.
        self._answering = glance, host
        hooks.callback(runtime.groups.close)
        hooks.callback(self._broadcasts.close)
        for patch in (connections.piecewise_reads, geometry_sizes):
            hooks.callback(patch.hold(self))
        hooks.callback(ShortTurns(worker).uninstall)
        self._transfers = ValueTransfers(
            worker, self._broadcasts.awaited.get_all, LEAST_WIDE_NBYTES, runtime.ledger
        )
        hooks.callback(self._transfers.uninstall)
        hooks.callback(ShownShuffles(worker, runtime.links.sent).uninstall)
        counted = CountedShards(worker, runtime.shards_nbytes, runtime.shards_on_disk_nbytes)
        hooks.callback(counted.uninstall)
        self._whole_close = WholeClose(worker, runtime.close)
        # Last, when everything that the runtime needs is imported.
        gc_freeze = GcFreeze(worker)
        hooks.callback(gc_freeze.close)
        gc_freeze.watch()

    async def gpurt_report(self, most: int) -> dict[str, Any]:
        """Handler: return the state of the runtime here, with `most` entries of each kind."""
        report = self.runtime.report(request_checks.count("most", most))
        memory = await self._memory.report() if self._memory is not None else None
        load = worker_load(self._worker) | {"heartbeat": self._counter_sender.n_heartbeats}
        return {**report, **load, "memory": memory, "unmanaged": self._unmanaged_reason}

    async def gpurt_explain(self, key: Any) -> dict[str, Any] | None:
        """Handler: return how the output of a task is stored here."""
        request_checks.key(key)
        return self._memory.explain(key) if self._memory is not None else None

    def task_left(self, key: Any, state: str) -> None:
        self._transfers.task_ended()
        if state == "long-running":
            if self._memory is not None:
                self._memory.seceded(key)
        else:
            self.runtime.task_left(key, state)
            if self._memory is not None:
                self._memory.task_done(key)

    async def detach(self) -> None:
        """Restore the worker to stock behaviour. Runs in progress continue.

        This runs once, and continues if its caller is cancelled. On a closing worker it does not
        wait, because a cancellation at that moment would stop Dask's close half-way. There,
        `WorkerRuntime.close` does the rest.
        """
        if self._detaching is None:
            self._hooks.close()
            self.runtime.final_close = self._finish_close
            if is_closing(self._worker):
                self.runtime.detach()
                return
            self._detaching = asyncio.create_task(self._restore(), name="gpurt-detach")
        await asyncio.shield(self._detaching)

    async def _restore(self) -> None:
        await self._counter_sender.send_final()
        await self._close_memory()
        self.runtime.detach()
        await self.runtime.links.disconnect()
        # Last: the scheduler may ask until now, and Dask logs a traceback if nobody answers.
        remove_handlers(self._worker.handlers, self._handlers)
        if not is_closing(self._worker):
            self.runtime.final_close = None
            if self._whole_close is not None:
                self._whole_close.uninstall()
            forget_handlers()

    async def _finish_close(self) -> None:
        """Finish at the worker's close, when stock behaviour need not be restored."""
        if self._detaching is not None:
            await asyncio.wait({self._detaching}, timeout=DEADLINE_S / 2)
        else:
            await self._counter_sender.send_final()
        await self._close_memory()

    async def _close_memory(self) -> None:
        for one in (self._memory, self._relief):
            if one is not None:
                await one.close()

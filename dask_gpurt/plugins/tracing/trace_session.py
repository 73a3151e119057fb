"""A trace on the scheduler: it starts recording on all workers, and collects what they recorded.

One plugin a trace, and one trace at a time. It records tasks with their dependencies, compares the
clocks of workers with its own, and hands files of workers to the client in pieces. It ends with the
client that began it. `traced_worker` is the workers' side, `cluster_trace` the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

import distributed
from distributed.diagnostics.plugin import SchedulerPlugin

import dask_gpurt
from dask_gpurt.errors import ActivationError, ProtocolError, TraceInProgressError, TracingError
from dask_gpurt.plugins import bootstrap, request_checks
from dask_gpurt.plugins.patches.worker_messages import remove_worker_plugin
from dask_gpurt.plugins.tracing.clock_exchanges import N_AT_ENDS, Clocks
from dask_gpurt.plugins.tracing.event_recorder import EventRecorder
from dask_gpurt.plugins.tracing.known_links import known_links
from dask_gpurt.plugins.tracing.ledger_hook import TRACE
from dask_gpurt.plugins.tracing.task_events import TaskEvents
from dask_gpurt.plugins.tracing.trace_bootstrap import TracePlugin
from dask_gpurt.plugins.tracing.traced_worker import PART_NBYTES
from dask_gpurt.plugins.tracing.worker_trace import LOST, WorkerTrace
from dask_gpurt.plugins.weak_handlers import remove_handlers, weak_handlers
from dask_gpurt.tracing.clocks import clock_later_s

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dask_gpurt")

#: How long a trace waits at its start for workers to begin.
_BEGIN_S = 10.0
#: How long it waits for workers to end, or to hand over a part of a file.
_ANSWER_S = 30.0
#: How long a worker that left may take to hand over its file.
_HAND_OVER_S = 5.0
#: How often this process's clock is compared with UTC.
_N_COMPARISONS = 16
#: Most workers in a trace. Later ones are left out.
_MOST_WORKERS = 10_000


class TraceSession(SchedulerPlugin):
    """The trace of a cluster. Registered by a client; `start` begins the trace.

    Parameters
    ----------
    trace
        Identifies the trace; only the client that began it knows this.
    client
        Identifier of that client.
    version
        Version of dask_gpurt in the client's process.
    limit_nbytes, full_keys
        As for `EventRecorder`, of each worker and of the scheduler.
    """

    def __init__(
        self, trace: str, client: str, version: str, limit_nbytes: int, full_keys: bool
    ) -> None:
        self.name = f"gpurt-trace-{trace}"
        self.trace, self.client, self.version = trace, client, version
        self.limit_nbytes, self.full_keys = limit_nbytes, full_keys

    async def start(self, scheduler: Scheduler) -> None:
        """Begin the trace. distributed calls this.

        Raises
        ------
        ActivationError
            The client has another version of this package.
        TraceInProgressError
            Another trace is on.
        TracingError
            The client has left.
        """
        if self.version != dask_gpurt.__version__:
            raise ActivationError(
                f"the scheduler on {socket.gethostname()} has dask-gpurt {dask_gpurt.__version__},"
                f" the client {self.version}; install the same version"
            )
        if (other := scheduler.extensions.get(TRACE)) is not None:
            raise TraceInProgressError(
                f"a trace of this cluster is on already: client {other.client} began it"
                f" {perf_counter() - other.began_s:.0f} s ago; wait for its end, or close that"
                " client"
            )
        if self.client not in scheduler.clients:
            raise TracingError(f"client {self.client} has left")
        scheduler.extensions[TRACE] = self
        self.scheduler = scheduler
        self._begins_now()
        self.ended_s: float | None = None
        #: Whether all workers have been told. Events before that are left out.
        self.has_begun = False
        self._workers: list[WorkerTrace] = []
        self._present: dict[str, WorkerTrace] = {}
        self._changed = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._telling: asyncio.Future[Any] | None = None
        self._recorder = EventRecorder(None, self.limit_nbytes, full_keys=self.full_keys)
        self._tasks = TaskEvents(scheduler, self._recorder)
        self._clocks = Clocks(scheduler)
        self._handlers = weak_handlers(
            self.gpurt_trace_begun,
            self.gpurt_trace_left,
            self.gpurt_trace_stop,
            self.gpurt_trace_part,
            self.gpurt_trace_close,
        )
        scheduler.handlers.update(self._handlers)
        for address in scheduler.workers:
            self._add(address)
        # Now: the scheduler would register this only after `start`, and miss workers until then.
        scheduler.add_plugin(self, name=self.name, idempotent=True)
        try:
            await self._start_workers()
        except BaseException:
            await self._closed()
            raise

    async def _start_workers(self) -> None:
        plugin = bootstrap.as_text(
            TracePlugin, self.trace, dask_gpurt.__version__, self.limit_nbytes, self.full_keys
        )
        telling = self.scheduler.register_worker_plugin(
            None, plugin, name=self.name, idempotent=False
        )
        self._telling = asyncio.ensure_future(telling)
        self._telling.add_done_callback(lambda task: task.cancelled() or task.exception())
        # A worker with a blocked event loop begins later.
        await asyncio.wait({self._telling}, timeout=_BEGIN_S)
        if self._closing is not None:
            # distributed would keep this plugin, and nothing would end it.
            raise TracingError(f"client {self.client} has left")
        self._clocks.begin(self._recording)
        self.has_begun = True
        self._begins_now()

    def _begins_now(self) -> None:
        self.began_s = perf_counter()
        self.began_utc_s = self.began_s - clock_later_s(perf_counter, time, _N_COMPARISONS)

    def _recording(self) -> list[WorkerTrace]:
        return [one for one in self._present.values() if one.problem is None and one.has_begun]

    # ------------------------------------------------------------------ what the scheduler sees

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Any], **kwargs: Any) -> None:
        if self.ended_s is None:
            self._tasks.submitted(tasks)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if self.ended_s is None:
            self._tasks.transition(key, start, finish, kwargs)

    def _add(self, address: str) -> None:
        if len(self._workers) < _MOST_WORKERS and address not in self._present:
            made = WorkerTrace(self.scheduler.workers[address], self.limit_nbytes)
            self._workers.append(made)
            self._present[address] = made

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self._add(worker)
        if (joined := self._present.get(worker)) is not None:
            joined.joined_s = perf_counter()
        self._tasks.instant("worker joined", worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        if (left := self._present.pop(worker, None)) is not None:
            left.left_s = perf_counter()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """End the trace with its client."""
        if client == self.client and self._closing is None:
            logger.info("client %s went away; its trace is dropped", client)
            self._closing = asyncio.ensure_future(self._close())

    async def close(self) -> None:
        """Close files at the scheduler's end. Workers close theirs at their own."""
        self._clocks.stop()
        await asyncio.to_thread(self._close_files)

    # ------------------------------------------------------------------ workers

    def _find(self, address: str) -> WorkerTrace | None:
        """Return the newest worker of an address, present or not."""
        found = (one for one in reversed(self._workers) if one.address == address)
        return next(found, None)

    async def gpurt_trace_begun(self, worker: str, trace: str, problem: str | None) -> None:
        """Handler: note that a worker records, or why it does not."""
        self._check(trace)
        request_checks.name("worker", worker)
        if (found := self._find(worker)) is not None:
            found.problem = request_checks.problem(problem)
            if self.ended_s is not None:
                found.problem = "it joined as the trace ended"
            found.has_begun = True
            if found.problem is not None:
                return
            if found.joined_s is None:
                # The worker waits for this, so that the exchanges are quick.
                await self._clocks.compare([found], N_AT_ENDS)
            else:
                # A worker that joins answers nobody before it has started, and waits for this.
                self._clocks.compare_later(found)

    async def gpurt_trace_left(
        self, worker: str, trace: str, offset: int, part: bytes, described: Any
    ) -> None:
        """Handler: take a part of the file of a worker that closes."""
        self._check(trace)
        request_checks.name("worker", worker)
        if (found := self._find(worker)) is None:
            raise ProtocolError(f"{worker} takes no part in this trace")
        await found.take(offset, part, described)
        self._changed.set()

    # ------------------------------------------------------------------ the client

    def _check(self, trace: str) -> None:
        if request_checks.name("trace", trace) != self.trace:
            raise ProtocolError("this trace is over")

    async def gpurt_trace_stop(self, trace: str) -> dict[str, Any]:
        """Handler: end recording everywhere; return what there is, as plain values."""
        self._check(trace)
        if self.ended_s is None:
            self.ended_s = perf_counter()
            running = self._tasks.running()
            self._clocks.stop()
            recording = self._recording()
            await self._clocks.compare(recording, N_AT_ENDS)
            async with asyncio.TaskGroup() as group:
                for one in recording:
                    group.create_task(self._end_worker(one))
            await self._await_files()
            # After the files are here: workers have told until when these tasks ran.
            self._tasks.note_running(running)
            for one in self._workers:
                if one.left_s is not None:
                    self._tasks.instant(
                        "worker left" if one.is_whole else "worker lost", one.address, one.left_s
                    )
            await asyncio.to_thread(self._recorder.stop)
        return {
            "began_s": self.began_s,
            "ended_s": self.ended_s,
            "began_utc_s": self.began_utc_s,
            "scheduler": {
                "address": self.scheduler.address,
                "host": socket.gethostname(),
                "nbytes": self._recorder.nbytes,
                "n_dropped": self._recorder.n_dropped,
                "ended": self._recorder.ended,
            },
            "workers": [one.plain() for one in self._workers],
            "settings": self._settings(),
            "pids": {one.address: one.pid for one in self._workers if one.pid},
            "memory_limits": {one.address: one.memory_limit_nbytes for one in self._workers},
            "links": known_links(self.scheduler, self._workers),
            "versions": {
                "dask_gpurt": dask_gpurt.__version__,
                "distributed": distributed.__version__,
            },
        }

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the runtime; the description of machines may be long."""
        plugin: Any = self.scheduler.plugins.get(bootstrap.NAME)
        if plugin is None or not plugin.is_active:
            return {}
        plain: dict[str, Any] = plugin.settings.to_plain()
        return {name: value for name, value in plain.items() if name != "topology"}

    async def _end_worker(self, one: WorkerTrace) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                rpc = self.scheduler.rpc(one.address)
                one.describe(await rpc.gpurt_trace_end(trace=self.trace))
        except Exception as error:
            logger.info("no trace of %s: %r", one.address, error)
            one.ended = one.ended or f"{LOST}: {str(error)[:200] or type(error).__name__}"

    async def _await_files(self) -> None:
        """Wait for files of workers that left lately: they hand them over as they close."""
        while True:
            now_s = perf_counter()
            waits = [
                one.left_s + _HAND_OVER_S - now_s
                for one in self._workers
                if one.left_s is not None and not one.is_whole and one.has_begun
            ]
            if not waits or (wait_s := max(waits)) <= 0:
                return
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)

    async def gpurt_trace_part(self, trace: str, number: int, offset: int) -> bytes:
        """Handler: return a part of a file: of the scheduler (-1), or of a worker by its number.

        Empty bytes mean the end of the file, or that the worker has gone.
        """
        self._check(trace)
        if type(number) is not int or not -1 <= number < len(self._workers):
            raise ProtocolError(f"no worker {number!r} in this trace")
        if type(offset) is not int or offset < 0:
            raise ProtocolError(f"a part of a trace at {offset!r}")
        if number == -1:
            return await asyncio.to_thread(self._recorder.read, offset, PART_NBYTES)
        one = self._workers[number]
        if one.left_s is not None or not one.is_whole:
            return await one.read(offset, PART_NBYTES)
        try:
            async with asyncio.timeout(_ANSWER_S):
                part: bytes = await self.scheduler.rpc(one.address).gpurt_trace_part(
                    trace=self.trace, offset=offset
                )
        except Exception as error:
            logger.info("the trace of %s is cut off: %r", one.address, error)
            return b""
        if type(part) is not bytes or len(part) > PART_NBYTES:
            raise ProtocolError(f"{one.address} sent no part of a trace")
        return part

    async def gpurt_trace_close(self, trace: str) -> None:
        """Handler: end the trace and close all files."""
        self._check(trace)
        await self._closed()

    async def _closed(self) -> None:
        """Close this once, whoever asks; wait for it."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        scheduler = self.scheduler
        self.ended_s = self.ended_s or perf_counter()
        self._clocks.stop()
        # Workers that are being told to begin still say when they did.
        begun = self.gpurt_trace_begun.__name__
        still = {begun: self._handlers.pop(begun)}
        remove_handlers(scheduler.handlers, self._handlers)
        if scheduler.plugins.get(self.name) is self:
            scheduler.remove_plugin(self.name)
        try:
            # Wait, or a worker could be told to remove a plugin before it has it.
            if self._telling is not None:
                await asyncio.wait({self._telling}, timeout=_ANSWER_S)
            if self.name in scheduler.worker_plugins:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(remove_worker_plugin(scheduler, self.name), _ANSWER_S)
        finally:
            remove_handlers(scheduler.handlers, still)
            # Only now may another trace begin: workers would refuse a second recorder.
            if scheduler.extensions.get(TRACE) is self:
                del scheduler.extensions[TRACE]
            await asyncio.to_thread(self._close_files)

    def _close_files(self) -> None:
        self._recorder.close()
        for one in self._workers:
            one.close()

"""A trace on one worker: its ledger, runs of its tasks, samples, and the scheduler's questions.

`event_recorder` has the file. The scheduler's side is `trace_session`. Works on a worker without
the runtime as well; there is no ledger then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import psutil
from distributed.metrics import time

from dask_gpurt.devices.ledger import Ledger, LedgerEntry
from dask_gpurt.errors import ProtocolError
from dask_gpurt.metrics import since
from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.bootstrap import NAME
from dask_gpurt.plugins.patches.p2p import event_loop
from dask_gpurt.plugins.patches.worker_memory import is_closing
from dask_gpurt.plugins.shielding import in_a_thread, to_its_end
from dask_gpurt.plugins.tracing.cupti_recorder import CuptiRecorder
from dask_gpurt.plugins.tracing.event_recorder import EventRecorder
from dask_gpurt.plugins.tracing.ledger_hook import TRACE
from dask_gpurt.plugins.weak_handlers import remove_handlers, weak_handlers
from dask_gpurt.tracing.clocks import clock_later_s
from dask_gpurt.tracing.lane_names import CPU, FETCH
from dask_gpurt.tracing.records import RecordEncoder

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt")

#: Time between two samples.
SAMPLE_S = 0.25
#: How often Dask's clock is compared with this one after a task.
_N_COMPARISONS = 3
#: Most bytes of a file in one message.
PART_NBYTES = 4 << 20


class TracedWorker:
    """Records on one worker until `detach`. An extension of the worker, for its close."""

    def __init__(self, worker: Worker, trace: str, limit_nbytes: int, full_keys: bool) -> None:
        self._worker, self._trace = worker, trace
        self.recorder = EventRecorder(worker.local_directory, limit_nbytes, full_keys=full_keys)
        self._ledger: Ledger | None = None
        self._counted_before = self._counters()
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call only starts the count
        self._moved: tuple[float, int, int] | None = None
        self._fetched_nbytes = 0
        #: Bytes of the file that the scheduler has got at the worker's close.
        self._n_handed = 0
        #: By key of a task: when its inputs were here, and the delay in Dask's times of its run.
        now_s, tasks = perf_counter(), worker.state.tasks
        self._here: dict[Any, float] = {
            key: now_s for key, task in tasks.items() if task.state in ("ready", "constrained")
        }
        self._delays: dict[Any, float] = {}
        #: By key of a task: when it left its thread.
        self._left: dict[Any, float] = {
            key: now_s for key, task in tasks.items() if task.state == "long-running"
        }
        self._is_over = False
        self._handlers = weak_handlers(
            self.gpurt_trace_clock, self.gpurt_trace_end, self.gpurt_trace_part
        )
        worker.handlers.update(self._handlers)
        worker.extensions[TRACE] = self
        if (runtime := worker.extensions.get(NAME)) is not None:
            self.follow(runtime.ledger)
        #: Kernels and copies of GPUs, where CUPTI is installed.
        self._kernels = CuptiRecorder(self.recorder.work, perf_counter)
        self._has_kernels = self._kernels.start()
        self._timer = event_loop(worker).call_later(SAMPLE_S, self._sample)

    def follow(self, ledger: Ledger) -> None:
        """Record all entries of a ledger from now on."""
        self._ledger = ledger
        ledger.recorder = self._record

    def _record(self, entry: LedgerEntry) -> None:
        if entry.lane == FETCH:
            self._fetched_nbytes += entry.nbytes
        self.recorder.work(entry)

    def _counters(self) -> dict[str, int]:
        runtime = self._worker.extensions.get(NAME)
        return {} if runtime is None else runtime.counters.snapshot()

    # ------------------------------------------------------------------ tasks

    def transition(self, key: Any, start: str, finish: str) -> None:
        """Note a step of a task. Runs on the event loop, for each step of each task."""
        if self._is_over:
            return
        if finish == "executing":
            # Dask reads the delay when the loop starts the task's coroutine, right after this call.
            # It may change before and after that: each heartbeat sets it.
            event_loop(self._worker).call_soon(self._note_delay, key)
        elif finish in ("ready", "constrained"):
            self._here[key] = perf_counter()
        elif finish == "long-running":
            self._left[key] = perf_counter()
        elif start in ("executing", "long-running"):
            self._task_ended(key, finish)
        elif finish in ("released", "forgotten"):
            self._here.pop(key, None)
            self._delays.pop(key, None)
            self._left.pop(key, None)

    def _note_delay(self, key: Any) -> None:
        self._delays[key] = self._worker.scheduler_delay

    def _task_ended(self, key: Any, finish: str) -> None:
        here_s = self._here.pop(key, None)
        delay_s = self._delays.pop(key, self._worker.scheduler_delay)
        left_s = self._left.pop(key, None)
        task = self._worker.state.tasks.get(key)
        if task is None or finish not in ("memory", "error"):
            return
        runs = [one for one in task.startstops if one["action"] == "compute"]
        if not runs:
            return
        # Dask's times are of another clock, plus the delay.
        to_here_s = clock_later_s(perf_counter, time, _N_COMPARISONS) - delay_s
        start_s, end_s = (to_here_s + runs[-1][name] for name in ("start", "stop"))
        thread = self._worker.threads.get(key, 0)
        away_s = 0.0 if left_s is None else max(end_s - max(left_s, start_s), 0.0)
        times = min(here_s or start_s, start_s), start_s, end_s, away_s
        self.recorder.add(partial(self._encode_run, key, times, thread, finish))

    def _tasks_go_on(self) -> None:
        """Record the tasks that run now, as if they ended."""
        now_s = perf_counter()
        to_here_s = clock_later_s(perf_counter, time, _N_COMPARISONS)
        threads = {key: thread for thread, key in [*self._worker.active_threads.items()]}
        for key in [*self._worker.active_keys]:
            task = self._worker.state.tasks.get(key)
            if task is None or task.start_time is None:
                continue
            start_s = min(task.start_time + to_here_s, now_s)
            away_s = now_s - max(self._left.get(key, now_s), start_s)
            times = min(self._here.get(key, start_s), start_s), start_s, now_s, away_s
            self.recorder.add(partial(self._encode_run, key, times, threads.get(key, 0), ""))

    def _encode_run(
        self,
        key: Any,
        times: tuple[float, float, float, float],
        thread: int,
        finish: str,
        encoder: RecordEncoder,
    ) -> None:
        here_s, start_s, end_s, away_s = times
        number = self.recorder.key_number(key)
        encoder.task_run(number, here_s, start_s, end_s, thread, away_s)
        if finish == "error":
            encoder.instant("task failed", end_s, self.recorder.shown(key))

    # ------------------------------------------------------------------ samples

    def _sample(self) -> None:
        if self._is_over:
            return
        self._timer = event_loop(self._worker).call_later(SAMPLE_S, self._sample)
        try:
            values = list(self._values())
        except Exception:  # a sample is not worth an error in a program's event loop
            logger.debug("no sample", exc_info=True)
            return
        now_s = perf_counter()

        def encode(encoder: RecordEncoder) -> None:
            for name, value in values:
                encoder.sample(name, now_s, float(value))

        self.recorder.add(encode)

    def _values(self) -> Iterator[tuple[str, float]]:
        """Yield what is sampled: bytes, bytes a second, and the share of a core."""
        worker = self._worker
        yield CPU, self._process.cpu_percent() / 100
        yield "bytes: process", self._process.memory_info().rss
        runtime = worker.extensions.get(NAME)
        sent, received = worker.transfer_outgoing_bytes_total, self._fetched_nbytes
        data: Any = worker.data
        if runtime is not None:
            counted = runtime.counters.snapshot()
            sent += counted["sent_nbytes"]
            received += counted["received_nbytes"]
            yield "bytes: shards", runtime.shards_nbytes()
            yield "bytes: shards on disk", runtime.shards_on_disk_nbytes()
            yield "bytes: waiting to be sent", runtime.outgoing_budget.used_nbytes
        if hasattr(data, "residency"):
            for level in data.report()["levels"]:
                yield f"bytes: {level['name']}", level["used_nbytes"]
        now_s = perf_counter()
        if self._moved is not None:
            before_s, sent_before, received_before = self._moved
            took_s = max(now_s - before_s, 1e-3)
            yield "bytes a second: sent", max(sent - sent_before, 0) / took_s
            yield "bytes a second: received", max(received - received_before, 0) / took_s
        self._moved = now_s, sent, received

    # ------------------------------------------------------------------ the scheduler's questions

    async def gpurt_trace_clock(self) -> tuple[float, float]:
        """Handler: return when this was asked and when it is answered, on this worker's clock."""
        asked_s = perf_counter()
        return asked_s, perf_counter()

    async def gpurt_trace_end(self, trace: str) -> dict[str, Any]:
        """Handler: end the recording; return what there is. Files stay until the plugin goes."""
        self._check(trace)
        await self._end()
        return self._described()

    async def gpurt_trace_part(self, trace: str, offset: int) -> bytes:
        """Handler: return a part of the file, after the end; empty bytes at the end of the file."""
        self._check(trace)
        if type(offset) is not int or offset < 0:
            raise ProtocolError(f"a part of a trace at {offset!r}")
        return await asyncio.to_thread(self.recorder.read, offset, PART_NBYTES)

    def _check(self, trace: str) -> None:
        if request_checks.name("trace", trace) != self._trace:
            raise ProtocolError("another trace is on here")

    def _described(self) -> dict[str, Any]:
        recorder = self.recorder
        return {
            "nbytes": recorder.nbytes,
            "n_events": recorder.n_events,
            "n_dropped": recorder.n_dropped,
            "ended": recorder.ended,
            "counters": self._counted,
            "pid": os.getpid(),
        }

    # ------------------------------------------------------------------ the end

    async def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._timer.cancel()
            self._tasks_go_on()
            if self._ledger is not None:
                self._ledger.recorder = None
            self._counted = since(self._counted_before, self._counters())
        if self._has_kernels:
            self._has_kernels = False
            await in_a_thread(self._kernels.stop)
        await in_a_thread(self.recorder.stop)

    async def close(self) -> None:
        """Hand over what was recorded: the worker closes. distributed calls this.

        Bounded in time. Never raises, because an error would stop the worker's close half-way.
        """
        try:
            if not await to_its_end(self._hand_over):
                logger.info("the worker closes before its trace is handed over")
        except Exception as error:  # the scheduler may be gone
            logger.info("a trace is not handed over: %r", error)
        with contextlib.suppress(Exception):
            await in_a_thread(self.recorder.close)

    async def _hand_over(self) -> None:
        await self._end()
        while True:
            part = await asyncio.to_thread(self.recorder.read, self._n_handed, PART_NBYTES)
            described = None if part else self._described()
            await self._worker.scheduler.gpurt_trace_left(
                worker=self._worker.address,
                trace=self._trace,
                offset=self._n_handed,
                part=part,
                described=described,
            )
            if not part:
                return
            self._n_handed += len(part)

    async def detach(self) -> None:
        """End the recording and remove the file. A closing worker does so in `close`."""
        if not is_closing(self._worker):
            await self._end()
        # Once it closes, the worker goes through its extensions, and none may go meanwhile.
        if is_closing(self._worker):
            return
        remove_handlers(self._worker.handlers, self._handlers)
        if self._worker.extensions.get(TRACE) is self:
            del self._worker.extensions[TRACE]
        await in_a_thread(self.recorder.close)

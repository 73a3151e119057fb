"""Managed memory of one worker: installs our store in place of the worker's, and drives it.

Tasks claim room before they run. Values are read off the event loop before they are sent. This
module tells the store when the worker and the scheduler expect the next uses of values, and how
much room unmanaged memory leaves. `store_levels` creates the tiers that the settings ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from dask_gpurt.config import MemorySettings
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.host_memory import malloc
from dask_gpurt.devices.lanes import Lane
from dask_gpurt.devices.ledger import COMPUTE, LedgerEntry
from dask_gpurt.memory.decisions.admission import Claim
from dask_gpurt.memory.decisions.backoff import LogThrottle
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.foresight import assigned_use
from dask_gpurt.memory.decisions.levels import Value
from dask_gpurt.memory.decisions.prefix_sizes import PrefixSizes
from dask_gpurt.memory.decisions.process_samples import SAMPLES, ProcessSamples
from dask_gpurt.memory.decisions.residency import Residency
from dask_gpurt.memory.store import HOST, TieredStore
from dask_gpurt.memory.tiers import Lanes
from dask_gpurt.plugins.memory.get_data import DataServer
from dask_gpurt.plugins.memory.gpu_level import LEAST_SHARE, is_on_device
from dask_gpurt.plugins.memory.handback import HandedOver, return_in_memory, return_spilled
from dask_gpurt.plugins.memory.store_levels import DEVICE, StoreLevels
from dask_gpurt.plugins.patches import worker_memory
from dask_gpurt.plugins.patches.p2p import context_meter, event_loop
from dask_gpurt.plugins.patches.task_order import TaskOrder
from dask_gpurt.plugins.shielding import in_a_thread
from dask_gpurt.plugins.shuffle.fine_metrics import read_inputs
from dask_gpurt.plugins.tracing.ledger_hook import enter_phase

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.plugins.worker.worker_runtime import WorkerRuntime

logger = logging.getLogger("dask_gpurt.memory")

#: Wait after which a warning says that values cannot be read for lack of memory.
WARN_S = 3.0
#: For each thread: tasks ahead of the running one whose inputs may be prefetched.
TASKS_AHEAD = 8
#: Most values that a worker under pressure asks the scheduler about at a time.
MAX_QUERIED = 5_000
#: Share of the event loop's time that it may take to collect these values.
QUERY_SHARE = 0.05
#: Interval at which the store is polled if Dask does not monitor the process memory.
POLL_INTERVAL_S = 0.1
#: Delay before inputs without another known use may be written after their task: the scheduler's
#: message that releases them is probably on its way.
DEFER_S = 0.05
#: Wait without any move or ended task, after which the next task begins although it does not fit:
#: the running ones may wait for it.
PATIENCE_S = 10.0


def obstacle(worker: Worker, settings: MemorySettings) -> str | None:
    """Return why this worker keeps the store it has; None if it gets ours."""
    if not settings.enabled:
        return "gpurt.memory.enabled is false"
    if worker_memory.spill_limits_nbytes(worker) is None:
        return "the worker has no memory limit, or distributed.worker.memory.spill is off"
    kind = type(worker.data)
    if kind.__module__.startswith("dask_cuda") and not settings.replace_dask_cuda:
        return "the worker has dask-cuda's store, and gpurt.memory.replace-dask-cuda is false"
    if worker_memory.is_made_by_dask(worker) or kind.__module__.startswith("dask_cuda"):
        return None
    if kind is worker_memory.SpillBuffer:
        return "the worker has a store of its own kind (a SpillBuffer with settings of its own)"
    return f"the worker has a store of its own kind ({kind.__module__}.{kind.__qualname__})"


class ManagedMemory:
    """The managed store of one worker, from attaching the runtime until `close`.

    Parameters
    ----------
    runtime
        Has the shards and the idle pools of this worker, and can release some of their memory.
    """

    def __init__(self, worker: Worker, settings: MemorySettings, runtime: WorkerRuntime) -> None:
        self._worker = worker
        self._runtime = runtime
        self._loop = event_loop(worker)
        self._stock: Any = worker.data
        self._sizes = PrefixSizes()
        #: Next uses that the scheduler predicted, by key.
        self._hints: dict[Hashable, Any] = {}
        self._query: asyncio.Task[None] | None = None
        self._query_from_s = 0.0
        self._progress_at = self._loop.time()
        self._log_throttle = LogThrottle()
        self._release: Future[None] | None = None
        #: The last values that were evicted because the process was over its limit.
        self._eviction: Future[None] | None = None
        #: Tasks at the head of the queue when it was last read.
        self._queued: list[Hashable] = []
        self._n_started = 0
        self._is_closed = False
        self._claims: dict[Hashable, Claim] = {}
        #: Totals of the store's reads and writes that Dask's metrics already have.
        self._reported_io: dict[tuple[str, str], float] = {}
        limits = worker_memory.spill_limits_nbytes(worker)
        assert limits is not None
        self._target_nbytes, spill_nbytes = limits
        self._samples = (
            ProcessSamples(spill_nbytes, self._progress_at) if spill_nbytes is not None else None
        )
        self._writes = Lane("write", 1, runtime.ledger)
        self._reads = Lane("read", 2, runtime.ledger)
        self._take_over(settings)
        self._poller: asyncio.Task[None] | None = None
        if not worker_memory.is_monitored(worker):
            self._poller = asyncio.create_task(self._poll(), name="gpurt-memory-monitor")

    def _take_over(self, settings: MemorySettings) -> None:
        """Give the worker a store of ours. If this fails, its own store has all values again."""
        with contextlib.ExitStack() as undo:
            for lane in (self._writes, self._reads):
                undo.callback(lane.close)
                # Moves that were decided must not fail later, when no thread may be left.
                lane.start()
            self._levels = StoreLevels(
                self._worker,
                settings,
                self._stock,
                self._target_nbytes,
                lambda *moved: self.store.on_io(*moved),
            )
            self._device = self._levels.device
            self.store = self._new_store(settings)
            self._task_order = TaskOrder(self._worker, self.store.is_spilled)
            undo.callback(self._task_order.uninstall)
            self._first_users = worker_memory.FirstUsers(self._worker, self._task_order.dequeued)
            self._data_server = DataServer(self._worker, self.store, self._reads, self._digest)
            objects, spilled = worker_memory.take_over(self._stock)
            undo.callback(self._stock.update, objects)
            undo.callback(self.store.close)
            self.store.adopt(objects, spilled, level=self._levels.inherited_level)
            self._swap = worker_memory.StoreSwap(
                self._worker,
                self.store,
                execute=self._execute,
                get_data=self._data_server.get_data,
                asks_for_client=lambda key: self._on_loop(partial(self._may_wait, key)),
                monitor=self._monitor,
            )
            undo.pop_all()

    def _new_store(self, settings: MemorySettings) -> TieredStore:
        levels = self._levels
        return TieredStore(
            Residency(levels.levels, levels.chains, POLICIES[settings.policy], self._next_use),
            levels.tiers,
            levels.packings,
            Lanes(
                partial(_submit, self._writes),
                partial(_submit, self._reads),
                self._on_loop,
                self._after_delay,
            ),
            top_level_of=self._top_level_of,
            upcoming=self._upcoming,
            on_lost=partial(worker_memory.recompute, self._worker),
        )

    def _top_level_of(self, value: Any) -> int:
        device = self._device
        if device is None or device.problem or not is_on_device(value):
            return HOST
        device.begin(lambda: _submit(self._writes, self._open_device, "open"))
        return DEVICE

    def _open_device(self) -> None:
        assert self._device is not None
        self._device.open(self._make_device_room)
        self._fit_device()
        self.store.decide()

    def _make_device_room(self, nbytes: int) -> bool:
        """Evict for an allocation that found no room; in the thread that allocates."""
        assert self._device is not None
        taken_nbytes = self.store.residency.levels[DEVICE].used_nbytes
        self._device.was_full(taken_nbytes, nbytes, self._loop.time())
        self._on_loop(self._fit_device)
        return self.store.make_room(DEVICE, nbytes)

    def _on_loop(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(call)

    def _after_delay(self, call: Callable[[], None]) -> None:
        self._loop.call_later(DEFER_S, call)

    # ------------------------------------------------------------------ tasks and messages

    async def _execute(self, stock: Callable[..., Awaitable[Any]], key: Any, **kwargs: Any) -> Any:
        """Run a task once its inputs are in memory and its output has room."""
        self._task_order.begins(key)
        task = self._worker.state.tasks.get(key)
        # Dask may have made this call before the runtime was detached, and run it only afterwards.
        if task is None or self._is_closed:
            return await stock(key, **kwargs)
        prefix = task.prefix
        begun: asyncio.Future[set[Hashable]] = self._loop.create_future()
        claim, is_ready = self.store.claim(
            key,
            [dependency.key for dependency in task.dependencies],
            self._sizes.expected(prefix) or 0,
            task.priority or (),
            partial(_set_result, begun),
            self._sizes.top_level(prefix),
        )
        self._claims[key] = claim
        spilled = [value for value in claim.values if not value.in_memory]
        read_inputs("memory-read", [value for value in claim.values if value.in_memory])
        try:
            lost = set() if is_ready else await self._admitted(key, begun, spilled)
            if lost or worker_memory.cannot_begin(self._worker, key):
                return worker_memory.reschedule(self._worker, key)
            if not is_ready:
                read_inputs("disk-read", spilled)
            # Time without running tasks does not count: an idle worker did not stall.
            self._progress_at = self._loop.time()
            event = await stock(key, **kwargs)
        finally:
            if self._claims.get(key) is claim:
                del self._claims[key]
            self.store.end(claim)
            self._progress_at = self._loop.time()
        self._learn(prefix, key, claim, event)
        return event

    async def _admitted(
        self, key: Any, begun: asyncio.Future[set[Hashable]], spilled: Collection[Value]
    ) -> set[Hashable]:
        """Wait until a task is admitted; return the inputs that it lost."""
        # The wait counts as time of the task; the lanes report their own seconds separately.
        name, start_s = "disk-read" if spilled else "memory-room", self._runtime.ledger.clock()
        with context_meter.meter(name):
            lost = await begun
        enter_phase(self._runtime.ledger, name, start_s, key=key)
        return lost

    def _learn(self, prefix: str, key: Any, claim: Claim, event: Any) -> None:
        """Learn sizes from a finished task, and enter it into the ledger."""
        if (result := worker_memory.result_of(event)) is None:
            return
        value, nbytes, took_s = result
        self._sizes.learn(prefix, nbytes, self._top_level_of(value))
        self._task_order.learn(prefix, sum(one.nbytes for one in claim.values), nbytes)
        # Dask has measured the value in the task's thread; doing it again would block the loop.
        self.store.measured[key] = nbytes
        now_s = self._runtime.ledger.clock()
        entry = LedgerEntry(COMPUTE, prefix, nbytes, now_s - took_s, now_s, key=key)
        self._runtime.ledger.add(entry)

    def _may_wait(self, key: Hashable) -> None:
        """Note that a task has a client, and so may submit other tasks and wait for them."""
        if (claim := self._claims.get(key)) is not None:
            self.store.may_wait(claim)

    def seceded(self, key: Hashable) -> None:
        """Release the claim of a task that left its thread and may wait for others."""
        if (claim := self._claims.pop(key, None)) is not None:
            self.store.end(claim)

    def task_done(self, key: Hashable) -> None:
        """Note that a task's result is in the store, or will not arrive."""
        self.store.measured.pop(key, None)

    # ------------------------------------------------------------------ next uses

    def _next_use(self, key: Hashable) -> Any:
        user = self._first_users.of(key)
        first = self._task_order.use(user, in_memory=not self.store.is_spilled(key))
        here = assigned_use(first) if first is not None else None
        hint = self._hints.get(key)
        if here is None or hint is None:
            return hint if here is None else here
        return min(here, hint)

    def _upcoming(self) -> Iterable[Hashable]:
        """Return the inputs of the next tasks, which the store reads ahead.

        It returns nothing while memory is short. A paused worker begins no task, and values that
        are read would keep it above the limit. Above the limit, they leave again as soon as they
        are read.
        """
        is_over = self._samples is not None and self._samples.is_over_for_long
        if is_over or worker_memory.is_paused(self._worker):
            return ()
        # Reading the queue takes a pass over it, so the result is reused for some tasks.
        n_started = self._worker.state.executed_count
        ahead = TASKS_AHEAD * self._worker.state.nthreads
        if not self._queued or n_started - self._n_started >= ahead // 2:
            self._n_started = n_started
            self._queued = worker_memory.queued(self._worker, ahead)
        # This skips tasks that have begun since.
        return worker_memory.inputs(self._worker, self._queued)

    async def _query_next_uses(self) -> None:
        """Ask the scheduler about the next uses of values that no task here waits for."""
        began = self._loop.time()
        unknown = (key for key in self.store if self._first_users.of(key) is None)
        keys = list(islice(unknown, MAX_QUERIED))
        pause_s = (self._loop.time() - began) / QUERY_SHARE
        try:
            uses, schedulers_pause_s = await self._worker.scheduler.gpurt_next_uses(
                keys=keys, worker=self._worker.address
            )
        except OSError:  # the scheduler is gone or busy; the next query may succeed
            self._query_from_s = self._loop.time() + pause_s
            return
        except Exception as error:
            self._query_from_s = self._loop.time() + PATIENCE_S
            logger.info("the scheduler does not say when values are needed: %r", error)
            return
        self._query_from_s = self._loop.time() + max(pause_s, schedulers_pause_s)
        self._hints = {
            key: tuple(use) for key, use in zip(keys, uses, strict=True) if use is not None
        }

    # ------------------------------------------------------------------ room

    async def _poll(self) -> None:
        """Call `_monitor` regularly where Dask does not.

        Without a limit on the process, too, disks recover and tasks stall.
        """
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self._monitor(0)

    def _digest(self, where: str, label: tuple[str, str], value: float) -> None:
        """Record one of Dask's fine metrics."""
        self._worker.digest_metric((where, *label), value)

    def _digest_io(self) -> None:
        """Record what the lanes wrote and read, under the names of stock's spilling."""
        for label, so_far in self.store.io().items():
            if new := so_far - self._reported_io.get(label, 0):
                self._reported_io[label] = so_far
                self._digest("memory-monitor", label, new)

    async def _monitor(self, process_nbytes: int) -> None:
        """Fit the store's room to the process memory, and resolve stalls."""
        if self._is_closed:
            return
        self._digest_io()
        now = self._loop.time()
        room = self._target_nbytes
        others_nbytes = self._runtime.shards_nbytes() + self._levels.pinned_nbytes
        if (samples := self._samples) is not None:
            managed_nbytes = self.store.managed_nbytes + others_nbytes
            is_releasing = self._release is not None and not self._release.done()
            if samples.take(now, process_nbytes, managed_nbytes, is_releasing=is_releasing):
                # Not awaited: it may queue behind a large write, and Dask decides whether to pause
                # only after this call. The next call sees the effect.
                release = partial(self._release_memory, samples.over_nbytes)
                self._release = self._writes.submit(
                    _call_and_log, release, priority=Priority.HIGH, path="release"
                )
            if process_nbytes < self._target_nbytes:
                self._runtime.relax_budget()
            room = min(room, samples.limit_nbytes - samples.unmanaged_nbytes)
        room -= others_nbytes
        least = int(LEAST_SHARE * self._target_nbytes)
        room = samples.capacity_nbytes(room, least) if samples else max(room, least)
        self.store.set_capacity(room)
        self._fit_device()
        self.store.retry(now)
        self._check_failed_reads(now)
        if now - self._progress_at > PATIENCE_S and self.store.force_progress():
            self._progress_at = now
        self.store.decide()
        if samples is not None and samples.is_over_for_long:
            self._evict_over_limit(samples, process_nbytes)
        is_querying = self._query is not None and not self._query.done()
        if self.store.has_spilled and not is_querying and now >= self._query_from_s:
            self._query = asyncio.create_task(self._query_next_uses(), name="gpurt-next-uses")

    def _check_failed_reads(self, now: float) -> None:
        """Warn of reads that fail for lack of memory, and abandon them if nothing moves."""
        failed = self.store.failed_reads(now)
        if not failed:
            return
        longest = failed[0]
        if longest.waited_s(now) > WARN_S and self._log_throttle.is_due("no memory to read", now):
            logger.warning(
                "no memory to read %d values, such as %r; tasks that need them wait: %s",
                len(failed),
                longest.value.key,
                longest.reason,
            )
        if now - self._progress_at > PATIENCE_S:
            self.store.abandon_reads([one for one in failed if one.waited_s(now) > PATIENCE_S])

    def _fit_device(self) -> None:
        if self._device is not None:
            room_nbytes = self._device.room_nbytes(self._loop.time())
            if room_nbytes is not None:
                self.store.set_capacity(room_nbytes, DEVICE)

    def _evict_over_limit(self, samples: ProcessSamples, process_nbytes: int) -> None:
        """Evict values, because the process has been over its limit for several samples.

        The next ones leave once these are written, and the process is measured again.
        """
        if self._eviction is not None and not self._eviction.done():
            return
        members = self.store.residency.levels[HOST].members
        self.store.evict(samples.n_leaving(len(members)))
        if members or samples.n_over % SAMPLES == 0:
            self._eviction = self._writes.submit(_call_and_log, malloc.trim, path="release")
        if not members and samples.n_over == SAMPLES:
            worker_memory.warn_of_unmanaged(process_nbytes)

    def _release_memory(self, over_nbytes: int) -> None:
        self._runtime.release_memory(over_nbytes)
        malloc.trim()

    async def report(self) -> dict[str, Any]:
        """Return the state of the store, for `status` and `doctor`."""
        disk = await asyncio.to_thread(self._levels.disk.probe)
        device = self._device.report() if self._device is not None else None
        return {**self.store.report(), "disk": disk, "device": device}

    def explain(self, key: Hashable) -> dict[str, Any] | None:
        """Return where a value is and why; None if it is not here."""
        with contextlib.suppress(KeyError):
            return self.store.explain(key)
        return None

    async def close(self) -> None:
        """Give the worker back the store it had, with all its values.

        A closing worker needs no values, but still lists them and sends them to peers that ask. So
        it keeps our store and the values in memory. This method waits for writes in flight: none
        may run when Dask removes the worker's directory.
        """
        given: HandedOver = {}
        if not self._is_closed and not worker_memory.is_closing(self._worker):
            level = self._levels.inherited_level
            goes = partial(worker_memory.is_closing, self._worker)
            given = await return_spilled(self.store, self._stock, self._writes, level, goes)
        # No `await` from here until the worker has either the one store or the other.
        was_closed, self._is_closed = self._is_closed, True
        self._data_server.close()
        for task in (self._query, self._poller):
            if task is not None:
                task.cancel()
        self._digest_io()
        if not was_closed and not worker_memory.is_closing(self._worker):
            self._levels.inherited.close()
            return_in_memory(self.store, self._stock, given)
            self._swap.uninstall(self._stock)
            self._task_order.uninstall()
            self.store.release_objects()
        if self._device is not None:
            self._device.close()
        self.store.close()
        if not await in_a_thread(self._clear):
            logger.warning("a disk does not respond; files of values may remain on it")

    def _clear(self) -> None:
        # Removing gigabytes of files takes a second.
        self.store.free_tiers()
        for lane in (self._writes, self._reads):
            lane.close()


def _set_result(begun: asyncio.Future[set[Hashable]], lost: set[Hashable]) -> None:
    if not begun.done():  # the wait may have been cancelled, as when a worker closes
        begun.set_result(lost)


def _submit(lane: Lane, call: Callable[[], None], path: str = "", nbytes: int = 0) -> None:
    lane.submit(_call_and_log, call, path=path, nbytes=nbytes)


def _call_and_log(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        # Nothing reads the result of a lane, so an error would go unnoticed.
        logger.exception("moving a value or releasing memory failed")

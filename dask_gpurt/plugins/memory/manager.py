"""Managed memory on one worker: the store in place of the worker's own, and what it listens to.

Makes the tiers that settings ask for, has tasks claim room before they run and values read off the
event loop before they are sent, tells the store what the worker and the scheduler know of the
future, and how much room is left by what it does not manage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.config import MemorySettings
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.host_memory import malloc
from dask_gpurt.devices.lanes import Lane
from dask_gpurt.devices.ledger import COMPUTE, Entry, Ledger
from dask_gpurt.memory.decisions.admission import Claim
from dask_gpurt.memory.decisions.backoff import LogThrottle
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.foresight import reachable
from dask_gpurt.memory.decisions.group_sizes import GroupSizes
from dask_gpurt.memory.decisions.residency import Residency, Value
from dask_gpurt.memory.store import HOST, TieredStore
from dask_gpurt.memory.tiers import Lanes
from dask_gpurt.plugins.memory.get_data import DataServer
from dask_gpurt.plugins.memory.gpu_budget import shards_on_device_nbytes
from dask_gpurt.plugins.memory.gpu_store import is_on_device
from dask_gpurt.plugins.memory.handback import Returned, return_in_memory, return_spilled
from dask_gpurt.plugins.memory.store_levels import DEVICE, StoreLevels
from dask_gpurt.plugins.patches import worker_memory
from dask_gpurt.plugins.patches.p2p import context_meter, event_loop
from dask_gpurt.plugins.patches.task_order import TaskOrder
from dask_gpurt.plugins.shielding import in_a_thread
from dask_gpurt.plugins.shuffle.fine_metrics import amount

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt.memory")

#: The store keeps at least this share of its room, however much memory it does not know of.
LEAST_SHARE = 0.25
#: Where values cannot be read for want of memory, it is said after so long.
WARN_S = 3.0
#: Tasks ahead of the one that runs, for each thread, whose inputs may be read early.
TASKS_AHEAD = 8
#: A worker under pressure asks the scheduler about this many values at a time.
MAX_ASKED = 5_000
#: Share of the loop's time in which it may find out which.
ASKING_SHARE = 0.05
#: Where Dask does not look at the process' memory, the store is looked after this often.
LOOK_INTERVAL_S = 0.1
#: Memory that is only kept warm is given back, and shards are spilled, this often at most.
RELIEF_INTERVAL_S = 0.5
#: Inputs that nobody else is known to want are not written for so long after their task: the
#: scheduler's word that they can go is on its way.
REST_S = 0.05
#: What the process takes besides comes and goes with every task: the median of so many looks.
SAMPLES = 5
#: With nothing moving or ending for so long, the next task begins although it does not fit: it
#: may be what the running ones wait for.
PATIENCE_S = 10.0


def obstacle(worker: Worker, settings: MemorySettings) -> str | None:
    """Why this worker keeps the store it has; None if it gets ours."""
    if not settings.enabled:
        return "gpurt.memory.enabled is false"
    if worker_memory.spill_marks_nbytes(worker) is None:
        return "the worker has no memory limit, or distributed.worker.memory.spill is off"
    kind = type(worker.data)
    if kind.__module__.startswith("dask_cuda") and not settings.replace_dask_cuda:
        return "the worker has dask-cuda's store, and gpurt.memory.replace-dask-cuda is false"
    if worker_memory.is_made_by_dask(worker) or kind.__module__.startswith("dask_cuda"):
        return None
    if kind is worker_memory.SpillBuffer:
        return "the worker has a store of its own kind (a SpillBuffer with settings of its own)"
    return f"the worker has a store of its own kind ({kind.__module__}.{kind.__qualname__})"


class MemoryOwners(Protocol):
    """What else of ours is on a worker: shards and memory that is kept warm, and the ledger."""

    ledger: Ledger

    def shards_nbytes(self) -> int:
        """Bytes that shards of shuffles take now, those on their way out included."""

    def relieve(self, over_nbytes: int) -> None:
        """The process takes so much too much. In a thread."""

    def ease(self) -> None:
        """The process has memory again."""


class ManagedMemory:
    """The store of one worker, from when the runtime is attached until it is detached.

    Parameters
    ----------
    besides
        The rest of what is ours on this worker, which can give memory back.
    """

    def __init__(
        self,
        worker: Worker,
        settings: MemorySettings,
        besides: MemoryOwners,
    ) -> None:
        self._worker = worker
        self._besides = besides
        self._loop = event_loop(worker)
        self._stock: Any = worker.data
        self._sizes = GroupSizes()
        self._hints: dict[Hashable, Any] = {}
        self._asking: asyncio.Task[None] | None = None
        self._ask_from_s = 0.0
        self._unmanaged: deque[int] = deque(maxlen=SAMPLES)
        self._relieved_at = self._moved_at = self._loop.time()
        self._log_throttle = LogThrottle()
        self._relief: Future[None] | None = None
        #: Looks in a row at which the process took too much.
        self._n_over = 0
        #: Tasks that were about to begin when the queue was looked at last.
        self._queued: list[Hashable] = []
        self._started = 0
        self._is_closed = False
        self._claims: dict[Hashable, Claim] = {}
        #: What of the store's counts Dask's metrics have been told.
        self._told_io: dict[tuple[str, str], float] = {}
        marks = worker_memory.spill_marks_nbytes(worker)
        assert marks is not None
        self._target_nbytes, self._spill_nbytes = marks
        self._writes = Lane("write", 1, besides.ledger)
        self._reads = Lane("read", 2, besides.ledger)
        self._levels = levels = StoreLevels(
            worker,
            settings,
            self._stock,
            self._target_nbytes,
            lambda *moved: self.store.on_io(*moved),
        )
        self._device = levels.device
        self.store = TieredStore(
            Residency(levels.levels, levels.chains, POLICIES[settings.policy], self._next_use),
            levels.tiers,
            levels.packings,
            Lanes(
                partial(_submit, self._writes),
                partial(_submit, self._reads),
                self._on_loop,
                self._later,
            ),
            top_level_of=self._top_level_of,
            upcoming=self._soon,
            on_lost=partial(worker_memory.recompute, worker),
        )
        self._at_hand = TaskOrder(worker, self._is_spilled)
        self.store.adopt(*worker_memory.take_over(self._stock), level=levels.inherited_level)
        self._messages = DataServer(worker, self.store, self._reads, self._tell)
        self._swap = worker_memory.StoreSwap(
            worker,
            self.store,
            execute=self._execute,
            get_data=self._messages.get_data,
            asks_for_client=lambda key: self._on_loop(partial(self._may_wait, key)),
            monitor=self._monitor,
        )
        self._looking: asyncio.Task[None] | None = None
        if not worker_memory.is_monitored(worker):
            self._looking = asyncio.create_task(self._look(), name="gpurt-memory-monitor")

    def _top_level_of(self, value: Any) -> int:
        device = self._device
        if device is None or device.problem or not is_on_device(value):
            return HOST
        device.begin(lambda: _submit(self._writes, self._open_device, "open"))
        return DEVICE

    def _open_device(self) -> None:
        assert self._device is not None
        self._device.open(lambda nbytes: self.store.make_room(DEVICE, nbytes))
        self._fit_device()
        self.store.decide()

    def _on_loop(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(call)

    def _later(self, call: Callable[[], None]) -> None:
        self._loop.call_later(REST_S, call)

    # ------------------------------------------------------------------ tasks and messages

    async def _execute(self, stock: Callable[..., Awaitable[Any]], key: Any, **kwargs: Any) -> Any:
        self._at_hand.begins(key)
        task = self._worker.state.tasks.get(key)
        # Dask may have called this before the runtime was taken off, and run it only since.
        if task is None or self._is_closed:
            return await stock(key, **kwargs)
        group = task.prefix
        begun: asyncio.Future[set[Hashable]] = self._loop.create_future()

        def begin(lost: set[Hashable]) -> None:
            if not begun.done():  # the wait may have been cancelled, as when a worker closes
                begun.set_result(lost)

        claim, is_ready = self.store.claim(
            key,
            [dependency.key for dependency in task.dependencies],
            self._sizes.expected(group) or 0,
            task.priority or (),
            begin,
            self._sizes.top_level(group),
        )
        self._claims[key] = claim
        cold = [value for value in claim.values if not value.in_memory]
        _meter("memory-read", [value for value in claim.values if value.in_memory])
        try:
            if not is_ready:
                # The seconds that a task waits are its own; those of the lanes are told apart.
                with context_meter.meter("disk-read" if cold else "memory-room"):
                    lost = await begun
                if lost or worker_memory.is_cancelled(self._worker, key):
                    return worker_memory.reschedule(key)
                _meter("disk-read", cold)
            # Patience is with what runs now: a worker that had nothing to do did not stand still.
            self._moved_at = self._loop.time()
            event = await stock(key, **kwargs)
        finally:
            if self._claims.get(key) is claim:
                del self._claims[key]
            self.store.end(claim)
            self._moved_at = self._loop.time()
        ran = worker_memory.ran(event)
        if ran is not None:
            value, nbytes, took_s = ran
            self._sizes.learn(group, nbytes, self._top_level_of(value))
            self._at_hand.learn(group, sum(one.nbytes for one in claim.values), nbytes)
            # By Dask, in the task's thread. To do so again would hold up the loop.
            self.store.measured[key] = nbytes
            now_s = self._besides.ledger.clock()
            self._besides.ledger.add(Entry(COMPUTE, group, nbytes, now_s - took_s, now_s))
        return event

    def _may_wait(self, key: Hashable) -> None:
        """A task can hand in others and wait for them."""
        if (claim := self._claims.get(key)) is not None:
            self.store.may_wait(claim)

    def seceded(self, key: Hashable) -> None:
        """A task left its thread and may wait for others: it keeps no room."""
        if (claim := self._claims.pop(key, None)) is not None:
            self.store.end(claim)

    def left(self, key: Hashable) -> None:
        """A task's result is in the store, or will not come."""
        self.store.measured.pop(key, None)

    # ------------------------------------------------------------------ what lies ahead

    def _next_use(self, key: Hashable) -> Any:
        users = worker_memory.local_users(self._worker, key, self._at_hand.leaving)
        first = self._at_hand.use(users, in_memory=not self._is_spilled(key))
        here = reachable(first) if first is not None else None
        hint = self._hints.get(key)
        if here is None or hint is None:
            return hint if here is None else here
        return min(here, hint)

    def _is_spilled(self, key: Hashable) -> bool:
        value = self.store.residency.values.get(key)
        return value is not None and not value.in_memory

    def _soon(self) -> Iterable[Hashable]:
        # Looking into the queue costs a pass over it, so what was seen serves for some tasks.
        started = self._worker.state.executed_count
        ahead = TASKS_AHEAD * self._worker.state.nthreads
        if not self._queued or started - self._started >= ahead // 2:
            self._started = started
            self._queued = worker_memory.queued(self._worker, ahead)
        # Inputs of those that ended since would be read for nothing.
        return worker_memory.inputs(self._worker, self._queued)

    async def _ask_ahead(self) -> None:
        """Ask the scheduler when values are needed that nothing here waits for."""
        began = self._loop.time()
        unknown = (key for key in self.store if not worker_memory.local_users(self._worker, key))
        keys = list(islice(unknown, MAX_ASKED))
        rest_s = (self._loop.time() - began) / ASKING_SHARE
        try:
            uses, schedulers_rest_s = await self._worker.scheduler.gpurt_next_uses(
                keys=keys, worker=self._worker.address
            )
        except OSError:
            return  # the scheduler is gone or busy; there is a next time
        self._ask_from_s = self._loop.time() + max(rest_s, schedulers_rest_s)
        self._hints = {
            key: tuple(use) for key, use in zip(keys, uses, strict=True) if use is not None
        }

    # ------------------------------------------------------------------ room

    async def _look(self) -> None:
        """Where no limit is on the process, disks still come back, and tasks still get stuck."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self._monitor(0)

    def _tell(self, where: str, label: tuple[str, str], value: float) -> None:
        """One of Dask's fine metrics."""
        self._worker.digest_metric((where, *label), value)

    def _tell_io(self) -> None:
        """What the lanes wrote and read; as stock has what it spills."""
        for label, so_far in self.store.io().items():
            if new := so_far - self._told_io.get(label, 0):
                self._told_io[label] = so_far
                self._tell("memory-monitor", label, new)

    async def _monitor(self, process_nbytes: int) -> None:
        """Fit the store's room to what the process takes besides."""
        if self._is_closed:
            return
        self._tell_io()
        now = self._loop.time()
        room = self._target_nbytes
        shards_nbytes = self._besides.shards_nbytes()
        pinned_nbytes = self._levels.pinned_nbytes
        if self._spill_nbytes is not None:
            over_nbytes = process_nbytes - self._spill_nbytes
            if over_nbytes > 0 and self._may_relieve(now):
                # Not awaited: it may come after a large write, and Dask asks whether to pause only
                # once this look is over. What it leaves is for the next one to see.
                self._relieved_at = now
                relieve = partial(self._relieve, over_nbytes)
                self._relief = self._writes.submit(
                    _logged, relieve, priority=Priority.HIGH, path="relieve"
                )
            else:
                managed_nbytes = self.store.managed_nbytes + shards_nbytes + pinned_nbytes
                self._unmanaged.append(process_nbytes - managed_nbytes)
                self._n_over = self._n_over + 1 if over_nbytes > 0 else 0
            if process_nbytes < self._target_nbytes:
                self._besides.ease()
            if self._unmanaged:
                unmanaged_nbytes = max(0, int(median(self._unmanaged)))
                room = min(room, self._spill_nbytes - unmanaged_nbytes)
        room -= shards_nbytes + pinned_nbytes
        self.store.set_capacity(max(room, int(LEAST_SHARE * self._target_nbytes)))
        self._fit_device()
        self.store.retry(now)
        self._look_at_reads(now)
        if now - self._moved_at > PATIENCE_S and self.store.force_progress():
            self._moved_at = now
        self.store.decide()
        if self._n_over >= SAMPLES:
            self._let_go(process_nbytes)
        is_asking = self._asking is not None and not self._asking.done()
        if self.store.has_spilled and not is_asking and now >= self._ask_from_s:
            self._asking = asyncio.create_task(self._ask_ahead(), name="gpurt-next-uses")

    def _look_at_reads(self, now: float) -> None:
        """Nobody waits without a word, or for ever, for what there is no memory to read."""
        put_off = self.store.failed_reads(now)
        if not put_off:
            return
        longest = put_off[0]
        if longest.waited_s(now) > WARN_S and self._log_throttle.is_due("no memory to read", now):
            logger.warning(
                "no memory to read %d values, such as %r; what needs them waits: %s",
                len(put_off),
                longest.value.key,
                longest.reason,
            )
        if now - self._moved_at > PATIENCE_S:
            self.store.abandon_reads([one for one in put_off if one.waited_s(now) > PATIENCE_S])

    def _fit_device(self) -> None:
        """Shards of shuffles take from the room of values on a device too."""
        if self._device is not None and (room := self._device.room_nbytes) is not None:
            left = max(room - shards_on_device_nbytes(), int(LEAST_SHARE * room))
            self.store.set_capacity(left, DEVICE)

    def _let_go(self, process_nbytes: int) -> None:
        """The process has taken too much for a while, whatever values say of their sizes.

        Values may be larger than they say, so they go one by one until it is enough.
        """
        if self.store.residency.levels[HOST].members:
            self.store.evict()
        elif self._n_over == SAMPLES:
            worker_memory.warn_of_unmanaged(process_nbytes)

    def _may_relieve(self, now: float) -> bool:
        is_under_way = self._relief is not None and not self._relief.done()
        return not is_under_way and now - self._relieved_at > RELIEF_INTERVAL_S

    def _relieve(self, over_nbytes: int) -> None:
        self._besides.relieve(over_nbytes)
        malloc.trim()

    async def report(self) -> dict[str, Any]:
        """For `status` and `doctor`."""
        disk = await asyncio.to_thread(self._levels.disk.probe)
        device = self._device.report() if self._device is not None else None
        return {**self.store.report(), "disk": disk, "device": device}

    def explain(self, key: Hashable) -> dict[str, Any] | None:
        """Where a value is and why; None if it is not here."""
        with contextlib.suppress(KeyError):
            return self.store.explain(key)
        return None

    async def close(self) -> None:
        """Leave the worker with the store it had, and with everything in that.

        A worker that closes has no use for values, but still lists them in its last moments, and
        sends them to whoever asks; so it keeps the store and what is in memory. What is being
        written is waited for, so that nobody writes any more when Dask removes the worker's
        directory.
        """
        given: Returned = {}
        if not self._is_closed and not worker_memory.is_closing(self._worker):
            level = self._levels.inherited_level
            given = await return_spilled(
                self.store,
                self._stock,
                self._writes,
                level,
                partial(worker_memory.is_closing, self._worker),
            )
        # From here on nothing waits until the worker has one store or the other.
        was_closed, self._is_closed = self._is_closed, True
        self._messages.close()
        for task in (self._asking, self._looking):
            if task is not None:
                task.cancel()
        self._tell_io()
        if not was_closed and not worker_memory.is_closing(self._worker):
            self._levels.inherited.close()
            return_in_memory(self.store, self._stock, given)
            self._swap.remove(self._stock)
            self._at_hand.remove()
            self.store.release_objects()
        if self._device is not None:
            self._device.close()
        self.store.close()
        if not await in_a_thread(self._clear):
            logger.warning("a disk does not answer; files of values may stay on it")

    def _clear(self) -> None:
        # Removing gigabytes of files takes a second.
        self.store.clear()
        for lane in (self._writes, self._reads):
            lane.close()


def _meter(label: str, values: Collection[Value]) -> None:
    """Tell the metrics of the task at hand what it takes."""
    if values:
        amount(label, sum(value.nbytes for value in values), len(values))


def _submit(lane: Lane, call: Callable[[], None], path: str = "", nbytes: int = 0) -> None:
    lane.submit(_logged, call, path=path, nbytes=nbytes)


def _logged(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        # Nobody asks for the result: an error of ours would pass without a word.
        logger.exception("moving a value or giving memory back failed")

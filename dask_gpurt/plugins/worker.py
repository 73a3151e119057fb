"""What a worker has while the runtime is on: counters, the shard budget, and two hooks.

`dask_gpurt.plugins.bootstrap` has the plugin that brings it there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import dask_gpurt
from dask_gpurt.codecs.chooser import Chooser
from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.codecs.nvcomp import NVCOMP_CODECS
from dask_gpurt.codecs.rule import Mode
from dask_gpurt.config import Settings, ShuffleSettings
from dask_gpurt.devices.host_memory.malloc import PageKeeper
from dask_gpurt.devices.host_memory.pool import HostPool
from dask_gpurt.devices.lanes import Lane
from dask_gpurt.devices.ledger import Ledger, overlap
from dask_gpurt.metrics import Counters, since
from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.memory import gpu_store
from dask_gpurt.plugins.memory.gc_freeze import GcFreeze
from dask_gpurt.plugins.memory.manager import ManagedMemory, obstacle
from dask_gpurt.plugins.patches.connections import PiecewiseReads, ShortTurns
from dask_gpurt.plugins.patches.dataframe import RowNumbers
from dask_gpurt.plugins.patches.gather_dep import GatherRetry
from dask_gpurt.plugins.patches.p2p import RunLookup, event_loop, sync
from dask_gpurt.plugins.patches.prometheus import ShownShuffles
from dask_gpurt.plugins.patches.worker_close import WholeClose
from dask_gpurt.plugins.patches.worker_memory import is_closing
from dask_gpurt.plugins.shielding import DEADLINE_S, to_its_end
from dask_gpurt.plugins.shuffle.transport_choice import Links
from dask_gpurt.plugins.topology.host_report import MachineReport
from dask_gpurt.plugins.worker_counters import Counting
from dask_gpurt.shuffle.shards import Budget, ShardStore
from dask_gpurt.shuffle.tally import MAX_RUNS, brief

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun

logger = logging.getLogger("dask_gpurt")

NAME = "gpurt"

#: Share of a worker's memory that may stay with the pool, and with the allocator, between uses.
KEEP_SHARE = 0.1
#: How long warm memory is kept after the last run, in case another follows.
IDLE_S = 60.0
#: Input partitions with fewer rows are not worth a message ahead.
SKETCHED_ROWS = 10_000


class ShuffleLanes:
    """Where runs do what touches every byte of what they send and receive.

    Parameters
    ----------
    n_threads
        For codecs: as many as the worker has for tasks.
    """

    def __init__(self, n_threads: int, ledger: Ledger) -> None:
        self.codec = Lane("codec", n_threads, ledger)
        self.spill = Lane("spill", 1, ledger)

    def close(self) -> None:
        self.codec.close()
        self.spill.close()


class WorkerState:
    """Everything of ours on one worker. Outlives the plugin while runs need it."""

    def __init__(self, worker: Worker) -> None:
        self.counters = Counters()
        self.ledger = Ledger()
        self._worker = worker
        self._budget: Budget | None = None
        self.memory_nbytes = memory_nbytes = self._memory_limit_nbytes()
        self.pool = HostPool(int(KEEP_SHARE * memory_nbytes))
        self.links = Links(worker, int(KEEP_SHARE * memory_nbytes))
        self._pages = PageKeeper(int(KEEP_SHARE * memory_nbytes))
        self._row_numbers = RowNumbers()
        self._runs: set[ExchangeRun] = set()
        #: Counters as they were when the runtime was last switched on here.
        self._counted_before: dict[str, int] = {}
        self._past_runs: deque[dict[str, Any]] = deque(maxlen=MAX_RUNS)
        #: Ended runs that the scheduler has not been told of.
        self._untold_runs: deque[dict[str, Any]] = deque(maxlen=MAX_RUNS)
        self._choosers: dict[tuple[Mode, Set[int]], Chooser] = {}
        self._lanes: ShuffleLanes | None = None
        self._cooling: asyncio.TimerHandle | None = None
        #: Closes links that runs made after the runtime was taken off.
        self._unlinking: asyncio.Task[None] | None = None
        #: Closes the rest of the runtime on a worker that closes. May be called twice.
        self.last_work: Callable[[], Awaitable[None]] | None = None
        #: The runtime is on here. Off, nothing is kept for a next run.
        self.is_attached = True
        #: What an output task read, by its key, until its result is safe.
        self._to_release: dict[Any, list[tuple[ShardStore, int]]] = {}
        #: Shuffles of which shards were damaged on this worker's disk.
        self.kept_off_disk: set[str] = set()

    def keep_off_disk(self, shuffle_id: str) -> None:
        """Have later runs of a shuffle spill nothing here: its shards were damaged on the disk.

        So a disk that stays broken has each shuffle start over once, and not for ever.
        """
        if shuffle_id not in self.kept_off_disk:
            self.kept_off_disk.add(shuffle_id)
            logger.error(
                "%s gave back damaged data of shuffle %s, which starts over and stays in memory "
                "here. Check that disk, or point Dask's temporary-directory to another one.",
                self._worker.local_directory,
                shuffle_id,
            )

    @property
    def limit_nbytes(self) -> int:
        return self._budget.limit_nbytes if self._budget is not None else 0

    def budget(self, settings: ShuffleSettings) -> Budget:
        """The budget that all runs of this worker share."""
        if self._budget is None:
            self._budget = Budget(0)
        self._budget.most_nbytes = settings.memory_nbytes(self._memory_limit_nbytes())
        return self._budget

    def relieve(self, over_nbytes: int) -> None:
        """The process takes so much too much. In a thread: spills.

        What is only kept warm goes first, then shards that are needed last.
        """
        self.pool.trim()
        self.links.outgoing.trim()
        if self._budget is not None:
            self._budget.press(over_nbytes)
            for run in tuple(self._runs):
                run.make_room()

    def ease(self) -> None:
        """The process has memory again."""
        if self._budget is not None:
            self._budget.ease(self._budget.most_nbytes // 20)

    def shards_nbytes(self) -> int:
        """Memory that shards take on this worker now, with what is on its way out."""
        kept_nbytes = self._budget.used_nbytes if self._budget is not None else 0
        return kept_nbytes + self.links.outgoing.used_nbytes

    def _memory_limit_nbytes(self) -> int:
        limit = self._worker.memory_manager.memory_limit
        if limit:
            return int(limit)
        from distributed.system import MEMORY_LIMIT

        return int(MEMORY_LIMIT)

    def chooser(self, mode: Mode, device_codecs: Set[int] = frozenset()) -> Chooser:
        """Chooses codecs; what it learnt in one run serves for the next.

        Parameters
        ----------
        device_codecs
            Numbers of codecs of devices to choose from, besides those of the host.
        """
        found = self._choosers.get((mode, device_codecs))
        if found is None:
            more = {number: NVCOMP_CODECS[number] for number in device_codecs}
            made = Chooser(mode, {**HOST_CODECS, **more})
            found = self._choosers.setdefault((mode, device_codecs), made)
        return found

    @property
    def lanes(self) -> ShuffleLanes:
        """Those of all runs of this worker; there are some from the first run to cooling down."""
        assert self._lanes is not None, "no run, no lanes"
        return self._lanes

    def begin_run(self, run: ExchangeRun) -> None:
        """A shuffle run begins on this worker. On the event loop."""
        self.counters.add(shuffle_runs=1)
        self._runs.add(run)
        if self._cooling is not None:
            self._cooling.cancel()
            self._cooling = None
        if self._lanes is None:
            self._lanes = ShuffleLanes(self._worker.state.nthreads, self.ledger)
            self._pages.acquire()
        self._row_numbers.install()

    def end_run(self, run: ExchangeRun, report: dict[str, Any]) -> None:
        """A run ended. Some time after the last one, warm memory is given back. On the loop."""
        self._runs.discard(run)
        self._past_runs.append(report)
        self._untold_runs.append(report)
        if not self._runs:
            if self.is_attached:
                self._cooling = event_loop(self._worker).call_later(IDLE_S, self.cool_down)
            else:
                self.cool_down()
                # Nobody else does: those that there were before are closed already.
                self._unlinking = asyncio.create_task(self.links.disconnect())

    def attach(self) -> None:
        """The runtime is switched on: what is reported is counted from here on. On the loop."""
        self.is_attached = True
        self._counted_before = self.counters.snapshot()
        self._past_runs.clear()
        self._untold_runs.clear()

    def detach(self) -> None:
        """The runtime is taken off: keep nothing for runs that will not come. On the loop."""
        self.is_attached = False
        self._to_release.clear()
        if self._cooling is not None:
            self._cooling.cancel()
        self.cool_down()

    def cool_down(self) -> None:
        """Give back memory that was only kept warm, and idle threads. Not while there are runs."""
        self._cooling = None
        if self._lanes is not None and not self._runs:
            self._lanes.close()
            self._lanes = None
            self.pool.trim()
            self.links.cool_down()
            self._pages.release()
            self._row_numbers.uninstall()

    def release_with(self, key: Any, store: ShardStore, slot: int) -> None:
        """Let go of a partition's shards once the result of task `key` is in memory.

        With the end of the run where the runtime is off here: nobody would say that it is.
        """
        if self.is_attached:
            self._to_release.setdefault(key, []).append((store, slot))

    def task_left(self, key: Any, state: str) -> None:
        """A task went to another state: its result is safe in memory, or it will not come."""
        read = self._to_release.pop(key, ())
        if state == "memory":
            for store, slot in read:
                store.release(slot, key)

    def _overlap(self) -> dict[str, Any]:
        """What the newest work of each lane took, and how much of it went on at the same time."""
        entries = self.ledger.entries()
        found = overlap(entries)
        return {
            "entries": len(entries),
            "seconds": found.parts_s,
            "measured_s": found.measured_s,
            "efficiency": found.efficiency,
        }

    async def close(self) -> None:
        """The worker is closed. Dask calls this of what extends it.

        A cancellation is dropped, as everybody else waits for this. No error leaves it: the
        worker would stop half way.
        """
        for work in (self.last_work, self._unlink, self.links.disconnect):
            try:
                if work is not None and not await to_its_end(work):
                    logger.warning("%s: closed without waiting any longer", self._worker.name)
            except Exception:
                logger.exception("%s: closing failed", self._worker.name)
        self.links.close()

    async def _unlink(self) -> None:
        if self._unlinking is not None:
            await asyncio.wait({self._unlinking})

    def counted(self) -> dict[str, int]:
        """Counters since the runtime was switched on."""
        return since(self._counted_before, self.counters.snapshot())

    def news(self) -> dict[str, Any]:
        """Counters, and the runs that ended since this was asked last. On the loop."""
        runs = [brief(run) for run in self._untold_runs]
        self._untold_runs.clear()
        return {"counters": self.counted(), "runs": runs}

    def last_word(self) -> dict[str, Any]:
        """Counters, and all runs that are known here. On the loop."""
        runs = [*self._past_runs, *(run.report() for run in self._runs)]
        return {"counters": self.counted(), "runs": [brief(run) for run in runs]}

    def report(self) -> dict[str, Any]:
        return {
            "version": dask_gpurt.__version__,
            "counters": self.counted(),
            "lanes": self._overlap(),
            "links": self.links.report(),
            "lacks": self.links.lacks(),
            "codecs": [
                decision.to_plain()
                for chooser in self._choosers.values()
                for decision in chooser.explain()
            ],
            "runs": [*self._past_runs, *(run.report() for run in self._runs)],
        }


def state_of(worker: Worker) -> WorkerState:
    """State of a worker, made on first use.

    It is kept with the worker: as it refers to it, a table of ours would keep both for ever, weakly
    keyed or not.
    """
    state: WorkerState | None = worker.extensions.get(NAME)
    if state is None:
        state = worker.extensions[NAME] = WorkerState(worker)
    return state


def sketch(worker: Worker, shuffle_id: str, data: Any) -> None:
    """Tell the scheduler how full output partitions will be, before it says who owns them.

    In a task thread, for the first input partition that is at hand here. Without an answer the
    partitions are given out as stock does it.
    """
    try:
        if len(data) < SKETCHED_ROWS:
            return
        # Frames whose partition numbers are plain integers, on the host.
        column = sync(worker.loop, worker.scheduler.gpurt_sketch, shuffle_id=shuffle_id)
        if column is None:
            return
        numbers = data[column].to_numpy()
        if not isinstance(numbers, np.ndarray) or numbers.dtype.kind not in "iu":
            return
        rows = np.bincount(numbers[numbers >= 0]).tolist()
        sync(worker.loop, worker.scheduler.gpurt_sketch, shuffle_id=shuffle_id, rows=rows)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        logger.debug("no sketch of shuffle %s: %r", shuffle_id, error)


class Attachment:
    """The runtime on one worker, for as long as the plugin is registered."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun

        gpu_store.register_sizeof()
        self._worker = worker
        self.state = state = state_of(worker)
        state.attach()
        self._lookup = RunLookup(
            worker, lambda run: isinstance(run, ExchangeRun), partial(sketch, worker)
        )

        self._unmanaged_reason = obstacle(worker, settings.memory)
        self._memory: ManagedMemory | None = None
        if self._unmanaged_reason is None:
            self._memory = ManagedMemory(worker, settings.memory, state)
        else:
            logger.info("Dask's own store stays: %s", self._unmanaged_reason)

        async def gpurt_report() -> dict[str, Any]:
            memory = await self._memory.report() if self._memory is not None else None
            return {**state.report(), "memory": memory, "unmanaged": self._unmanaged_reason}

        async def gpurt_explain(key: Any) -> dict[str, Any] | None:
            request_checks.key(key)
            return self._memory.explain(key) if self._memory is not None else None

        self._handlers: dict[str, Callable[..., Any]] = {
            "gpurt_report": gpurt_report,
            "gpurt_explain": gpurt_explain,
            **MachineReport(worker).handlers,
        }
        worker.handlers.update(self._handlers)
        self._reads = PiecewiseReads()
        self._turns = ShortTurns(worker)
        self._gather_retry = GatherRetry(worker)
        self._shown = ShownShuffles(worker)
        self._whole_close = WholeClose(worker, state.close)
        self._detaching: asyncio.Task[None] | None = None
        self._counting = Counting(worker, state)
        # At the end: everything that the runtime needs is imported.
        self._gc_freeze = GcFreeze(worker)

    def task_left(self, key: Any, state: str) -> None:
        self._gather_retry.task_ended()
        if state == "long-running":
            if self._memory is not None:
                self._memory.seceded(key)
        else:
            self.state.task_left(key, state)
            if self._memory is not None:
                self._memory.task_done(key)

    async def detach(self) -> None:
        """Leave the worker as stock has it. Runs that are under way go on.

        It is done once, and goes on if whoever waits for it is cancelled. Nothing is waited for on
        a worker that closes: Dask would stop half way if it were cancelled at that moment. The
        state does the rest there, see `WorkerState.close`.
        """
        if self._detaching is None:
            self._leave()
            self.state.last_work = self._let_go
            if is_closing(self._worker):
                self.state.detach()
                return
            self._detaching = asyncio.create_task(self._give_back(), name="gpurt-detach")
        await asyncio.shield(self._detaching)

    def _leave(self) -> None:
        self._counting.leave()
        self._gc_freeze.close()
        self._reads.uninstall()
        self._turns.uninstall()
        self._gather_retry.uninstall()
        self._shown.uninstall()
        self._lookup.uninstall()
        for name in self._handlers:
            self._worker.handlers.pop(name, None)

    async def _give_back(self) -> None:
        await self._counting.say_last()
        if self._memory is not None:
            await self._memory.close()
        self.state.detach()
        await self.state.links.disconnect()
        if not is_closing(self._worker):
            self.state.last_work = None
            self._whole_close.uninstall()

    async def _let_go(self) -> None:
        """The worker closes; what it would get back is of no use to it any more."""
        if self._detaching is not None:
            await asyncio.wait({self._detaching}, timeout=DEADLINE_S / 2)
        else:
            await self._counting.say_last()
        if self._memory is not None:
            await self._memory.close()

"""The state of the runtime on one worker: counters, the shard budget, lanes, links, pools.

All shuffle runs of a worker share it. It knows nothing of hooks: `attachment` installs them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import dask_gpurt
from dask_gpurt.codecs.chooser import Chooser
from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.codecs.nvcomp import NVCOMP_CODECS
from dask_gpurt.codecs.rule import CodecDecision, Mode
from dask_gpurt.config import ShuffleSettings
from dask_gpurt.devices.host_memory.malloc import PageKeeper
from dask_gpurt.devices.host_memory.pool import HostPool
from dask_gpurt.devices.lanes import Lane
from dask_gpurt.devices.ledger import overlap
from dask_gpurt.metrics import Counters, since
from dask_gpurt.plugins.bootstrap import NAME
from dask_gpurt.plugins.collectives.groups.worker_groups import WorkerGroups
from dask_gpurt.plugins.patches.dataframe import RowNumbers
from dask_gpurt.plugins.patches.p2p import event_loop
from dask_gpurt.plugins.shielding import to_its_end
from dask_gpurt.plugins.shuffle.peer_connections import open_files
from dask_gpurt.plugins.shuffle.peer_links import Links
from dask_gpurt.plugins.tracing.ledger_hook import new_ledger
from dask_gpurt.plugins.worker_report import RunReports, limited
from dask_gpurt.shuffle.budget import Budget
from dask_gpurt.shuffle.credits import RecentSenders
from dask_gpurt.shuffle.shards import ShardStore
from dask_gpurt.transport.sending.send_budget import SendBudget

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun

logger = logging.getLogger("dask_gpurt")

#: Share of a worker's memory that the pool and the allocator may keep between uses.
KEEP_SHARE = 0.1
#: Producers wait if pages of outgoing shards waste more than this share of a worker's memory, and
#: more than `LEAST_WASTE_NBYTES`. Some waste is normal: threads that cut together share pages.
WASTE_SHARE = 0.2
LEAST_WASTE_NBYTES = 64 << 20
#: How long pooled memory is kept after the last run, in case another run follows.
IDLE_S = 60.0


class ShuffleLanes(NamedTuple):
    """Threads that encode, decode and copy messages, and one thread that spills shards."""

    codec: Lane
    spill: Lane


class WorkerRuntime:
    """The state of the runtime on one worker. Outlives the plugin while runs need it."""

    def __init__(self, worker: Worker) -> None:
        self.counters = Counters()
        self.ledger = new_ledger(worker)
        self._worker = worker
        self._budget = Budget(0)
        self.memory_nbytes = memory_nbytes = self._memory_limit_nbytes()
        self.pool = HostPool(int(KEEP_SHARE * memory_nbytes))
        self.links = Links(worker, int(KEEP_SHARE * memory_nbytes), self.ledger)
        #: Peers that sent messages lately.
        self.senders = RecentSenders(memory_nbytes)
        most_nbytes = max(LEAST_WASTE_NBYTES, int(WASTE_SHARE * memory_nbytes))
        self.outgoing_budget = SendBudget(
            0, lambda: self.links.outgoing.wastes_more_than(most_nbytes)
        )
        self._pages = PageKeeper(int(KEEP_SHARE * memory_nbytes))
        self._row_numbers = RowNumbers()
        self._runs: set[ExchangeRun] = set()
        #: Counters at the time the runtime was last switched on here.
        self._counted_before: dict[str, int] = {}
        self.run_reports = RunReports()
        self._choosers: dict[tuple[Mode, Set[int]], Chooser] = {}
        self._lanes: ShuffleLanes | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        #: Closes links that runs opened after the runtime was detached.
        self._closing_links: asyncio.Task[None] | None = None
        #: Closes the rest of the runtime when the worker closes. May be called twice.
        self.final_close: Callable[[], Awaitable[None]] | None = None
        #: Whether the runtime is on here. If not, nothing is kept for later runs.
        self.is_attached = True
        #: Shards that each output task read, by its key. Released once its result is in memory.
        self._to_release: dict[Any, list[tuple[ShardStore, int]]] = {}
        #: Shuffles whose shards were damaged on this worker's disk.
        self.kept_off_disk: set[str] = set()
        self.groups = WorkerGroups(worker, self)

    def keep_off_disk(self, shuffle_id: str) -> None:
        """Keep later runs of a shuffle in memory: its shards were damaged on this disk.

        So a broken disk restarts each shuffle once, not again and again.
        """
        if shuffle_id not in self.kept_off_disk:
            self.kept_off_disk.add(shuffle_id)
            logger.error(
                "%s gave back damaged data of shuffle %s, which restarts and stays in memory "
                "here. Check that disk, or point Dask's temporary-directory to another one.",
                self._worker.local_directory,
                shuffle_id,
            )

    @property
    def limit_nbytes(self) -> int:
        return self._budget.limit_nbytes

    def budget(self, settings: ShuffleSettings) -> Budget:
        """Return the budget shared by all runs of this worker."""
        self._budget.most_nbytes = settings.memory_nbytes(self._memory_limit_nbytes())
        return self._budget

    def send_budget(self, settings: ShuffleSettings) -> SendBudget:
        """Return the budget for shards that wait to be sent, shared by all runs."""
        self.outgoing_budget.limit_nbytes = settings.in_flight_nbytes(self._memory_limit_nbytes())
        return self.outgoing_budget

    def release_memory(self, over_nbytes: int) -> None:
        """Release `over_nbytes`: trim the pools, then spill shards. Runs in a worker thread.

        Idle pooled memory goes first, then the shards that are needed last.
        """
        self.pool.trim()
        self.links.outgoing.trim()
        self._budget.lower_limit(over_nbytes)
        for run in tuple(self._runs):
            run.relieve()

    def relax_budget(self) -> None:
        """Relax the budget by a step: the process has memory again."""
        self._budget.raise_limit(self._budget.most_nbytes // 20)

    def shards_nbytes(self) -> int:
        """Return the memory of shards on this worker, outgoing messages included."""
        return self._budget.used_nbytes + self.links.outgoing.used_nbytes

    def shards_on_disk_nbytes(self) -> int:
        """Return the bytes of this worker's shards on disk."""
        return self._budget.on_disk_nbytes

    def _memory_limit_nbytes(self) -> int:
        limit = self._worker.memory_manager.memory_limit
        if limit:
            return int(limit)
        from distributed.system import MEMORY_LIMIT

        return int(MEMORY_LIMIT)

    def chooser(self, mode: Mode, device_codecs: Set[int] = frozenset()) -> Chooser:
        """Return the chooser of codecs for a mode. Runs share what it has learnt.

        Parameters
        ----------
        device_codecs
            Numbers of device codecs to offer, besides the host codecs.
        """
        found = self._choosers.get((mode, device_codecs))
        if found is None:
            more = {number: NVCOMP_CODECS[number] for number in device_codecs}
            made = Chooser(mode, {**HOST_CODECS, **more})
            found = self._choosers.setdefault((mode, device_codecs), made)
        return found

    @property
    def lanes(self) -> ShuffleLanes:
        """Lanes of all runs of this worker. They exist from the first run until `cool_down`."""
        assert self._lanes is not None, "no run, no lanes"
        return self._lanes

    def begin_run(self, run: ExchangeRun) -> None:
        """Register a shuffle run that begins on this worker. Runs on the event loop."""
        self.counters.add(shuffle_runs=1)
        self._runs.add(run)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._lanes is None:
            # As many threads for messages as the worker has for tasks.
            codec = Lane("codec", self._worker.state.nthreads, self.ledger)
            self._lanes = ShuffleLanes(codec, Lane("spill", 1, self.ledger))
            self._pages.acquire()
        self._row_numbers.install()

    def end_run(self, run: ExchangeRun, report: dict[str, Any]) -> None:
        """Unregister a run that ended. Runs on the event loop.

        `IDLE_S` after the last run, idle memory is released.
        """
        self._runs.discard(run)
        self.run_reports.ended(report)
        if not self._runs:
            if self.is_attached:
                self._idle_timer = event_loop(self._worker).call_later(IDLE_S, self.cool_down)
            else:
                self.cool_down()
                # Links that existed before the runtime was detached are closed already.
                self._closing_links = asyncio.create_task(self.links.disconnect())

    def attach(self) -> None:
        """Start a new count: the runtime is switched on. Runs on the event loop."""
        self.is_attached = True
        self.groups.open()
        self._counted_before = self.counters.snapshot()
        self.run_reports.clear()

    def detach(self) -> None:
        """Release what is kept for later runs: the runtime is detached. Runs on the event loop."""
        self.is_attached = False
        self._to_release.clear()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.cool_down()

    def cool_down(self) -> None:
        """Release pooled memory and idle threads, unless there are runs."""
        self._idle_timer = None
        if self._lanes is not None and not self._runs:
            for lane in self._lanes:
                lane.close()
            self._lanes = None
            self.pool.trim()
            self.links.cool_down()
            self._pages.release()
            self._row_numbers.uninstall()

    def release_with(self, key: Any, store: ShardStore, slot: int) -> None:
        """Release a partition's shards once the result of task `key` is in memory.

        If the runtime is off here, nothing reports that the result is in memory. The shards are
        then released at the end of the run.
        """
        if self.is_attached:
            self._to_release.setdefault(key, []).append((store, slot))

    def task_left(self, key: Any, state: str) -> None:
        """Handle a task's transition: its result is in memory, or will not come."""
        read = self._to_release.pop(key, ())
        if state == "memory":
            for store, slot in read:
                store.release(slot, key)

    def _overlap(self) -> dict[str, Any]:
        """Return the time of recent work in each lane, and how much of it overlapped."""
        entries = self.ledger.entries()
        found = overlap(entries)
        return {
            "entries": len(entries),
            "seconds": found.parts_s,
            "measured_s": found.measured_s,
            "efficiency": found.efficiency,
        }

    async def close(self) -> None:
        """Close the runtime with its worker. distributed calls this for its extensions.

        This ignores a cancellation, because the rest of the worker's close waits for it. It never
        raises, because an error would stop the worker's close half-way.
        """
        links = self.links
        for work in (self.final_close, self._links_closed, links.disconnect, links.leave_peers):
            try:
                if work is not None and not await to_its_end(work):
                    logger.warning(
                        "%s: the runtime did not close in time; the worker closes without it",
                        self._worker.name,
                    )
            except Exception:
                logger.exception("%s: the runtime failed to close", self._worker.name)
        self.links.close()

    async def _links_closed(self) -> None:
        if self._closing_links is not None:
            await asyncio.wait({self._closing_links})

    def counted(self) -> dict[str, int]:
        """Return the counters since the runtime was switched on."""
        return since(self._counted_before, self.counters.snapshot())

    def heartbeat_data(self) -> dict[str, Any]:
        """Return the counters, and the runs that ended lately. Runs on the event loop."""
        return {"counters": self.counted(), "runs": self.run_reports.for_heartbeat()}

    def final_counters(self) -> dict[str, Any]:
        """Return the counters, and all runs known here. Runs on the event loop."""
        runs, still_open = self.run_reports.past(), self.reports_of_open_runs()
        return {"counters": self.counted(), "runs": runs, "open_runs": still_open}

    def reports_of_open_runs(self, most: int | None = None) -> list[dict[str, Any]]:
        """Return the reports of runs that have not ended here, the newest first."""
        newest = sorted(self._runs, key=lambda run: -run.run_id)
        return [run.report() for run in newest[:most]]

    def codec_decisions(self) -> list[CodecDecision]:
        """Return all valid decisions on codecs with their numbers."""
        return [one for chooser in self._choosers.values() for one in chooser.explain()]

    def report(self, most: int) -> dict[str, Any]:
        """Return the state of the runtime here, with at most `most` entries of each kind."""
        return {
            "version": dask_gpurt.__version__,
            "counters": self.counted(),
            "lanes": self._overlap(),
            **limited(self.links.report(), self.codec_decisions(), most),
            "lacks": self.links.lacks(),
            "open_files": open_files()[0],
            "runs": self.run_reports.unsure()[-most:],
            "open_runs": self.reports_of_open_runs(most),
        }


def runtime_of(worker: Worker) -> WorkerRuntime:
    """Return the runtime of a worker, creating it on first use.

    The worker holds it. A table in this module would keep both alive forever, even with weak keys,
    because the runtime refers to its worker.
    """
    runtime: WorkerRuntime | None = worker.extensions.get(NAME)
    if runtime is None:
        runtime = worker.extensions[NAME] = WorkerRuntime(worker)
    return runtime

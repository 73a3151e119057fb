"""Recorder of the runtime's counters while a script runs.

This module is a client preload that `dask_gpurt.command.run` lists for one process. Every client of
the process is read at its start, about every half second, and once more before it or its cluster
closes. The readings in between ask no worker: the scheduler knows counters from heartbeats.
Other processes, such as workers that inherit the list, have no recorder, and nothing happens there.

It reads `dask_gpurt.status`; `dask_gpurt.command.run_report` formats the result.
`dask_gpurt.command.live` uses its records for the programs that ask for progress themselves.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dask.config

from dask_gpurt import config, metrics
from dask_gpurt.metrics import SPENT

if TYPE_CHECKING:
    from distributed import Client

PRELOAD = "dask_gpurt.command.observe"

#: Least interval between readings of a cluster while the script runs. A scheduler with many workers
#: asks for longer ones, up to a limit.
INTERVAL_S = 0.5
MAX_INTERVAL_S = 30.0
#: Most shuffles of a cluster that are kept; the newest win.
MAX_SHUFFLES = 1_000
#: Longest wait for one reading. It exceeds the scheduler's wait for stuck workers, so that one
#: stuck worker does not hide the counts of the others. A late reading is dropped.
READ_TIMEOUT_S = 8.0


@dataclass
class ClusterRecord:
    """Counts of one cluster since its start."""

    address: str
    is_active: bool = False
    reason: str | None = None
    #: Keyed by activation, because each activation counts from 0. The runtime may be switched off
    #: and on again, and a new cluster may reuse an address.
    runs_of: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    fallbacks_of: defaultdict[str, Counter[tuple[str, str]]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    not_ready: dict[str, str] = field(default_factory=dict)
    #: By activation too, summed over all workers, including workers that left.
    totals_of: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    spent_of: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    #: Summaries of shuffles by id and run, the newest at the end, and loads of workers by address.
    shuffles: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    loads: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Most bytes that the process of each worker ever took, by address.
    peaks: dict[str, int] = field(default_factory=dict)
    #: Most threads that workers had in one reading.
    n_threads: int = 0
    #: Every worker that ever reported.
    workers: set[str] = field(default_factory=set)
    tasks_done: int = 0
    tasks_total: int = 0

    def absorb(self, status: dict[str, Any]) -> None:
        """Merge a reading. Counters may come in any order; `reason` and loads are the last ones."""
        self.is_active = self.is_active or status["active"]
        self.reason = status.get("reason")
        activation = status.get("activation") or ""
        self.runs_of[activation] |= Counter(status["runs"])
        self.fallbacks_of[activation] |= Counter(
            {(one["what"], one["why"]): one["count"] for one in status["fallbacks"]}
        )
        self.not_ready.update(status.get("not_ready", {}))
        counted = {name: status["totals"].get(name, 0) for name in metrics.MEANING}
        self.totals_of[activation] |= Counter(counted)
        self.workers |= set(status["ready"])
        if "spent" in status:
            self._absorb_figures(status, activation)

    def _absorb_figures(self, status: dict[str, Any], activation: str) -> None:
        self.spent_of[activation] |= Counter(status["spent"])
        for one in status["shuffles"]:
            key = one["id"], one["run"]
            if self.shuffles.get(key, one)["nbytes"] <= one["nbytes"]:
                self.shuffles[key] = one
        while len(self.shuffles) > MAX_SHUFFLES:
            del self.shuffles[next(iter(self.shuffles))]
        for worker, report in status["workers"].items():
            if report:
                self.loads[worker] = report["load"]
        present = (report["load"]["threads"] for report in status["workers"].values() if report)
        self.n_threads = max(self.n_threads, sum(present))

    @property
    def runs(self) -> Counter[str]:
        return sum(self.runs_of.values(), Counter())

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        return sum(self.fallbacks_of.values(), Counter())

    @property
    def totals(self) -> Counter[str]:
        return sum(self.totals_of.values(), Counter())

    @property
    def spent(self) -> Counter[str]:
        return sum(self.spent_of.values(), Counter())


@dataclass(frozen=True)
class CounterSnapshot:
    """Sum over all clusters, since the script's first use of each."""

    totals: dict[str, int]
    runs: dict[str, int]
    fallbacks: list[dict[str, Any]]
    clusters: list[dict[str, Any]]
    not_ready: dict[str, str]
    tasks_done: int
    tasks_total: int
    #: What workers spent (`SPENT`), their loads, and summaries of shuffles.
    spent: dict[str, float] = field(default_factory=dict)
    loads: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Most threads that workers had at one time.
    n_threads: int = 0
    shuffles: list[dict[str, Any]] = field(default_factory=list)


class Recorder:
    """Reads every cluster that this process has a client of.

    Parameters
    ----------
    on_first
        Called once, when the first client connects.
    with_tasks
        Whether to count tasks too, for progress.
    with_stock
        Whether to ask what clusters spent on which the runtime is off.
    """

    #: Whether `closing_text` ends with a verdict.
    has_verdict = False
    #: Longest wait for the last reading of a client, from another thread than its loop's.
    last_timeout_s = 2 * READ_TIMEOUT_S

    def __init__(
        self, on_first: Callable[[], None], with_tasks: bool, with_stock: bool = False
    ) -> None:
        self._on_first = on_first
        self._with_tasks, self._with_stock = with_tasks, with_stock
        self._lock = threading.Lock()
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()
        self._polls: weakref.WeakKeyDictionary[Client, asyncio.Task[None]] = (
            weakref.WeakKeyDictionary()
        )
        self._records: dict[str, ClusterRecord] = {}
        self._before: dict[str, ClusterRecord] = {}

    async def begin(self, client: Client) -> None:
        """Start to read a client that has connected. Runs on its event loop."""
        address = scheduler_address(client)
        with self._lock:
            is_first = not self._records
            is_known = address in self._records
            self._records.setdefault(address, ClusterRecord(address))
            # Counts from before the script's first client do not belong to the script.
            before = self._before.setdefault(address, ClusterRecord(address))
            self._clients.add(client)
        await self.read(client, None if is_known else before)
        from dask_gpurt.plugins import activation

        activation.told_at_disable.add(self.absorb)
        self._polls[client] = asyncio.create_task(self._poll(weakref.ref(client)))
        if is_first:
            self._on_first()

    def absorb(self, address: str, status: dict[str, Any]) -> None:
        """Merge a status that somebody else has read."""
        with self._lock:
            if (record := self._records.get(address)) is not None:
                record.absorb(status)

    async def end(self, client: Client) -> None:
        """Read a client for the last time before it closes. Runs on its event loop."""
        if (poll := self._polls.pop(client, None)) is not None:
            poll.cancel()
        if client in self._clients:
            self.drop(client)
            await self.read_last(client)

    async def read_last(self, client: Client) -> None:
        """Read a client for the last time. Runs on its event loop."""
        await self.read(client)

    def closing_text(self) -> str:
        """Return what else is to be printed at the end of the script."""
        return ""

    def drop(self, client: Client) -> None:
        """Stop reading this client: its cluster closes, or has closed."""
        with self._lock:
            self._clients.discard(client)

    def forget(self) -> None:
        """Drop all clients in a forked process, where their event loops do not run."""
        self._lock = threading.Lock()
        self._clients = weakref.WeakSet()

    async def read(
        self, client: Client, before: ClusterRecord | None = None, *, ask_workers: bool = True
    ) -> float:
        """Read the status of a client's cluster; return for how many seconds to wait at least.

        Does nothing if the cluster does not answer. Without asking workers, counters are as of
        their last heartbeats.
        """
        try:
            # Imported here, because it loads all of distributed.
            from dask_gpurt.plugins.activation import read_status, scheduler_differs
            from dask_gpurt.plugins.dashboard.gathering import count_tasks
            from dask_gpurt.plugins.time_spent import peak_memory, stock_figures

            address = scheduler_address(client)
            async with asyncio.timeout(READ_TIMEOUT_S):
                status = await read_status(client, ask_workers=ask_workers)
                tasks, peaks = None, {}
                may_ask = ask_workers or self._with_tasks
                if may_ask and await scheduler_differs(client) is None:
                    if ask_workers:
                        peaks = await peak_memory(client)
                        if self._with_stock and not status["active"]:
                            status.update(await stock_figures(client))
                    if self._with_tasks:
                        tasks = await client.run_on_scheduler(  # type: ignore[no-untyped-call]
                            count_tasks
                        )
        except Exception:
            # Observation must never make a script fail.
            return INTERVAL_S
        with self._lock:
            record = self._records[address]
            for one in filter(None, (record, before)):
                one.absorb(status)
                one.peaks |= peaks
            if tasks is not None:
                record.tasks_done, record.tasks_total = tasks
        rest_s: float = status["rest_s"]
        return min(max(INTERVAL_S, rest_s), MAX_INTERVAL_S)

    async def _poll(self, find: weakref.ref[Client]) -> None:
        rest_s = INTERVAL_S
        while True:
            await asyncio.sleep(rest_s)
            client = find()
            if client is None or client not in self._clients:
                return
            rest_s = await self.read(client, ask_workers=False)
            del client

    def clients_of(self, cluster: Any) -> list[Client]:
        """Return the open clients of a cluster object."""
        with self._lock:
            clients = [client for client in self._clients if client.status == "running"]
        address = cluster.scheduler_address
        return [client for client in clients if scheduler_address(client) == address]

    def finish(self) -> None:
        """Read all clients that are still open."""
        with self._lock:
            clients = [client for client in self._clients if client.status == "running"]
        for client in clients:
            self.read_from_outside(client)
            # distributed closes it at the end of the process, when it can no longer be read.
            self.drop(client)

    def read_from_outside(self, client: Client) -> None:
        """Read a client for the last time, from a thread other than its event loop's."""
        # An asynchronous client whose loop has stopped, or runs in this thread, cannot be read.
        loop: Any = client.loop
        if client.asynchronous or loop is None or not loop.asyncio_loop.is_running():
            return
        try:
            client.sync(  # type: ignore[no-untyped-call]
                self.read_last, client, callback_timeout=self.last_timeout_s
            )
        except Exception:
            return

    def snapshot(self) -> CounterSnapshot:
        """Return the counts so far."""
        with self._lock:
            return summed(
                [(record, self._before[address]) for address, record in self._records.items()]
            )


def summed(pairs: Collection[tuple[ClusterRecord, ClusterRecord]]) -> CounterSnapshot:
    """Return the sum over clusters. Each has a record, and an earlier one that is subtracted."""
    runs: Counter[str] = Counter()
    fallbacks: Counter[tuple[str, str]] = Counter()
    not_ready: dict[str, str] = {}
    counters = []
    spent: Counter[str] = Counter()
    loads: dict[str, dict[str, Any]] = {}
    shuffles: list[dict[str, Any]] = []
    for record, before in pairs:
        spent += record.spent - before.spent
        shuffles += [one for key, one in record.shuffles.items() if key not in before.shuffles]
        for worker, load in record.loads.items():
            task_s = before.loads.get(worker, {"task_s": 0.0})["task_s"]
            peak_nbytes = record.peaks.get(worker, 0)
            # A process that once took more does not tell how much it takes now.
            is_new = peak_nbytes > before.peaks.get(worker, 0)
            loads[worker] = {
                **load,
                "task_s": load["task_s"] - task_s,
                "peak_nbytes": peak_nbytes if is_new else None,
            }
        runs += record.runs - before.runs
        fallbacks += record.fallbacks - before.fallbacks
        not_ready |= record.not_ready
        counters.append(record.totals - before.totals)
    return CounterSnapshot(
        totals=metrics.total(counters),
        runs={"gpurt": runs["gpurt"], "stock": runs["stock"]},
        fallbacks=[
            {"what": what, "why": why, "count": count} for (what, why), count in fallbacks.items()
        ],
        clusters=[
            {
                "scheduler": record.address,
                "active": record.is_active,
                "reason": None if record.is_active else record.reason,
                "workers": len(record.workers),
            }
            for record, _ in pairs
        ],
        not_ready=not_ready,
        tasks_done=sum(record.tasks_done for record, _ in pairs),
        tasks_total=sum(record.tasks_total for record, _ in pairs),
        spent={name: float(spent[name]) for name in SPENT},
        loads=loads,
        n_threads=sum(record.n_threads for record, _ in pairs),
        shuffles=shuffles,
    )


def scheduler_address(client: Client) -> str:
    """Return the address of the scheduler that a client is connected to."""
    scheduler: Any = client.scheduler
    return str(scheduler.address)


_recorder: Recorder | None = None


def install(recorder: Recorder) -> None:
    """Record every client of this process.

    The counters of a cluster are lost when the cluster closes, or when a client shuts it down,
    before any client closes. So these two methods of distributed are wrapped in this process.
    """
    from distributed import Client
    from distributed.deploy.cluster import Cluster

    global _recorder
    _recorder = recorder
    quiet_preloads()
    preload, argv = "distributed.client.preload", "distributed.client.preload-argv"
    names = config.preload_list("client")
    given = list(dask.config.get(argv, None) or [])
    # The arguments are one list for all preloads, or one list for each.
    if len(given) == len(names) and not any(isinstance(one, str) for one in given):
        given.append([])
    dask.config.set({preload: [*names, PRELOAD], argv: given})
    _read_before(Cluster, "close", recorder.clients_of)
    _read_before(Client, "shutdown", lambda client: [client])


def quiet_preloads() -> None:
    """Keep distributed from logging several lines about preloads at each client's start."""
    logger = logging.getLogger("distributed.preloading")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)


def _read_before(owner: Any, name: str, clients_of: Callable[[Any], list[Client]]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert _recorder is not None
        try:
            clients = clients_of(self)
        except Exception:
            clients = []
        if not getattr(self, "asynchronous", False):
            for client in clients:
                _recorder.read_from_outside(client)
                _recorder.drop(client)
            return method(self, *args, **kwargs)

        async def read_and_close() -> Any:
            for client in clients:
                await _recorder.read_last(client)
                _recorder.drop(client)
            return await method(self, *args, **kwargs)

        return read_and_close() if clients else method(self, *args, **kwargs)

    setattr(owner, name, wrapper)


async def dask_setup(client: Client) -> None:
    """Start to record a client. Dask calls this after a client has connected."""
    if _recorder is not None:
        await _recorder.begin(client)


async def dask_teardown(client: Client) -> None:
    """Finish recording a client. Dask calls this before a client closes."""
    if _recorder is not None:
        await _recorder.end(client)

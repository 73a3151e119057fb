"""The scheduler's side: who is ready, which data plane each new shuffle run gets, who places tasks.

The plugin is what activation registers; the scheduler then sends a bootstrap to every worker it
has or will have. A run is put on our data plane if every worker is ready for it and there is an
adapter for its kind of data. Otherwise stock Dask does that run, and why is kept and logged once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from distributed.diagnostics.plugin import SchedulerPlugin

import dask_gpurt
from dask_gpurt.config import Settings
from dask_gpurt.errors import ActivationError, StrictFallbackError
from dask_gpurt.memory.decisions.foresight import Pace
from dask_gpurt.plugins import bootstrap, request_checks
from dask_gpurt.plugins.patches import p2p, worker_memory
from dask_gpurt.plugins.patches.lost_values import LostValues
from dask_gpurt.plugins.patches.p2p_owners import OutputOwners
from dask_gpurt.plugins.patches.p2p_restart import Restarts
from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.shuffle.array_run import ArraySpec
from dask_gpurt.plugins.shuffle.frame_run import FrameSpec, frame_kind, obstacle
from dask_gpurt.plugins.topology.broadcast import Answers, ask
from dask_gpurt.plugins.topology.cluster_machines import Machines
from dask_gpurt.plugins.worker import NAME
from dask_gpurt.plugins.worker_counters import Counted, take

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dask_gpurt")

#: How long a new run waits for workers that are just joining to say that they are ready.
JOIN_TIMEOUT_S = 10.0
#: How long a worker may take to say what it has done, or where something is.
ANSWER_DEADLINE_S = 5.0
#: Share of the scheduler's time in which it may tell workers when their values are needed.
TELLING_SHARE = 0.1
#: Shuffles whose skew is remembered, for when they start over.
MAX_SKETCHES = 256

#: By scheduler: held while the runtime is switched on or off there, of which two at a time would
#: each take the other's for stock's.
_switching: WeakKeyDictionary[Scheduler, asyncio.Lock] = WeakKeyDictionary()


def _switching_of(scheduler: Scheduler) -> asyncio.Lock:
    return _switching.setdefault(scheduler, asyncio.Lock())


class GpurtScheduler(SchedulerPlugin):
    """Registered by activation, as idempotent; one a scheduler.

    Of those that are registered at the same time, the others leave it at the first.

    Parameters
    ----------
    settings
        Of the client, or of the scheduler's own configuration.
    version
        Of dask_gpurt where the settings come from.
    """

    name = NAME
    idempotent = True

    def __init__(self, settings: Settings, version: str) -> None:
        self.settings = settings
        self.version = version
        self._telling_workers: asyncio.Future[Any] | None = None

    async def start(self, scheduler: Scheduler) -> None:
        """Called by the scheduler.

        Raises
        ------
        ActivationError
            The client has another version. It leaves nothing here that would keep out others.
        ConfigError
            The description of the machines is wrong.
        """
        if self.version != dask_gpurt.__version__:
            raise ActivationError(
                f"the scheduler on {socket.gethostname()} has dask-gpurt "
                f"{dask_gpurt.__version__}, the client {self.version}; "
                f"run `pip install dask-gpurt=={self.version}` there"
            )
        async with _switching_of(scheduler):
            # The scheduler, too, leaves it at the first: it looks before it calls this, and after.
            if NAME not in scheduler.plugins:
                self._opened = asyncio.Event()
                try:
                    await self._start(scheduler)
                finally:
                    # Also where that failed: clients that come wait to be told what is on here.
                    self._opened.set()

    async def _start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        #: What is counted here is of this activation; there may have been others before.
        self.activation = uuid4().hex
        self.is_active = False
        self.inactive_reason: str | None = self._unusable()
        self.ready: set[str] = set()
        self.not_ready: dict[str, str] = {}
        self.runs: Counter[str] = Counter()
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self._sketches: OrderedDict[str, list[int]] = OrderedDict()
        self._pace = Pace(TELLING_SHARE)
        #: Is set, and another one takes its place, whenever a worker has reported or has left.
        self._reported = asyncio.Event()
        self.placement: Placement | None = None
        self.tally = Counted.at(scheduler)
        self.machines = Machines(scheduler, self.ready)
        scheduler.handlers["gpurt_status"] = self.status
        # For clients, which cannot ask what handlers there are.
        scheduler.log_event(bootstrap.EVENTS, {"answers": True})
        try:
            await self.machines.configure(self.settings.topology)
        except BaseException:
            del scheduler.handlers["gpurt_status"]
            scheduler.log_event(bootstrap.EVENTS, {"answers": False})
            raise
        if self.inactive_reason is not None:
            logger.warning("dask_gpurt is off: %s; stock Dask runs", self.inactive_reason)
            return
        self._place()
        self._handlers: dict[str, Callable[..., Any]] = {
            "gpurt_configure": self.configure,
            "gpurt_counted": self.counted,
            "gpurt_disable": self.disable,
            "gpurt_explain": self.explain,
            "gpurt_next_uses": self.next_uses,
            "gpurt_sketch": self.sketch,
            "gpurt_topology": self.topology,
            "gpurt_worker_ready": self.worker_ready,
        }
        scheduler.handlers.update(self._handlers)
        self._swap = p2p.SpecSwap(
            scheduler, self._choose, self._everyone_reported, self.ready.__contains__
        )
        self._restarts = Restarts(scheduler)
        self._lost_values = LostValues(scheduler)
        self._owners = OutputOwners(scheduler)
        self.is_active = True
        # Not only once workers know, as the scheduler would: some may come or leave until then.
        scheduler.add_plugin(self, name=NAME, idempotent=True)
        self._opened.set()
        telling = scheduler.register_worker_plugin(
            None, self._bootstrap(), name=NAME, idempotent=False
        )
        self._telling_workers = asyncio.ensure_future(telling)
        # A worker whose event loop is held up takes it in when it comes to; until then it is one
        # that is not ready, and nobody waits for it any longer than for others.
        self._telling_workers.add_done_callback(_worth_a_line)
        await asyncio.wait({self._telling_workers}, timeout=JOIN_TIMEOUT_S)

    def _unusable(self) -> str | None:
        return p2p.unsupported_reason() or p2p.lacks_shuffles(self.scheduler)

    async def configure(self, settings: dict[str, Any], version: str) -> str | None:
        """Handler: another client with the flag came; its settings hold for runs to come.

        And for workers to come, where they are about what a worker makes when it starts.

        Returns why not, if they cannot.

        Raises
        ------
        ConfigError
            A setting or the description of the machines is wrong; nothing has changed.
        ProtocolError
            The version is none.
        """
        if request_checks.name("version", version) != self.version:
            return (
                f"the cluster runs dask-gpurt {self.version}, this client has {version};"
                " install the same version"
            )
        new = Settings.from_plain(settings)
        await self.machines.configure(new.topology)
        if not self.is_active:
            return "another client switched the runtime off meanwhile"
        before, self.settings = self.settings, new
        if (new.placement, new.topology) != (before.placement, before.topology):
            self._place()
        if new.memory != before.memory:
            self.scheduler.worker_plugins[NAME] = self._bootstrap()
            if self.scheduler.workers:
                logger.warning(
                    "new gpurt.memory settings hold for workers that start from now on; the %d"
                    " that run keep theirs until they are restarted",
                    len(self.scheduler.workers),
                )
        return None

    def _bootstrap(self) -> bytes:
        """What makes a worker one of ours."""
        return bootstrap.pickled(p2p.TESTED, self.settings.to_plain())

    def _place(self) -> None:
        """Choose workers as the settings say, or leave that to stock."""
        self._leave_placing()
        if self.settings.placement.enabled:
            policy = self.settings.placement.policy
            if policy == "auto":
                policy = "data-aware" if self.machines.is_described else "stock"
            self.placement = Placement(self.scheduler, policy, self.machines.topology)
            if policy == "data-aware":
                self.machines.inform(self.placement)
        self.machines.workers_changed()

    def _leave_placing(self) -> None:
        self.machines.inform(None)
        if self.placement is not None:
            self.placement.close()
            self.placement = None

    async def topology(self, probe: bool = False) -> dict[str, Any]:
        """Handler: the machines that workers report, and on demand what is between them."""
        return await self.machines.found(request_checks.flag("probe", probe))

    async def explain(self, key: Any) -> dict[str, Any]:
        """Handler: why a task ran where it did, and where its output is on those who have it."""
        request_checks.key(key)
        if self.placement is None:
            reason = "gpurt.placement.enabled is false"
            said: dict[str, Any] = {"known": False, "key": str(key), "reason": reason}
        else:
            said = self.placement.explain(key)
        where = await self._where(key)
        return {**said, "memory": where.said, "silent": where.silent}

    async def _where(self, key: Any) -> Answers:
        task = self.scheduler.tasks.get(key)
        holders = {ws.address for ws in (task.who_has or ())} if task is not None else set()
        answers = await ask(
            self.scheduler,
            {"op": "gpurt_explain", "key": key},
            sorted(holders & self.ready),
            ANSWER_DEADLINE_S,
        )
        return answers._replace(said=_understood(answers))

    async def disable(self) -> None:
        """Handler: stock behaviour from here on. Runs that are under way end on our data plane."""
        async with _switching_of(self.scheduler):
            if self.is_active:
                await self._stop()

    async def _stop(self) -> None:
        # Whoever switches it on again has another one, which waits for the end of this.
        if self.scheduler.plugins.get(NAME) is self:
            self.scheduler.remove_plugin(NAME)
        self.is_active = False
        self.inactive_reason = "disabled by a client"
        self._swap.uninstall()
        self._restarts.uninstall()
        self._owners.uninstall()
        self._leave_placing()
        # Shuffles that are about to begin need not wait for workers that are joining.
        self._say_who_reported()
        # `gpurt_status` stays: it can still say that, and why, the runtime is off. Others are asked
        # until workers have given back the last of their values, have said what they counted, and
        # those that are joining just now have said so.
        lasting = ("gpurt_counted", "gpurt_next_uses", "gpurt_worker_ready")
        for_workers = {name: self._handlers.pop(name) for name in lasting}
        self._take_off(self._handlers)
        # After that nobody has links probed again.
        await self.machines.close()
        try:
            # A worker that has yet to take the plugin in is not told to remove it before that.
            if self._telling_workers is not None:
                await asyncio.wait({self._telling_workers})
            await self.scheduler.unregister_worker_plugin(None, name=NAME)
        finally:
            self._take_off(for_workers)
            # Workers may lose values for as long as they give them back.
            self._lost_values.uninstall()

    def _take_off(self, handlers: dict[str, Callable[..., Any]]) -> None:
        registered = self.scheduler.handlers
        for name, handler in handlers.items():
            if registered.get(name) == handler:
                del registered[name]

    async def close(self) -> None:
        if self._telling_workers is not None:
            self._telling_workers.cancel()
        await self.machines.close()

    # ------------------------------------------------------------------ workers

    async def worker_ready(self, worker: str, problem: str | None) -> None:
        """Handler: the bootstrap ran on a worker."""
        request_checks.name("worker", worker)
        request_checks.problem(problem)
        if not self.is_active or worker not in self.scheduler.workers:
            # It left meanwhile, and nobody would take it off again.
            return
        self.not_ready.pop(worker, None)
        if problem is None:
            self.ready.add(worker)
            self.tally.begin(self.scheduler.workers[worker].server_id, worker)
        else:
            self.not_ready[worker] = problem
            logger.error("%s", problem)
        if not self._silent():
            self.machines.workers_changed()
        self._say_who_reported()

    async def counted(self, worker: str, said: Any) -> None:
        """Handler: the last word of a worker, by its id, that closes or lets go of the runtime."""
        take(self.tally, worker, said)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        if self.placement is not None:
            self.placement.add_worker(scheduler.workers[worker])

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        # Not a coroutine: the scheduler would wait for it, and log that it was cancelled as it
        # closes.
        if self.placement is not None:
            self.placement.remove_worker(worker)
        self.machines.remove_worker(worker)
        self.tally.leave(worker)
        self.ready.discard(worker)
        self.not_ready.pop(worker, None)
        # It may have been the last one that had not reported.
        self._say_who_reported()

    def _say_who_reported(self) -> None:
        self._reported.set()
        self._reported = asyncio.Event()

    def _silent(self) -> set[str]:
        return set(self.scheduler.workers) - self.ready - set(self.not_ready)

    async def _everyone_reported(self) -> None:
        def known() -> bool:
            return not self.is_active or not self._silent()

        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                while not known():
                    await self._reported.wait()
        except TimeoutError:
            for worker in sorted(self._silent()):
                self.not_ready[worker] = f"no word from worker {worker} in {JOIN_TIMEOUT_S:g} s"
                logger.warning("%s", self.not_ready[worker])

    # ------------------------------------------------------------------ runs

    def _choose(self, stock: p2p.ShuffleSpec[Any]) -> p2p.ShuffleSpec[Any]:
        """Spec to run: ours where everything is there for it, or the stock one."""
        if not self.is_active:
            # Switched off while it waited for workers that were joining.
            return stock
        what, why = self._obstacle(stock)
        if why is None:
            self.runs["gpurt"] += 1
            order = p2p.read_order(self.scheduler, stock.id)
            if isinstance(stock, p2p.ArrayRechunkSpec):
                return ArraySpec.replacing(stock, self.settings.shuffle, order)
            assert isinstance(stock, p2p.DataFrameShuffleSpec)
            rows = self._sketches.get(stock.id)
            return FrameSpec.replacing(
                stock, frame_kind(stock.meta), self.settings.shuffle, rows, order
            )
        if self.settings.strict:
            raise StrictFallbackError(
                f"{what} would run on stock Dask: {why}. Set gpurt.strict to false to allow that."
            )
        if not self.fallbacks[what, why]:
            logger.warning("%s runs on stock Dask: %s", what, why)
        self.fallbacks[what, why] += 1
        self.runs["stock"] += 1
        return stock

    async def sketch(self, shuffle_id: str, rows: list[int] | None = None) -> Any:
        """Handler: how full output partitions are in an input partition that is at hand.

        Asked without `rows`, answers with the label of the column that has their numbers, or None
        if that is not wanted.
        """
        request_checks.name("shuffle_id", shuffle_id)
        if shuffle_id in p2p.active_shuffles(self.scheduler) or len(self.scheduler.workers) < 2:
            return None
        spec = p2p.stock_spec(self.scheduler, shuffle_id)
        if not isinstance(spec, p2p.DataFrameShuffleSpec):
            return None
        if rows is None:
            return spec.column
        self._sketches[shuffle_id] = request_checks.rows(rows, spec.npartitions)
        while len(self._sketches) > MAX_SKETCHES:
            self._sketches.popitem(last=False)
        return None

    async def next_uses(self, keys: list[Any], worker: str) -> tuple[list[Any], float]:
        """Handler: when values are needed next, for a worker that runs short of memory.

        And for how many seconds it should not ask again: all may run short of it at a time.
        """
        request_checks.keys(keys)
        request_checks.name("worker", worker)
        began = monotonic()
        uses = worker_memory.next_uses(self.scheduler, keys, worker)
        now = monotonic()
        return uses, self._pace.rest_s(now - began, now)

    def _obstacle(self, stock: p2p.ShuffleSpec[Any]) -> tuple[str, str | None]:
        if isinstance(stock, p2p.ArrayRechunkSpec):
            what = "array rechunk"
        elif isinstance(stock, p2p.DataFrameShuffleSpec):
            what = f"shuffle of {frame_kind(stock.meta)}"
            if (why := obstacle(stock.meta)) is not None:
                return what, why
        else:
            return f"shuffle of {type(stock).__name__}", "this kind of shuffle is not known"
        if self.not_ready:
            return what, next(iter(self.not_ready.values()))
        if silent := self._silent():
            return what, f"no word from worker {min(silent)}"
        return what, None

    async def status(self, reports: bool = True) -> dict[str, Any]:
        """Handler: what is active here, what fell back and why, and each worker's report."""
        request_checks.flag("reports", reports)
        # A client that comes while this one is being switched on must not do it again.
        await self._opened.wait()
        asked = sorted(self.ready) if reports and self.is_active else []
        answers = await ask(self.scheduler, {"op": "gpurt_report"}, asked, ANSWER_DEADLINE_S)
        understood = _understood(answers)
        for worker, report in understood.items():
            if (known := self.scheduler.workers.get(worker)) is not None:
                take(self.tally, known.server_id, report)
        workers = {**dict.fromkeys(self.scheduler.workers), **understood}
        return {
            "active": self.is_active,
            "activation": self.activation,
            "reason": self.inactive_reason,
            "unusable": self._unusable(),
            "version": dask_gpurt.__version__,
            "host": socket.gethostname(),
            "strict": self.settings.strict,
            "runs": {"gpurt": self.runs["gpurt"], "stock": self.runs["stock"]},
            "fallbacks": [
                {"what": what, "why": why, "count": count}
                for (what, why), count in self.fallbacks.items()
            ],
            "placement": None if self.placement is None else self.placement.summary(),
            "topology": self.machines.summary(),
            "totals": self.tally.totals(),
            "departed": self.tally.departed(),
            "kept_runs": self.tally.runs_without(understood),
            "workers": workers,
            "not_ready": dict(self.not_ready),
            "silent": answers.silent,
        }


def _understood(answers: Answers) -> dict[str, Any]:
    """Answers of those that could be asked."""
    return {one: answer for one, answer in answers.said.items() if isinstance(answer, dict)}


def _worth_a_line(telling: asyncio.Future[Any]) -> None:
    """A worker that left as it was told is none that has to have the runtime."""
    if not telling.cancelled() and (error := telling.exception()) is not None:
        logger.warning("not every worker could be told of the runtime: %s", error)

"""The scheduler's side of the runtime: its life, its handlers, and its status.

Activation registers this plugin. The scheduler then sends a bootstrap plugin to every present and
future worker. `readiness` collects their reports, `data_plane_choice` decides about shuffle runs,
and `plugins.placement` about tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from distributed.diagnostics.plugin import SchedulerPlugin

import dask_gpurt
from dask_gpurt.config import Settings
from dask_gpurt.errors import ActivationError
from dask_gpurt.memory.decisions.foresight import Pace
from dask_gpurt.plugins import bootstrap, request_checks
from dask_gpurt.plugins.ask_workers import ask
from dask_gpurt.plugins.bootstrap import NAME
from dask_gpurt.plugins.collectives.cluster_collectives import NO_COLLECTIVES, ClusterCollectives
from dask_gpurt.plugins.dashboard.gathering import Gatherer
from dask_gpurt.plugins.dashboard.page import DashboardPage
from dask_gpurt.plugins.patches import connections, p2p, worker_memory
from dask_gpurt.plugins.patches.graphs.graph_swap import holding_workers
from dask_gpurt.plugins.patches.p2p_owners import OutputOwners
from dask_gpurt.plugins.patches.p2p_restart import Restarts
from dask_gpurt.plugins.patches.values.lost_values import LostValues
from dask_gpurt.plugins.patches.worker_messages import remove_worker_plugin
from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.placement.roots.fewer_tasks import FewerTasks
from dask_gpurt.plugins.scheduler import readiness
from dask_gpurt.plugins.scheduler.data_plane_choice import DataPlaneChoice
from dask_gpurt.plugins.scheduler.readiness import Readiness
from dask_gpurt.plugins.topology.cluster_machines import Machines
from dask_gpurt.plugins.weak_handlers import (
    Handler,
    remove_handlers,
    weak_handler,
    weak_handlers,
)
from dask_gpurt.plugins.worker_counters import CounterReceiver, counted_reports, spent_since, take
from dask_gpurt.plugins.worker_report import most_entries

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dask_gpurt")

#: Longest wait for a worker's report, or for its answer to `explain`.
ANSWER_DEADLINE_S = 5.0
#: Share of the scheduler's time for telling workers when their values are needed next.
NEXT_USES_SHARE = 0.1
#: Share of the scheduler's time that programs may take to poll its status.
POLLS_SHARE = 0.02
#: Handlers that stay until all workers have detached: until then, workers may report, send their
#: final counters, and ask when values are needed next.
_FOR_WORKERS = {"gpurt_counted", "gpurt_next_uses", "gpurt_worker_ready"}
#: A lock for each scheduler, held while the runtime is switched on or off. Without it, a second
#: activation would save the patches of the first one as stock Dask's functions.
_activation_locks: WeakKeyDictionary[Scheduler, asyncio.Lock] = WeakKeyDictionary()


def activation_lock(scheduler: Scheduler) -> asyncio.Lock:
    """Return the lock that serialises activations on a scheduler."""
    return _activation_locks.setdefault(scheduler, asyncio.Lock())


class GpurtScheduler(SchedulerPlugin):
    """The scheduler plugin that activation registers. Idempotent, one per scheduler.

    If several are registered at once, the first one stays.

    Parameters
    ----------
    settings
        Settings of the client, or of the scheduler's own configuration.
    version
        Version of dask_gpurt in the process that the settings come from.
    """

    name = NAME
    idempotent = True

    def __init__(self, settings: Settings, version: str) -> None:
        self.settings, self.version = settings, version
        self._registering_workers: asyncio.Future[Any] | None = None

    async def start(self, scheduler: Scheduler) -> None:
        """Start the runtime. distributed calls this.

        Raises
        ------
        ActivationError
            The client has another version, or the scheduler keeps no events. No state stays behind
            that would block other clients.
        ConfigError
            The description of the machines is invalid.
        """
        if self.version != dask_gpurt.__version__:
            raise ActivationError(
                f"the scheduler on {socket.gethostname()} has dask-gpurt "
                f"{dask_gpurt.__version__}, the client {self.version}; "
                f"run `pip install dask-gpurt=={self.version}` there"
            )
        async with activation_lock(scheduler):
            # The scheduler also drops a second plugin: it checks before and after this call.
            if NAME not in scheduler.plugins:
                self._opened = asyncio.Event()
                try:
                    await self._start(scheduler)
                finally:
                    # Set it after a failure too: `status` waits for it before it answers.
                    self._opened.set()

    async def _start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        #: Identifies this activation. All counts here begin with it.
        self.activation = uuid4().hex
        self.is_active = False
        self.inactive_reason: str | None = self._why_unusable()
        self.readiness = Readiness(scheduler)
        self.data_plane_choice = DataPlaneChoice(scheduler, self.readiness)
        self._pace, self._polls = Pace(NEXT_USES_SHARE), Pace(POLLS_SHARE)
        self.placement: Placement | None = None
        self.collectives: ClusterCollectives | None = None
        self._handlers: dict[str, Handler] = {}
        self._hooks, self._hooks_for_workers = contextlib.ExitStack(), contextlib.ExitStack()
        self.tally = CounterReceiver.at(scheduler)
        self.machines = Machines(scheduler, self.readiness.ready)
        await self._answer_clients()
        if self.inactive_reason is not None:
            logger.warning("dask_gpurt is off: %s; stock Dask runs", self.inactive_reason)
            return
        try:
            self._start_placement()
            self._install()
        except BaseException:
            self._uninstall()
            self._remove_for_workers()
            self._answer_no_more()
            raise
        self.is_active = True
        # Register the plugin now. distributed would do so only after this method, and the plugin
        # would miss workers that join or leave until then.
        scheduler.add_plugin(self, name=NAME, idempotent=True)
        self._opened.set()
        plugin = self._bootstrap()
        telling = scheduler.register_worker_plugin(None, plugin, name=NAME, idempotent=False)
        self._registering_workers = asyncio.ensure_future(telling)
        # A worker whose event loop is blocked gets the plugin later. Until then it is not ready.
        self._registering_workers.add_done_callback(_log_failure)
        await asyncio.wait({self._registering_workers}, timeout=readiness.JOIN_TIMEOUT_S)

    async def _answer_clients(self) -> None:
        """Let clients find this plugin, and read the description of the machines.

        Raises
        ------
        ActivationError, ConfigError
            As from `start`. The plugin does not answer.
        """
        scheduler = self.scheduler
        # The extension keeps this plugin, which answers after `disable` too.
        scheduler.extensions[NAME] = self
        scheduler.handlers["gpurt_status"] = weak_handler(self.status)
        # Clients cannot list handlers, so an event tells them.
        scheduler.log_event(bootstrap.EVENTS, {"answers": True})
        try:
            if not scheduler.get_events(bootstrap.EVENTS):
                raise ActivationError(
                    "the scheduler keeps no events, so clients cannot find the runtime; set"
                    " distributed.admin.low-level-log-length to 1 or more where it starts"
                )
            await self.machines.configure(self.settings.topology)
        except BaseException:
            self._answer_no_more()
            raise

    def _answer_no_more(self) -> None:
        del self.scheduler.handlers["gpurt_status"]
        self.scheduler.log_event(bootstrap.EVENTS, {"answers": False})

    def _install(self) -> None:
        """Install the handlers, patches and the page of this scheduler, which `_stop` removes."""
        scheduler, ready, hooks = self.scheduler, self.readiness.ready, self._hooks
        gatherer = Gatherer(scheduler, self.status, ready, self.tally)
        methods: list[Handler] = [self.configure, self.counted, self.disable, self.explain]
        methods += [self.next_uses, self.data_plane_choice.sketch, self.topology, self.worker_ready]
        self._handlers = weak_handlers(*methods, prefix="gpurt_")
        self._handlers["gpurt_overview"] = weak_handler(gatherer.fresh)
        scheduler.handlers.update(self._handlers)
        self._hooks_for_workers.callback(LostValues(scheduler).uninstall)
        swap = p2p.SpecSwap(scheduler, self._choose, self.readiness.wait, ready.__contains__)
        hooks.callback(swap.uninstall)
        self._restarts = Restarts(scheduler)
        hooks.callback(self._restarts.uninstall)
        hooks.callback(OutputOwners(scheduler).uninstall)
        hooks.callback(FewerTasks(scheduler).uninstall)
        if self.settings.collectives.enabled:
            told = ready, self.readiness.wait, lambda: self.settings
            self.collectives = ClusterCollectives(scheduler, *told)
            hooks.callback(self.collectives.uninstall)
        self.gpurt_page = DashboardPage(scheduler, gatherer)
        hooks.callback(self.gpurt_page.uninstall)

    def _uninstall(self) -> None:
        """Remove all that workers can do without, but for `gpurt_status`."""
        self._hooks.close()
        self._stop_placement()
        self.readiness.close()
        for_clients = self._handlers.keys() - _FOR_WORKERS
        remove_handlers(
            self.scheduler.handlers, {name: self._handlers[name] for name in for_clients}
        )

    def _remove_for_workers(self) -> None:
        """Remove the rest, when all workers have detached."""
        remove_handlers(self.scheduler.handlers, self._handlers)
        if self.collectives is not None:
            self.collectives.close()
        # Workers may lose values until they have handed back all of them.
        self._hooks_for_workers.close()
        connections.forget_handlers()

    def _why_unusable(self) -> str | None:
        return p2p.unsupported_reason() or p2p.lacks_shuffles(self.scheduler)

    async def configure(self, settings: dict[str, Any], version: str) -> str | None:
        """Handler: apply the settings of another client that enables the runtime to future runs.

        New `gpurt.memory` settings apply only to workers that start later.

        Returns
        -------
        str or None
            The reason why the settings were not applied; None if they were.

        Raises
        ------
        ConfigError
            A setting or the description of the machines is invalid. Nothing has changed.
        ProtocolError
            The version is not a version string.
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
        before = self.settings
        if new.collectives.enabled != (is_on := before.collectives.enabled):
            # The parts on workers and here have to agree, and workers keep theirs.
            new = replace(new, collectives=replace(new.collectives, enabled=is_on))
            logger.warning(
                "gpurt.collectives.enabled stays %s; to change it, call"
                " dask_gpurt.disable(client), then dask_gpurt.enable(client)",
                is_on,
            )
        self.settings = new
        if (new.placement, new.topology) != (before.placement, before.topology):
            self._start_placement()
        if new != before:
            self.scheduler.worker_plugins[NAME] = self._bootstrap()
            if new.memory != before.memory and self.scheduler.workers:
                logger.warning(
                    "new gpurt.memory settings apply to workers that start from now on; the %d"
                    " that run keep theirs until they restart",
                    len(self.scheduler.workers),
                )
        return None

    def _bootstrap(self) -> bytes:
        """Return the pickled plugin that attaches the runtime to workers."""
        return bootstrap.pickled(p2p.TESTED, self.settings.to_plain())

    def _start_placement(self) -> None:
        """Start placement as the settings say, or leave it to stock Dask."""
        self._stop_placement()
        if self.settings.placement.enabled:
            policy = self.settings.placement.policy
            if policy == "auto" and not self.machines.is_discovered:
                policy = "data-aware" if self.machines.is_described else "stock"
            self.placement = Placement(self.scheduler, policy, self.machines.topology)
            if policy != "stock":
                self.machines.set_learner(self.placement)
        self.machines.workers_changed()

    def _stop_placement(self) -> None:
        self.machines.set_learner(None)
        if self.placement is not None:
            self.placement.close()
            self.placement = None

    async def topology(self, probe: bool = False) -> dict[str, Any]:
        """Handler: return the known machines and links; with `probe`, measure links first."""
        return await self.machines.describe(request_checks.flag("probe", probe))

    async def explain(self, key: Any) -> dict[str, Any]:
        """Handler: return why a task ran on its worker, and how its holders store its output."""
        request_checks.key(key)
        if self.placement is None:
            reason = "gpurt.placement.enabled is false"
            said: dict[str, Any] = {"known": False, "key": str(key), "reason": reason}
        else:
            said = self.placement.explain(key)
        said["broadcast"] = self.collectives.explain(key) if self.collectives is not None else None
        asked = sorted(holding_workers(self.scheduler.tasks.get(key)) & self.readiness.ready)
        answers = await ask(self.scheduler, "gpurt_explain", asked, ANSWER_DEADLINE_S, key=key)
        return {**said, "memory": answers.reports(), "silent": answers.silent}

    async def disable(self) -> None:
        """Handler: restore stock behaviour. Runs in progress finish on our data plane."""
        async with activation_lock(self.scheduler):
            if self.is_active:
                await self._stop()

    async def _stop(self) -> None:
        # A new activation uses a new plugin, which waits for the end of this method.
        if self.scheduler.plugins.get(NAME) is self:
            self.scheduler.remove_plugin(NAME)
        self.is_active = False
        self.inactive_reason = "disabled by a client"
        # `gpurt_status` stays: it tells clients that the runtime is off, and why.
        self._uninstall()
        # The handlers are gone, so nothing can start another probe of links.
        await self.machines.end()
        try:
            # Wait first. Otherwise a worker could be told to remove the plugin before it has it.
            if self._registering_workers is not None:
                await asyncio.wait({self._registering_workers})
            await remove_worker_plugin(self.scheduler, NAME)
        finally:
            self._remove_for_workers()

    async def close(self) -> None:
        if self._registering_workers is not None:
            self._registering_workers.cancel()
        await self.machines.close()

    # ------------------------------------------------------------------ workers

    async def worker_ready(self, worker: str, problem: str | None) -> None:
        """Handler: record that a worker is ready, or the problem that it reports."""
        request_checks.name("worker", worker)
        request_checks.problem(problem)
        if worker not in self.scheduler.workers:
            # A worker may call itself by the name of its host.
            with contextlib.suppress(OSError, ValueError, TypeError):
                worker = self.scheduler.coerce_address(worker)
        if not self.is_active or worker not in self.scheduler.workers:
            return  # the runtime is off, or the worker left: nothing would remove an entry
        self.readiness.report(worker, problem)
        if problem is None:
            self.tally.begin(self.scheduler.workers[worker].server_id, worker)
        if not self.readiness.unreported():
            self.machines.workers_changed()

    async def counted(self, worker: str, said: Any) -> None:
        """Handler: record the final counters of a worker (by its id) that closes or detaches."""
        take(self.tally, worker, said)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        if self.placement is not None:
            self.placement.add_worker(scheduler.workers[worker])

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        # Not a coroutine: a closing scheduler would wait for it, and log that it was cancelled.
        if self.placement is not None:
            self.placement.remove_worker(worker)
        self.machines.remove_worker(worker)
        self.tally.leave(worker)
        self.readiness.remove(worker)

    # ------------------------------------------------------------------ runs

    def _choose(self, stock: p2p.ShuffleSpec[Any]) -> p2p.ShuffleSpec[Any]:
        keeps_shards = self._restarts.was_read_again(stock.id)
        return self.data_plane_choice.choose(stock, self.settings, keeps_shards=keeps_shards)

    async def next_uses(self, keys: list[Any], worker: str) -> tuple[list[Any], float]:
        """Handler: return when values are needed next, for a worker that is short of memory.

        Also return how many seconds to wait before asking again: all may be short at once.
        """
        request_checks.keys(keys)
        request_checks.name("worker", worker)
        began = monotonic()
        uses = worker_memory.next_uses(self.scheduler, keys, worker)
        now = monotonic()
        return uses, self._pace.rest_s(now - began, now)

    async def status(self, reports: bool = True) -> dict[str, Any]:
        """Handler: return activity, fallbacks with reasons, and each worker's report.

        Without reports, counters are as of the last heartbeats. Ask again after `rest_s` seconds.
        """
        request_checks.flag("reports", reports)
        # A client that connects during activation must not activate again.
        await self._opened.wait()
        asked = sorted(self.readiness.ready) if reports and self.is_active else []
        most = most_entries(len(asked))
        answers = await ask(self.scheduler, "gpurt_report", asked, ANSWER_DEADLINE_S, most=most)
        began = monotonic()
        workers = dict.fromkeys(self.scheduler.workers)
        workers |= counted_reports(self.scheduler, self.tally, self.placement, answers.reports())
        found = {
            "active": self.is_active,
            "activation": self.activation,
            "reason": self.inactive_reason,
            "unusable": self._why_unusable(),
            "version": dask_gpurt.__version__,
            "host": socket.gethostname(),
            "strict": self.settings.strict,
            **self.data_plane_choice.report(),
            "placement": None if self.placement is None else self.placement.summary(),
            **(NO_COLLECTIVES if self.collectives is None else self.collectives.report()),
            "topology": self.machines.summary(),
            "totals": self.tally.totals(),
            "spent": spent_since(self.scheduler, answers.reports()),
            "departed": self.tally.departed(),
            "shuffles": self.tally.shuffles(),
            "ready": sorted(self.readiness.ready),
            "workers": workers,
            "not_ready": dict(self.readiness.not_ready),
            "silent": answers.silent,
        }
        now = monotonic()
        return {**found, "rest_s": 0.0 if reports else self._polls.rest_s(now - began, now)}


def _log_failure(telling: asyncio.Future[Any]) -> None:
    """Warn if a worker did not get the runtime. It is no error: the worker may have left."""
    if not telling.cancelled() and (error := telling.exception()) is not None:
        logger.warning("the runtime could not be registered on every worker: %s", error)

"""Placement on a scheduler: it applies the rules to each task, and keeps a log.

The scheduler's own restrictions (workers, hosts, resources, actors) come first: the rules only see
the workers that those allow. `rules` decides for tasks with inputs, `root_tasks` for those without.
This module itself decides which steals pay. `plugins.patches.task_placement` replaces the
scheduler's decisions by these. `scheduler_view` reads the scheduler's state, `decision_log` keeps
decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from distributed.metrics import time

from dask_gpurt.placement.cost import Task, WorkerSnapshot, costs, steal_pays
from dask_gpurt.plugins.patches.task_placement import DecisionSwap
from dask_gpurt.plugins.patches.values.failed_moves import FailedMoves
from dask_gpurt.plugins.placement.cluster_links import ClusterLinks
from dask_gpurt.plugins.placement.decision_log import MAX_RECORDS, PlacementLog
from dask_gpurt.plugins.placement.early_stealing import EarlyStealing
from dask_gpurt.plugins.placement.join_partners import MAX_PLACES
from dask_gpurt.plugins.placement.live_contractions import Contractions
from dask_gpurt.plugins.placement.question import Choice, Question, choice_of_stock
from dask_gpurt.plugins.placement.roots.root_tasks import RootTasks
from dask_gpurt.plugins.placement.rules import rules
from dask_gpurt.plugins.placement.scheduler_view import (
    MAX_HOLDERS,
    UNKNOWN_S,
    PlacementView,
    unknown_s,
)

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.topology.model import Topology

logger = logging.getLogger("dask_gpurt")


class Placement:
    """Placement on one scheduler. It is active once made; `close` restores stock Dask.

    Parameters
    ----------
    scheduler
        A live scheduler.
    policy
        `data-aware`; `stock`, which only logs stock Dask's decisions; or `auto`, which is
        `data-aware` while all links between workers are described, and else `stock`. Where links
        have to be learnt, some graphs take longer than with stock Dask. Joins on 64 GPUs took 1.62
        times as long (`benchmarks.simulated_placement --policy data-aware-untold`).
    topology
        The description of the machines; None if there is none.
    clock
        Returns seconds, for transfers in flight. A simulation passes its own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        policy: Literal["auto", "data-aware", "stock"],
        topology: Topology | None = None,
        *,
        clock: Callable[[], float] = time,
    ) -> None:
        self._scheduler = scheduler
        self._policy = policy
        self._links = ClusterLinks(topology)
        self._view = PlacementView(scheduler, self._links, clock)
        self._contractions = Contractions(scheduler, self._view)
        self._roots = RootTasks(scheduler, self._view, self._contractions, clock)
        self._rules, self._last_rule = rules(scheduler, self._view, self._roots)
        self.log = PlacementLog()
        self._failed_moves = FailedMoves(scheduler)
        for ws in scheduler.workers.values():
            self.add_worker(ws)
        self._swap = DecisionSwap(scheduler, self)
        self._early_stealing = EarlyStealing(scheduler, self.slowness, self._swap.balance)

    @property
    def _is_stock(self) -> bool:
        """Whether stock Dask decides now."""
        return self._policy == "stock" or (
            self._policy == "auto" and not self._links.are_described()
        )

    @property
    def policy_now(self) -> str:
        """The policy that decides now: `data-aware` or `stock`."""
        return "stock" if self._is_stock else "data-aware"

    def close(self) -> None:
        """Let stock Dask decide from here on."""
        self._early_stealing.close()
        self._swap.uninstall()
        self._failed_moves.uninstall()
        self._roots.close()

    def add_worker(self, ws: WorkerState) -> None:
        """Add a worker that joined."""
        self._view.add_worker(ws)
        self._contractions.workers_changed()
        self._failed_moves.workers_changed()

    def remove_worker(self, address: str) -> None:
        """Remove a worker that left."""
        self._view.remove_worker(address)
        self._contractions.workers_changed()
        self._failed_moves.workers_changed()
        self._roots.remove_worker(address)

    def set_topology(self, topology: Topology) -> None:
        """Replace the description of the machines."""
        self._view.set_topology(topology)
        self._contractions.workers_changed()

    def observe(self, address: str, rates: Mapping[str, tuple[float, int]]) -> None:
        """Record the transfer rates that a worker measured."""
        self._links.observe(address, rates)

    def are_links_described(self) -> bool:
        """Return whether all links between workers are described."""
        return self._links.are_described()

    def are_links_written(self) -> bool:
        """Return whether a person described all links between workers."""
        return self._links.are_written()

    def undescribed(self) -> list[str]:
        """Return the workers whose host is not described."""
        return self._links.undescribed()

    def ended(self, ts: TaskState, address: str, seconds: float) -> None:
        """Record that a worker ended a task that took `seconds`."""
        ws = self._scheduler.workers.get(address)
        if ws is not None and self._policy != "stock":
            self._view.ended(ts, ws, seconds)
            self._early_stealing.ended(ws)
            self._roots.ended(ws)

    def slowness(self, ws: WorkerState) -> float:
        """Return the slowness of a worker (`dask_gpurt.placement.speeds`)."""
        return 1.0 if self._is_stock else self._view.slowness(ws)

    def learned_slowness(self, address: str) -> float:
        """Return the slowness of a worker by the tasks that it ended."""
        return self._view.speeds.learned(address)

    def failed(self, error: Exception) -> None:
        """Count an error of this package, after which stock Dask decided; log the first one."""
        if not self.log.n_failed:
            logger.error("placement failed; stock Dask decides instead", exc_info=error)
        self.log.n_failed += 1

    def explain(self, key: Any) -> dict[str, Any]:
        """Return why a task ran where it did, as plain values, or that the log does not have it."""
        found = self.log.explain(key)
        if found is not None:
            return {"known": True, "policy": self.policy_now, **found}
        ts = self._scheduler.tasks.get(key)
        where = "there is no such task now" if ts is None else f"the task is {ts.state}"
        reason = f"none of the last {MAX_RECORDS:,} decisions is about this task; {where}"
        return {"known": False, "key": str(key), "reason": reason}

    def summary(self) -> dict[str, Any]:
        """Return how many decisions were made, and how many of them differ from stock Dask's."""
        return {"policy": self.policy_now, **self.log.summary()}

    # ------------------------------------------------------------------ tasks with inputs

    def place(
        self, ts: TaskState, stock: Callable[[TaskState], WorkerState | None]
    ) -> WorkerState | None:
        """Return a worker for a task with inputs; None if no worker may run it."""
        if self._failed_moves.has_stuck_input(ts):
            return self._keep(ts, choice_of_stock(self._where_inputs_go(ts, stock(ts))), "stuck")
        if self._is_stock or ts.actor:
            return self._keep(ts, choice_of_stock(stock(ts)), "stock")
        valid = self._scheduler.valid_workers(ts)
        question = Question(ts, valid, stock, self._view, self._contractions)
        for rule in self._rules:
            choice = rule.choose(question)
            if choice is not None:
                return self._keep(ts, choice, rule.reason)
        return self._keep(ts, self._last_rule.choose(question), self._last_rule.reason)

    def _keep(self, ts: TaskState, choice: Choice, reason: str) -> WorkerState | None:
        ws = choice.worker
        if ws is not None:
            self.log.keep(ts.key, ws.address, choice.reason or reason, choice.stock, choice.costs)
        return ws

    def _where_inputs_go(self, ts: TaskState, stock: WorkerState | None) -> WorkerState | None:
        """Return a worker that may get the stuck inputs of a task; None if the task has to wait."""
        only = self._failed_moves.workers(ts)
        if not only or (stock is not None and self._failed_moves.may_try(ts, stock)):
            return stock
        running = only & self._scheduler.running
        return min(running, key=lambda ws: (ws.occupancy, ws.address), default=None)

    # ------------------------------------------------------------------ root tasks

    def place_root(self, ts: TaskState, stock: WorkerState) -> WorkerState | None:
        """Return a worker for a task without inputs; None if it should stay queued."""
        # Stock Dask also counts tasks with few inputs among these.
        if self._failed_moves.has_stuck_input(ts):
            chosen = self._where_inputs_go(ts, stock)
            if chosen is None:
                # All tasks behind it in the queue would wait, too.
                spare = self._scheduler.idle_task_count
                chosen = next((ws for ws in spare if self._failed_moves.may_try(ts, ws)), stock)
            return self._keep(ts, Choice(chosen, stock.address), "stuck")
        chosen = stock if self._is_stock else self._roots.choose(ts, stock)
        if chosen is not None:
            reason = "stock" if chosen is stock else "siblings"
            self.log.keep(ts.key, chosen.address, reason, stock.address)
        return chosen

    def queued(self, ts: TaskState) -> None:
        """Note that no worker has a free slot for a task without inputs."""
        if not self._is_stock:
            self._roots.queued(ts)

    def next_root(self, front: TaskState) -> TaskState | None:
        """Return the queued task to place next, given the first one; None if all should wait."""
        return front if self._is_stock else self._roots.next_task(front)

    # ------------------------------------------------------------------ stealing

    def choose_thief(
        self,
        ts: TaskState,
        stock: WorkerState,
        thieves: Collection[WorkerState],
        occupancy_s: Callable[[WorkerState], float],
    ) -> WorkerState | None:
        """Return the worker that may steal a task; None if the task should stay where it is."""
        if self._failed_moves.has_stuck_input(ts):
            return stock if self._failed_moves.may_try(ts, stock) else None
        view, victim = self._view, ts.processing_on
        if self._is_stock or victim is None or ts.actor:
            return stock
        joins = view.joins(ts)
        sizes = view.sizes.observe(ts.dependencies)
        task = view.task(ts, sizes, joins, (stock.address, victim.address))
        # Stock Dask's figure includes steals under negotiation, in stock Dask's seconds. As long as
        # no task of the kind has ended, one of them would outweigh the victim's whole queue.
        is_known = ts.prefix.duration_average >= 0
        scale = 1.0 if is_known else unknown_s(ts.prefix) / max(task.duration_s, UNKNOWN_S)

        def seen(ws: WorkerState) -> WorkerSnapshot:
            (found,) = view.workers((ws.address,))
            negotiated_s = scale * (occupancy_s(ws) - ws.occupancy) * found.slowness
            busy_s = max(0.0, view.busy_s(ws, found.slowness) + negotiated_s)
            return found._replace(occupancy_s=busy_s)

        candidates = {stock.address: stock, **self._thieves_near(ts, task, thieves)}
        if task.device is not None and victim.address in view.with_gpu:
            candidates = {a: ws for a, ws in candidates.items() if a in view.with_gpu}
        if candidates:
            workers = [seen(ws) for ws in (victim, *candidates.values())]
            found = costs(task, workers, self._links.places)
            thief = min(candidates, key=lambda one: (found[one].total_s, one))
            if steal_pays(found[victim.address], found[thief], self._links.uncertainty()):
                self.log.steals_allowed += 1
                return candidates[thief]
        self.log.steals_refused += 1
        return None

    def _thieves_near(
        self, ts: TaskState, task: Task, thieves: Collection[WorkerState]
    ) -> dict[str, WorkerState]:
        """Return thieves that have, or will have, an input or a join partner of a task.

        Thieves that may not run the task are left out.
        """
        near: set[str] = set()
        for one in islice(task.inputs, MAX_HOLDERS):
            near.update(islice(one.holders, MAX_PLACES), one.arriving_s)
        near.update(*task.joins)
        workers = self._scheduler.workers
        found = {one: workers[one] for one in sorted(near) if one in workers}
        found = {one: ws for one, ws in found.items() if ws in thieves}
        if found and (valid := self._scheduler.valid_workers(ts)) is not None:
            found = {one: ws for one, ws in found.items() if ws in valid}
        return found

"""The scheduler's side of placement: what policies choose is what the scheduler does.

Whatever restricts a task (workers, hosts, resources, actors) is asked of the scheduler first;
what is left is what policies see. Decides nothing itself but where there is nothing to decide.
What is replaced on the scheduler is in `plugins.patches.task_placement`; what is read of it, in
`scheduler_view`; what is kept, in `decision_log`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import compress, islice
from typing import TYPE_CHECKING, Any, Literal

from distributed.metrics import time

from dask_gpurt.placement.cost import Task, Worker, costs, steal_pays
from dask_gpurt.placement.fast_paths import (
    cheapest,
    holder_is_best,
    largest_is_best,
    places_to_weigh,
)
from dask_gpurt.placement.policy import MAX_CANDIDATES, DataAware, Snapshot
from dask_gpurt.plugins.patches.task_placement import DecisionSwap, expected_duration_s
from dask_gpurt.plugins.placement.cluster_links import WorkerPaths
from dask_gpurt.plugins.placement.decision_log import MAX_RECORDS, PlacementLog
from dask_gpurt.plugins.placement.early_stealing import Relief
from dask_gpurt.plugins.placement.join_partners import MAX_PLACES, times_joined
from dask_gpurt.plugins.placement.live_contractions import Contractions
from dask_gpurt.plugins.placement.root_tasks import RootPlaces
from dask_gpurt.plugins.placement.scheduler_view import (
    MAX_HOLDERS,
    NEW_S,
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
    """Where tasks go, on one scheduler. Made switched on; `remove` puts stock back.

    Parameters
    ----------
    scheduler
        A live scheduler.
    policy
        `data-aware`, or `stock`, which only writes down.
    topology
        What is known of the machines, if anything was described.
    clock
        Seconds, for what is on its way. Replaced where time is simulated.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        policy: Literal["data-aware", "stock"],
        topology: Topology | None = None,
        clock: Callable[[], float] = time,
    ) -> None:
        self._scheduler = scheduler
        self._is_stock = policy == "stock"
        self._policy_name = policy
        self._policy = DataAware()
        self._paths = WorkerPaths(topology)
        self._view = PlacementView(scheduler, self._paths, clock)
        self._contractions = Contractions(scheduler, self._view)
        self._roots = RootPlaces(scheduler, self._view, self._contractions, clock)
        self.log = PlacementLog()
        for ws in scheduler.workers.values():
            self.add_worker(ws)
        self._swap = DecisionSwap(scheduler, self)
        self._relief = Relief(scheduler, self._view.slowness, self._swap.balance)

    def remove(self) -> None:
        """Stock decides from here on."""
        self._relief.close()
        self._swap.remove()
        self._roots.close()

    def add_worker(self, ws: WorkerState) -> None:
        """A worker came."""
        self._view.add_worker(ws)
        self._contractions.workers_changed()

    def remove_worker(self, address: str) -> None:
        """A worker left."""
        self._view.remove_worker(address)
        self._contractions.workers_changed()
        self._roots.remove_worker()

    def observe(self, address: str, rates: Mapping[str, tuple[float, int]]) -> None:
        """A worker received data, at these rates."""
        self._paths.observe(address, rates)

    def undescribed(self) -> list[str]:
        """Workers that are on no host that was described."""
        return self._paths.undescribed()

    def ended(self, ts: TaskState, address: str, seconds: float) -> None:
        """A worker ended a task."""
        ws = self._scheduler.workers.get(address)
        if ws is not None and not self._is_stock:
            self._view.ended(ts, ws, seconds)
            self._relief.ended(ws)

    def slowness(self, ws: WorkerState) -> float:
        """Seconds that a worker takes for what takes others one."""
        return 1.0 if self._is_stock else self._view.slowness(ws)

    def failed(self, error: Exception) -> None:
        """Something here raised; stock decided instead. Said in full once, then counted."""
        if not self.log.n_failed:
            logger.error("placement failed, stock Dask decides instead", exc_info=error)
        self.log.n_failed += 1

    def explain(self, key: Any) -> dict[str, Any]:
        """Why a task ran where it did, in plain values; says so if that is not remembered."""
        found = self.log.explain(key)
        if found is not None:
            return {"known": True, "policy": self._policy_name, **found}
        ts = self._scheduler.tasks.get(key)
        where = "there is no such task now" if ts is None else f"the task is {ts.state}"
        reason = f"no decision about it is among the last {MAX_RECORDS:,}; {where}"
        return {"known": False, "key": str(key), "reason": reason}

    def summary(self) -> dict[str, Any]:
        """Counts of decisions, and of those that stock would have made differently."""
        return {"policy": self._policy_name, **self.log.summary()}

    # ------------------------------------------------------------------ tasks with inputs

    def place(
        self, ts: TaskState, stock: Callable[[TaskState], WorkerState | None]
    ) -> WorkerState | None:
        """Worker for a task with inputs, None if no worker may run it."""
        state, view = self._scheduler, self._view
        if self._is_stock or ts.actor:
            return self._as_stock(ts, stock(ts))
        valid = state.valid_workers(ts)
        if not ts.dependencies:
            ws = stock(ts)
            if ws is None or valid is not None:
                return self._as_stock(ts, ws)
            # Of a group that is not much larger than the cluster; it is never queued.
            return self._as_root(ts, self._roots.choose(ts, ws, may_wait=False) or ws, ws)
        if view.weighs_nothing(ts):
            # Where there is nothing to move, stock knows as much as we do, who has how much to do;
            # but not who is slow, and it does not ask whoever has no input.
            ws = stock(ts)
            if ws is not None and self._runs_as_quickly(ws, valid) and self._may_begin(ws):
                self.log.keep(ts.key, ws.address, "small", ws.address)
                return ws
        if valid is not None and len(valid) < 2:
            # None, or one, or whatever stock makes of loose restrictions.
            ws = self._as_stock(ts, stock(ts))
            if ws is not None and len(ts.dependencies) <= MAX_HOLDERS:
                known = view.sizes.observe(ts.dependencies)
                view.arrivals.expect(ws.address, view.task(ts, known, (), (ws.address,)))
            return ws
        return self._where_it_costs_least(ts, valid, stock)

    def _where_it_costs_least(
        self,
        ts: TaskState,
        valid: set[WorkerState] | None,
        stock: Callable[[TaskState], WorkerState | None],
    ) -> WorkerState | None:
        """Worker for a task that several may run, and that has something to be moved."""
        state, view = self._scheduler, self._view
        if valid is None and len(ts.dependencies) == 2:
            host = self._contractions.host_of(ts)
            if host is not None:
                here = view.running_on(host)
                # Where all of them are slow, others help.
                valid = set(here) if any(view.slowness(ws) <= 1 for ws in here) else None
        holders = view.single_holders(ts)
        only = self._only_holder(holders, valid) if holders else None
        is_new = view.is_new(ts)
        sizes: list[int] = []
        if is_new:
            sizes = view.sizes.observe(ts.dependencies)
            most = view.with_nearly_all(ts, sizes)
            if most is not None:
                # No byte is moved for a wait that nobody has seen.
                if (
                    self._runs_as_quickly(most, valid)
                    and view.ahead_s(most, view.queue_lasts_s()) <= NEW_S * most.nthreads
                ):
                    self.log.keep(ts.key, most.address, "new", None)
                    return most
                is_new = False
        if (
            only is not None
            and (n_joins := times_joined(ts)) is not None
            and not view.arrivals.is_arriving(ts)
        ):
            sizes = sizes or view.sizes.observe(ts.dependencies)
            if (not n_joins and self._may_begin(only)) or holder_is_best(
                sum(sizes),
                view.sizes(ts),
                n_joins,
                view.room_nbytes(only),
                view.wait_s(only, NEW_S if is_new else 0.0),
                self._paths.widest_nbytes_per_s(only.address),
            ):
                return self._at_holder(ts, only)
        joins = view.joins(ts)
        if only is not None and not joins and self._may_begin(only):
            return self._at_holder(ts, only)
        sizes = sizes or view.sizes.observe(ts.dependencies)
        # Where nobody is idle and nothing is queued, whoever has an input keeps a task waiting.
        if holders and valid is None and not joins and not is_new and (state.idle or state.queued):
            first = self._foremost(ts, holders, sizes)
            if first is not None:
                return first
        idle = () if is_new else view.company(ts, joins)
        workers = view.workers_to_a_new_kind if is_new else view.workers
        if holders and valid is None:
            best = self._cheapest(ts, holders, sizes, joins, idle, workers, stock)
            if best is not None:
                return best
        task = view.task(ts, sizes, joins, idle)
        doubt = self._paths.doubt()
        usual = stock(ts) if doubt > 1 and view.has_few_holders(ts) else None
        decision = self._policy.decide(
            Snapshot(
                task,
                workers,
                self._paths.places,
                None if valid is None else {ws.address for ws in valid},
                idle,
                state.bandwidth,
                view.takes_tasks(),
                doubt,
                None if usual is None else usual.address,
            )
        )
        if decision.worker is None:
            return self._as_stock(ts, stock(ts))
        view.arrivals.expect(decision.worker, task)
        self.log.keep(ts.key, decision.worker, "cost", decision.stock, decision.costs)
        return state.workers[decision.worker]

    def _only_holder(
        self, holders: list[str], valid: Collection[WorkerState] | None
    ) -> WorkerState | None:
        """The worker that alone has all inputs, if it may run the task as quickly as any."""
        first = holders[0]
        if holders.count(first) < len(holders):
            return None
        ws = self._scheduler.workers.get(first)
        return ws if ws is not None and self._runs_as_quickly(ws, valid) else None

    def _runs_as_quickly(self, ws: WorkerState, valid: Collection[WorkerState] | None) -> bool:
        """Whether a worker may run a task, and as quickly as any."""
        with_gpu = self._view.with_gpu
        return (
            ws in self._scheduler.running
            and (not with_gpu or ws.address in with_gpu)
            and (valid is None or ws in valid)
            and self._view.slowness(ws) <= 1
        )

    def _may_begin(self, ws: WorkerState) -> bool:
        """Whether a worker has a thread to spare, or nobody else can be asked who has."""
        state = self._scheduler
        # While the scheduler has tasks in its queue, nobody else is.
        return len(ws.processing) < ws.nthreads or not state.idle or bool(state.queued)

    def _at_holder(self, ts: TaskState, only: WorkerState) -> WorkerState:
        self.log.keep(ts.key, only.address, "holder", only.address)
        return only

    def _foremost(self, ts: TaskState, holders: list[str], sizes: list[int]) -> WorkerState | None:
        """A worker on which a task costs least, if that needs no more than a glance."""
        state, view = self._scheduler, self._view
        # What is cheap to ask, and rules out most where workers are busy, comes first.
        most_nbytes = max(sizes)
        if sizes.count(most_nbytes) == 1:
            ws = state.workers[holders[sizes.index(most_nbytes)]]
            if view.keeps_waiting(ws):
                return None
        else:
            largest = compress(holders, [nbytes == most_nbytes for nbytes in sizes])
            free = [ws for one in largest if not view.keeps_waiting(ws := state.workers[one])]
            if not free:
                return None
            ws = min(free, key=_least_busy)
        if view.arrivals.is_arriving(ts):
            return None
        address = ws.address
        if ws not in state.running or (view.with_gpu and address not in view.with_gpu):
            return None
        # Also for what it has already: so close to its limit it is worth a second look.
        if view.slowness(ws) > 1 or sum(sizes) + view.sizes(ts) > view.room_nbytes(ws):
            return None
        duration_s = expected_duration_s(state, ts)
        wait_s = view.links_wait_s(ws, holders)
        if not largest_is_best(holders, sizes, duration_s, wait_s, self._paths.places):
            return None
        view.arrivals.expect_from(holders, ts, sizes, address)
        # Stock does not know that nobody waits for what is made up for by its own queue.
        self.log.keep(ts.key, address, "most", None if ws.processing else address)
        return ws

    def _cheapest(
        self,
        ts: TaskState,
        holders: list[str],
        sizes: list[int],
        joins: list[dict[str, float]],
        idle: tuple[str, ...],
        workers: Callable[[Iterable[str]], list[Worker]],
        stock: Callable[[TaskState], WorkerState | None],
    ) -> WorkerState | None:
        """Where a task costs least, if it is of the plain shape that most are."""
        state, view = self._scheduler, self._view
        if view.takes_tasks():
            return None
        output_nbytes = view.sizes(ts)
        under_way = view.arrivals.under_way(ts)
        held = places_to_weigh(holders, sizes, output_nbytes, joins, under_way)
        if len(held) > MAX_CANDIDATES:
            return None
        for address in idle:
            held.setdefault(address, 0)
        if len(held) == 1:
            return self._at_holder(ts, state.workers[holders[0]])
        if view.with_gpu and not held.keys() <= view.with_gpu:
            return None
        doubt = self._paths.doubt()
        usual = stock(ts) if doubt > 1 else None
        decision = cheapest(
            holders,
            sizes,
            view.outlets_s(holders),
            under_way,
            held,
            workers(held),
            self._paths.places,
            duration_s=expected_duration_s(state, ts),
            output_nbytes=output_nbytes,
            joins=joins,
            bandwidth=state.bandwidth,
            doubt=doubt,
            asked=None if usual is None else usual.address,
        )
        chosen = decision.worker
        if chosen is None:
            return None
        view.arrivals.expect_from(holders, ts, sizes, chosen)
        self.log.keep(ts.key, chosen, "cost", decision.stock, decision.costs)
        return state.workers[chosen]

    def _as_stock(self, ts: TaskState, ws: WorkerState | None) -> WorkerState | None:
        if ws is not None:
            self.log.keep(ts.key, ws.address, "stock", ws.address)
        return ws

    # ------------------------------------------------------------------ root tasks

    def place_root(self, ts: TaskState, stock: WorkerState) -> WorkerState | None:
        """Worker for a task that has no data to go by; None if it had better stay queued."""
        chosen = stock if self._is_stock else self._roots.choose(ts, stock)
        return None if chosen is None else self._as_root(ts, chosen, stock)

    def _as_root(self, ts: TaskState, chosen: WorkerState, stock: WorkerState) -> WorkerState:
        reason = "stock" if chosen is stock else "siblings"
        self.log.keep(ts.key, chosen.address, reason, stock.address)
        return chosen

    # ------------------------------------------------------------------ stealing

    def choose_thief(
        self,
        ts: TaskState,
        stock: WorkerState,
        thieves: Collection[WorkerState],
        occupancy_s: Callable[[WorkerState], float],
    ) -> WorkerState | None:
        """Worker that may take a task from the one it waits on; None if it had better stay."""
        view, victim = self._view, ts.processing_on
        if self._is_stock or victim is None or ts.actor:
            return stock
        joins = view.joins(ts)
        sizes = view.sizes.observe(ts.dependencies)
        task = view.task(ts, sizes, joins, (stock.address, victim.address))
        # Stock's figure also has the steals that are being negotiated, in stock's seconds: as long
        # as no task of the kind has ended, one of them would outweigh the victim's whole queue.
        is_known = ts.prefix.duration_average >= 0
        scale = 1.0 if is_known else unknown_s(ts.prefix) / max(task.duration_s, UNKNOWN_S)

        def seen(ws: WorkerState) -> Worker:
            (found,) = view.workers((ws.address,))
            negotiated_s = scale * (occupancy_s(ws) - ws.occupancy) * found.slowness
            busy_s = max(0.0, view.busy_s(ws, found.slowness) + negotiated_s)
            return found._replace(occupancy_s=busy_s)

        candidates = {stock.address: stock, **self._thieves_near(ts, task, thieves)}
        if task.device is not None and victim.address in view.with_gpu:
            candidates = {a: ws for a, ws in candidates.items() if a in view.with_gpu}
        if candidates:
            workers = [seen(ws) for ws in (victim, *candidates.values())]
            found = costs(task, workers, self._paths.places)
            thief = min(candidates, key=lambda one: (found[one].total_s, one))
            if steal_pays(found[victim.address], found[thief], self._paths.doubt()):
                self.log.steals_allowed += 1
                return candidates[thief]
        self.log.steals_refused += 1
        return None

    def _thieves_near(
        self, ts: TaskState, task: Task, thieves: Collection[WorkerState]
    ) -> dict[str, WorkerState]:
        """Thieves that have, or will have, something of what a task needs, and may run it."""
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


def _least_busy(ws: WorkerState) -> tuple[float, int, str]:
    return len(ws.processing) / ws.nthreads, ws.nbytes, ws.address

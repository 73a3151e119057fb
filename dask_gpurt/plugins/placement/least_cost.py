"""The last placement rule: it weighs the cost of all candidates and chooses the cheapest.

`rules` leaves to this rule the tasks that none of the cheap rules places. Costs come from
`dask_gpurt.placement`, facts about tasks and workers from `scheduler_view`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.placement.cost import HeldTask
from dask_gpurt.placement.fast_paths import candidate_nbytes, cheapest
from dask_gpurt.placement.policy import MAX_CANDIDATES, DataAware, Snapshot
from dask_gpurt.plugins.patches.task_placement import expected_duration_s
from dask_gpurt.plugins.placement.question import Choice, Question, address_of, choice_of_stock
from dask_gpurt.plugins.placement.scheduler_view import NEW_S, PlacementView

if TYPE_CHECKING:
    from distributed import Scheduler


class LeastCost:
    """A task that no other rule places: it goes to the candidate where it costs least.

    `dask_gpurt.placement.policy.DataAware` says which candidates there are.
    """

    reason = "cost"

    def __init__(self, scheduler: Scheduler, view: PlacementView) -> None:
        self._scheduler = scheduler
        self._view = view
        self._policy = DataAware()

    def choose(self, question: Question) -> Choice:
        # Joins before sizes: recording sizes changes the expected sizes of join partners.
        joins = question.joins
        is_new = question.is_spread_and_new
        idle = () if is_new else self._view.idle_candidates(question.ts, joins)
        new_s = NEW_S if is_new else 0.0
        if question.holders and question.allowed is None:
            choice = self._among_holders(question, idle, new_s)
            if choice is not None:
                return choice
        return self._among_all(question, idle, new_s)

    def _among_holders(
        self,
        question: Question,
        idle: tuple[str, ...],
        new_s: float,
    ) -> Choice | None:
        """Choose for the most common shape, each input on one worker; return None for others."""
        state, view, ts, holders = self._scheduler, self._view, question.ts, question.holders
        if view.takes_tasks():
            return None
        task = HeldTask(
            holders=holders,
            sizes=question.sizes,
            outlets_s=view.outlets_s(holders),
            arrivals_s=view.in_flight.arrivals_s(ts),
            duration_s=expected_duration_s(state, ts),
            output_nbytes=view.sizes(ts),
            joins=question.joins,
        )
        held = candidate_nbytes(task)
        if len(held) > MAX_CANDIDATES:
            return None
        for address in idle:
            held.setdefault(address, 0)
        if len(held) == 1:
            return Choice(state.workers[holders[0]], holders[0], reason="holder")
        if view.with_gpu and not held.keys() <= view.with_gpu:
            return None
        uncertainty = view.links.uncertainty()
        stock = question.stock() if uncertainty > 1 else None
        decision = cheapest(
            task,
            held,
            view.workers(held, new_s),
            view.links.places,
            bandwidth=state.bandwidth,
            uncertainty=uncertainty,
            stock=address_of(stock),
        )
        if decision.worker is None:
            return None
        view.in_flight.expect_from(holders, ts, task.sizes, decision.worker)
        return Choice(state.workers[decision.worker], decision.stock, decision.costs)

    def _among_all(
        self,
        question: Question,
        idle: tuple[str, ...],
        new_s: float,
    ) -> Choice:
        """Choose for a task of any shape."""
        state, view, ts, allowed = self._scheduler, self._view, question.ts, question.allowed
        task = view.task(ts, question.sizes, question.joins, idle)
        uncertainty = view.links.uncertainty()
        stock = question.stock() if uncertainty > 1 and view.has_few_holders(ts) else None
        decision = self._policy.decide(
            Snapshot(
                task=task,
                workers=lambda addresses: view.workers(addresses, new_s),
                places=view.links.places,
                valid=None if allowed is None else {ws.address for ws in allowed},
                idle=idle,
                bandwidth_nbytes_per_s=state.bandwidth,
                takes_tasks=view.takes_tasks(),
                uncertainty=uncertainty,
                stock=address_of(stock),
            )
        )
        if decision.worker is None:
            return choice_of_stock(question.stock())
        view.in_flight.expect(decision.worker, task)
        return Choice(state.workers[decision.worker], decision.stock, decision.costs)

"""Rules that place a task with inputs, in the order in which they are asked.

A rule looks at one task. It chooses a worker, or it leaves the task to the next rule; the last rule
always chooses. The cheap rules come first. Where a cheap rule chooses, weighing all candidates
(`LeastCost`) would choose the same worker or one that is no better.

Each rule has a `reason`, which `explain` shows for a decision (`dask_gpurt.placement.explanation`).
The rules only decide: `placer` asks them and keeps the log. Facts about tasks and workers come from
`scheduler_view`, costs from `dask_gpurt.placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dask_gpurt.placement.cost import Cost, HeldTask
from dask_gpurt.placement.fast_paths import (
    cheapest,
    holder_is_best,
    largest_is_best,
    places_to_weigh,
)
from dask_gpurt.placement.policy import MAX_CANDIDATES, DataAware, Snapshot
from dask_gpurt.plugins.patches.task_placement import expected_duration_s
from dask_gpurt.plugins.placement.join_partners import times_joined
from dask_gpurt.plugins.placement.live_contractions import Contractions
from dask_gpurt.plugins.placement.root_tasks import RootPlaces
from dask_gpurt.plugins.placement.scheduler_view import MAX_HOLDERS, NEW_S, PlacementView

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

_NO_COSTS: Mapping[str, Cost] = {}


class Choice(NamedTuple):
    """A worker for a task.

    Attributes
    ----------
    worker
        None if no worker may run the task.
    stock
        Address of the worker that stock Dask would choose; None if that was not worked out.
    costs
        Costs of the candidates by address, where several were weighed.
    reason
        Reason to give instead of the rule's own.
    """

    worker: WorkerState | None
    stock: str | None
    costs: Mapping[str, Cost] = _NO_COSTS
    reason: str | None = None


def stocks(ws: WorkerState | None) -> Choice:
    """Return the choice of stock Dask's worker, because it is stock Dask's."""
    return Choice(ws, _address(ws), reason="stock")


def _kept(ws: WorkerState) -> Choice:
    """Return the choice of a worker that stock Dask would choose too."""
    return Choice(ws, ws.address)


class Question:
    """A task that has to be placed, with the facts that several rules need.

    Each fact is worked out when a rule first asks for it.

    Attributes
    ----------
    ts
        The task.
    restricted_to
        Workers that its restrictions allow; None if it may run anywhere.
    """

    __slots__ = (
        "_allowed",
        "_ask_stock",
        "_contractions",
        "_holders",
        "_joins",
        "_main_holder",
        "_sizes",
        "_view",
        "restricted_to",
        "ts",
    )

    def __init__(
        self,
        ts: TaskState,
        restricted_to: set[WorkerState] | None,
        ask_stock: Callable[[TaskState], WorkerState | None],
        view: PlacementView,
        contractions: Contractions,
    ) -> None:
        self.ts = ts
        self.restricted_to = restricted_to
        self._ask_stock = ask_stock
        self._view = view
        self._contractions = contractions
        self._allowed: tuple[Collection[WorkerState] | None] | None = None
        self._holders: list[str] | None = None
        self._joins: list[dict[str, float]] | None = None
        self._main_holder: tuple[WorkerState | None] | None = None
        self._sizes: list[int] | None = None

    def stock(self) -> WorkerState | None:
        """Return stock Dask's choice for the task."""
        return self._ask_stock(self.ts)

    @property
    def allowed(self) -> Collection[WorkerState] | None:
        """Workers that come into question; None if all do.

        A task of a contraction goes to the host that was planned for it, unless a worker there is
        slow: then workers of other hosts help.
        """
        if self._allowed is None:
            allowed: Collection[WorkerState] | None = self.restricted_to
            if allowed is None and len(self.ts.dependencies) == 2:
                host = self._contractions.host_of(self.ts)
                if host is not None:
                    here = self._view.running_on(host)
                    if any(self._view.slowness(ws) <= 1 for ws in here):
                        allowed = set(here)
            self._allowed = (allowed,)
        return self._allowed[0]

    @property
    def holders(self) -> list[str]:
        """For each input the only worker that has it; empty if an input is on several workers."""
        if self._holders is None:
            self._holders = self._view.single_holders(self.ts)
        return self._holders

    @property
    def sizes(self) -> list[int]:
        """Bytes of each input."""
        if self._sizes is None:
            self._sizes = self._view.sizes.observe(self.ts.dependencies)
        return self._sizes

    @property
    def joins(self) -> list[dict[str, float]]:
        """For each task that needs this one's output with others': bytes of those by worker."""
        if self._joins is None:
            self._joins = self._view.joins(self.ts)
        return self._joins

    @property
    def main_holder(self) -> WorkerState | None:
        """The one worker that has nearly all of the inputs."""
        if self._main_holder is None:
            self._main_holder = (self._view.with_nearly_all(self.ts, self.sizes),)
        return self._main_holder[0]

    @property
    def is_spread_and_new(self) -> bool:
        """Whether no task of the kind has ended, and no worker has nearly all of the inputs."""
        return self._view.is_new(self.ts) and self.main_holder is None


class Rule(Protocol):
    """Chooses a worker for some tasks."""

    @property
    def reason(self) -> str:
        """Key of `dask_gpurt.placement.explanation.REASONS`."""

    def choose(self, question: Question) -> Choice | None:
        """Return a choice; None if the next rule has to be asked."""


class RootTask:
    """A task without inputs that is never queued: its group is not much larger than the cluster."""

    reason = "siblings"

    def __init__(self, roots: RootPlaces) -> None:
        self._roots = roots

    def choose(self, question: Question) -> Choice | None:
        ts = question.ts
        if ts.dependencies:
            return None
        stock = question.stock()
        if stock is None or question.restricted_to is not None:
            return stocks(stock)
        chosen = self._roots.choose(ts, stock, may_wait=False)
        if chosen is None or chosen is stock:
            return stocks(stock)
        return Choice(chosen, stock.address)


class SmallTask:
    """A task whose inputs and output take no longer to move than to ask for.

    Stock Dask knows as much as this package about which worker has how much to do. It does not know
    which worker is slow, and it asks no worker without an input.
    """

    reason = "small"

    def __init__(self, view: PlacementView) -> None:
        self._view = view

    def choose(self, question: Question) -> Choice | None:
        view = self._view
        if not view.weighs_nothing(question.ts):
            return None
        ws = question.stock()
        if ws is None or not view.is_as_quick_as_any(ws, question.restricted_to):
            return None
        return _kept(ws) if view.may_begin(ws) else None


class RestrictedTask:
    """A task that at most one worker may run, or whose loose restrictions no worker meets."""

    reason = "stock"

    def __init__(self, view: PlacementView) -> None:
        self._view = view

    def choose(self, question: Question) -> Choice | None:
        ts, view = question.ts, self._view
        if question.restricted_to is None or len(question.restricted_to) > 1:
            return None
        ws = question.stock()
        if ws is not None and len(ts.dependencies) <= MAX_HOLDERS:
            view.arrivals.expect(ws.address, view.task(ts, question.sizes, (), (ws.address,)))
        return stocks(ws)


class NewKind:
    """A task of a kind of which none has ended, and one worker has nearly all of its inputs.

    Nobody knows how long such a task takes. So it stays with its inputs unless that worker has been
    given a lot to do already.
    """

    reason = "new"

    def __init__(self, view: PlacementView) -> None:
        self._view = view

    def choose(self, question: Question) -> Choice | None:
        view = self._view
        if not view.is_new(question.ts) or (ws := question.main_holder) is None:
            return None
        if not view.is_as_quick_as_any(ws, question.allowed):
            return None
        is_free_soon = view.ahead_s(ws, view.queue_lasts_s()) <= NEW_S * ws.nthreads
        return Choice(ws, None) if is_free_soon else None


class SoleHolder:
    """A task all of whose inputs are on one worker, which is no slower than others.

    It stays there if the worker can begin now and its output is joined with nothing, or if moving
    the inputs costs more than waiting and joining (`fast_paths.holder_is_best`).
    """

    reason = "holder"

    def __init__(self, scheduler: Scheduler, view: PlacementView) -> None:
        self._scheduler = scheduler
        self._view = view

    def choose(self, question: Question) -> Choice | None:
        view, ts = self._view, question.ts
        ws = self._sole_holder(question)
        if ws is None:
            return None
        n_joins = times_joined(ts)
        if n_joins is not None and not view.arrivals.is_arriving(ts):
            needed_nbytes = sum(question.sizes)
            if (not n_joins and view.may_begin(ws)) or holder_is_best(
                needed_nbytes,
                view.sizes(ts),
                n_joins,
                view.room_nbytes(ws),
                view.wait_s(ws, NEW_S if question.is_spread_and_new else 0.0),
                view.paths.widest_nbytes_per_s(ws.address),
            ):
                return _kept(ws)
        return _kept(ws) if not question.joins and view.may_begin(ws) else None

    def _sole_holder(self, question: Question) -> WorkerState | None:
        holders = question.holders
        if not holders or holders.count(holders[0]) < len(holders):
            return None
        ws = self._scheduler.workers.get(holders[0])
        if ws is None or not self._view.is_as_quick_as_any(ws, question.allowed):
            return None
        return ws


class LargestInput:
    """A task that a worker with its largest input can begin at once (`largest_is_best`).

    Not where all workers are busy and no task is queued: then each holder keeps the task waiting.
    """

    reason = "most"

    def __init__(self, scheduler: Scheduler, view: PlacementView) -> None:
        self._scheduler = scheduler
        self._view = view

    def choose(self, question: Question) -> Choice | None:
        state, view, ts = self._scheduler, self._view, question.ts
        holders = question.holders
        if not holders or question.allowed is not None or question.joins:
            return None
        if question.is_spread_and_new or not (state.idle or state.queued):
            return None
        sizes = question.sizes
        # The cheap tests that rule out most workers of a busy cluster come first.
        ws = self._free_holder(holders, sizes)
        if ws is None or view.arrivals.is_arriving(ts):
            return None
        # Room is asked for the inputs that the worker has already, too: a worker so close to its
        # limit is worth weighing.
        has_room = sum(sizes) + view.sizes(ts) <= view.room_nbytes(ws)
        if not view.is_as_quick_as_any(ws, None) or not has_room:
            return None
        duration_s = expected_duration_s(state, ts)
        wait_s = view.links_wait_s(ws, holders)
        if not largest_is_best(holders, sizes, duration_s, wait_s, view.paths.places):
            return None
        view.arrivals.expect_from(holders, ts, sizes, ws.address)
        # Stock Dask counts tasks that the worker will have worked off before its queue is empty. So
        # it is only known to choose this worker if the worker has nothing to do.
        return Choice(ws, None if ws.processing else ws.address)

    def _free_holder(self, holders: Sequence[str], sizes: Sequence[int]) -> WorkerState | None:
        """Return the least busy worker that has one of the largest inputs and can begin now."""
        workers, view = self._scheduler.workers, self._view
        most_nbytes = max(sizes)
        if sizes.count(most_nbytes) == 1:
            ws = workers[holders[sizes.index(most_nbytes)]]
            return None if view.keeps_waiting(ws) else ws
        largest = compress(holders, [nbytes == most_nbytes for nbytes in sizes])
        free = [ws for one in largest if not view.keeps_waiting(ws := workers[one])]
        return min(free, key=_least_busy) if free else None


class LeastCost:
    """Any task: the candidate on which it costs least (`dask_gpurt.placement.policy.DataAware`)."""

    reason = "cost"

    def __init__(self, scheduler: Scheduler, view: PlacementView) -> None:
        self._scheduler = scheduler
        self._view = view
        self._policy = DataAware()

    def choose(self, question: Question) -> Choice:
        # The order matters: sizes that are taken in now would change what is expected of joins.
        joins = question.joins
        sizes = question.sizes
        is_new = question.is_spread_and_new
        idle = () if is_new else self._view.company(question.ts, joins)
        new_s = NEW_S if is_new else 0.0
        if question.holders and question.allowed is None:
            choice = self._among_holders(question, joins, sizes, idle, new_s)
            if choice is not None:
                return choice
        return self._among_all(question, joins, sizes, idle, new_s)

    def _among_holders(
        self,
        question: Question,
        joins: Sequence[dict[str, float]],
        sizes: Sequence[int],
        idle: tuple[str, ...],
        new_s: float,
    ) -> Choice | None:
        """Choose for the shape that most tasks have: each input is on one worker; else None."""
        state, view, ts, holders = self._scheduler, self._view, question.ts, question.holders
        if view.takes_tasks():
            return None
        task = HeldTask(
            holders=holders,
            sizes=sizes,
            outlets_s=view.outlets_s(holders),
            under_way=view.arrivals.under_way(ts),
            duration_s=expected_duration_s(state, ts),
            output_nbytes=view.sizes(ts),
            joins=joins,
        )
        held = places_to_weigh(task)
        if len(held) > MAX_CANDIDATES:
            return None
        for address in idle:
            held.setdefault(address, 0)
        if len(held) == 1:
            return Choice(state.workers[holders[0]], holders[0], reason="holder")
        if view.with_gpu and not held.keys() <= view.with_gpu:
            return None
        doubt = view.paths.doubt()
        usual = question.stock() if doubt > 1 else None
        decision = cheapest(
            task,
            held,
            view.workers(held, new_s),
            view.paths.places,
            bandwidth=state.bandwidth,
            doubt=doubt,
            asked=_address(usual),
        )
        if decision.worker is None:
            return None
        view.arrivals.expect_from(holders, ts, sizes, decision.worker)
        return Choice(state.workers[decision.worker], decision.stock, decision.costs)

    def _among_all(
        self,
        question: Question,
        joins: Sequence[dict[str, float]],
        sizes: Sequence[int],
        idle: tuple[str, ...],
        new_s: float,
    ) -> Choice:
        """Choose for a task of any shape."""
        state, view, ts, allowed = self._scheduler, self._view, question.ts, question.allowed
        task = view.task(ts, sizes, joins, idle)
        doubt = view.paths.doubt()
        usual = question.stock() if doubt > 1 and view.has_few_holders(ts) else None
        decision = self._policy.decide(
            Snapshot(
                task=task,
                workers=lambda addresses: view.workers(addresses, new_s),
                places=view.paths.places,
                valid=None if allowed is None else {ws.address for ws in allowed},
                idle=idle,
                bandwidth_nbytes_per_s=state.bandwidth,
                takes_tasks=view.takes_tasks(),
                doubt=doubt,
                usual=_address(usual),
            )
        )
        if decision.worker is None:
            return stocks(question.stock())
        view.arrivals.expect(decision.worker, task)
        return Choice(state.workers[decision.worker], decision.stock, decision.costs)


def rules(
    scheduler: Scheduler, view: PlacementView, roots: RootPlaces
) -> tuple[tuple[Rule, ...], LeastCost]:
    """Return the rules in the order in which they are asked, and the one that always chooses."""
    return (
        RootTask(roots),
        SmallTask(view),
        RestrictedTask(view),
        NewKind(view),
        SoleHolder(scheduler, view),
        LargestInput(scheduler, view),
    ), LeastCost(scheduler, view)


def _address(ws: WorkerState | None) -> str | None:
    return None if ws is None else ws.address


def _least_busy(ws: WorkerState) -> tuple[float, int, str]:
    return len(ws.processing) / ws.nthreads, ws.nbytes, ws.address

"""Rules that place a task with inputs, in the order in which they are applied.

A rule looks at one task. It chooses a worker, or it leaves the task to the next rule; the last rule
always chooses. The cheap rules come first. Where a cheap rule chooses, weighing all candidates
(`least_cost.LeastCost`) would choose the same worker or one that is no better.

Each rule has a `reason`, which `explain` shows for a decision (`dask_gpurt.placement.explanation`).
The rules only decide: `placer` applies them and keeps the log. `question` has their input and
output. Facts about tasks and workers come from `scheduler_view`, costs from `dask_gpurt.placement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, islice
from math import fsum
from typing import TYPE_CHECKING

from dask_gpurt.placement.combining import Combiner, best_combiner
from dask_gpurt.placement.fast_paths import holder_is_best, largest_is_best
from dask_gpurt.plugins.patches.graphs.reduction_layers import slice_number
from dask_gpurt.plugins.patches.task_placement import expected_duration_s
from dask_gpurt.plugins.placement.join_partners import times_joined
from dask_gpurt.plugins.placement.least_cost import LeastCost
from dask_gpurt.plugins.placement.question import Choice, Question, Rule, choice_of_stock
from dask_gpurt.plugins.placement.roots.root_tasks import RootTasks
from dask_gpurt.plugins.placement.roots.tree_leaves import combines_held
from dask_gpurt.plugins.placement.scheduler_view import (
    MAX_HOLDERS,
    MAX_TASKS_READ,
    NEW_S,
    PlacementView,
)
from dask_gpurt.topology.places import path_between

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import WorkerState


class RootTask:
    """A task without inputs that is never queued: its group is not much larger than the cluster."""

    reason = "siblings"

    def __init__(self, roots: RootTasks) -> None:
        self._roots = roots

    def choose(self, question: Question) -> Choice | None:
        ts = question.ts
        if ts.dependencies:
            return None
        stock = question.stock()
        if stock is None or question.restricted_to is not None:
            return choice_of_stock(stock)
        chosen = self._roots.choose(ts, stock, may_wait=False)
        if chosen is None or chosen is stock:
            return choice_of_stock(stock)
        return Choice(chosen, stock.address)


class _ViewRule:
    """A rule that reads the view of a scheduler."""

    def __init__(self, scheduler: Scheduler, view: PlacementView) -> None:
        self._scheduler = scheduler
        self._view = view


class SmallTask(_ViewRule):
    """A task whose inputs and output are so small that a transfer is all latency.

    Stock Dask knows as much as this package about how much work each worker has. It does not know
    which worker is slow, and it considers no worker without an input.
    """

    reason = "small"

    def choose(self, question: Question) -> Choice | None:
        view = self._view
        if not view.is_small(question.ts):
            return None
        ws = question.stock()
        if ws is None or not view.is_suitable(ws, question.restricted_to):
            return None
        return _kept(ws) if view.may_begin(ws) else None


class RestrictedTask(_ViewRule):
    """A task that at most one worker may run, or whose loose restrictions no worker meets."""

    reason = "stock"

    def choose(self, question: Question) -> Choice | None:
        ts, view = question.ts, self._view
        if question.restricted_to is None or len(question.restricted_to) > 1:
            return None
        ws = question.stock()
        if ws is not None and len(ts.dependencies) <= MAX_HOLDERS:
            view.in_flight.expect(ws.address, view.task(ts, question.sizes, (), (ws.address,)))
        return choice_of_stock(ws)


class NewKind(_ViewRule):
    """A task of a kind of which none has ended, where one worker has nearly all of its inputs.

    Its duration is unknown. So it stays with its inputs unless that worker has been given a lot to
    do already.
    """

    reason = "new"

    def choose(self, question: Question) -> Choice | None:
        view = self._view
        if not view.is_new(question.ts) or (ws := question.main_holder) is None:
            return None
        if not view.is_suitable(ws, question.allowed):
            return None
        is_free_soon = view.ahead_s(ws, view.queue_lasts_s()) <= NEW_S * ws.nthreads
        return Choice(ws, None) if is_free_soon else None


class SharedInput(_ViewRule):
    """A task whose inputs are on one worker, but for some that nearly all workers fetch.

    In `x - x.mean(0)` each block of `x` stays where it is. By the costs of one task alone, its
    block might as well move to the first worker that has the mean. A worker keeps its share of
    such tasks, unless it has other work that delays them.
    """

    reason = "shared"

    def choose(self, question: Question) -> Choice | None:
        state, view, ts = self._scheduler, self._view, question.ts
        if not 1 < len(ts.dependencies) <= MAX_HOLDERS:
            return None
        ws = question.holder_of_own(len(state.workers))
        if ws is None or not view.is_suitable(ws, question.allowed):
            return None
        prefix = ts.prefix
        n_alike = ws.task_prefix_count.get(prefix.name, 0)
        if n_alike >= len(ts.group) * ws.nthreads / state.total_nthreads:
            return None
        alike_s = n_alike * max(0.0, prefix.duration_average)
        if view.ahead_s(ws, view.queue_lasts_s()) > NEW_S * ws.nthreads + alike_s:
            return None
        if sum(question.sizes) + view.sizes(ts) > view.room_nbytes(ws):
            return None
        view.in_flight.expect(ws.address, view.task(ts, question.sizes, (), (ws.address,)))
        return Choice(ws, None)


class CombiningTask(_ViewRule):
    """A task of a reduction tree over blocks that workers hold already (`best_combiner`)."""

    reason = "combine"

    def choose(self, question: Question) -> Choice | None:
        state, view, ts = self._scheduler, self._view, question.ts
        if not combines_held(ts):
            return None
        holders = question.holders
        workers = [state.workers[one] for one in dict.fromkeys(holders)]
        if not workers or not all(view.is_suitable(ws, question.allowed) for ws in workers):
            return None
        found = [self._combiner(question, ws) for ws in workers]
        most_s = NEW_S + max(one.fetch_s for one in found)
        chosen = best_combiner(found, len(ts.group), state.total_nthreads, most_s)
        if chosen is None:
            return None
        view.in_flight.expect_from(holders, ts, question.sizes, chosen)
        return Choice(state.workers[chosen], None)

    def _combiner(self, question: Question, ws: WorkerState) -> Combiner:
        view, ts, places = self._view, question.ts, self._view.links.places
        fetch_s = view.links_wait_s(ws, question.holders)
        missing_nbytes = 0
        for holder, nbytes in zip(question.holders, question.sizes, strict=True):
            if holder != ws.address:
                missing_nbytes += nbytes
                fetch_s += path_between(places, ws.address, holder).transfer_s(nbytes)
        before_s = fsum(
            max(0.0, one.prefix.duration_average)
            for one in islice(ws.processing, MAX_TASKS_READ)
            if one.priority and ts.priority and one.priority < ts.priority
        )
        return Combiner(
            address=ws.address,
            nthreads=ws.nthreads,
            missing_nbytes=missing_nbytes,
            fetch_s=fetch_s,
            n_alike=ws.task_prefix_count.get(ts.prefix.name, 0),
            before_s=before_s,
            nbytes=ws.nbytes,
        )


class SoleHolder(_ViewRule):
    """A task all of whose inputs are on one worker, which is no slower than others.

    It stays there if the worker can begin now and the output is joined with nothing. It also stays
    if moving the inputs costs more than waiting and joining (`fast_paths.holder_is_best`).
    """

    reason = "holder"

    def choose(self, question: Question) -> Choice | None:
        view, ts = self._view, question.ts
        ws = self._sole_holder(question)
        if ws is None:
            return None
        n_joins = times_joined(ts)
        if n_joins is not None and not view.in_flight.is_arriving(ts):
            needed_nbytes = sum(question.sizes)
            if (not n_joins and view.may_begin(ws)) or holder_is_best(
                needed_nbytes,
                view.sizes(ts),
                n_joins,
                view.room_nbytes(ws),
                view.wait_s(ws, NEW_S if question.is_spread_and_new else 0.0),
                view.links.widest_nbytes_per_s(ws.address),
            ):
                return _kept(ws)
        return _kept(ws) if not question.joins and view.may_begin(ws) else None

    def _sole_holder(self, question: Question) -> WorkerState | None:
        holders = question.holders
        if not holders or holders.count(holders[0]) < len(holders):
            return None
        ws = self._scheduler.workers.get(holders[0])
        if ws is None or not self._view.is_suitable(ws, question.allowed):
            return None
        return ws


class SliceOfValues(_ViewRule):
    """A task that combines slices of values: tasks with other slices of them go to other workers.

    Then all links are busy, each with its part. The rule of costs would put all slices on one
    worker, because their outputs are joined in the end.
    """

    reason = "slice"

    def choose(self, question: Question) -> Choice | None:
        view, ts = self._view, question.ts
        if (number := slice_number(ts)) is None:
            return None
        workers = sorted(set(question.holders))
        if not workers:
            return None
        ws = self._scheduler.workers.get(workers[number % len(workers)])
        if ws is None or not view.is_suitable(ws, question.allowed):
            return None
        view.in_flight.expect_from(question.holders, ts, question.sizes, ws.address)
        return Choice(ws, None)


class LargestInput(_ViewRule):
    """A task that a worker with its largest input can begin at once (`largest_is_best`).

    The rule does not apply if all workers are busy and no task is queued: then each holder keeps
    the task waiting.
    """

    reason = "most"

    def choose(self, question: Question) -> Choice | None:
        state, view, ts = self._scheduler, self._view, question.ts
        holders = question.holders
        if not holders or question.allowed is not None or question.joins:
            return None
        if question.is_spread_and_new or not (state.idle or state.queued):
            return None
        sizes = question.sizes
        # Cheap tests that rule out most workers of a busy cluster come first.
        ws = self._free_holder(holders, sizes)
        if ws is None or view.in_flight.is_arriving(ts):
            return None
        # The test counts inputs that the worker already has, too. A worker so close to its limit is
        # worth weighing.
        has_room = sum(sizes) + view.sizes(ts) <= view.room_nbytes(ws)
        if not view.is_suitable(ws, None) or not has_room:
            return None
        duration_s = expected_duration_s(state, ts)
        wait_s = view.links_wait_s(ws, holders)
        if not largest_is_best(holders, sizes, duration_s, wait_s, view.links.places):
            return None
        view.in_flight.expect_from(holders, ts, sizes, ws.address)
        # Stock Dask also counts tasks that the worker will have done before its queue is empty. So
        # it is only certain to choose this worker if the worker has nothing to do.
        return Choice(ws, None if ws.processing else ws.address)

    def _free_holder(self, holders: Sequence[str], sizes: Sequence[int]) -> WorkerState | None:
        """Return the least busy worker that has one of the largest inputs and can begin now."""
        workers, view = self._scheduler.workers, self._view
        most_nbytes = max(sizes)
        if sizes.count(most_nbytes) == 1:
            ws = workers[holders[sizes.index(most_nbytes)]]
            return None if view.would_wait(ws) else ws
        largest = compress(holders, [nbytes == most_nbytes for nbytes in sizes])
        free = [ws for one in largest if not view.would_wait(ws := workers[one])]
        return min(free, key=_least_busy) if free else None


def rules(
    scheduler: Scheduler, view: PlacementView, roots: RootTasks
) -> tuple[tuple[Rule, ...], LeastCost]:
    """Return the rules in the order in which they are applied, and the one that always chooses."""
    return (
        RootTask(roots),
        SmallTask(scheduler, view),
        RestrictedTask(scheduler, view),
        SharedInput(scheduler, view),
        CombiningTask(scheduler, view),
        NewKind(scheduler, view),
        SoleHolder(scheduler, view),
        SliceOfValues(scheduler, view),
        LargestInput(scheduler, view),
    ), LeastCost(scheduler, view)


def _kept(ws: WorkerState) -> Choice:
    """Return the choice of a worker that stock Dask would choose too."""
    return Choice(ws, ws.address)


def _least_busy(ws: WorkerState) -> tuple[float, int, str]:
    return len(ws.processing) / ws.nthreads, ws.nbytes, ws.address

"""Placement of tasks without inputs on a live scheduler: next to the tasks they are joined with.

Stock Dask gives such a task to the worker with the fewest tasks. Here that worker is replaced by
the first of these that applies:

1. For a block of a reduction, the worker that makes its neighbours (`tree_runs`).
2. A worker that has a *sibling* of the task, or an idle worker on a sibling's host
   (`dask_gpurt.placement.siblings`). An operand of a contraction goes to a worker of the host that
   was planned for it (`dask_gpurt.placement.contractions`).
3. Without siblings, an idle worker as good as stock Dask's, on the host of the previous root task:
   Dask orders tasks so that neighbours are needed together. Stock Dask spreads three kinds of
   tasks: those whose outputs are joined with nothing, operands without a plan, and those that are
   joined with more results than one host makes. Their results go to many hosts, and need many
   links.

Three kinds of workers are then avoided:

- a worker with a GPU, if the task leaves it unused (`host_tasks`);
- a worker behind a link so slow that results pile up there, if the results have to leave;
- a worker so slow that in the end the whole computation would wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from dask_gpurt.placement.joins import Join, Partners
from dask_gpurt.placement.siblings import MAX_DEPENDENTS, MAX_INPUTS, Candidate, best_candidate
from dask_gpurt.plugins.patches.task_placement import expected_duration_s
from dask_gpurt.plugins.placement.join_partners import MAX_CHAIN, MIN_JOIN_NBYTES
from dask_gpurt.plugins.placement.live_contractions import Contractions
from dask_gpurt.plugins.placement.roots.host_tasks import HostTasks
from dask_gpurt.plugins.placement.roots.queue_hold import QueueHold
from dask_gpurt.plugins.placement.roots.tree_runs import TreeRuns
from dask_gpurt.plugins.placement.scheduler_view import (
    MAX_NEIGHBOURS,
    PlacementView,
    n_on_threads,
    tasks_per_thread,
)

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

#: Assumed size of a result, where only the ranking of workers matters.
NOMINAL_NBYTES = 64 * 2**20
#: Limit of siblings' hosts whose workers are read.
MAX_HOSTS = 3
#: Operands per thread that a host is given beyond full, since its products need them.
MAX_OPERANDS_AHEAD = 2
#: If more tasks are joined with one another, some of them are assumed to be elsewhere.
MAX_JOINED = 16


class RootTasks:
    """Placement of root tasks on one scheduler.

    Parameters
    ----------
    clock
        Returns seconds, for results that leave a host over a slow link.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        view: PlacementView,
        contractions: Contractions,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._view = view
        self._contractions = contractions
        self._clock = clock
        self._queue_hold = QueueHold(scheduler)
        self._host_tasks = HostTasks(scheduler, view)
        self._trees = TreeRuns(scheduler, view, self._queue_hold, self._n_free)
        self._last_host: str | None = None
        #: Time at which all results made on a host behind a slow link have left, by host.
        self._leaving_until: dict[str, float] = {}

    def choose(
        self, ts: TaskState, stock: WorkerState, *, may_wait: bool = True
    ) -> WorkerState | None:
        """Return a worker for a task; None if the task should wait in the scheduler's queue.

        Parameters
        ----------
        stock
            The worker that stock Dask would choose.
        may_wait
            Whether the task may stay in the scheduler's queue.
        """
        is_queueing = math.isfinite(self._scheduler.WORKER_SATURATION)
        is_operand, planned_host = self._contractions.host_of_root(ts)
        leaf = self._trees.leaf(ts) if is_queueing and not is_operand else None
        if leaf is not None:
            fresh = self._on_last_host(stock, is_queued=may_wait)
            found = self._trees.choose(leaf, ts, fresh, may_wait=may_wait)
        else:
            found = self._among_siblings(
                ts,
                stock,
                planned_host,
                is_operand=is_operand,
                is_queueing=is_queueing,
                may_wait=may_wait,
            )
        if found is None:
            return None
        chosen = found
        if self._view.slowness(chosen) > 1:
            quicker = self._avoid_slow_worker(ts, chosen, may_wait=may_wait and is_queueing)
            if quicker is None:
                if leaf is not None:
                    self._trees.waits(leaf, ts)
                return None
            chosen = quicker
        if self._view.with_gpu:
            chosen = self._host_tasks.instead(ts, chosen)
        self._last_host = chosen.host
        self._queue_hold.placed(ts)
        return chosen

    def queued(self, ts: TaskState) -> None:
        """Note that no worker has a free slot for a task."""
        self._trees.queued(ts)

    def next_task(self, front: TaskState) -> TaskState | None:
        """Return the queued task to place next, given the first one; None if all should wait."""
        return self._trees.next_task(front)

    def ended(self, ws: WorkerState) -> None:
        """Note that a worker ended a task."""
        self._trees.ended(ws)

    def remove_worker(self, address: str) -> None:
        """Note that a worker left."""
        self._trees.remove_worker(address)
        self._queue_hold.remove_worker()

    def close(self) -> None:
        """Stop: release the tasks that are held in the queue."""
        self._queue_hold.close()

    # ------------------------------------------------------------------ siblings

    def _among_siblings(
        self,
        ts: TaskState,
        stock: WorkerState,
        planned_host: str | None,
        *,
        is_operand: bool,
        is_queueing: bool,
        may_wait: bool,
    ) -> WorkerState | None:
        """Return a worker near the siblings of a task, or near the previous task."""
        is_unplanned = is_operand and planned_host is None
        chosen = (
            None if is_unplanned else self._next_to_siblings(ts, stock, is_queueing=is_queueing)
        )
        if planned_host is not None and (chosen is None or chosen.host != planned_host):
            chosen = self._free_on_planned_host(planned_host, is_queueing=is_queueing) or chosen
        if chosen is None:
            stays_near = (
                is_queueing
                and not is_unplanned
                and self._view.joins.may_be_joined(ts)
                and not self._is_joined_elsewhere(ts)
            )
            chosen = self._on_last_host(stock, is_queued=may_wait) if stays_near else stock
            if is_queueing and self._is_behind_slow_link(chosen):
                return self._avoid_slow_link(ts, chosen, may_wait=may_wait)
        return chosen

    def _free_on_planned_host(self, host: str, *, is_queueing: bool) -> WorkerState | None:
        """Return the least busy worker of a host; None if all have far too many tasks."""
        free = (
            ws
            for ws in self._view.running_on(host)
            if not is_queueing or self._n_free(ws) > -MAX_OPERANDS_AHEAD * ws.nthreads
        )
        return min(free, key=lambda ws: len(ws.processing) / ws.nthreads, default=None)

    def _next_to_siblings(
        self, ts: TaskState, stock: WorkerState, *, is_queueing: bool
    ) -> WorkerState | None:
        state, view = self._scheduler, self._view
        known_nbytes = view.sizes(ts)
        joins = view.joins(
            ts,
            # Before any task of the group has ended, only the graph says what belongs together.
            MIN_JOIN_NBYTES if known_nbytes else 0,
            # Without queueing, stock Dask assigns a group in even runs of neighbours. Nothing else
            # keeps a group from following its first task to one worker.
            other_group=not is_queueing,
        )
        if not joins:
            return None
        to_come = (len(state.queued) + ts.group.states["waiting"]) / state.total_nthreads
        stocks_ahead = tasks_per_thread(stock)
        siblings = sorted({address for others in joins for address in others})
        if len(siblings) == 1:
            # The most common case. No worker saves more than the sibling's own.
            most_ahead = stocks_ahead + to_come
            is_known = known_nbytes > 0
            ws = self._with_room(siblings[0], most_ahead, is_queueing=is_queueing, extra=is_known)
            if ws is not None:
                return ws
        chosen = best_candidate(
            self._candidates(siblings, joins, known_nbytes, stock, is_queueing=is_queueing),
            ahead=stocks_ahead,
            duration_s=expected_duration_s(state, ts),
            to_come=to_come,
        )
        return None if chosen is None else state.workers[chosen]

    def _with_room(
        self, address: str, most_ahead: float, *, is_queueing: bool, extra: bool
    ) -> WorkerState | None:
        """Return a sibling's worker if the task can join the sibling there at no cost.

        Parameters
        ----------
        most_ahead
            Tasks per thread that the worker may have.
        extra
            Whether a full worker may be given one more task per thread.
        """
        ws = self._scheduler.workers.get(address)
        if ws is None or ws not in self._scheduler.running or tasks_per_thread(ws) > most_ahead:
            return None
        spare = ws.nthreads if extra else 0
        return ws if not is_queueing or self._n_free(ws) > -spare else None

    def _candidates(
        self,
        siblings: list[str],
        joins: list[Partners],
        known_nbytes: int,
        stock: WorkerState,
        *,
        is_queueing: bool,
    ) -> list[Candidate]:
        """Return workers near siblings where joining costs less than on stock Dask's worker."""
        nbytes = known_nbytes or NOMINAL_NBYTES
        if not known_nbytes:
            joins = [Partners(dict.fromkeys(others, NOMINAL_NBYTES)) for others in joins]
        later = [Join(others, self._view.links.places) for others in joins]

        def joined_s(address: str) -> float:
            return sum(one.seconds(address, nbytes) for one in later)

        elsewhere_s = joined_s(stock.address)
        is_certain = known_nbytes > 0
        found = []
        for ws in self._around(siblings, with_neighbours=is_queueing):
            saved_s = elsewhere_s - joined_s(ws.address)
            if saved_s > 0 or ws is stock:
                n_free = self._n_free(ws) if is_queueing else math.inf
                terms = ws.address, ws.nthreads, n_free, tasks_per_thread(ws), saved_s, is_certain
                found.append(Candidate(*terms))
        return found

    def _around(self, addresses: list[str], *, with_neighbours: bool) -> Iterator[WorkerState]:
        """Yield the workers at these addresses, then those with a free slot on the same hosts."""
        state = self._scheduler
        hosts: dict[str, None] = {}
        for address in addresses:
            ws = state.workers.get(address)
            if ws is not None and ws in state.running:
                hosts[ws.host] = None
                yield ws
        if with_neighbours:
            for host in islice(hosts, MAX_HOSTS):
                yield from (ws for ws in self._free_on(host) if ws.address not in addresses)

    def _free_on(self, host: str) -> Iterator[WorkerState]:
        """Yield the workers of a host that stock Dask might choose, in order of their addresses."""
        with_place = self._scheduler.idle_task_count
        here = self._view.on_host(host)
        if len(here) <= MAX_NEIGHBOURS:
            yield from (ws for ws in here if ws in with_place)

    def _on_last_host(self, stock: WorkerState, *, is_queued: bool) -> WorkerState:
        if self._last_host is None or self._last_host == stock.host:
            return stock

        def load(ws: WorkerState) -> float:
            # Without queued tasks nothing evens out the load later.
            n_done = 0 if is_queued else len(ws.has_what)
            return (len(ws.processing) + n_done) / ws.nthreads

        most = load(stock)
        return next((ws for ws in self._free_on(self._last_host) if load(ws) <= most), stock)

    def _n_free(self, ws: WorkerState) -> int:
        """Return the number of tasks that a worker can take before the scheduler calls it full."""
        slots = max(math.ceil(self._scheduler.WORKER_SATURATION * ws.nthreads), 1)
        return slots - n_on_threads(ws)

    # ------------------------------------------------------------------ slow links

    def _is_behind_slow_link(self, ws: WorkerState) -> bool:
        return self._view.links.is_behind_slow_link(ws.address)

    def _has_usual_link(self, ws: WorkerState) -> bool:
        return not self._is_behind_slow_link(ws)

    def _avoid_slow_link(
        self, ts: TaskState, chosen: WorkerState, *, may_wait: bool
    ) -> WorkerState | None:
        """Return a worker for a task that is about to go behind a slow link.

        If the output is needed elsewhere, a host makes no more than it can send. The result is
        another worker with a free slot, if there is one. It is the chosen worker, if its earlier
        results have nearly left, so that the task delays no other task. It is None if another
        worker should be free sooner.
        """
        state, view = self._scheduler, self._view
        nbytes = self._leaving_nbytes(ts) if self._is_joined_elsewhere(ts) else 0.0
        if not nbytes:
            return chosen
        others = list(filter(self._has_usual_link, state.idle_task_count))
        if others:
            return min(others, key=lambda ws: (len(ws.processing) / ws.nthreads, ws.address))
        now = self._clock()
        leaving_s = nbytes / view.links.outlet_nbytes_per_s(chosen.address)
        until = max(now, self._leaving_until.get(chosen.host, now)) + leaving_s
        usual_s = nbytes / view.links.usual_outlet_nbytes_per_s()
        duration_s = max(0.0, ts.prefix.duration_average)
        late_s = until - now - duration_s - usual_s
        if may_wait and late_s > 0 and self._should_wait(ts, late_s, self._has_usual_link):
            return None
        self._leaving_until = {h: at for h, at in self._leaving_until.items() if at > now}
        self._leaving_until[chosen.host] = until
        return chosen

    # ------------------------------------------------------------------ slow workers

    def _avoid_slow_worker(
        self, ts: TaskState, slow: WorkerState, *, may_wait: bool
    ) -> WorkerState | None:
        """Return a worker for a task that is about to go to a slow worker.

        The result is another worker with a free slot, if there is one. It is the slow worker, if
        that one ends the task before the queue is empty, so that the task delays no other task. It
        is None if another worker should be free early enough to end the task sooner.
        """
        state, view = self._scheduler, self._view
        others = list(filter(self._is_quick, state.idle_task_count))
        if others:
            return min(others, key=lambda ws: (len(ws.processing) / ws.nthreads, ws.address))
        duration_s = max(0.0, ts.prefix.duration_average)
        late_s = (view.slowness(slow) - 1) * duration_s
        if (
            may_wait
            and late_s > view.queue_lasts_s()
            and self._should_wait(ts, late_s, self._is_quick)
        ):
            return None
        return slow

    def _is_quick(self, ws: WorkerState) -> bool:
        return self._view.slowness(ws) <= 1

    # ------------------------------------------------------------------ waiting in the queue

    def _should_wait(
        self, ts: TaskState, late_s: float, is_better: Callable[[WorkerState], bool]
    ) -> bool:
        """Return whether to hold a task for a better worker that should be free within `late_s`.

        The estimate may be wrong: a task on that worker may wait for an external event. So after
        that time the task goes to any worker with a free slot.
        """
        state, view = self._scheduler, self._view
        if state.validate:
            # The scheduler checks that no task is queued while a worker has a free slot.
            return False
        return any(
            len(ws.processing) > len(ws.long_running)
            and view.busy_s(ws) <= late_s * ws.nthreads
            and is_better(ws)
            for ws in state.running
        ) and self._queue_hold.hold(ts, late_s)

    # ------------------------------------------------------------------ later joins

    def _leaving_nbytes(self, ts: TaskState) -> float:
        """Return the bytes of a task's result, or of its parts, that other tasks need elsewhere."""
        total, level = 0.0, [(ts, self._view.sizes(ts) or NOMINAL_NBYTES)]
        for _ in range(MAX_CHAIN):
            passed_on = []
            for one, nbytes in level:
                if len(one.dependents) > MAX_DEPENDENTS:
                    total += nbytes
                    continue
                for later in one.dependents:
                    if len(later.dependencies) > 1:
                        total += nbytes
                    else:
                        passed_on.append((later, self._view.sizes(later) or nbytes))
            level = passed_on
        return total + sum(nbytes for _, nbytes in level)

    @staticmethod
    def _is_joined_elsewhere(ts: TaskState) -> bool:
        """Return whether a result is joined with more results than one host is likely to make."""
        joined, fresh = {ts}, [ts]
        while fresh:
            one = fresh.pop()
            if len(one.dependents) > MAX_DEPENDENTS:
                return True
            for later in one.dependents:
                needed = later.dependencies
                if len(needed) > MAX_INPUTS:
                    return True
                if len(needed) == 1:
                    # The result is passed on: tasks that need the later result need this one.
                    members = [later]
                else:
                    # A result with very many dependents is sent to each of them and keeps no task
                    # on its host.
                    members = [m for m in needed if len(m.dependents) <= MAX_DEPENDENTS]
                for member in members:
                    if member not in joined:
                        joined.add(member)
                        fresh.append(member)
                if len(joined) > MAX_JOINED:
                    return True
        return False

"""Root tasks of reduction trees on a live scheduler: neighbours go to one worker.

`dask_gpurt.placement.runs` divides the leaves of a tree into runs. `tree_leaves` finds the leaves
in the scheduler's graph. This module says which queued task a worker with a free slot begins. A
worker is never given more tasks than the scheduler's queueing allows: the rest of its run stays
queued.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_gpurt.placement.runs import UNMADE, Runs, pays_to_take
from dask_gpurt.plugins.patches.task_placement import expected_duration_s
from dask_gpurt.plugins.placement.join_partners import MIN_JOIN_NBYTES
from dask_gpurt.plugins.placement.roots.queue_hold import QueueHold
from dask_gpurt.plugins.placement.roots.tree_leaves import leaf_of, leaves_near
from dask_gpurt.plugins.placement.scheduler_view import PlacementView, n_on_threads
from dask_gpurt.topology.places import path_between

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

#: Limit of trees whose runs are kept.
MAX_TREES = 16
#: Limit of workers with free slots that are offered a task of a tree.
MAX_OFFERED = 32
#: Least seconds that a task waits for the worker of its run while another one has a free slot.
HOLD_S = 1.0


class Leaf(NamedTuple):
    """A leaf of a tree, and the runs of the tree."""

    ts: TaskState
    runs: Runs[Key]


class TreeRuns:
    """The runs of all reduction trees on one scheduler.

    Parameters
    ----------
    n_free
        Returns the tasks that a worker can be given before the scheduler calls it full.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        view: PlacementView,
        hold: QueueHold,
        n_free: Callable[[WorkerState], int],
    ) -> None:
        self._scheduler = scheduler
        self._view = view
        self._hold = hold
        self._n_free = n_free
        #: By the group of leaves. Runs hold keys: a task that is cancelled must not live on here.
        self._trees: OrderedDict[str, Runs[Key]] = OrderedDict()
        #: The worker that ended a task last: it has a free slot.
        self._last_ended: WorkerState | None = None

    def leaf(self, root: TaskState) -> Leaf | None:
        """Return the leaf that a root task is a part of; None if it is in no tree to divide."""
        found = leaf_of(root)
        if found is None:
            return None
        group = found.group
        runs = self._trees.get(group.name)
        if runs is not None and not (runs.is_used_up and runs.owner(found.key) is None):
            return Leaf(found, runs)
        n_leaves = sum(n for state, n in group.states.items() if state in UNMADE)
        # With fewer, each run is a single leaf.
        are_enough = n_leaves > self._scheduler.total_nthreads
        if runs is not None:
            # Groups are named after functions, so a later graph often has the same ones.
            if are_enough or runs.is_outgrown:
                runs.renew(n_leaves, self._state_of)
        else:
            if not are_enough:
                return None
            if 0 < self._view.sizes(found) < MIN_JOIN_NBYTES:
                return None
            self._forget_ended()
            if len(self._trees) >= MAX_TREES:
                self._trees.popitem(last=False)
            runs = self._trees[group.name] = Runs(n_leaves, self._is_queued)
        return Leaf(found, runs)

    def choose(
        self, leaf: Leaf, root: TaskState, fresh: WorkerState, *, may_wait: bool
    ) -> WorkerState | None:
        """Return the worker of a root task; None if it should wait in the scheduler's queue.

        Parameters
        ----------
        fresh
            A worker with a free slot, on which a new run may begin.
        may_wait
            Whether the task may stay in the scheduler's queue.
        """
        state, runs = self._scheduler, leaf.runs
        address = runs.owner(leaf.ts.key)
        owner = None if address is None else state.workers.get(address)
        if owner is None or owner not in state.running:
            if runs.is_served(fresh.address):
                fresh = self._unserved(runs) or fresh
            self._begin(leaf, fresh)
            return fresh
        # Without a queue, all tasks of a group are given out at once, and a run is a fair share.
        if owner is fresh or not may_wait or self._n_free(owner) > 0:
            return owner
        # The scheduler checks that no task is queued while a worker has a free slot.
        if state.validate:
            return fresh
        self.waits(leaf, root)
        # If nothing else takes that slot, its worker may want a part of a run.
        self._hold.look_soon()
        return None

    def queued(self, root: TaskState) -> None:
        """Note that no worker has a free slot for a root task."""
        leaf = self.leaf(root)
        if leaf is not None:
            self.waits(leaf, root)

    @staticmethod
    def waits(leaf: Leaf, root: TaskState) -> None:
        """Note that a root task stays in the queue."""
        leaf.runs.wait(leaf.ts.key, root.priority or (), root.key)

    def next_task(self, front: TaskState) -> TaskState | None:
        """Return the queued task that should be placed next; None if all should wait.

        Parameters
        ----------
        front
            The first task of the queue.
        """
        leaf = self.leaf(front) if self._trees else None
        if leaf is None:
            return front
        runs = leaf.runs
        for ws in self._with_free_slot():
            key = runs.next_task(ws.address)
            if key is None and (self._try_begin(leaf, front, ws) or self._try_take(runs, ws)):
                key = runs.next_task(ws.address)
            if key is not None:
                return self._scheduler.tasks[key]
        return front if runs.is_empty else None

    def ended(self, ws: WorkerState) -> None:
        """Note that a worker ended a task."""
        self._last_ended = ws

    def remove_worker(self, address: str) -> None:
        """Remove a worker that left."""
        self._forget_ended()
        for runs in self._trees.values():
            runs.remove_worker(address)

    def _forget_ended(self) -> None:
        """Forget the trees whose tasks the scheduler has forgotten."""
        # A difference of the two key views would read all groups of the scheduler.
        for name in [one for one in self._trees if one not in self._scheduler.task_groups]:
            del self._trees[name]

    # ------------------------------------------------------------------ new runs

    def _begin(self, leaf: Leaf, ws: WorkerState) -> None:
        """Begin a run of a worker with a leaf."""
        runs = leaf.runs
        n_leaves = runs.share(ws.address, ws.nthreads, self._scheduler.total_nthreads)
        free = (
            one.key
            for one in leaves_near(leaf.ts)
            if one is not leaf.ts and one.state in UNMADE and runs.owner(one.key) is None
        )
        runs.begin(ws.address, [leaf.ts.key, *islice(free, n_leaves - 1)])

    def _try_begin(self, leaf: Leaf, front: TaskState, ws: WorkerState) -> bool:
        """Begin a run of a worker with queued tasks; return whether there were any."""
        runs = leaf.runs
        if runs.owner(leaf.ts.key) is not None:
            first = runs.first_unowned()
            found = None if first is None else leaf_of(self._scheduler.tasks[first])
            if found is None:
                return False
            leaf = Leaf(found, runs)
        self._begin(leaf, ws)
        return True

    # ------------------------------------------------------------------ workers

    def _with_free_slot(self) -> Iterator[WorkerState]:
        """Yield workers with a free slot, the one that ended a task last first."""
        spare, last = self._scheduler.idle_task_count, self._last_ended
        if last is not None and last in spare:
            yield last
        for ws in islice(spare, MAX_OFFERED):
            if ws is not last:
                yield ws

    def _unserved(self, runs: Runs[Key]) -> WorkerState | None:
        """Return a worker with a free slot that waits for a run."""
        free = islice(self._scheduler.idle_task_count, MAX_OFFERED)
        return next((ws for ws in free if not runs.is_served(ws.address)), None)

    def _try_take(self, runs: Runs[Key], thief: WorkerState) -> bool:
        """Let a worker take over half of the longest run that waits, if that pays."""
        # Its second task only waits for the first one. That it is made near its neighbours matters
        # more.
        if n_on_threads(thief) >= thief.nthreads:
            return False
        found = runs.longest(thief.address)
        if found is None:
            return False
        address, waiting = found
        victim = self._scheduler.workers.get(address)
        if victim is not None and victim in self._scheduler.running:
            last = self._scheduler.tasks[waiting[-1]]
            duration_s = expected_duration_s(self._scheduler, last)
            n_ahead = n_on_threads(victim) + len(waiting) - 1
            if self._view.is_new(last):
                # Nobody knows how long they take, but the second one after this can hardly be soon.
                pays = n_ahead >= 2 * victim.nthreads
            else:
                pays = pays_to_take(
                    n_ahead,
                    victim.nthreads,
                    n_on_threads(thief),
                    thief.nthreads,
                    duration_s,
                    self._moved_s(last, thief, victim),
                )
            wait_s = HOLD_S + n_ahead / victim.nthreads * duration_s
            if not pays and self._hold.hold(last, wait_s):
                return False
        runs.take(address, thief.address)
        return True

    def _moved_s(self, root: TaskState, thief: WorkerState, victim: WorkerState) -> float:
        """Return the seconds to send a task's leaf back to the worker of its run."""
        nbytes = self._view.sizes(leaf_of(root) or root)
        path = path_between(self._view.links.places, thief.address, victim.address)
        return path.transfer_s(nbytes)

    def _state_of(self, key: Any) -> str | None:
        ts = self._scheduler.tasks.get(key)
        return None if ts is None else ts.state

    def _is_queued(self, key: Key) -> bool:
        return self._state_of(key) == "queued"

"""A live scheduler as placement sees it: tasks, workers, what is on its way. Decides nothing.

Not a copy: what is asked for is read when it is asked for, since a decision looks at a few
workers out of very many. All of it runs in the scheduler's only thread, for every task.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from dask_gpurt.placement.cost import Input, Task, Worker
from dask_gpurt.placement.siblings import MAX_DEPENDENTS, MAX_INPUTS
from dask_gpurt.plugins import seams
from dask_gpurt.plugins.worker_paths import WorkerPaths

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskPrefix, TaskState, WorkerState

#: Inputs whose transfers are remembered.
MAX_ARRIVALS = 10_000
#: Workers with little to do that are looked at, and holders of one input.
MAX_IDLE = 4
MAX_HOLDERS = 16
#: An input that more have is nearly everywhere; where it is tells nothing.
MAX_PLACES = 4
#: Results smaller than this are joined wherever it suits.
MIN_JOIN_NBYTES = 64 * 1024
#: How often the usual length of tasks is worked out anew.
_ASKED_PER_MEDIAN = 256
#: Share of its memory limit at which a worker begins to spill, unless it is told otherwise.
SPILL_FROM = 0.6

GPU = "gpu"
#: Packages whose objects are in a GPU's memory.
_ON_GPU = ("cudf.", "cupy.", "cuml.", "cugraph.", "cuspatial.", "pylibcudf.")


class PlacementView:
    """One a scheduler.

    Parameters
    ----------
    paths
        Ways between workers.
    clock
        Seconds, for what is on its way.
    """

    def __init__(
        self, scheduler: Scheduler, paths: WorkerPaths, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self.paths = paths
        self._clock = clock
        self.with_gpu: set[str] = set()
        #: By key, then by worker: when an input that a decision had it fetch will be there.
        self._arrivals: OrderedDict[Hashable, dict[str, float]] = OrderedDict()
        #: By worker: when it will have all that decisions had it fetch.
        self._receiving_until: dict[str, float] = {}
        self._typical_s = math.inf
        self._n_asked = 0

    def add_worker(self, ws: WorkerState) -> None:
        """A worker came."""
        self.paths.add(ws)
        described = self.paths.device_kind(ws.address)
        if described == GPU or any(name.lower() == GPU for name in ws.resources):
            self.with_gpu.add(ws.address)

    def remove_worker(self, address: str) -> None:
        """A worker left."""
        self.paths.remove(address)
        self.with_gpu.discard(address)
        self._receiving_until.pop(address, None)

    # ------------------------------------------------------------------ workers

    def is_running(self, address: str) -> bool:
        """Whether a worker takes tasks."""
        ws = self._scheduler.workers.get(address)
        return ws is not None and ws in self._scheduler.running

    def worker(self, address: str) -> Worker:
        """What is known of a worker."""
        ws = self._scheduler.workers[address]
        limit = ws.memory_limit
        until = self._receiving_until.get(address)
        return Worker(
            address,
            ws.nthreads,
            self.busy_s(ws),
            ws.nbytes,
            limit * SPILL_FROM - ws.nbytes if limit else math.inf,
            (GPU,) if address in self.with_gpu else (),
            0.0 if until is None else max(0.0, until - self._clock()),
        )

    def busy_s(self, ws: WorkerState) -> float:
        """Seconds of computing that a worker has been given.

        Unlike stock's occupancy, without what it has to fetch: that is known better here, and it
        fetches while it computes.
        """
        prefixes = self._scheduler.task_prefixes
        total_s = 0.0
        for name, count in ws.task_prefix_count.items():
            duration_s = prefixes[name].duration_average
            total_s += count * (duration_s if duration_s >= 0 else self._unknown_s(prefixes[name]))
        return total_s

    def _unknown_s(self, prefix: TaskPrefix) -> float:
        """Length of tasks of which none has ended.

        Stock takes half a second, which has data moved away from workers that are in fact about
        to be done. Here they are as long as tasks usually are.
        """
        if prefix.max_exec_time > 0:
            return 2 * prefix.max_exec_time
        if self._n_asked % _ASKED_PER_MEDIAN == 0:
            durations = [one.duration_average for one in self._scheduler.task_prefixes.values()]
            self._typical_s = median([one for one in durations if one >= 0] or [math.inf])
        self._n_asked += 1
        return min(self._typical_s, self._scheduler.UNKNOWN_TASK_DURATION)

    def idle_near(self, ts: TaskState) -> Iterator[str]:
        """A few workers with a thread to spare: any, then of the host of the largest input."""
        state = self._scheduler
        idle = state.idle
        # Stock also calls those idle that have less to do than others. Those do not wait for us.
        for address, ws in islice(idle.items(), MAX_IDLE):
            if len(ws.processing) < ws.nthreads:
                yield address
        if len(idle) > MAX_IDLE:
            largest = max(ts.dependencies, key=lambda dts: (dts.get_nbytes(), str(dts.key)))
            for holder in islice(largest.who_has or (), 1):
                neighbours = state.host_info.get(holder.host, {}).get("addresses", ())
                near = (one for one in islice(neighbours, MAX_HOLDERS) if one in idle)
                yield from islice(near, MAX_IDLE)

    # ------------------------------------------------------------------ tasks

    def task(
        self, ts: TaskState, joins: Sequence[dict[str, float]], asked: Collection[str]
    ) -> Task:
        """What is known of a task.

        Parameters
        ----------
        asked
            Workers of which it has to be right whether they hold an input that very many hold.
        """
        inputs = []
        device = None
        for dts in ts.dependencies:
            who = dts.who_has or ()
            if len(who) <= MAX_HOLDERS:
                holders = [ws.address for ws in who]
            else:
                holders = [ws.address for ws in islice(who, MAX_HOLDERS)]
                workers = self._scheduler.workers
                holders += [one for one in asked if one in workers and workers[one] in who]
            arriving = self._arriving(dts) if dts.key in self._arrivals else {}
            inputs.append(Input(dts.key, dts.get_nbytes(), holders, arriving))
            if self.with_gpu and dts.type is not None and dts.type.startswith(_ON_GPU):
                device = GPU
        duration_s = seams.expected_duration_s(self._scheduler, ts)
        return Task(ts.key, inputs, duration_s, expected_nbytes(ts), joins, device)

    def only_holder(self, ts: TaskState) -> WorkerState | None:
        """The worker that has all inputs, if nobody else has any."""
        only: WorkerState | None = None
        for dts in ts.dependencies:
            who = dts.who_has
            if who is None or len(who) != 1:
                return None
            (ws,) = who
            if only is None:
                only = ws
            elif ws is not only:
                return None
        return only

    def has_free_holder(self, ts: TaskState) -> bool:
        """Whether a worker that has an input could begin at once; others need not be looked at."""
        for dts in ts.dependencies:
            for ws in islice(dts.who_has or (), MAX_PLACES):
                if len(ws.processing) < ws.nthreads:
                    return True
        return False

    def joins(
        self, ts: TaskState, min_nbytes: int = MIN_JOIN_NBYTES, *, other_group: bool = False
    ) -> list[dict[str, float]]:
        """Where the other inputs are of those tasks that will need this one's output.

        Parameters
        ----------
        min_nbytes
            What is smaller is left out, on either side: that can be moved when it is time.
        other_group
            Leave out those of the task's own group.
        """
        dependents = ts.dependents
        if not dependents or len(dependents) > MAX_DEPENDENTS or expected_nbytes(ts) < min_nbytes:
            return []
        found = []
        for later in dependents:
            needed = later.dependencies
            if not 2 <= len(needed) <= MAX_INPUTS:
                continue
            placed: dict[str, float] = {}
            for other in needed:
                if other is ts or (other_group and other.group is ts.group):
                    continue
                if (ws := _place_of(other)) is None:
                    continue
                if (n := expected_nbytes(other)) >= min_nbytes:
                    placed[ws.address] = placed.get(ws.address, 0.0) + n
            if placed:
                found.append(placed)
        return found

    # ------------------------------------------------------------------ what is on its way

    def expect(self, address: str, task: Task) -> None:
        """A worker will now fetch what it lacks of a task; note when it should have it."""
        now = self._clock()
        for one in task.inputs:
            if address in one.holders or address in one.arriving_s:
                continue
            seconds = min(self.paths(a, address).transfer_s(one.nbytes) for a in one.holders)
            at = max(now, self._receiving_until.get(address, now)) + seconds
            self._receiving_until[address] = at
            self._arrivals.setdefault(one.key, {})[address] = at
            while len(self._arrivals) > MAX_ARRIVALS:
                self._arrivals.popitem(last=False)

    def _arriving(self, dts: TaskState) -> dict[str, float]:
        """Seconds until each worker has an input it is fetching."""
        expected = self._arrivals[dts.key]
        now = self._clock()
        workers = self._scheduler.workers
        found = {}
        for address, at in list(expected.items()):
            ws = workers.get(address)
            if ws is not None and dts in ws.needs_what:
                found[address] = max(0.0, at - now)
            else:
                # It is there, or nobody needs it there any more.
                del expected[address]
        if not expected:
            del self._arrivals[dts.key]
        return found


def _place_of(ts: TaskState) -> WorkerState | None:
    """Where a result is, or will be made."""
    who = ts.who_has
    if not who:
        return ts.processing_on
    if len(who) > MAX_PLACES:
        return None
    return min(who, key=lambda ws: ws.address) if len(who) > 1 else next(iter(who))


def expected_nbytes(ts: TaskState) -> float:
    """Size of a result: as it is, or as others of its kind were, or as its smallest input is.

    0 if nothing is known.
    """
    if ts.nbytes >= 0:
        return ts.nbytes
    for kin in (ts.group, ts.prefix):
        if kin.nbytes_total > 0:
            states = kin.states
            n_done = states["memory"] + states["released"] + states["forgotten"]
            if n_done:
                return kin.nbytes_total / n_done
    # Nothing of the kind has ended. A guess on the low side, that tips the scales between workers
    # that are as good otherwise.
    return max(0, min((dts.nbytes for dts in islice(ts.dependencies, MAX_PLACES)), default=0))

"""A view of a live scheduler for placement: its tasks, its workers, their queues. Places no task.

The view is not a copy: it reads the scheduler's state when asked, since a decision needs a few
workers out of very many. All of it runs in the scheduler's only thread, for every task.
`dask_gpurt.plugins.placement.in_flight` has the transfers in flight to workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.cost import Input, Task, WorkerSnapshot
from dask_gpurt.placement.joins import Partners
from dask_gpurt.placement.policy import MAX_CANDIDATES
from dask_gpurt.placement.speeds import Speeds
from dask_gpurt.plugins.patches.task_placement import expected_duration_s
from dask_gpurt.plugins.placement.cluster_links import ClusterLinks
from dask_gpurt.plugins.placement.in_flight import TransfersInFlight
from dask_gpurt.plugins.placement.join_partners import MAX_PLACES, MIN_JOIN_NBYTES, JoinPartners
from dask_gpurt.plugins.placement.output_sizes import ExpectedSizes
from dask_gpurt.shuffle.routing import host_of

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskPrefix, TaskState, WorkerState

    from dask_gpurt.topology.model import Topology

#: Limit of idle workers offered as candidates, and of holders that are read of one input.
MAX_IDLE = 2
MAX_HOLDERS = 16
#: Limit of workers of a host that are read one by one.
MAX_NEIGHBOURS = 16
#: Limit of tasks of a worker whose groups are read.
MAX_TASKS_READ = 32
#: A worker with this share of a task's inputs counts as having all of them.
NEARLY_ALL = 0.9
#: Least seconds that a Dask worker takes to handle a task.
UNKNOWN_S = 0.001
#: Seconds assumed for a queued task whose kind has not ended yet. Such a task also waits this long
#: at most for the holder of its inputs. Two alternatives made some graphs slower than with stock
#: Dask. With stock Dask's half a second, blocks are sent over NVLink although it takes less to
#: process them. With a millisecond, all tasks wait where they need the fewest bytes.
NEW_S = 0.1
#: Share of its memory limit at which a worker begins to spill by default.
SPILL_FROM = 0.6

GPU = "gpu"
_WITH_GPU = (GPU,)
_new = tuple.__new__
_group = attrgetter("group.name")
_address = attrgetter("address")
#: Packages whose objects are in a GPU's memory.
_ON_GPU = ("cudf.", "cupy.", "cuml.", "cugraph.", "cuspatial.", "pylibcudf.")


class PlacementView:
    """The view of one scheduler.

    Parameters
    ----------
    links
        Links between workers.
    clock
        Returns seconds, for transfers in flight.
    """

    def __init__(
        self, scheduler: Scheduler, links: ClusterLinks, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self.links = links
        self._clock = clock
        self.sizes = ExpectedSizes()
        self.joins = JoinPartners(self.sizes)
        self.speeds = Speeds()
        self.with_gpu: set[str] = set()
        #: Workers in order of their addresses, by host, filled on demand.
        self._on_host: dict[str, list[WorkerState]] = {}
        self.in_flight = TransfersInFlight(scheduler, links, clock)

    def add_worker(self, ws: WorkerState) -> None:
        """Add a worker that joined."""
        self._on_host.pop(ws.host, None)
        self.links.add(ws)
        self.speeds.add(ws.address)
        self._look_for_gpu(ws)

    def _look_for_gpu(self, ws: WorkerState) -> None:
        described = self.links.device_kind(ws.address)
        if described == GPU or any(name.lower() == GPU for name in ws.resources):
            self.with_gpu.add(ws.address)

    def set_topology(self, topology: Topology) -> None:
        """Replace the description of the machines. Transfers in flight no longer delay others."""
        workers = self._scheduler.workers.values()
        self.links.set_topology(topology, workers)
        self.in_flight.by_inlet.clear()
        self.in_flight.by_outlet.clear()
        self.with_gpu.clear()
        for ws in workers:
            self._look_for_gpu(ws)

    def remove_worker(self, address: str) -> None:
        """Remove a worker that left."""
        self._on_host.clear()
        self.links.remove(address)
        self.with_gpu.discard(address)
        self.in_flight.remove_worker(address)
        self.speeds.forget(address)

    # ------------------------------------------------------------------ workers

    def takes_tasks(self) -> Callable[[str], bool] | None:
        """Return a test whether a worker takes tasks; None if all of them do."""
        state = self._scheduler
        if len(state.running) == len(state.workers):
            return None

        def takes(address: str) -> bool:
            ws = state.workers.get(address)
            return ws is not None and ws in state.running

        return takes

    def workers(self, addresses: Iterable[str], new_s: float = 0.0) -> list[WorkerSnapshot]:
        """Return the state of workers, without those that are gone.

        While the scheduler removes a worker, it places the worker's tasks again one by one. Their
        join partners may then still be listed on that worker.

        Parameters
        ----------
        new_s
            Least seconds assumed for a queued task of whose kind none has ended. Pass it for a task
            of such a kind: thousands of them may be placed before the first one ends. Without it,
            all of them would go to where they need the fewest bytes; with it, they spread over
            workers.
        """
        state = self._scheduler
        known, in_flight, with_gpu = state.workers, self.in_flight, self.with_gpu
        learned = self.speeds.learned
        lasting_s = self.queue_lasts_s()
        found = []
        for address in addresses:
            ws = known.get(address)
            if ws is None:
                continue
            n_tasks = len(ws.processing)
            if n_tasks:
                slowness = self.slowness(ws)
                ahead_s = self.ahead_s(ws, lasting_s, slowness, new_s)
            else:
                slowness, ahead_s = learned(address), 0.0
            nbytes = ws.nbytes
            terms = (
                address,
                ws.nthreads,
                ahead_s,
                nbytes,
                # `room_nbytes`, without the call.
                ws.memory_limit * SPILL_FROM - nbytes if ws.memory_limit else inf,
                _WITH_GPU if address in with_gpu else (),
                in_flight.receiving_s(ws) if address in in_flight.by_worker else 0.0,
                n_tasks,
                slowness,
                in_flight.inlet_s(address) if in_flight.by_inlet else 0.0,
            )
            # The same as `WorkerSnapshot(*terms)`, in half the time.
            found.append(_new(WorkerSnapshot, terms))
        return found

    def on_host(self, host: str) -> list[WorkerState]:
        """Return the workers of a host in order of their addresses; some of them may be gone.

        The scheduler places the tasks of a worker that leaves before it tells plugins. Workers that
        take tasks, or have a free slot, are still there.
        """
        found = self._on_host.get(host)
        if found is None:
            state = self._scheduler
            # The scheduler keeps a set, whose order differs between processes.
            addresses = sorted(state.host_info.get(host, {}).get("addresses", ()))
            here = (state.workers.get(one) for one in addresses)
            found = self._on_host[host] = [ws for ws in here if ws is not None]
        return found

    def running_on(self, host: str) -> list[WorkerState]:
        """Return the workers of a host that take tasks, in order of their addresses."""
        running = self._scheduler.running
        return [ws for ws in self.on_host(host) if ws in running]

    def links_wait_s(self, ws: WorkerState, holders: Iterable[str]) -> float:
        """Return seconds until a worker can fetch from some holders, if all are on other hosts."""
        in_flight = self.in_flight
        wait_s = in_flight.receiving_s(ws) if ws.address in in_flight.by_worker else 0.0
        if in_flight.by_inlet:
            wait_s = max(wait_s, in_flight.inlet_s(ws.address))
            for holder, outlet_s in zip(holders, self.outlets_s(holders), strict=True):
                if outlet_s > wait_s and holder != ws.address:
                    wait_s = outlet_s
        return wait_s

    def outlets_s(self, holders: Iterable[str]) -> list[float]:
        """Return seconds until the links out of the hosts of some workers are free."""
        in_flight = self.in_flight
        if in_flight.by_outlet:
            return [in_flight.outlet_s(one) for one in holders]
        return [0.0 for _ in holders]

    def would_wait(self, ws: WorkerState) -> bool:
        """Return whether a task given to a worker now would wait for the worker's other tasks."""
        # If the scheduler has no queued tasks, any task of the worker is in the way.
        return bool(ws.processing) and (
            not self._scheduler.queued or self.ahead_s(ws, self.queue_lasts_s()) > 0
        )

    def is_suitable(self, ws: WorkerState, allowed: Collection[WorkerState] | None) -> bool:
        """Return whether a worker may run a task and is no slower than others.

        Parameters
        ----------
        allowed
            Workers that the task may run on; None if it may run anywhere.
        """
        return (
            ws in self._scheduler.running
            and (not self.with_gpu or ws.address in self.with_gpu)
            and (allowed is None or ws in allowed)
            and self.slowness(ws) <= 1
        )

    def may_begin(self, ws: WorkerState) -> bool:
        """Return whether a worker has a free thread, or no other worker has one for this task."""
        state = self._scheduler
        # While tasks are queued, each free thread is about to get one of them.
        return len(ws.processing) < ws.nthreads or not state.idle or bool(state.queued)

    def wait_s(self, ws: WorkerState, new_s: float = 0.0) -> float:
        """Return seconds until a worker of normal speed begins a task that it is given now.

        This is `WorkerSnapshot.queue_s`. `workers` explains `new_s`.
        """
        if not ws.processing:
            return 0.0
        return self.ahead_s(ws, self.queue_lasts_s(), new_s=new_s) / ws.nthreads

    @staticmethod
    def room_nbytes(ws: WorkerState) -> float:
        """Return the bytes that a worker can take before it begins to spill."""
        return ws.memory_limit * SPILL_FROM - ws.nbytes if ws.memory_limit else inf

    def slowness(self, ws: WorkerState) -> float:
        """Return the slowness of a worker (`dask_gpurt.placement.speeds`)."""
        processing = ws.processing
        if not processing:
            return self.speeds.learned(ws.address)
        now_s = self._clock()
        # A worker with a free thread may be silent because it has little to do, such as a task that
        # takes long or waits for others.
        if ws.needs_what or n_on_threads(ws) < ws.nthreads:
            return self.speeds.slowness(ws.address, now_s, None)
        if not self.speeds.is_overdue(ws.address, now_s):
            return self.speeds.learned(ws.address)
        groups = map(_group, islice(processing, MAX_TASKS_READ))
        return self.speeds.slowness(ws.address, now_s, groups)

    def ended(self, ts: TaskState, ws: WorkerState, seconds: float) -> None:
        """Record that a worker ended a task that took `seconds`."""
        self.speeds.ended(ws.address, ts.group.name, seconds, self._clock(), not ws.processing)

    def ahead_s(
        self, ws: WorkerState, lasting_s: float, slowness: float = 1.0, new_s: float = 0.0
    ) -> float:
        """Return seconds of computing ahead of a new task, beyond what balances out.

        While the scheduler has queued tasks, a busy worker gets fewer of them and an idle worker
        more. So only the work that is left when the queue is empty, after `lasting_s`, makes a task
        wait.
        """
        busy_s = self.busy_s(ws, slowness, new_s)
        return max(0.0, busy_s - lasting_s * ws.nthreads) if lasting_s else busy_s

    def queue_lasts_s(self) -> float:
        """Return seconds until the scheduler's queue is empty."""
        queued = self._scheduler.queued
        if not queued:
            return 0.0
        root_s = max(0.0, queued.peek().prefix.duration_average)
        return len(queued) * root_s / self._scheduler.total_nthreads

    def busy_s(self, ws: WorkerState, slowness: float = 1.0, new_s: float = 0.0) -> float:
        """Return seconds of computing that a worker has been given; `workers` explains `new_s`.

        Unlike stock Dask's occupancy, this excludes transfers: placement has better figures for
        those, and a worker fetches while it computes.
        """
        n_tasks = len(ws.processing)
        if not n_tasks:
            return 0.0
        prefixes = self._scheduler.task_prefixes
        total_s = 0.0
        for name, count in ws.task_prefix_count.items():
            prefix = prefixes[name]
            duration_s = prefix.duration_average
            total_s += count * (duration_s if duration_s >= 0 else max(unknown_s(prefix), new_s))
        # A running task is half done, on average.
        n_running = ws.nthreads if ws.nthreads < n_tasks else n_tasks
        return slowness * total_s * (1 - n_running / (2 * n_tasks))

    def idle_near(self, ts: TaskState) -> Iterator[str]:
        """Yield a few workers with a free thread.

        Any of them come first, then some on the host of the task's largest input.
        """
        idle: Any = self._scheduler.idle
        # Stock Dask also lists workers as idle that have less work than others; those have no free
        # thread. The order is the one in which workers became idle: far cheaper than by address.
        for address, ws in islice(dict.items(idle), MAX_IDLE):
            if len(ws.processing) < ws.nthreads:
                yield address
        if len(idle) > MAX_IDLE:
            largest = next(iter(ts.dependencies))
            if len(ts.dependencies) > 1:
                largest = max(ts.dependencies, key=lambda dts: (dts.get_nbytes(), str(dts.key)))
            who = largest.who_has or ()
            if 0 < len(who) <= MAX_HOLDERS:
                first = min(who, key=_address) if len(who) > 1 else next(iter(who))
                here = self.on_host(first.host)
                if len(here) <= MAX_NEIGHBOURS:
                    yield from islice((ws.address for ws in here if ws.address in idle), MAX_IDLE)
                else:
                    # Addresses are sorted, so those of a host are adjacent.
                    host = host_of(first.address)
                    yield from islice(idle.irange(f"{host}:", f"{host};", (True, False)), MAX_IDLE)

    # ------------------------------------------------------------------ tasks

    def task(
        self,
        ts: TaskState,
        sizes: Iterable[int],
        joins: Sequence[Partners],
        candidates: Collection[str],
    ) -> Task:
        """Return what placement needs to know of a task.

        Parameters
        ----------
        sizes
            Bytes of its inputs, as returned by `self.sizes.observe`.
        candidates
            Workers that must be listed as holders if they are, even of an input with very many
            holders.
        """
        inputs = []
        in_flight = self.in_flight
        outlet_of, arrivals_s = in_flight.outlet_s, in_flight.arrivals_s(ts)
        for dts, nbytes, arriving in zip(ts.dependencies, sizes, arrivals_s, strict=True):
            who = dts.who_has or ()
            holders: Sequence[str]
            if len(who) == 1:
                (ws,) = who
                holders = (ws.address,)
            else:
                holders = self._some_holders(who, candidates)
            outlet_s = min(map(outlet_of, holders), default=0.0) if in_flight.by_outlet else 0.0
            inputs.append(_new(Input, (dts.key, nbytes, holders, arriving, outlet_s)))
        device = GPU if self.with_gpu and any(map(_is_on_gpu, ts.dependencies)) else None
        duration_s = expected_duration_s(self._scheduler, ts)
        return _new(Task, (ts.key, inputs, duration_s, self.sizes(ts), joins, device))

    def _some_holders(self, who: Collection[WorkerState], candidates: Collection[str]) -> list[str]:
        holders = [ws.address for ws in islice(who, MAX_HOLDERS)]
        if len(who) > MAX_HOLDERS:
            known = self._scheduler.workers
            for one in candidates:
                if one in known and known[one] in who and one not in holders:
                    holders.append(one)
        return holders

    @staticmethod
    def is_new(ts: TaskState) -> bool:
        """Return whether no task of this kind has ended, and no duration is configured for it."""
        return bool(ts.prefix.duration_average < 0)

    def is_small(self, ts: TaskState) -> bool:
        """Return whether a task's inputs and output are so small that a transfer is all latency."""
        total_nbytes = 0
        for dts in ts.dependencies:
            nbytes = dts.nbytes
            total_nbytes += nbytes if nbytes >= 0 else MIN_JOIN_NBYTES
            if total_nbytes >= MIN_JOIN_NBYTES:
                return False
        return self.sizes(ts) < MIN_JOIN_NBYTES

    @staticmethod
    def single_holders(ts: TaskState) -> list[str]:
        """Return the holder's address of each input; an empty list if an input has several."""
        found = []
        for dts in ts.dependencies:
            who = dts.who_has
            if who is None or len(who) != 1:
                return []
            (ws,) = who
            found.append(ws.address)
        return found

    @staticmethod
    def with_nearly_all(ts: TaskState, sizes: Sequence[int]) -> WorkerState | None:
        """Return the one worker that has nearly all of a task's inputs, if there is one."""
        held: dict[WorkerState, int] = {}
        for dts, nbytes in zip(ts.dependencies, sizes, strict=True):
            for ws in islice(dts.who_has or (), MAX_HOLDERS):
                held[ws] = held.get(ws, 0) + nbytes
        least = NEARLY_ALL * sum(sizes)
        found = [ws for ws, nbytes in held.items() if nbytes >= least]
        return found[0] if len(found) == 1 else None

    @staticmethod
    def has_few_holders(ts: TaskState) -> bool:
        """Return whether stock Dask, which reads all holders of inputs, has few to read."""
        return all(len(dts.who_has or ()) <= MAX_HOLDERS for dts in ts.dependencies)

    def idle_candidates(self, ts: TaskState, joins: Sequence[Partners]) -> tuple[str, ...]:
        """Return workers with a free thread that are candidates even if they have no inputs.

        While the scheduler has queued tasks, there are none. An idle worker is about to get one of
        those, and moving bytes to it makes no task end sooner. There are none either while a holder
        of inputs could begin at once and is no slower than others. But if some candidates are left
        out, these free holders are returned, those with the most bytes first.
        """
        state = self._scheduler
        if not state.idle or state.queued:
            return ()
        free: dict[str, int] = {}
        for dts in ts.dependencies:
            for ws in islice(dts.who_has or (), MAX_PLACES):
                if (
                    len(ws.processing) < ws.nthreads
                    and self.slowness(ws) <= 1
                    and ws in state.running
                ):
                    if not free and _n_places(ts, joins) <= MAX_CANDIDATES:
                        return ()
                    free[ws.address] = free.get(ws.address, 0) + dts.get_nbytes()
        if free:
            return tuple(sorted(free, key=lambda one: (-free[one], one))[:MAX_IDLE])
        return tuple(self.idle_near(ts))


def n_on_threads(ws: WorkerState) -> int:
    """Return the number of tasks that occupy or wait for a thread: all but long-running ones."""
    return len(ws.processing) - len(ws.long_running)


def tasks_per_thread(ws: WorkerState) -> float:
    """Return the tasks of a worker that occupy or wait for a thread, for each of its threads."""
    return n_on_threads(ws) / ws.nthreads


def unknown_s(prefix: TaskPrefix) -> float:
    """Return the duration that is assumed for a kind of task before one of them has ended.

    Stock Dask assumes half a second. With that, data is moved away from workers that are about to
    be done. With this figure no large result is moved for a wait that has not been observed; small
    ones may be.
    """
    return max(2 * prefix.max_exec_time, UNKNOWN_S)


def _n_places(ts: TaskState, joins: Sequence[Partners]) -> int:
    """Return the number of workers with an input or a join partner, counting some twice."""
    return sum(len(dts.who_has or ()) for dts in ts.dependencies) + sum(map(len, joins))


def is_gpu_type(name: str) -> bool:
    """Return whether objects of a type are in a GPU's memory."""
    return name.startswith(_ON_GPU)


def _is_on_gpu(ts: TaskState) -> bool:
    return ts.type is not None and is_gpu_type(ts.type)

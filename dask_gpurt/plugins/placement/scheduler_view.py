"""A live scheduler as placement sees it: tasks, workers. Decides nothing.

Not a copy: what is asked for is read when it is asked for, since a decision looks at a few
workers out of very many. All of it runs in the scheduler's only thread, for every task. What is on
its way to workers is in `dask_gpurt.plugins.placement.in_flight`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.cost import Input, Task, Worker
from dask_gpurt.placement.policy import MAX_CANDIDATES
from dask_gpurt.placement.speeds import Speeds
from dask_gpurt.plugins.patches.task_placement import expected_duration_s
from dask_gpurt.plugins.placement.cluster_links import ClusterLinks
from dask_gpurt.plugins.placement.in_flight import TransfersInFlight
from dask_gpurt.plugins.placement.join_partners import MAX_PLACES, MIN_JOIN_NBYTES, JoinPartners
from dask_gpurt.plugins.placement.output_sizes import ExpectedSizes

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskPrefix, TaskState, WorkerState

#: Workers with little to do that are looked at, and holders of one input.
MAX_IDLE = 2
MAX_HOLDERS = 16
#: Workers of a host that are looked at one by one.
MAX_NEIGHBOURS = 16
#: Tasks of a worker that are looked at to see what it could be at.
MAX_LOOKED_AT = 32
#: Share of a task's inputs that is as good as all of them.
NEARLY_ALL = 0.9
#: Seconds that handling a task takes at the least, in a worker of Dask's.
UNKNOWN_S = 0.001
#: What one counts for where another is placed of whose kind none has ended, either; and what it may
#: have to wait for where its inputs are. Stock's half a second has blocks sent over NVLink that are
#: worked through in less, and a millisecond has all of them wait where they need the fewest bytes:
#: either had some graphs take longer than with stock.
NEW_S = 0.1
#: Share of its memory limit at which a worker begins to spill, unless it is told otherwise.
SPILL_FROM = 0.6

GPU = "gpu"
_WITH_GPU = (GPU,)
_new = tuple.__new__
_group = attrgetter("group.name")
_address = attrgetter("address")
#: Packages whose objects are in a GPU's memory.
_ON_GPU = ("cudf.", "cupy.", "cuml.", "cugraph.", "cuspatial.", "pylibcudf.")


class PlacementView:
    """One a scheduler.

    Parameters
    ----------
    links
        Ways between workers.
    clock
        Seconds, for what is on its way.
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
        #: By host, workers in order of their addresses, where somebody asked.
        self._on_host: dict[str, list[WorkerState]] = {}
        self.in_flight = TransfersInFlight(scheduler, links, clock)

    def add_worker(self, ws: WorkerState) -> None:
        """A worker came."""
        self._on_host.pop(ws.host, None)
        self.links.add(ws)
        self.speeds.add(ws.address)
        described = self.links.device_kind(ws.address)
        if described == GPU or any(name.lower() == GPU for name in ws.resources):
            self.with_gpu.add(ws.address)

    def remove_worker(self, address: str) -> None:
        """A worker left."""
        self._on_host.clear()
        self.links.remove(address)
        self.with_gpu.discard(address)
        self.in_flight.remove_worker(address)
        self.speeds.forget(address)

    # ------------------------------------------------------------------ workers

    def takes_tasks(self) -> Callable[[str], bool] | None:
        """Says of a worker whether it takes tasks; None if all of them do."""
        state = self._scheduler
        if len(state.running) == len(state.workers):
            return None

        def takes(address: str) -> bool:
            ws = state.workers.get(address)
            return ws is not None and ws in state.running

        return takes

    def workers(self, addresses: Iterable[str], new_s: float = 0.0) -> list[Worker]:
        """What is known of workers; nothing of those that are gone.

        While one is taken off, tasks that ran there are placed anew one by one, and what they will
        be joined with may still be said to be there.

        Parameters
        ----------
        new_s
            Seconds that a task counts for in a queue at the least if none of its kind has ended.
            Given for a task of such a kind: there may be thousands of them before the first one
            ends, and so they are dealt out rather than sent wherever they need the fewest bytes.
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
            # As `Worker(*terms)` does, in half the time.
            found.append(_new(Worker, terms))
        return found

    def on_host(self, host: str) -> list[WorkerState]:
        """Workers of a host in order of their addresses, some of which may be gone.

        Tasks that ran on one that leaves are placed anew before we are told of it. Whoever takes
        tasks, or has a place for one, is still there.
        """
        found = self._on_host.get(host)
        if found is None:
            state = self._scheduler
            # The scheduler's own list is a set, whose order is another in each process.
            addresses = sorted(state.host_info.get(host, {}).get("addresses", ()))
            here = (state.workers.get(one) for one in addresses)
            found = self._on_host[host] = [ws for ws in here if ws is not None]
        return found

    def running_on(self, host: str) -> list[WorkerState]:
        """Workers of a host that take tasks, in order of their addresses."""
        running = self._scheduler.running
        return [ws for ws in self.on_host(host) if ws in running]

    def links_wait_s(self, ws: WorkerState, holders: Iterable[str]) -> float:
        """Seconds until a worker can fetch what others have, if all of it is on other hosts."""
        in_flight = self.in_flight
        wait_s = in_flight.receiving_s(ws) if ws.address in in_flight.by_worker else 0.0
        if in_flight.by_inlet:
            wait_s = max(wait_s, in_flight.inlet_s(ws.address))
            for holder, outlet_s in zip(holders, self.outlets_s(holders), strict=True):
                if outlet_s > wait_s and holder != ws.address:
                    wait_s = outlet_s
        return wait_s

    def outlets_s(self, holders: Iterable[str]) -> list[float]:
        """Seconds until ways out of the hosts of some workers are free."""
        in_flight = self.in_flight
        if in_flight.by_outlet:
            return [in_flight.outlet_s(one) for one in holders]
        return [0.0 for _ in holders]

    def would_wait(self, ws: WorkerState) -> bool:
        """Whether what a worker is given now has to wait for what it was given before."""
        # Without a queue, whatever it has to do is in the way.
        return bool(ws.processing) and (
            not self._scheduler.queued or self.ahead_s(ws, self.queue_lasts_s()) > 0
        )

    def is_as_quick_as_any(self, ws: WorkerState, allowed: Collection[WorkerState] | None) -> bool:
        """Return whether a worker may run a task, and is no slower than others.

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
        """Return whether a worker has a thread to spare, or no other worker has one for us."""
        state = self._scheduler
        # While tasks are queued, each free thread is about to get one of those.
        return len(ws.processing) < ws.nthreads or not state.idle or bool(state.queued)

    def wait_s(self, ws: WorkerState, new_s: float = 0.0) -> float:
        """Seconds until a worker that is no slower than others begins with what it is given now.

        As `Worker.queue_s`; of `new_s`, see `workers`.
        """
        if not ws.processing:
            return 0.0
        return self.ahead_s(ws, self.queue_lasts_s(), new_s=new_s) / ws.nthreads

    @staticmethod
    def room_nbytes(ws: WorkerState) -> float:
        """Bytes that a worker has room for before it begins to spill."""
        return ws.memory_limit * SPILL_FROM - ws.nbytes if ws.memory_limit else inf

    def slowness(self, ws: WorkerState) -> float:
        """Seconds that a worker takes for what takes others one."""
        processing = ws.processing
        if not processing:
            return self.speeds.learned(ws.address)
        now_s = self._clock()
        # One that has a thread to spare is not heard of because it has little to do: a task or two
        # that take long, or that wait for others.
        if ws.needs_what or n_on_threads(ws) < ws.nthreads:
            return self.speeds.slowness(ws.address, now_s, None)
        if not self.speeds.is_overdue(ws.address, now_s):
            return self.speeds.learned(ws.address)
        groups = map(_group, islice(processing, MAX_LOOKED_AT))
        return self.speeds.slowness(ws.address, now_s, groups)

    def ended(self, ts: TaskState, ws: WorkerState, seconds: float) -> None:
        """A worker ended a task that took it so long."""
        self.speeds.ended(ws.address, ts.group.name, seconds, self._clock(), not ws.processing)

    def ahead_s(
        self, ws: WorkerState, lasting_s: float, slowness: float = 1.0, new_s: float = 0.0
    ) -> float:
        """Seconds of computing ahead of what a worker is given now, beyond what is made up for.

        As long as the scheduler has tasks in its queue, a worker that has much to do is given
        fewer of them, and a worker that has little is given more. Only what it has to do after
        the queue has run dry, after `lasting_s`, keeps anybody waiting.
        """
        busy_s = self.busy_s(ws, slowness, new_s)
        return max(0.0, busy_s - lasting_s * ws.nthreads) if lasting_s else busy_s

    def queue_lasts_s(self) -> float:
        """Seconds until the scheduler's queue has run dry."""
        queued = self._scheduler.queued
        if not queued:
            return 0.0
        root_s = max(0.0, queued.peek().prefix.duration_average)
        return len(queued) * root_s / self._scheduler.total_nthreads

    def busy_s(self, ws: WorkerState, slowness: float = 1.0, new_s: float = 0.0) -> float:
        """Seconds of computing that a worker has been given; of `new_s`, see `workers`.

        Unlike stock's occupancy, without what it has to fetch: that is known better here, and it
        fetches while it computes.
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
        # What runs is half done, on average.
        n_running = ws.nthreads if ws.nthreads < n_tasks else n_tasks
        return slowness * total_s * (1 - n_running / (2 * n_tasks))

    def idle_near(self, ts: TaskState) -> Iterator[str]:
        """A few workers with a thread to spare: any, then of the host of the largest input."""
        idle: Any = self._scheduler.idle
        # Stock also calls those idle that have less to do than others. Those do not wait for us.
        # As they became idle, which is far cheaper to ask than their addresses' order.
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
                    # Sorted by address, so that those of a host follow one another.
                    host, _, _ = first.address.rpartition(":")
                    yield from islice(idle.irange(f"{host}:", f"{host};", (True, False)), MAX_IDLE)

    # ------------------------------------------------------------------ tasks

    def task(
        self,
        ts: TaskState,
        sizes: Iterable[int],
        joins: Sequence[dict[str, float]],
        asked: Collection[str],
    ) -> Task:
        """What is known of a task.

        Parameters
        ----------
        sizes
            Bytes of its inputs, as `self.sizes` took them in.
        asked
            Workers of which it has to be right whether they hold an input that very many hold.
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
                holders = self._some_holders(who, asked)
            outlet_s = min(map(outlet_of, holders), default=0.0) if in_flight.by_outlet else 0.0
            inputs.append(_new(Input, (dts.key, nbytes, holders, arriving, outlet_s)))
        device = GPU if self.with_gpu and any(map(_is_on_gpu, ts.dependencies)) else None
        duration_s = expected_duration_s(self._scheduler, ts)
        return _new(Task, (ts.key, inputs, duration_s, self.sizes(ts), joins, device))

    def _some_holders(self, who: Collection[WorkerState], asked: Collection[str]) -> list[str]:
        holders = [ws.address for ws in islice(who, MAX_HOLDERS)]
        if len(who) > MAX_HOLDERS:
            known = self._scheduler.workers
            for one in asked:
                if one in known and known[one] in who and one not in holders:
                    holders.append(one)
        return holders

    @staticmethod
    def is_new(ts: TaskState) -> bool:
        """Whether no task of a kind has ended yet, nor is it said how long they take."""
        return bool(ts.prefix.duration_average < 0)

    def is_small(self, ts: TaskState) -> bool:
        """Whether neither a task's inputs nor its output take longer to move than to ask for."""
        total_nbytes = 0
        for dts in ts.dependencies:
            nbytes = dts.nbytes
            total_nbytes += nbytes if nbytes >= 0 else MIN_JOIN_NBYTES
            if total_nbytes >= MIN_JOIN_NBYTES:
                return False
        return self.sizes(ts) < MIN_JOIN_NBYTES

    @staticmethod
    def single_holders(ts: TaskState) -> list[str]:
        """Address of the worker that has it, for each input; none if others have one, too."""
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
        """The one worker that has nearly all of a task's inputs, if there is one."""
        held: dict[WorkerState, int] = {}
        for dts, nbytes in zip(ts.dependencies, sizes, strict=True):
            for ws in islice(dts.who_has or (), MAX_HOLDERS):
                held[ws] = held.get(ws, 0) + nbytes
        least = NEARLY_ALL * sum(sizes)
        found = [ws for ws, nbytes in held.items() if nbytes >= least]
        return found[0] if len(found) == 1 else None

    @staticmethod
    def has_few_holders(ts: TaskState) -> bool:
        """Whether stock, which looks at all holders of inputs, does not have many to look at."""
        return all(len(dts.who_has or ()) <= MAX_HOLDERS for dts in ts.dependencies)

    def idle_candidates(self, ts: TaskState, joins: Sequence[dict[str, float]]) -> tuple[str, ...]:
        """Workers with a thread to spare that are to be looked at whatever they have of a task.

        None while the scheduler has tasks in its queue: a worker with nothing to do is about to get
        one of those, and nobody is done sooner for the bytes that are moved to it. While workers
        that have an input could begin at once, and are no slower than others, those with most of
        it, if there are so many others that they may be left out.
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
    """Tasks that a worker has threads for, or will: all but those that have left theirs."""
    return len(ws.processing) - len(ws.long_running)


def unknown_s(prefix: TaskPrefix) -> float:
    """Length of tasks of which none has ended: as little as a task takes.

    Stock takes half a second, which has data moved away from workers that are in fact about to be
    done. Here no large result is moved for a wait that nobody has seen; small ones may be.
    """
    return max(2 * prefix.max_exec_time, UNKNOWN_S)


def _n_places(ts: TaskState, joins: Sequence[dict[str, float]]) -> int:
    """Workers that have something of a task or what it is joined with, some of them twice."""
    return sum(len(dts.who_has or ()) for dts in ts.dependencies) + sum(map(len, joins))


def _is_on_gpu(ts: TaskState) -> bool:
    return ts.type is not None and ts.type.startswith(_ON_GPU)

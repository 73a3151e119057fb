"""What decisions had workers fetch, when it should be there, and what carries it. Decides nothing.

Only of what the scheduler was told to send; what became of it is asked of the scheduler's own
books when it is looked at: an input that nobody needs there any more has come, or never will.
Placement reads it through `dask_gpurt.plugins.placement.scheduler_view`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

from dask_gpurt.placement.cost import Task, fetches_s
from dask_gpurt.plugins.placement.cluster_links import ClusterLinks

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

#: Seconds of what a host's link still has to carry that are too few to look further for.
LEAST_UPLINK_S = 0.005
#: Inputs whose transfers are remembered.
MAX_IN_FLIGHT = 10_000

_NOTHING: Mapping[str, float] = {}


class TransfersInFlight:
    """One a scheduler.

    Parameters
    ----------
    links
        Ways between workers.
    clock
        Seconds.

    Attributes
    ----------
    by_key
        By input, then by worker: when it will be there. Look, and ask `arriving_s`.
    by_worker
        When it will have all that decisions had it fetch. Look, and ask `receiving_s`.
    by_inlet, by_outlet
        When a host's link (`ClusterLinks.uplink`) will have carried all that decisions had workers
        behind it fetch from other hosts; and all that they had workers of other hosts fetch from
        behind it. Look, and ask `inlet_s` and `outlet_s`.
    """

    def __init__(
        self, scheduler: Scheduler, links: ClusterLinks, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._links = links
        self._clock = clock
        self.by_key: OrderedDict[Hashable, dict[str, float]] = OrderedDict()
        self.by_worker: dict[str, float] = {}
        self.by_inlet: dict[str, float] = {}
        self.by_outlet: dict[str, float] = {}

    def remove_worker(self, address: str) -> None:
        """A worker left."""
        self.by_worker.pop(address, None)
        # Whether it was the last one of its host is not worth finding out.
        now = self._clock()
        for by_uplink in (self.by_inlet, self.by_outlet):
            for name in [name for name, until in by_uplink.items() if until <= now]:
                del by_uplink[name]

    def expect(self, address: str, task: Task) -> None:
        """A worker will now fetch what it lacks of a task; note when it should have it."""
        missing = [
            one
            for one in task.inputs
            if address not in one.holders and address not in one.arriving_s
        ]
        if missing:
            places = self._links.places
            now = self._clock()
            at = self._free_at(address, now)
            fetches = fetches_s(missing, address, places)
            host = places[address][0]
            for one, seconds in zip(missing, fetches, strict=True):
                at += seconds
                self.by_key.setdefault(one.key, {})[address] = at
                if all(places[holder][0] != host for holder in one.holders):
                    self._carries(self.by_inlet, address, one.nbytes, seconds, now)
                    # Workers choose one by lot.
                    n = len(one.holders)
                    for holder in one.holders:
                        self._carries(self.by_outlet, holder, one.nbytes / n, seconds / n, now)
            self._receives_until(address, at)

    def expect_from(
        self, holders: Iterable[str], ts: TaskState, sizes: Iterable[int], address: str
    ) -> None:
        """The same of a task of which each input has one holder, and what is under way is known."""
        by_key = self.by_key
        places = self._links.places
        host, _, near, far = places[address]
        now = self._clock()
        at = self._free_at(address, now)
        is_fetching = False
        crossing_nbytes, crossing_s = 0, 0.0
        for dts, holder, nbytes in zip(ts.dependencies, holders, sizes, strict=True):
            if holder != address and not (dts.key in by_key and address in by_key[dts.key]):
                is_fetching = True
                is_near = places[holder][0] == host
                path = (near if is_near else far)[holder]
                seconds = path.latency_s + nbytes / path.bandwidth_nbytes_per_s
                at += seconds
                by_key.setdefault(dts.key, {})[address] = at
                if not is_near:
                    crossing_nbytes += nbytes
                    crossing_s += seconds
                    self._carries(self.by_outlet, holder, nbytes, seconds, now)
        if is_fetching:
            self._receives_until(address, at)
        if crossing_s:
            self._carries(self.by_inlet, address, crossing_nbytes, crossing_s, now)

    def is_arriving(self, ts: TaskState) -> bool:
        """Whether somebody may be fetching an input of a task."""
        by_key = self.by_key
        if by_key:
            # Asked for every decision at a glance: a generator would take three times as long.
            for dts in ts.dependencies:
                if dts.key in by_key:
                    return True
        return False

    def arrivals_s(self, ts: TaskState) -> list[Mapping[str, float]]:
        """For each input of a task: seconds until it is there, by worker that is fetching it."""
        by_key = self.by_key
        return [self.arriving_s(dts) if dts.key in by_key else _NOTHING for dts in ts.dependencies]

    def arriving_s(self, dts: TaskState) -> dict[str, float]:
        """Seconds until each worker has an input it is fetching, which is one of `by_key`."""
        expected = self.by_key[dts.key]
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
            del self.by_key[dts.key]
        return found

    def receiving_s(self, ws: WorkerState) -> float:
        """Seconds until a worker has all it is fetching already."""
        until = self.by_worker.get(ws.address)
        if until is None:
            return 0.0
        if not ws.needs_what:
            # It came sooner than expected, or is not needed there any more.
            del self.by_worker[ws.address]
            return 0.0
        return max(0.0, until - self._clock())

    def inlet_s(self, address: str) -> float:
        """Seconds until what a worker fetches from other hosts has the way in to itself."""
        return self._busy_s(self.by_inlet, address)

    def outlet_s(self, address: str) -> float:
        """Seconds until what workers of other hosts fetch from one has the way out to itself."""
        return self._busy_s(self.by_outlet, address)

    def _busy_s(self, by_uplink: dict[str, float], address: str) -> float:
        until = by_uplink.get(self._links.uplink(address).name)
        waiting_s = 0.0 if until is None else until - self._clock()
        return waiting_s if waiting_s >= LEAST_UPLINK_S else 0.0

    def _carries(
        self, by_uplink: dict[str, float], address: str, nbytes: float, took_s: float, now: float
    ) -> None:
        """A worker's link will carry so many bytes more, which take so long on the whole way."""
        name, rate = self._links.uplink(address)
        until = by_uplink.get(name, now)
        # What a slower link on the way holds up leaves room for others.
        seconds = took_s if rate == inf else nbytes / rate
        by_uplink[name] = (until if until > now else now) + seconds

    def _free_at(self, address: str, now: float) -> float:
        """When a worker will begin to receive what it is sent now."""
        if address in self.by_worker:
            now += self.receiving_s(self._scheduler.workers[address])
        return now

    def _receives_until(self, address: str, at: float) -> None:
        self.by_worker[address] = at
        by_key = self.by_key
        while len(by_key) > MAX_IN_FLIGHT:
            by_key.popitem(last=False)

"""Transfers in flight that placement decisions caused: input, target, expected arrival, link.

This module records only the inputs that the scheduler told workers to fetch. Their arrival is read
from the scheduler's state: if a worker no longer needs an input, the input has arrived or never
will. `scheduler_view` gives the rest of placement access to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from dask_gpurt.placement.cost import Task, fetches_s
from dask_gpurt.plugins.placement.cluster_links import ClusterLinks

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

#: A link that is busy for less than this is treated as free.
LEAST_UPLINK_S = 0.005
#: Limit of inputs whose transfers are recorded.
MAX_IN_FLIGHT = 10_000

_NOTHING: Mapping[str, float] = {}


@dataclass(slots=True)
class LinkLoad:
    """When a host's link has carried all recorded transfers, and the workers that receive them."""

    until_s: float
    receivers: set[str]


class TransfersInFlight:
    """The transfers in flight of one scheduler's cluster.

    Parameters
    ----------
    links
        Links between workers.
    clock
        Returns seconds.

    Attributes
    ----------
    by_key
        Time of arrival by input, then by worker. Test it for emptiness; read it through
        `arriving_s`.
    by_worker
        Time at which a worker has received all its transfers. Read it through `receiving_s`.
    by_inlet, by_outlet
        By host link (`ClusterLinks.uplink`), its load with transfers into the host, and out of it.
        Read them through `inlet_s` and `outlet_s`.
    """

    def __init__(
        self, scheduler: Scheduler, links: ClusterLinks, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._links = links
        self._clock = clock
        self.by_key: OrderedDict[Hashable, dict[str, float]] = OrderedDict()
        self.by_worker: dict[str, float] = {}
        self.by_inlet: dict[str, LinkLoad] = {}
        self.by_outlet: dict[str, LinkLoad] = {}

    def remove_worker(self, address: str) -> None:
        """Remove a worker that left."""
        self.by_worker.pop(address, None)
        # Finding out whether it was the last worker of its host is not worth the time.
        now = self._clock()
        for by_uplink in (self.by_inlet, self.by_outlet):
            for name in [name for name, load in by_uplink.items() if load.until_s <= now]:
                del by_uplink[name]

    def expect(self, address: str, task: Task) -> None:
        """Record that a worker will now fetch the missing inputs of a task."""
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
                    self._add_load(self.by_inlet, address, one.nbytes, seconds, now, address)
                    # Workers choose a holder at random.
                    n = len(one.holders)
                    for holder in one.holders:
                        self._add_load(
                            self.by_outlet, holder, one.nbytes / n, seconds / n, now, address
                        )
            self._receives_until(address, at)

    def expect_from(
        self, holders: Iterable[str], ts: TaskState, sizes: Iterable[int], address: str
    ) -> None:
        """Do what `expect` does for a task each of whose inputs has one holder."""
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
                    self._add_load(self.by_outlet, holder, nbytes, seconds, now, address)
        if is_fetching:
            self._receives_until(address, at)
        if crossing_s:
            self._add_load(self.by_inlet, address, crossing_nbytes, crossing_s, now, address)

    def is_arriving(self, ts: TaskState) -> bool:
        """Return whether an input of a task may be in flight to some worker."""
        by_key = self.by_key
        if by_key:
            # This runs for every decision: a generator would take three times as long.
            for dts in ts.dependencies:
                if dts.key in by_key:
                    return True
        return False

    def arrivals_s(self, ts: TaskState) -> list[Mapping[str, float]]:
        """Return seconds until each input of a task arrives, by worker that is fetching it."""
        by_key = self.by_key
        return [self.arriving_s(dts) if dts.key in by_key else _NOTHING for dts in ts.dependencies]

    def arriving_s(self, dts: TaskState) -> dict[str, float]:
        """Return seconds until an input of `by_key` arrives, by worker that is fetching it."""
        expected = self.by_key[dts.key]
        now = self._clock()
        workers = self._scheduler.workers
        found = {}
        for address, at in list(expected.items()):
            ws = workers.get(address)
            if ws is not None and dts in ws.needs_what:
                found[address] = max(0.0, at - now)
            else:
                # The input has arrived, or the worker no longer needs it.
                del expected[address]
        if not expected:
            del self.by_key[dts.key]
        return found

    def receiving_s(self, ws: WorkerState) -> float:
        """Return seconds until a worker has received its transfers in flight."""
        until = self.by_worker.get(ws.address)
        if until is None:
            return 0.0
        if not ws.needs_what:
            # The transfers ended sooner than expected, or are no longer needed.
            del self.by_worker[ws.address]
            return 0.0
        return max(0.0, until - self._clock())

    def inlet_s(self, address: str) -> float:
        """Return seconds until the link into a worker's host is free."""
        return self._busy_s(self.by_inlet, address)

    def outlet_s(self, address: str) -> float:
        """Return seconds until the link out of a worker's host is free."""
        return self._busy_s(self.by_outlet, address)

    def _busy_s(self, by_uplink: dict[str, LinkLoad], address: str) -> float:
        name = self._links.uplink(address).name
        load = by_uplink.get(name)
        waiting_s = 0.0 if load is None else load.until_s - self._clock()
        if load is None or waiting_s < LEAST_UPLINK_S:
            return 0.0
        workers = self._scheduler.workers
        for one in load.receivers:
            if (ws := workers.get(one)) is not None and ws.needs_what:
                return waiting_s
        # All transfers ended sooner than expected, or are no longer needed.
        del by_uplink[name]
        return 0.0

    def _add_load(
        self,
        by_uplink: dict[str, LinkLoad],
        address: str,
        nbytes: float,
        took_s: float,
        now: float,
        receiver: str,
    ) -> None:
        """Add bytes to the load of a host's link; the whole path takes `took_s` for them."""
        name, rate = self._links.uplink(address)
        load = by_uplink.setdefault(name, LinkLoad(now, set()))
        load.receivers.add(receiver)
        # If another link of the path is slower, this one has room for other transfers.
        seconds = took_s if rate == inf else nbytes / rate
        load.until_s = max(load.until_s, now) + seconds

    def _free_at(self, address: str, now: float) -> float:
        """Return the time at which a worker begins to receive a new transfer."""
        if address in self.by_worker:
            now += self.receiving_s(self._scheduler.workers[address])
        return now

    def _receives_until(self, address: str, at: float) -> None:
        self.by_worker[address] = at
        by_key = self.by_key
        while len(by_key) > MAX_IN_FLIGHT:
            by_key.popitem(last=False)

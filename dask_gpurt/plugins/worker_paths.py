"""Ways between the workers of a live cluster: as somebody described them, else as learnt.

Puts workers on the nodes of a topology as they come, and remembers paths, since a decision asks
for several. Knows addresses and hosts, nothing of tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING

from dask_gpurt.topology.learned import End, LearnedLinks
from dask_gpurt.topology.model import Path, Topology

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

#: Paths that are remembered, and reports between which they are.
_MAX_PATHS = 100_000
_REPORTS_PER_WORKER = 4
#: Hosts that stand for all, where it is asked what is usual.
_SAMPLED_HOSTS = 16


class WorkerPaths:
    """One a scheduler.

    Parameters
    ----------
    topology
        What was described; None if nothing was.
    """

    def __init__(self, topology: Topology | None) -> None:
        self._topology = topology
        self._learned = LearnedLinks()
        self._ends: dict[str, End] = {}
        self._nodes: dict[str, str] = {}
        self._known: dict[tuple[str, str], Path] = {}
        self._outlets: dict[str, float] = {}
        self._usual_outlet: float | None = None
        self._n_reports = 0

    def add(self, ws: WorkerState) -> None:
        """A worker came."""
        self._ends[ws.address] = End(ws.address, ws.host)
        self._forget_outlets()
        if self._topology is not None:
            node = self._topology.node_of(address=ws.address, name=ws.name, host=ws.host)
            if node is not None:
                self._nodes[ws.address] = node

    def remove(self, address: str) -> None:
        """A worker left."""
        self._ends.pop(address, None)
        self._nodes.pop(address, None)
        self._learned.forget(address)
        self._known.clear()
        self._forget_outlets()

    def _forget_outlets(self) -> None:
        self._outlets.clear()
        self._usual_outlet = None

    def observe(self, address: str, rates: Mapping[str, tuple[float, int]]) -> None:
        """Take in what a worker says of the transfers it received: by peer, sum and count."""
        target = self._ends.get(address)
        if target is None:
            return
        for peer, (total, count) in rates.items():
            source = self._ends.get(peer)
            if (
                source is not None
                and count
                and self._learned.observe(source, target, total / count, count)
            ):
                self._n_reports += 1
        # Each report shifts what is believed of other pairs, a little. Working all paths out anew
        # each time would cost more than they gain by it.
        if self._n_reports >= _REPORTS_PER_WORKER * len(self._ends):
            self._n_reports = 0
            self._known.clear()
            self._forget_outlets()

    def device_kind(self, address: str) -> str | None:
        """Kind of the device that a worker is on, as described."""
        if self._topology is None or (node := self._nodes.get(address)) is None:
            return None
        device = self._topology.device(node)
        return None if device is None else device.kind

    def outlet_nbytes_per_s(self, address: str) -> float:
        """What a worker can send to other hosts: the median of ways to a few; infinite if none."""
        end = self._ends.get(address)
        if end is None:
            return math.inf
        found = self._outlets.get(end.host)
        if found is None:
            others = [one.address for one in self._some_of_each_host() if one.host != end.host]
            rates = [self(address, one).bandwidth_nbytes_per_s for one in others]
            found = self._outlets[end.host] = median(rates) if rates else math.inf
        return found

    def usual_outlet_nbytes_per_s(self) -> float:
        """Median of hosts, or of some of them."""
        if self._usual_outlet is None:
            rates = [self.outlet_nbytes_per_s(one.address) for one in self._some_of_each_host()]
            self._usual_outlet = median(rates) if rates else math.inf
        return self._usual_outlet

    def _some_of_each_host(self) -> list[End]:
        firsts: dict[str, End] = {}
        for end in self._ends.values():
            firsts.setdefault(end.host, end)
        step = max(1, len(firsts) // _SAMPLED_HOSTS)
        return list(firsts.values())[::step]

    def __call__(self, source: str, target: str) -> Path:
        """The way from one worker to another, by address."""
        try:
            return self._known[source, target]
        except KeyError:
            if len(self._known) >= _MAX_PATHS:
                self._known.clear()
            path = self._known[source, target] = self._find(source, target)
            return path

    def _find(self, source: str, target: str) -> Path:
        if self._topology is not None and source in self._nodes and target in self._nodes:
            described = self._topology.path(self._nodes[source], self._nodes[target])
            if described is not None and (described.links or source == target):
                return described
        unknown = End(source, source), End(target, target)
        return self._learned.path(
            self._ends.get(source, unknown[0]), self._ends.get(target, unknown[1])
        )

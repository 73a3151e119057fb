"""Ways between the workers of a live cluster: as somebody described them, else as learnt.

Puts workers on the nodes of a topology as they come, and remembers paths, since a decision asks
for several. Knows addresses and hosts, nothing of tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from dask_gpurt.topology.learned import End, LearnedLinks
from dask_gpurt.topology.model import Path, Topology

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

#: Paths that are remembered, and reports between which they are.
_MAX_PATHS = 100_000
_REPORTS_PER_WORKER = 4
#: Hosts that stand for all, where it is asked what is usual.
_SAMPLED_HOSTS = 16


class _Place(NamedTuple):
    """Where a worker is: a node, its host, and the number of `Topology.outside`."""

    node: str
    host: str
    outside: int


class _Into(dict[str, Path]):
    """Ways to one worker, found when they are first asked for; asking again costs a look-up."""

    __slots__ = ("_paths", "_target")

    def __init__(self, target: str, paths: WorkerPaths) -> None:
        self._target = target
        self._paths = paths

    def __missing__(self, source: str) -> Path:
        path = self[source] = self._paths.find(source, self._target)
        return path


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
        self._places: dict[str, _Place] = {}
        self._known: dict[str, _Into] = {}
        self._n_known = 0
        #: By what is alike of two nodes on different hosts. Few, unless hosts are cabled together.
        self._between: dict[tuple[int, int], Path | None] = {}
        self._outlets: dict[str, float] = {}
        self._usual_outlet: float | None = None
        self._doubt: float | None = None
        #: Gone through once they change: reports come hundreds of times a second.
        self._is_described: bool | None = None
        self._n_reports = 0

    def add(self, ws: WorkerState) -> None:
        """A worker came."""
        self._ends[ws.address] = End(ws.address, ws.host)
        self._is_described = None
        self._forget_outlets()
        if self._topology is not None:
            node = self._topology.node_of(address=ws.address, name=ws.name, host=ws.host)
            if node is not None:
                host, outside = node.partition("/")[0], self._topology.outside(node)
                self._places[ws.address] = _Place(node, host, outside)

    def remove(self, address: str) -> None:
        """A worker left."""
        self._ends.pop(address, None)
        self._places.pop(address, None)
        self._learned.forget(address)
        self._is_described = None
        self._forget_paths()
        self._forget_outlets()

    def _forget_paths(self) -> None:
        self._known.clear()
        self._n_known = 0

    def _forget_outlets(self) -> None:
        self._outlets.clear()
        self._usual_outlet = None
        self._doubt = None

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
                self._doubt = None
        # Each report shifts what is believed of other pairs, a little. Working all paths out anew
        # each time would cost more than they gain by it.
        if self._n_reports >= _REPORTS_PER_WORKER * len(self._ends):
            self._n_reports = 0
            self._forget_paths()
            self._forget_outlets()

    def device_kind(self, address: str) -> str | None:
        """Kind of the device that a worker is on, as described."""
        if self._topology is None or (place := self._places.get(address)) is None:
            return None
        device = self._topology.device(place.node)
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
        return self.into(target)[source]

    def into(self, target: str) -> Mapping[str, Path]:
        """The ways to a worker, by where they come from. To be asked and let go, not to be kept."""
        found = self._known.get(target)
        if found is None:
            found = self._known[target] = _Into(target, self)
        return found

    def doubt(self) -> float:
        """By what factor links may carry more or less than is believed; 1 if all are described."""
        if self._doubt is None:
            if self._is_described is None:
                self._is_described = self._look_whether_described()
            self._doubt = 1.0 if self._is_described else self._learned.doubt()
        return self._doubt

    def _look_whether_described(self) -> bool:
        """Whether all hosts are, and ways between them."""
        if not self._places.keys() >= self._ends.keys():
            return False
        one_each = list({place.host: place for place in self._places.values()}.values())
        return all(self._way_between(one_each[0], other) for other in one_each[1:])

    def find(self, source: str, target: str) -> Path:
        """Work out a way that is not remembered."""
        if self._n_known >= _MAX_PATHS:
            self._forget_paths()
        self._n_known += 1
        here, there = self._places.get(source), self._places.get(target)
        if here is not None and there is not None:
            # Of a thousand workers there are a million pairs. But hosts are alike, and so are the
            # devices of one, so that most of these pairs differ in the names of links only.
            if here.host != there.host:
                described = self._way_between(here, there)
            else:
                described = self._way_within(here, there)
            if described is not None:
                return described
        return self._learned.path(
            self._ends.get(source) or End(source, source),
            self._ends.get(target) or End(target, target),
        )

    def _way_within(self, source: _Place, target: _Place) -> Path | None:
        """The way between two places of a host; None if none is described, or they are one."""
        assert self._topology is not None
        path = self._topology.path(source.node, target.node)
        return path if path is not None and path.links else None

    def _way_between(self, source: _Place, target: _Place) -> Path | None:
        """The way between two places of different hosts; None if none is described."""
        kinds = source.outside, target.outside
        if kinds not in self._between:
            assert self._topology is not None
            path = self._topology.path(source.node, target.node)
            if len(self._between) >= _MAX_PATHS:
                self._between.clear()
            self._between[kinds] = path and replace(path, links=())
        return self._between[kinds]

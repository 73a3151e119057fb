"""Links between the workers of a live cluster: as described in a topology, else as learned.

A person's figures are used as they are. Links that workers reported carry no more than the
transfers that workers measured: Dask's connections get only a part of what a card can carry, and
data of GPUs may pass through the host.

`ClusterLinks` maps workers to nodes of the topology when they join. It caches paths, since one
decision needs several. It knows addresses and hosts, not tasks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import IntEnum
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dask_gpurt.topology.learned import End, LearnedLinks, LearnedShares
from dask_gpurt.topology.model import Path, Topology
from dask_gpurt.topology.places import Place, Places, path_between

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

Value = TypeVar("Value")
#: `_Location.outside` of a node, seen from other hosts; `_Location.inside`, from its own.
_Kind = int | tuple[int, str]

#: A host is behind a slow link if it can send less than this share of what is usual.
SLOW_SHARE = 0.5
#: Limit of cached paths, and reports per worker after which the cache is dropped.
_MAX_PATHS = 100_000
_REPORTS_PER_WORKER = 4
#: Hosts sampled to find out what is usual.
_SAMPLED_HOSTS = 16
#: Stands for an unknown worker on an unknown host.
_UNKNOWN_END = End("", "")


class Uplink(NamedTuple):
    """The link between a host and other hosts, shared by all workers behind it.

    Attributes
    ----------
    name
        Name of the link; name of the host if no link is described.
    nbytes_per_s
        Bandwidth in each direction; infinite if bandwidths are only known for whole paths.
    """

    name: str
    nbytes_per_s: float


class _Known(IntEnum):
    """How much is known of links: not all; all, but some by reports; or all from a person."""

    PARTLY = 0
    REPORTED = 1
    WRITTEN = 2


class _Location(NamedTuple):
    """The place of a worker in a topology: its node, its host, and the kinds of both.

    Attributes
    ----------
    outside
        `Topology.outside` of the node.
    inside
        `Topology.inside` of the host, and the name of the node there.
    is_reported
        `Topology.is_reported` of the node.
    """

    node: str
    host: str
    outside: int
    inside: tuple[int, str]
    is_reported: bool


class _Memo(dict[str, Value]):
    """A cache by address: it computes a missing entry, then returns it by a plain look-up."""

    __slots__ = ("_find",)

    def __init__(self, find: Callable[[str], Value]) -> None:
        self._find = find

    def __missing__(self, address: str) -> Value:
        found = self[address] = self._find(address)
        return found


class ClusterLinks:
    """The links of one scheduler's cluster.

    Parameters
    ----------
    topology
        The description of the machines; None if there is none.
    """

    def __init__(self, topology: Topology | None) -> None:
        self._topology = topology
        self._learned = LearnedLinks()
        self._shares = LearnedShares()
        self._ends: dict[str, End] = {}
        self._locations: dict[str, _Location] = {}
        #: Number of workers on each node.
        self._n_workers_on: Counter[str] = Counter()
        self._places: _Memo[Place] = _Memo(self._place)
        self._far_paths: dict[int, _Memo[Path]] = {}
        self._n_known = 0
        #: Two locations of each kind, on different hosts if possible.
        self._examples: dict[int, list[_Location]] = {}
        #: Paths by the kinds of two nodes. Few, unless hosts are cabled together.
        self._paths: dict[tuple[_Kind, _Kind], Path | None] = {}
        self._uplinks: dict[str, Uplink] = {}
        self._outlets: dict[str, float] = {}
        self._behind_slow_link: dict[str, bool] = {}
        self._usual_outlet: float | None = None
        self._sampled: list[End] | None = None
        self._uncertainty: float | None = None
        #: None after a worker left, until it is computed again.
        self._known: _Known | None = None
        self._n_reports = 0

    def add(self, ws: WorkerState) -> None:
        """Add a worker that joined."""
        before = self._all_known()
        self._ends[ws.address] = End(ws.address, ws.host)
        self._forget_outlets()
        location = self._locate(ws)
        self._known = _Known.PARTLY if location is None else min(before, self._known_at(location))
        if location is not None:
            self._drop_location(ws.address)
            self._locations[ws.address] = location
            self._n_workers_on[location.node] += 1
            examples = self._examples.setdefault(location.outside, [])
            if len(examples) < 2 and all(one.host != location.host for one in examples):
                examples.append(location)
                if location.outside in self._far_paths:
                    # Until now, workers on the host of the only other example had no path to this
                    # kind.
                    self._far_paths[location.outside].clear()
        self._uplinks.pop(ws.address, None)
        if self._known:
            # Compute this now rather than during a decision, and also how others of its kind reach
            # it.
            place = self._places[ws.address] = self._place(ws.address)
            place.far[ws.address]
            self.uplink(ws.address)
        else:
            self._forget_links()

    def set_topology(self, topology: Topology, workers: Iterable[WorkerState]) -> None:
        """Replace the description. What was measured stays."""
        self._topology = topology
        # Workers without a location would count as undescribed while they are added one by one.
        self._ends.clear()
        for memo in (self._locations, self._n_workers_on, self._examples, self._uplinks):
            memo.clear()
        self._paths.clear()
        self._forget_links()
        self._known = None
        for ws in workers:
            self.add(ws)

    def _locate(self, ws: WorkerState) -> _Location | None:
        """Return the location of a worker; None if it is not described."""
        if self._topology is None:
            return None
        node = self._topology.node_of(address=ws.address, name=ws.name, host=ws.host)
        if node is None:
            return None
        host, _, name = node.partition("/")
        inside = self._topology.inside(host), name
        is_reported = self._topology.is_reported(node)
        return _Location(node, host, self._topology.outside(node), inside, is_reported)

    def _known_at(self, location: _Location) -> _Known:
        """Return how the paths between a location and the other workers are known.

        The other workers have paths between them, so one of them stands for all.
        """
        is_reported = location.is_reported
        other = next(iter(self._locations.values()), location)
        if other.host != location.host:
            path = self._described_path(other, location)
            if path is None:
                return _Known.PARTLY
            is_reported |= path.is_reported
        return _Known.REPORTED if is_reported else _Known.WRITTEN

    def remove(self, address: str) -> None:
        """Remove a worker that left."""
        self._ends.pop(address, None)
        self._drop_location(address)
        self._uplinks.pop(address, None)
        self._learned.forget(address)
        self._known = None
        self._forget_links()
        self._forget_outlets()

    def _drop_location(self, address: str) -> None:
        location = self._locations.pop(address, None)
        if location is not None:
            self._n_workers_on[location.node] -= 1

    def _forget_links(self) -> None:
        self._places.clear()
        self._far_paths.clear()
        self._n_known = 0

    def _forget_outlets(self) -> None:
        self._outlets.clear()
        self._behind_slow_link.clear()
        self._usual_outlet = None
        self._sampled = None
        self._uncertainty = None

    def observe(self, address: str, rates: Mapping[str, tuple[float, int]]) -> None:
        """Record the transfer rates that a worker measured: by peer, their sum and count."""
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
                self._uncertainty = None
                self._learn_share(peer, address, total / count, count)
        # Each report changes the estimates of other pairs a little. Computing all paths again each
        # time would cost more than it gains.
        if self._n_reports >= _REPORTS_PER_WORKER * len(self._ends):
            self._n_reports = 0
            self._forget_links()
            self._forget_outlets()

    def _learn_share(self, source: str, target: str, nbytes_per_s: float, count: int) -> None:
        here, there = self._locations.get(source), self._locations.get(target)
        if here is not None and there is not None:
            described = self._described_path(here, there)
            if described is not None and described.is_reported:
                self._shares.observe(described, nbytes_per_s, count)

    def undescribed(self) -> list[str]:
        """Return the workers whose host is not described."""
        return sorted(self._ends.keys() - self._locations.keys())

    def device_kind(self, address: str) -> str | None:
        """Return the kind of the device that a worker is on, as described."""
        if self._topology is None or (location := self._locations.get(address)) is None:
            return None
        device = self._topology.device(location.node)
        return None if device is None else device.kind

    def uplink(self, address: str) -> Uplink:
        """Return the link through which a worker's host exchanges data with other hosts."""
        found = self._uplinks.get(address)
        if found is None:
            found = self._find_uplink(address)
            if self._topology is None or found.nbytes_per_s < math.inf:
                self._uplinks[address] = found
            # Otherwise another host may join later and have a path to this one.
        return found

    def _find_uplink(self, address: str) -> Uplink:
        location = self._locations.get(address)
        if location is not None and self._topology is not None:
            # Any other host will do: there are few paths into a host for each of its nodes.
            for others in self._examples.values():
                for other in others:
                    if other.host != location.host:
                        link = self._topology.entrance(other.node, location.node)
                        if link is not None:
                            return Uplink(link.name, link.bandwidth_nbytes_per_s)
        end = self._ends.get(address)
        return Uplink(end.host if end is not None else address, math.inf)

    def widest_nbytes_per_s(self, address: str) -> float:
        """Return an upper bound of the bandwidth of paths from or to a worker.

        It is infinite if the worker's links are not described.
        """
        location = self._locations.get(address)
        # Bandwidths between workers on one node are learned, and so are those of undescribed
        # workers.
        if location is None or self._n_workers_on[location.node] > 1 or not self.are_described():
            return math.inf
        assert self._topology is not None
        return self._topology.widest_nbytes_per_s(location.node)

    def outlet_nbytes_per_s(self, address: str) -> float:
        """Return what a worker can send to other hosts, as the median of a few paths.

        It is infinite if there are no other hosts.
        """
        end = self._ends.get(address)
        if end is None:
            return math.inf
        found = self._outlets.get(end.host)
        if found is None:
            others = [one.address for one in self._sampled_ends() if one.host != end.host]
            rates = [self(address, one).bandwidth_nbytes_per_s for one in others]
            found = self._outlets[end.host] = median(rates) if rates else math.inf
        return found

    def usual_outlet_nbytes_per_s(self) -> float:
        """Return the median of `outlet_nbytes_per_s` over hosts, or over some of them."""
        if self._usual_outlet is None:
            rates = [self.outlet_nbytes_per_s(one.address) for one in self._sampled_ends()]
            self._usual_outlet = median(rates) if rates else math.inf
        return self._usual_outlet

    def is_behind_slow_link(self, address: str) -> bool:
        """Return whether a worker's host can send far less than is usual."""
        found = self._behind_slow_link.get(address)
        if found is None:
            least = SLOW_SHARE * self.usual_outlet_nbytes_per_s()
            found = self.outlet_nbytes_per_s(address) < least
            self._behind_slow_link[address] = found
        return found

    def _sampled_ends(self) -> list[End]:
        # This is asked for each host in turn, which would be all workers times all hosts.
        if self._sampled is None:
            firsts: dict[str, End] = {}
            for end in self._ends.values():
                firsts.setdefault(end.host, end)
            step = max(1, len(firsts) // _SAMPLED_HOSTS)
            self._sampled = list(firsts.values())[::step]
        return self._sampled

    def __call__(self, source: str, target: str) -> Path:
        """Return the path from one worker to another, by address."""
        return path_between(self._places, source, target)

    @property
    def places(self) -> Places:
        """Places of workers. Do not keep entries: they are valid until workers change."""
        return self._places

    def uncertainty(self) -> float:
        """Return the factor by which links may differ from estimates; 1 if a person wrote all."""
        if self._uncertainty is None:
            self._uncertainty = 1.0 if self.are_written() else self._learned.uncertainty()
        return self._uncertainty

    def are_described(self) -> bool:
        """Return whether all workers' hosts and the paths between them are described."""
        return self._all_known() != _Known.PARTLY

    def are_written(self) -> bool:
        """Return whether a person described all workers' hosts and the paths between them."""
        return self._all_known() == _Known.WRITTEN

    def _all_known(self) -> _Known:
        if self._known is None:
            if self._locations.keys() >= self._ends.keys():
                alike = {(one.host, one.is_reported): one for one in self._locations.values()}
                self._known = min(map(self._known_at, alike.values()), default=_Known.WRITTEN)
            else:
                self._known = _Known.PARTLY
        return self._known

    def _place(self, address: str) -> Place:
        """Return the place of a worker; each has a kind of its own unless all are described."""
        self._count_path()
        location = self._locations.get(address)
        near = _Memo(partial(self._find, address))
        if location is None or not self.are_described():
            return Place(address, address, near, near)
        far = self._far_paths.get(location.outside)
        if far is None:
            far = self._far_paths[location.outside] = _Memo(
                partial(self._find_far, location.outside)
            )
        return Place(location.host, location.outside, near, far)

    def _count_path(self) -> None:
        if self._n_known >= _MAX_PATHS:
            self._forget_links()
        self._n_known += 1

    def _find(self, target: str, source: str) -> Path:
        """Compute a path that is not cached."""
        self._count_path()
        here, there = self._locations.get(source), self._locations.get(target)
        if here is not None and there is not None:
            described = self._described_path(here, there)
            if described is not None:
                return self._as_measured(described)
        return self._learned.path(
            self._ends.get(source) or End(source, source),
            self._ends.get(target) or End(target, target),
        )

    def _find_far(self, outside: int, source: str) -> Path:
        """Compute the path from a worker to all workers of a kind on other hosts."""
        self._count_path()
        here = self._locations.get(source)
        if here is not None:
            for there in self._examples[outside]:
                if (
                    there.host != here.host
                    and (path := self._described_path(here, there)) is not None
                ):
                    return self._as_measured(path)
        # The source left, or no other host has a worker of the kind.
        return self._learned.path(self._ends.get(source) or End(source, source), _UNKNOWN_END)

    def _described_path(self, source: _Location, target: _Location) -> Path | None:
        """Return the path between two nodes, without the names of its links.

        It is None if it is not described, or if both are the same node.
        """
        # A thousand workers have a million pairs. But hosts are alike, and so are the devices of a
        # host: most pairs differ in the names of links only.
        kinds: tuple[_Kind, _Kind] = source.outside, target.outside
        if source.host == target.host:
            kinds = source.inside, target.inside
        if kinds not in self._paths:
            assert self._topology is not None
            is_one = source.node == target.node
            path = None if is_one else self._topology.path(source.node, target.node)
            if len(self._paths) >= _MAX_PATHS:
                self._paths.clear()
            self._paths[kinds] = path and replace(path, links=())
        return self._paths[kinds]

    def _as_measured(self, described: Path) -> Path:
        return self._shares.of(described) if described.is_reported else described

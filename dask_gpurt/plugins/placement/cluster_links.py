"""Ways between the workers of a live cluster: as somebody described them, else as learnt.

Puts workers on the nodes of a topology as they come, and remembers paths, since a decision asks
for several. Knows addresses and hosts, nothing of tasks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dask_gpurt.topology.learned import End, LearnedLinks
from dask_gpurt.topology.model import Path, Topology
from dask_gpurt.topology.places import Place, Places, path_between

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

Key = TypeVar("Key")
Value = TypeVar("Value")

#: A host is behind a slow link if it can send less than this share of what others can.
SLOW_SHARE = 0.5
#: Paths that are remembered, and reports between which they are.
_MAX_PATHS = 100_000
_REPORTS_PER_WORKER = 4
#: Hosts that stand for all, where it is asked what is usual.
_SAMPLED_HOSTS = 16
#: A worker that there is not, on a host that nothing is known of.
_ELSEWHERE = End("", "")


class Uplink(NamedTuple):
    """What data to and from other hosts goes through, shared by all workers of which it is that.

    Attributes
    ----------
    name
        Of a link, or of a host where none is described.
    nbytes_per_s
        What it carries each way; infinite if that is only known of whole ways.
    """

    name: str
    nbytes_per_s: float


class _Spot(NamedTuple):
    """Where a worker is on a topology: a node, its host, and what is alike of others.

    Attributes
    ----------
    outside
        `Topology.outside` of the node.
    inside
        `Topology.inside` of the host, and what the node is called there.
    """

    node: str
    host: str
    outside: int
    inside: tuple[int, str]


class _Found(dict[str, Value]):
    """What is found of workers when it is first asked for; asking again costs a look-up."""

    __slots__ = ("_find",)

    def __init__(self, find: Callable[[str], Value]) -> None:
        self._find = find

    def __missing__(self, address: str) -> Value:
        found = self[address] = self._find(address)
        return found


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
        self._spots: dict[str, _Spot] = {}
        #: How many workers are on each node.
        self._n_at: Counter[str] = Counter()
        self._places: _Found[Place] = _Found(self._place)
        self._from_afar: dict[int, _Found[Path]] = {}
        self._n_known = 0
        #: Two of each kind, on different hosts where there are such.
        self._examples: dict[int, list[_Spot]] = {}
        #: By what is alike of two nodes on different hosts. Few, unless hosts are cabled together.
        self._between: dict[tuple[int, int], Path | None] = {}
        #: The same of two on one host.
        self._within: dict[tuple[tuple[int, str], tuple[int, str]], Path | None] = {}
        self._uplinks: dict[str, Uplink] = {}
        self._outlets: dict[str, float] = {}
        self._behind_slow_link: dict[str, bool] = {}
        self._usual_outlet: float | None = None
        self._sampled: list[End] | None = None
        self._doubt: float | None = None
        #: None where a worker left, and that may have made a difference.
        self._is_described: bool | None = None
        self._n_reports = 0

    def add(self, ws: WorkerState) -> None:
        """A worker came."""
        was_described = self._all_described()
        self._ends[ws.address] = End(ws.address, ws.host)
        self._forget_outlets()
        spot = self._spot(ws)
        self._is_described = was_described and spot is not None and self._is_reached(spot)
        if spot is not None:
            self._leave_spot(ws.address)
            self._spots[ws.address] = spot
            self._n_at[spot.node] += 1
            examples = self._examples.setdefault(spot.outside, [])
            if len(examples) < 2 and all(one.host != spot.host for one in examples):
                examples.append(spot)
                if spot.outside in self._from_afar:
                    # Whoever was on the host of all others of the kind had no way to another.
                    self._from_afar[spot.outside].clear()
        self._uplinks.pop(ws.address, None)
        if self._is_described:
            # Now rather than in the middle of a decision, also how others of its kind reach it.
            place = self._places[ws.address] = self._place(ws.address)
            place.far[ws.address]
            self.uplink(ws.address)
        else:
            self._forget_paths()

    def _spot(self, ws: WorkerState) -> _Spot | None:
        """Where a worker is, if that is described."""
        if self._topology is None:
            return None
        node = self._topology.node_of(address=ws.address, name=ws.name, host=ws.host)
        if node is None:
            return None
        host, _, name = node.partition("/")
        inside = self._topology.inside(host), name
        return _Spot(node, host, self._topology.outside(node), inside)

    def _is_reached(self, spot: _Spot) -> bool:
        """Whether there is a way described from the others, between whom there is one."""
        other = next(iter(self._spots.values()), spot)
        return other.host == spot.host or self._way_between(other, spot) is not None

    def remove(self, address: str) -> None:
        """A worker left."""
        self._ends.pop(address, None)
        self._leave_spot(address)
        self._uplinks.pop(address, None)
        self._learned.forget(address)
        self._is_described = None
        self._forget_paths()
        self._forget_outlets()

    def _leave_spot(self, address: str) -> None:
        spot = self._spots.pop(address, None)
        if spot is not None:
            self._n_at[spot.node] -= 1

    def _forget_paths(self) -> None:
        self._places.clear()
        self._from_afar.clear()
        self._n_known = 0

    def _forget_outlets(self) -> None:
        self._outlets.clear()
        self._behind_slow_link.clear()
        self._usual_outlet = None
        self._sampled = None
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

    def undescribed(self) -> list[str]:
        """Workers that are on no host that was described."""
        return sorted(self._ends.keys() - self._spots.keys())

    def device_kind(self, address: str) -> str | None:
        """Kind of the device that a worker is on, as described."""
        if self._topology is None or (spot := self._spots.get(address)) is None:
            return None
        device = self._topology.device(spot.node)
        return None if device is None else device.kind

    def uplink(self, address: str) -> Uplink:
        """What data to and from other hosts goes through at a worker's end."""
        found = self._uplinks.get(address)
        if found is None:
            found = self._find_uplink(address)
            if self._topology is None or found.nbytes_per_s < math.inf:
                self._uplinks[address] = found
            # Else there may yet be another host, from which there is a way.
        return found

    def _find_uplink(self, address: str) -> Uplink:
        spot = self._spots.get(address)
        if spot is not None and self._topology is not None:
            # Whichever the other host is: there are few ways into a host for each of its nodes.
            for others in self._examples.values():
                for other in others:
                    if other.host != spot.host:
                        link = self._topology.entrance(other.node, spot.node)
                        if link is not None:
                            return Uplink(link.name, link.bandwidth_nbytes_per_s)
        end = self._ends.get(address)
        return Uplink(end.host if end is not None else address, math.inf)

    def widest_nbytes_per_s(self, address: str) -> float:
        """What no way from or to a worker exceeds; infinite where that is not described."""
        spot = self._spots.get(address)
        # Between workers on one node it is learnt, as it is to whoever is not on any.
        if spot is None or self._n_at[spot.node] > 1 or not self._all_described():
            return math.inf
        assert self._topology is not None
        return self._topology.widest_nbytes_per_s(spot.node)

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

    def is_behind_slow_link(self, address: str) -> bool:
        """Whether a worker's host can send far less than is usual."""
        found = self._behind_slow_link.get(address)
        if found is None:
            least = SLOW_SHARE * self.usual_outlet_nbytes_per_s()
            found = self.outlet_nbytes_per_s(address) < least
            self._behind_slow_link[address] = found
        return found

    def _some_of_each_host(self) -> list[End]:
        # Asked for each host in turn, which would be all workers times all hosts.
        if self._sampled is None:
            firsts: dict[str, End] = {}
            for end in self._ends.values():
                firsts.setdefault(end.host, end)
            step = max(1, len(firsts) // _SAMPLED_HOSTS)
            self._sampled = list(firsts.values())[::step]
        return self._sampled

    def __call__(self, source: str, target: str) -> Path:
        """The way from one worker to another, by address."""
        return path_between(self._places, source, target)

    @property
    def places(self) -> Places:
        """Where workers are. What is in it is not to be kept: it holds until workers change."""
        return self._places

    def doubt(self) -> float:
        """By what factor links may carry more or less than is believed; 1 if all are described."""
        if self._doubt is None:
            self._doubt = 1.0 if self._all_described() else self._learned.doubt()
        return self._doubt

    def _all_described(self) -> bool:
        """Whether all hosts are, and ways between them."""
        if self._is_described is None:
            self._is_described = self._spots.keys() >= self._ends.keys() and all(
                map(self._is_reached, {spot.host: spot for spot in self._spots.values()}.values())
            )
        return self._is_described

    def _place(self, address: str) -> Place:
        """Of a worker; of a kind of its own unless everybody is where it was described."""
        self._count_one()
        spot = self._spots.get(address)
        near = _Found(partial(self._find, address))
        if spot is None or not self._all_described():
            return Place(address, address, near, near)
        far = self._from_afar.get(spot.outside)
        if far is None:
            far = self._from_afar[spot.outside] = _Found(partial(self._find_far, spot.outside))
        return Place(spot.host, spot.outside, near, far)

    def _count_one(self) -> None:
        if self._n_known >= _MAX_PATHS:
            self._forget_paths()
        self._n_known += 1

    def _find(self, target: str, source: str) -> Path:
        """Work out a way that is not remembered."""
        self._count_one()
        here, there = self._spots.get(source), self._spots.get(target)
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

    def _find_far(self, outside: int, source: str) -> Path:
        """Work out the way from a worker to all of a kind that are on other hosts."""
        self._count_one()
        here = self._spots.get(source)
        if here is not None:
            for there in self._examples[outside]:
                if there.host != here.host and (path := self._way_between(here, there)) is not None:
                    return path
        # It left, or there is nobody of the kind on another host.
        return self._learned.path(self._ends.get(source) or End(source, source), _ELSEWHERE)

    def _way_within(self, source: _Spot, target: _Spot) -> Path | None:
        """The way between two places of a host; None if none is described, or they are one."""
        alike = source.inside, target.inside
        if alike not in self._within:
            assert self._topology is not None
            path = self._topology.path(source.node, target.node)
            is_one = source.node == target.node
            self._remember(self._within, alike, None if is_one else path)
        return self._within[alike]

    def _way_between(self, source: _Spot, target: _Spot) -> Path | None:
        """The way between two places of different hosts; None if none is described."""
        kinds = source.outside, target.outside
        if kinds not in self._between:
            assert self._topology is not None
            path = self._topology.path(source.node, target.node)
            self._remember(self._between, kinds, path)
        return self._between[kinds]

    @staticmethod
    def _remember(ways: dict[Key, Path | None], alike: Key, path: Path | None) -> None:
        """Keep a way for all places that are alike, which differ in the names of links only."""
        if len(ways) >= _MAX_PATHS:
            ways.clear()
        ways[alike] = path and replace(path, links=())

"""Ways through a topology, worked out per node and put together per pair. Pure.

A scheduler asks for the way between any two of a thousand workers, in the middle of a decision. So
what is worked out is, once for each node, how it gets out of its host to the switches between
hosts; two such halves that meet at a switch make a way. A search through the whole topology for
each pair took milliseconds at that size.

Bytes do not pass through a host that is neither their source nor their target, unless there is no
other way; then the whole topology is searched after all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dask_gpurt.topology.model import Link

#: By node: its neighbours, and the links to them.
Neighbours = Mapping[str, Sequence[tuple[str, "Link"]]]


class Way(NamedTuple):
    """Compared by latency, then by the number of links, then by their names."""

    latency_s: float
    n_links: int
    links: tuple[str, ...]


class Routes:
    """The ways of one topology.

    Parameters
    ----------
    neighbours
        The graph.
    host_of
        Host of a node, None of a switch between hosts.
    is_end
        Whether bytes begin and end at a node and do not pass through.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        host_of: Mapping[str, str | None],
        is_end: Callable[[str], bool],
    ) -> None:
        self._neighbours = neighbours
        self._host_of = host_of
        self._is_end = is_end
        #: By node, by switch: ways that are narrower and quicker than those before.
        self._halves: dict[str, dict[str, list[tuple[float, Way]]]] = {}
        #: By node, by node of the same host: the widest way.
        self._within_host: dict[str, dict[str, Way]] = {}
        #: Hosts with links of their own to one another, of which halves know nothing.
        self._cabled = {
            (here, there)
            for node, onward in neighbours.items()
            for other, _ in onward
            if None is not (here := host_of[node]) != (there := host_of[other]) is not None
        }
        self._outside: dict[str, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._part_of = _parts(neighbours)

    def way(self, source: str, target: str) -> Way | None:
        """The widest way, the first of those in their order; None if there is none."""
        if self._part_of[source] != self._part_of[target]:
            return None
        here, there = self._host_of[source], self._host_of[target]
        if here is not None and here == there:
            self._half(source)
            found = self._within_host[source].get(target)
        elif here is None or there is None or (here, there) in self._cabled:
            found = self._best({here, there, None}, source, target)
        else:
            found = self._joined(source, target)
        return found or self._best(None, source, target)

    def outside(self, node: str) -> int:
        """A number, the same for nodes that other hosts are reached from alike: as wide, as quick.

        So it does not matter to the width and the latency of a way between hosts which of such
        nodes it begins or ends at.
        """
        found = self._outside.get(node)
        if found is None:
            half = tuple(
                (switch, tuple((width, way.latency_s) for width, way in ways))
                for switch, ways in sorted(self._half(node).items())
            )
            # Where hosts have links of their own to one another, a node is like no other.
            alike = node if self._cabled else half
            found = self._numbers.setdefault(alike, len(self._numbers))
            self._outside[node] = found
        return found

    def _joined(self, source: str, target: str) -> Way | None:
        one, other = self._half(source), self._half(target)
        meeting = [switch for switch in one if switch in other]
        width = max((min(one[s][0][0], other[s][0][0]) for s in meeting), default=0.0)
        found = None
        for switch in meeting:
            if min(one[switch][0][0], other[switch][0][0]) < width:
                continue
            out = _first_as_wide(one[switch], width)
            into = _first_as_wide(other[switch], width)
            way = Way(
                out.latency_s + into.latency_s,
                out.n_links + into.n_links,
                out.links + into.links[::-1],
            )
            if found is None or way < found:
                found = way
        return found

    def _half(self, node: str) -> dict[str, list[tuple[float, Way]]]:
        """How a node gets to each switch between hosts: the widest way, then quicker ones.

        On the way there, how it gets to the other nodes of its host.
        """
        found = self._halves.get(node)
        if found is None:
            found = self._halves[node] = {}
            neighbours = self._within_host[node] = {}
            within = {self._host_of[node], None}
            widths = self._widths(within, node)
            switches = [one for one in widths if self._host_of[one] is None]
            # Of whatever link: where the other half is the narrower one, this may be the quicker.
            links = (link for one in widths for _, link in self._onward(within, node, one))
            for width in sorted({link.bandwidth_nbytes_per_s for link in links}, reverse=True):
                ways = self._quickest(within, node, width)
                for other in ways:
                    if widths[other] == width and self._host_of[other] is not None:
                        neighbours[other] = ways[other]
                for switch in switches:
                    way = ways.get(switch)
                    known = found.get(switch)
                    if way is not None and (known is None or way < known[-1][1]):
                        found.setdefault(switch, []).append((width, way))
        return found

    def _best(self, within: set[str | None] | None, source: str, target: str) -> Way | None:
        width = self._widths(within, source).get(target)
        return None if width is None else self._quickest(within, source, width)[target]

    def _widths(self, within: set[str | None] | None, source: str) -> dict[str, float]:
        """Width of the widest way to each node of these hosts; of any, if None."""
        widths: dict[str, float] = {}
        queue = [(-float("inf"), source)]
        while queue:
            width, node = heapq.heappop(queue)
            if node in widths:
                continue
            widths[node] = -width
            for neighbour, link in self._onward(within, source, node):
                if neighbour not in widths:
                    heapq.heappush(queue, (max(width, -link.bandwidth_nbytes_per_s), neighbour))
        return widths

    def _quickest(
        self, within: set[str | None] | None, source: str, width: float
    ) -> dict[str, Way]:
        """The first way, in their order, of those that are so wide, to each node."""
        ways: dict[str, Way] = {}
        queue: list[tuple[Way, str]] = [(Way(0.0, 0, ()), source)]
        while queue:
            way, node = heapq.heappop(queue)
            if node in ways:
                continue
            ways[node] = way
            for neighbour, link in self._onward(within, source, node):
                if neighbour not in ways and link.bandwidth_nbytes_per_s >= width:
                    longer = Way(
                        way.latency_s + link.latency_s, way.n_links + 1, (*way.links, link.name)
                    )
                    heapq.heappush(queue, (longer, neighbour))
        return ways

    def _onward(
        self, within: set[str | None] | None, source: str, node: str
    ) -> Sequence[tuple[str, Link]]:
        # Bytes pass through memory, cards and switches, but not through a device on their way
        # from another: that would take its memory, and a process to move them on.
        if node != source and self._is_end(node):
            return ()
        onward = self._neighbours[node]
        if within is None:
            return onward
        return [one for one in onward if self._host_of[one[0]] in within]


def _first_as_wide(half: Sequence[tuple[float, Way]], width: float) -> Way:
    return min(way for one, way in half if one >= width)


def _parts(neighbours: Neighbours) -> dict[str, int]:
    """A number for each node, the same for those that links connect."""
    found: dict[str, int] = {}
    for number, start in enumerate(neighbours):
        stack = [start]
        while stack:
            node = stack.pop()
            if node not in found:
                found[node] = number
                stack += [neighbour for neighbour, _ in neighbours[node]]
    return found

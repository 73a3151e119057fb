"""Search for paths through a topology, computed per node and combined per pair. Pure.

During a decision, a scheduler asks for paths between any two of a thousand workers. So this module
computes once, for each node, its paths to the switches between hosts. Two such halves that meet at
a switch form a path. A search of the whole topology for each pair took milliseconds at that size.

Bytes do not pass through a host that is neither their source nor their target, unless there is no
other path. Only then is the whole topology searched.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol


class Edge(Protocol):
    """The part of a `Link` that the search uses; `model`, which has `Link`, imports this module."""

    @property
    def name(self) -> str: ...

    @property
    def bandwidth_nbytes_per_s(self) -> float: ...

    @property
    def latency_s(self) -> float: ...


#: By node: its neighbours, and the links to them.
Neighbours = Mapping[str, Sequence[tuple[str, Edge]]]


class RankedPath(NamedTuple):
    """A path, ordered by latency, then by the number of links, then by their names."""

    latency_s: float
    n_links: int
    links: tuple[str, ...]


class Routes:
    """The paths of one topology.

    Parameters
    ----------
    neighbours
        The graph.
    host_of
        Host of a node; None for a switch between hosts.
    is_end
        Whether bytes only begin or end at a node, and never pass through it.
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
        #: By node, then by switch: paths in the order of falling width and falling latency.
        self._halves: dict[str, dict[str, list[tuple[float, RankedPath]]]] = {}
        #: By node, then by node of the same host: the widest path.
        self._within_host: dict[str, dict[str, RankedPath]] = {}
        #: Pairs of hosts with direct links to each other, which the halves do not cover.
        self._cabled = {
            (here, there)
            for node, onward in neighbours.items()
            for other, _ in onward
            if None is not (here := host_of[node]) != (there := host_of[other]) is not None
        }
        self._cabled_hosts = {host for pair in self._cabled for host in pair}
        self._outside: dict[str, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._part_of = _parts(neighbours)

    def path(self, source: str, target: str) -> RankedPath | None:
        """Return the first of the widest paths in their order, or None if there is none."""
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
        """Return a class number, equal for nodes with similar paths to other hosts.

        The width and latency of a path between hosts are the same for all nodes of a class.
        """
        found = self._outside.get(node)
        if found is None:
            half = tuple(
                (switch, tuple((width, path.latency_s) for width, path in paths))
                for switch, paths in sorted(self._half(node).items())
            )
            # On a host with a direct link to another, each node is a class of its own.
            alike = node if self._host_of[node] in self._cabled_hosts else half
            found = self._numbers.setdefault(alike, len(self._numbers))
            self._outside[node] = found
        return found

    def uplinks(self, node: str) -> dict[str, RankedPath]:
        """Return the widest path from a node to each switch between hosts."""
        return {switch: paths[0][1] for switch, paths in self._half(node).items()}

    def _joined(self, source: str, target: str) -> RankedPath | None:
        one, other = self._half(source), self._half(target)
        meeting = [switch for switch in one if switch in other]
        width = max((min(one[s][0][0], other[s][0][0]) for s in meeting), default=0.0)
        found = None
        for switch in meeting:
            if min(one[switch][0][0], other[switch][0][0]) < width:
                continue
            out = _first_as_wide(one[switch], width)
            into = _first_as_wide(other[switch], width)
            path = RankedPath(
                out.latency_s + into.latency_s,
                out.n_links + into.n_links,
                out.links + into.links[::-1],
            )
            if found is None or path < found:
                found = path
        return found

    def _half(self, node: str) -> dict[str, list[tuple[float, RankedPath]]]:
        """Return a node's paths to each switch between hosts: the widest path, then faster ones.

        As a side effect, compute the node's paths to the other nodes of its host.
        """
        found = self._halves.get(node)
        if found is None:
            found = self._halves[node] = {}
            neighbours = self._within_host[node] = {}
            within = {self._host_of[node], None}
            widths = self._widths(within, node)
            switches = [one for one in widths if self._host_of[one] is None]
            # Try the width of every link: if the other half is narrower, a narrower path here may
            # be faster.
            links = (link for one in widths for _, link in self._onward(within, node, one))
            for width in sorted({link.bandwidth_nbytes_per_s for link in links}, reverse=True):
                paths = self._quickest(within, node, width)
                for other in paths:
                    if widths[other] == width and self._host_of[other] is not None:
                        neighbours[other] = paths[other]
                for switch in switches:
                    path = paths.get(switch)
                    known = found.get(switch)
                    if path is not None and (known is None or path < known[-1][1]):
                        found.setdefault(switch, []).append((width, path))
        return found

    def _best(self, within: set[str | None] | None, source: str, target: str) -> RankedPath | None:
        width = self._widths(within, source).get(target)
        return None if width is None else self._quickest(within, source, width)[target]

    def _widths(self, within: set[str | None] | None, source: str) -> dict[str, float]:
        """Return the width of the widest path to each node of these hosts (None: all hosts)."""
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
    ) -> dict[str, RankedPath]:
        """Return to each node the first path, in their order, that has at least this width."""
        paths: dict[str, RankedPath] = {}
        queue: list[tuple[RankedPath, str]] = [(RankedPath(0.0, 0, ()), source)]
        while queue:
            path, node = heapq.heappop(queue)
            if node in paths:
                continue
            paths[node] = path
            for neighbour, link in self._onward(within, source, node):
                if neighbour not in paths and link.bandwidth_nbytes_per_s >= width:
                    longer = RankedPath(
                        path.latency_s + link.latency_s, path.n_links + 1, (*path.links, link.name)
                    )
                    heapq.heappush(queue, (longer, neighbour))
        return paths

    def _onward(
        self, within: set[str | None] | None, source: str, node: str
    ) -> Sequence[tuple[str, Edge]]:
        # Bytes pass through memory, cards and switches, but not through a device between two
        # others. That would use its memory, and a process to forward the bytes.
        if node != source and self._is_end(node):
            return ()
        onward = self._neighbours[node]
        if within is None:
            return onward
        return [one for one in onward if self._host_of[one[0]] in within]


def _first_as_wide(half: Sequence[tuple[float, RankedPath]], width: float) -> RankedPath:
    return min(path for one, path in half if one >= width)


def _parts(neighbours: Neighbours) -> dict[str, int]:
    """Return a number for each node, equal for connected nodes."""
    found: dict[str, int] = {}
    for number, start in enumerate(neighbours):
        stack = [start]
        while stack:
            node = stack.pop()
            if node not in found:
                found[node] = number
                stack += [neighbour for neighbour, _ in neighbours[node]]
    return found

"""The time to bring an output together, later, with the other inputs of a dependent task. Pure.

`dask_gpurt.placement.cost` uses this time as one of its terms. A decision asks for it once per
candidate, with the same other inputs each time, so `Join` computes the common part once.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum, inf

from dask_gpurt.topology.places import Places, path_between


class Partners(dict[str, float]):
    """Results that one later task needs together with an output: their bytes by worker.

    Attributes
    ----------
    met_nbytes
        Bytes that are joined with them: the output, or what other tasks first make of it. A stencil
        joins only the edge of a block, and the block stays where it is.
    """

    __slots__ = ("met_nbytes",)

    def __init__(self, others: Mapping[str, float], met_nbytes: float = inf) -> None:
        super().__init__(others)
        self.met_nbytes = met_nbytes


def met_nbytes(others: Mapping[str, float], output_nbytes: float) -> float:
    """Return the bytes of an output that meet join partners; all of them if `others` sets none."""
    return min(output_nbytes, getattr(others, "met_nbytes", inf))


class Join:
    """Results that a later task needs together with an output that does not exist yet.

    Parameters
    ----------
    others
        Bytes of these results by worker: `Partners`, or a mapping if the whole output meets them.
    """

    __slots__ = ("_gathered", "_met_nbytes", "_others", "_places", "_targets")

    def __init__(self, others: Mapping[str, float], places: Places) -> None:
        self._others = others
        self._met_nbytes = met_nbytes(others, inf)
        self._places = places
        #: Cached results of `_gathered_at`: the workers that hold the others are usually candidates
        #: too.
        self._gathered: dict[str, tuple[float, dict[str, float]]] = {}
        #: Workers to join at, the one that gathers the others fastest first.
        self._targets: list[str] | None = None

    def seconds(self, address: str, nbytes: float) -> float:
        """Return the seconds to bring an output of `nbytes` at `address` together with the others.

        The result is the minimum over all workers, so it is 0 if all of the bytes are on `address`.
        """
        others, places = self._others, self._places
        if nbytes > self._met_nbytes:
            nbytes = self._met_nbytes
        # The look-up of paths and `Path.transfer_s` without the calls, here and below.
        if len(others) == 1:
            ((other, other_nbytes),) = others.items()
            if other == address:
                return 0.0
            host, _, near, far = places[address]
            others_host, _, others_near, others_far = places[other]
            if host == others_host:
                there, back = others_near[address], near[other]
            else:
                there, back = others_far[address], far[other]
            return min(
                there.latency_s + nbytes / there.bandwidth_nbytes_per_s,
                back.latency_s + other_nbytes / back.bandwidth_nbytes_per_s,
            )
        least_s, _ = self._gathered_at(address)
        targets = self._targets
        if targets is None:
            targets = self._targets = sorted(others, key=lambda one: self._gathered_at(one)[0])
        sent_nbytes = others.get(address, 0.0) + nbytes
        for target in targets:
            others_s, of_each = self._gathered[target]
            if others_s >= least_s:
                # All later targets are worse too: moving the output comes on top.
                break
            if target != address:
                sent_s = path_between(places, address, target).transfer_s(sent_nbytes)
                least_s = min(least_s, fsum({**of_each, address: sent_s}.values()))
        return least_s

    def _gathered_at(self, target: str) -> tuple[float, dict[str, float]]:
        """Return the seconds to move the others to a worker: the sum, and by source."""
        found = self._gathered.get(target)
        if found is None:
            places = self._places
            host, _, near, far = places[target]
            of_each = {}
            for source, n in self._others.items():
                if source != target:
                    path = (near if places[source][0] == host else far)[source]
                    of_each[source] = path.latency_s + n / path.bandwidth_nbytes_per_s
            found = self._gathered[target] = fsum(of_each.values()), of_each
        return found

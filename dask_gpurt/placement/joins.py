"""What it takes to bring together, later, an output and what a task will need with it. Pure.

Asked for each candidate of a decision, with the same results elsewhere: what is the same for all of
them is worked out once. `dask_gpurt.placement.cost` has it as one of its terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum

from dask_gpurt.topology.places import Places, path_between


class Join:
    """Results that a task will need together with an output that is not made yet.

    Parameters
    ----------
    others
        Bytes by worker.
    """

    __slots__ = ("_gathered", "_others", "_places", "_targets")

    def __init__(self, others: Mapping[str, float], places: Places) -> None:
        self._others = others
        self._places = places
        #: By place: what others are joined at is a candidate itself, as a rule.
        self._gathered: dict[str, tuple[float, dict[str, float]]] = {}
        #: Places to join them at, the one to which the others are moved soonest first.
        self._targets: list[str] | None = None

    def seconds(self, address: str, nbytes: float) -> float:
        """Of moving everything to one place, if `nbytes` more of it are at `address`.

        The place is the one to which it takes the least; so this is 0 where all of it is.
        """
        others, places = self._others, self._places
        # `way` and `Path.transfer_s` without the calls, here and below.
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
                # Nor is any after it better: the output still has to be added.
                break
            if target != address:
                sent_s = path_between(places, address, target).transfer_s(sent_nbytes)
                least_s = min(least_s, fsum({**of_each, address: sent_s}.values()))
        return least_s

    def _gathered_at(self, target: str) -> tuple[float, dict[str, float]]:
        """Seconds of moving the others to a place: in all, and by where they are."""
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

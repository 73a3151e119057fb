"""The cheapest algorithm for a value on given links, and the cost of each candidate.

The cost has four parts:

- the latency of messages that wait for each other;
- the messages that the busiest rank sends;
- the bytes that the busiest host sends through its network card;
- the bytes that the busiest rank sends within its host.

This is the alpha-beta model of collectives with two kinds of links. Bytes are counted from the
schedules themselves, once for each group of ranks, as parts of the value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from dask_gpurt.collectives import schedules, two_level
from dask_gpurt.collectives.plans import FLAT, Collective
from dask_gpurt.collectives.steps import Step

#: Largest group for which schedules with a message for each pair of ranks are considered.
MOST_FLAT = 256
#: Smallest slice of a chain. Smaller ones cost more for their messages than they save.
LEAST_SLICE_NBYTES = 1 << 20
#: Limit of the slices of a chain, which bounds the time to count its cost.
MOST_SLICES = 256
#: The algorithms that treat all ranks alike, and are considered for larger groups too.
_OF_LARGE: dict[Collective, str] = {
    "all-reduce": "tree",
    "reduce-scatter": "ring",
    "all-gather": "ring",
    "broadcast": "tree",
}
#: Flat algorithms that do not cut values. All other flat ones cut a slice for each rank.
_WHOLE = frozenset({"one-shot", "tree"})


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Costs of messages and of bytes.

    Attributes
    ----------
    hop_s
        Latency of a message: seconds from its departure until another one can follow from it.
    message_s
        Seconds for which a rank is busy with each message that it sends.
    rate
        Bytes a second of a host's network card, in each direction.
    inside_rate
        Bytes a second from one rank to another one of its host.
    """

    hop_s: float
    message_s: float
    rate: float
    inside_rate: float


@dataclass(frozen=True, slots=True)
class Effort:
    """The work of an algorithm, as sums over its steps.

    Attributes
    ----------
    n_hops
        Messages in the longest chain in which each message waits for the one before.
    n_messages
        Messages that the busiest rank sends.
    across
        Part of the value that the busiest host sends to other hosts; 1.0 is the whole value.
    inside
        Part of the value that the busiest rank sends within its host.
    """

    n_steps: int
    n_slices: int
    n_hops: int
    n_messages: int
    across: float
    inside: float

    def seconds(self, nbytes: int, costs: LinkCosts) -> float:
        return (
            self.n_hops * costs.hop_s
            + self.n_messages * costs.message_s
            + self.across * nbytes / costs.rate
            + self.inside * nbytes / costs.inside_rate
        )


@dataclass(frozen=True, slots=True)
class AlgorithmCost:
    """An algorithm with its expected cost for a value."""

    algorithm: str
    work: Effort
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        across, inside = (part * self.nbytes / 1e6 for part in (self.work.across, self.work.inside))
        return (
            f"{self.algorithm}: {self.seconds:.4f} s, {self.work.n_hops} hops,"
            f" {across:.1f} MB between hosts, {inside:.1f} MB inside"
        )


def counted(
    of_rank: Callable[[int], list[Step]], hosts: Sequence[Hashable], n_slices: int
) -> Effort:
    """Count the work of a schedule.

    Parameters
    ----------
    of_rank
        Returns the steps of a rank.
    hosts
        The host of each rank.
    """
    steps = list(zip(*map(of_rank, range(len(hosts))), strict=True))
    n_messages, across, inside = 0, 0, 0
    hops = [0] * len(hosts)
    for step in steps:
        hops = [
            max([hops[rank], *(hops[receive.peer] + 1 for receive in one.receives)])
            for rank, one in enumerate(step)
        ]
        out: Counter[Hashable] = Counter()
        near: Counter[int] = Counter()
        for rank, one in enumerate(step):
            here = hosts[rank]
            for send in one.sends:
                if hosts[send.peer] == here:
                    near[rank] += len(send.slices)
                else:
                    out[here] += len(send.slices)
        n_messages += max(len(one.sends) for one in step)
        across += max(out.values(), default=0)
        inside += max(near.values(), default=0)
    parts = across / n_slices, inside / n_slices
    return Effort(len(steps), n_slices, max(hops), n_messages, *parts)


class RankGroup:
    """The algorithms of a group of ranks, with their work.

    Parameters
    ----------
    hosts
        The host of each rank: a number, or its name.
    """

    def __init__(self, hosts: Sequence[Hashable]) -> None:
        self._hosts = hosts
        self._n_hosts = len(set(hosts))

    @cached_property
    def _all_reduce(self) -> dict[str, Effort]:
        work = self._flat("all-reduce")
        if 1 < self._n_hosts < len(self._hosts):
            steps = partial(two_level.all_reduce, hosts=self._hosts)
            n_slices = two_level.n_slices(self._hosts)
            work["two-level"] = counted(steps, self._hosts, n_slices)
        return work

    def all_reduce(self, nbytes: int, costs: LinkCosts) -> list[AlgorithmCost]:
        """Return the candidates for an all-reduce of such a value, the cheapest first."""
        return _sorted(self._all_reduce, nbytes, costs)

    def reduce_scatter(self, nbytes: int, costs: LinkCosts) -> list[AlgorithmCost]:
        """Return the candidates for a reduce-scatter of such a value, the cheapest first."""
        return _sorted(self._reduce_scatter, nbytes, costs)

    def all_gather(self, nbytes: int, costs: LinkCosts) -> list[AlgorithmCost]:
        """Return the candidates for an all-gather to such a value, the cheapest first."""
        return _sorted(self._all_gather, nbytes, costs)

    @cached_property
    def _reduce_scatter(self) -> dict[str, Effort]:
        return self._flat("reduce-scatter")

    @cached_property
    def _all_gather(self) -> dict[str, Effort]:
        return self._flat("all-gather")

    @cached_property
    def _broadcast(self) -> dict[str, Effort]:
        return self._flat("broadcast")

    def _flat(self, collective: Collective) -> dict[str, Effort]:
        """Return the work of the algorithms that treat all ranks alike."""
        n, found = len(self._hosts), FLAT[collective]
        names = found if n <= MOST_FLAT else [_OF_LARGE[collective]]
        return {
            name: counted(
                partial(_rank_of, found[name], n), self._hosts, 1 if name in _WHOLE else n
            )
            for name in names
        }

    def broadcast(self, nbytes: int, costs: LinkCosts) -> list[AlgorithmCost]:
        """Return the candidates for a broadcast of such a value, the cheapest first."""
        n_slices = chain_slices(self._n_hosts, nbytes, costs)
        chain = partial(two_level.broadcast, hosts=self._hosts, n_slices=n_slices)
        work = {"chain": counted(chain, self._hosts, n_slices), **self._broadcast}
        return _sorted(work, nbytes, costs)


def chain_slices(n_hosts: int, nbytes: int, costs: LinkCosts) -> int:
    """Return the number of slices with which a chain takes the least time.

    With H hosts and P slices, the last slice leaves after about `(H + P) (message_s + S / (P
    rate))`. This is least where `P * P = H S / (message_s rate)`.
    """
    best = math.sqrt(n_hosts * nbytes / max(costs.message_s * costs.rate, 1.0))
    return max(1, min(round(best), nbytes // LEAST_SLICE_NBYTES, MOST_SLICES))


def _rank_of(schedule: schedules.Schedule, n_ranks: int, rank: int) -> list[Step]:
    return schedule(rank, n_ranks)


def _sorted(work: dict[str, Effort], nbytes: int, costs: LinkCosts) -> list[AlgorithmCost]:
    found = [
        AlgorithmCost(name, one, nbytes, one.seconds(nbytes, costs)) for name, one in work.items()
    ]
    return sorted(found, key=lambda candidate: candidate.seconds)

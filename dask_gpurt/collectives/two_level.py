"""Algorithms for ranks that share hosts: many messages inside a host, few between hosts.

Ranks of one host share its network card. In a `two-shot` all-reduce, every rank sends its own value
of S bytes to other hosts. With g ranks on each of H hosts, 2 g (H - 1) / H S bytes pass each card.
Here a host adds up its own values first, and 2 (H - 1) / H S bytes pass its card.

Rank j of each host's first *rails* ranks exchanges slices with rank j of the other hosts. A host
with more ranks than the smallest one has ranks without a rail; they only exchange within the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from dask_gpurt.collectives.steps import SliceReceive, SliceSend, Step, one_slice


def members(hosts: Sequence[Hashable]) -> list[list[int]]:
    """Return the ranks of each host, given each rank's host; in the order in which hosts appear."""
    found: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def n_rails(hosts: Sequence[Hashable]) -> int:
    """Return the number of links between two hosts: the ranks of the host that has the fewest."""
    return min(map(len, members(hosts)))


def n_slices(hosts: Sequence[Hashable]) -> int:
    """Return the number of slices of an all-reduce: one for each rail and host."""
    return n_rails(hosts) * len(members(hosts))


def all_reduce(rank: int, hosts: Sequence[Hashable]) -> list[Step]:
    """Add within each host, then between hosts, and copy the sums back the same way: four steps.

    Parameters
    ----------
    rank
        The rank whose steps are returned.
    hosts
        The host of each rank: a number, or its name.
    """
    groups, rails = members(hosts), n_rails(hosts)
    n_hosts = len(groups)
    mine = next(number for number, group in enumerate(groups) if rank in group)
    group = groups[mine]
    rail = group.index(rank)

    def of_rail(number: int) -> range:
        """Return the slices of a rail."""
        return range(number * n_hosts, (number + 1) * n_hosts)

    def of_host(number: int) -> range:
        """Return the slice of this rank's rail that a host adds up."""
        return one_slice(rail * n_hosts + number)

    neighbours = [peer for peer in group if peer != rank]
    to_rails = [(group[number], of_rail(number)) for number in range(rails) if number != rail]
    gather = Step(
        tuple(SliceSend(peer, slices) for peer, slices in to_rails),
        tuple(SliceReceive(peer, of_rail(rail), adds=True) for peer in neighbours if rail < rails),
    )
    spread = Step(
        tuple(SliceSend(peer, of_rail(rail)) for peer in neighbours if rail < rails),
        tuple(SliceReceive(peer, slices) for peer, slices in to_rails),
    )
    across = [
        (number, groups[number][rail])
        for distance in range(1, n_hosts)
        if rail < rails and (number := (mine + distance) % n_hosts) != mine
    ]
    exchange = [
        Step(
            tuple(SliceSend(peer, of_host(number)) for number, peer in across),
            tuple(SliceReceive(peer, of_host(mine), adds=True) for _, peer in across),
        ),
        Step(
            tuple(SliceSend(peer, of_host(mine)) for _, peer in across),
            tuple(SliceReceive(peer, of_host(number)) for number, peer in across),
        ),
    ]
    if n_hosts == 1:
        return [gather, spread]
    return exchange if len(groups) == len(hosts) else [gather, *exchange, spread]


def broadcast(rank: int, hosts: Sequence[Hashable], n_slices: int) -> list[Step]:
    """Copy rank 0's value to all: slices go from host to host, and in each host to all its ranks.

    Every slice passes each card once. With H hosts there are H + slices - 1 steps, or one less if
    there is one rank on each host.
    """
    groups = members(hosts)
    mine = next(number for number, group in enumerate(groups) if rank in group)
    first = groups[mine][0]
    has_neighbours = len(groups) < len(hosts)
    steps = []
    for step in range(len(groups) + n_slices - 2 + has_neighbours):
        out, into = step - mine, step - mine + 1
        sends: list[SliceSend] = []
        receives: list[SliceReceive] = []
        if rank != first:
            if 0 <= out < n_slices:
                receives.append(SliceReceive(first, one_slice(out)))
        else:
            if 0 <= out < n_slices:
                # The other host first: its link is the slow one.
                peers = [groups[mine + 1][0]] if mine + 1 < len(groups) else []
                sends += [SliceSend(peer, one_slice(out)) for peer in peers + groups[mine][1:]]
            if mine and 0 <= into < n_slices:
                receives.append(SliceReceive(groups[mine - 1][0], one_slice(into)))
        steps.append(Step(tuple(sends), tuple(receives)))
    return steps

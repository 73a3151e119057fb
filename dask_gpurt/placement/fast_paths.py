"""Fast paths of `policy.DataAware`: the same decision, from fewer steps. Pure.

Most tasks have one plain shape: each input is on exactly one worker. `holder_is_best` and
`largest_is_best` recognise two cases of it by a comparison or two, without weighing any candidate.
`cheapest` weighs the candidates without making a `Snapshot` first. Property tests assert that each
of them chooses what `DataAware` chooses, so the rest of `placement` does not know of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from dask_gpurt.placement.cost import HeldTask, Worker, costs_of_held
from dask_gpurt.placement.policy import (
    MAX_CANDIDATES,
    MIN_JOINED_SHARE,
    Decision,
    coming,
    least_cost,
    stocks_choice,
    unless_in_doubt,
)
from dask_gpurt.topology.model import Path
from dask_gpurt.topology.places import Places, path_between

#: More than sums of seconds are off by, as a share, and far less than matters.
_ROUNDING = 2.0**-40
#: The same where it is not worth working out of how many seconds it would be a share.
_BEYOND_ROUNDING = 0.99


def holder_is_best(
    needed_nbytes: int,
    output_nbytes: float,
    n_joins: int,
    room_nbytes: float,
    wait_s: float = 0.0,
    widest_nbytes_per_s: float = inf,
) -> bool:
    """Whether a task costs least on the one worker that has all it needs.

    Wherever else it ran, the inputs would have to be sent first, at the expense of both ends: at
    least `2 * needed / b` seconds if `b` is what the way carries. Here nothing has to be fetched,
    and for each join the output can be sent over the same way, and on from there: at most
    `output / b` more. So there is no need to ask for `b` where nothing has to be waited for either,
    and else only for what no way from there exceeds. Ways through a third place are not taken to be
    quicker than the direct one.

    Parameters
    ----------
    needed_nbytes, output_nbytes
        Of all inputs, which nobody else has or is fetching; expected of the output.
    n_joins
        Tasks that will need the output together with something else, two at the most: of more,
        latencies would count.
    room_nbytes
        Before the worker begins to spill.
    wait_s
        Until it could begin there.
    widest_nbytes_per_s
        As much as any way from there carries, or more.
    """
    ahead_nbytes = 2 * needed_nbytes - output_nbytes * n_joins
    if ahead_nbytes <= 0 or output_nbytes > room_nbytes:
        return False
    return not wait_s or wait_s * widest_nbytes_per_s < _BEYOND_ROUNDING * ahead_nbytes


def largest_is_best(
    holders: Sequence[str],
    sizes: Sequence[int],
    duration_s: float,
    wait_s: float,
    places: Places,
) -> bool:
    """Whether a task costs least where its largest input is.

    That is so where each input is on another host, and all these are reached alike: wherever
    else the task ran, no less would have to be fetched, over the same ways. It also is of two
    holders that are reached from one another alike. Of those that have an input as large it is the
    one where it could begin at once and that has room for the rest, if that is as quick as others.
    What has to be waited for there first is less than fetching so much more costs, at both ends.
    False where it is not so plain.

    Parameters
    ----------
    holders, sizes
        For each input the only worker that has it or is fetching it, and bytes.
    duration_s
        Of the task, whose output will not be joined with anything.
    wait_s
        Until links are free for what has to be fetched; not more than none where two are as large.
    """
    usual = _only_way(holders, places)
    if usual is None:
        return False
    most_nbytes = next_nbytes = total_nbytes = n_most = 0
    for nbytes in sizes:
        total_nbytes += nbytes
        if nbytes > most_nbytes:
            next_nbytes, most_nbytes, n_most = most_nbytes, nbytes, 1
        elif nbytes == most_nbytes:
            n_most += 1
        elif nbytes > next_nbytes:
            next_nbytes = nbytes
    if wait_s and n_most > 1:
        return False
    # By so much less than is rounded off, nobody is ahead.
    bandwidth = usual.bandwidth_nbytes_per_s
    all_s = duration_s + wait_s + len(holders) * usual.latency_s + total_nbytes / bandwidth
    ahead_s = (most_nbytes - next_nbytes) / bandwidth
    return 2 * ahead_s - wait_s > 2 * all_s * _ROUNDING


def _only_way(holders: Sequence[str], places: Places) -> Path | None:
    """The way from any holder to any other; None if there are several, or it takes long to see."""
    if len(holders) == 2:
        one, other = holders
        there, back = path_between(places, one, other), path_between(places, other, one)
        if there is back:
            return there
        alike = (
            there.bandwidth_nbytes_per_s == back.bandwidth_nbytes_per_s
            and there.latency_s == back.latency_s
        )
        return there if alike else None
    if not 0 < len(holders) <= MAX_CANDIDATES:
        return None
    first = holders[0]
    _, kind, _, far = places[first]
    usual = far[first]
    hosts: set[str] = set()
    for address in holders:
        host, other_kind, _, _ = places[address]
        # Ways that are alike are one and the same.
        if far[address] is not usual or other_kind != kind:
            return None
        hosts.add(host)
    return usual if len(hosts) == len(holders) else None


def places_to_weigh(task: HeldTask) -> dict[str, int]:
    """Return the workers that a task may go to, with the bytes of its inputs that each has.

    These are the workers that have an input or are fetching one. A worker with something that the
    output will be joined with is one of them if joining it there saves enough to be worth a look.
    """
    found: dict[str, int] = {}
    for holder, nbytes in zip(task.holders, task.sizes, strict=True):
        found[holder] = found.get(holder, 0) + nbytes
    for address in coming(task.sizes, task.under_way, found):
        found[address] = 0
    if task.joins:
        saved: dict[str, float] = {}
        for others in task.joins:
            for address, n in others.items():
                saved[address] = saved.get(address, 0.0) + min(n, task.output_nbytes)
        enough = MIN_JOINED_SHARE * sum(task.sizes)
        for address, n in saved.items():
            if n >= enough:
                found.setdefault(address, 0)
    return found


def cheapest(
    task: HeldTask,
    held: Mapping[str, int],
    workers: Sequence[Worker],
    places: Places,
    *,
    bandwidth: float,
    doubt: float,
    asked: str | None,
) -> Decision:
    """Return what `DataAware` decides for a task all of whose holders are running.

    Parameters
    ----------
    held, workers
        The result of `places_to_weigh`, and what is known of these workers.
    bandwidth
        Bytes per second of all links, as stock Dask has it.
    doubt, asked
        As `Snapshot.doubt` and `Snapshot.usual`.
    """
    found = costs_of_held(task, workers, places)
    worker = least_cost(workers, found)
    usual = asked or stocks_choice(workers, set(task.holders), held, sum(task.sizes), bandwidth)
    if doubt > 1 and worker != usual:
        worker = unless_in_doubt(worker, usual, task.as_task(), workers, places, doubt)
    return Decision(worker, found, usual)

"""Fast paths of `policy.DataAware`: the same decisions in fewer steps. Pure.

Most tasks have one shape: each input is on exactly one worker. `holder_is_best` and
`largest_is_best` recognise two cases of it by a few comparisons, without weighing any candidate.
`cheapest` weighs the candidates without making a `Snapshot` first. Property tests assert that each
of them chooses what `DataAware` chooses. So the rest of `placement` does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from dask_gpurt.placement.cost import HeldTask, WorkerSnapshot, costs_of_held
from dask_gpurt.placement.joins import met_nbytes
from dask_gpurt.placement.policy import (
    MAX_CANDIDATES,
    MIN_JOINED_SHARE,
    Decision,
    choose_as_stock,
    fetching_nbytes,
    least_cost,
    stock_if_uncertain,
)
from dask_gpurt.topology.model import Path
from dask_gpurt.topology.places import Places, path_between

#: A share that is larger than rounding errors of sums of seconds, and too small to matter.
_ROUNDING = 2.0**-40
#: Factor that allows for rounding errors where the sum is not computed.
_BEYOND_ROUNDING = 0.99


def holder_is_best(
    needed_nbytes: int,
    output_nbytes: float,
    n_joins: int,
    room_nbytes: float,
    wait_s: float = 0.0,
    widest_nbytes_per_s: float = inf,
) -> bool:
    """Return whether a task costs least on the one worker that has all its inputs.

    Let `b` be the bandwidth of the path from there to another worker. To run there, the task would
    first have its inputs sent. That costs both ends together at least `2 * needed / b` seconds. On
    the holder nothing is fetched. For each join the output can take the same path later and go on
    from there, which costs at most `output / b` more. So if the task need not wait for the holder,
    `b` does not matter. If it has to wait, an upper bound of `b` is enough. This assumes that no
    detour through a third worker is faster than the direct path.

    Parameters
    ----------
    needed_nbytes, output_nbytes
        Bytes of all inputs, which no other worker has or is fetching; expected bytes of the output.
    n_joins
        Number of tasks that will need the output together with other results, two at most. With
        more joins, latencies would count.
    room_nbytes
        Bytes that the worker can take before it begins to spill.
    wait_s
        Seconds until the task could begin on the worker.
    widest_nbytes_per_s
        Upper bound of the bandwidth of any path from the worker.
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
    """Return whether a task costs least on the worker that has its largest input.

    This holds if each input is on a different host, and the paths between these hosts are equal.
    Then the task would fetch at least as much on any other worker, over the same paths. It also
    holds for two holders with equal paths between them. The caller makes sure that the task could
    begin there at once. The worker also has room for the rest, and is no slower than others. The
    wait for links there must be shorter than the extra fetching elsewhere, counted at both ends.
    The result is False for all other cases.

    Parameters
    ----------
    holders, sizes
        For each input, the only worker that has it or is fetching it, and its bytes.
    duration_s
        Seconds of the task, whose output is not joined with anything.
    wait_s
        Seconds until links are free for the missing inputs; must be 0 if two inputs are equally
        large.
    """
    path = _common_path(holders, places)
    if path is None:
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
    # A lead within the rounding error is no lead.
    bandwidth = path.bandwidth_nbytes_per_s
    all_s = duration_s + wait_s + len(holders) * path.latency_s + total_nbytes / bandwidth
    ahead_s = (most_nbytes - next_nbytes) / bandwidth
    return 2 * ahead_s - wait_s > 2 * all_s * _ROUNDING


def _common_path(holders: Sequence[str], places: Places) -> Path | None:
    """Return the path between any two holders; None if paths differ, or holders are too many."""
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
    path = far[first]
    hosts: set[str] = set()
    for address in holders:
        host, other_kind, _, _ = places[address]
        # Equal paths are the same object.
        if far[address] is not path or other_kind != kind:
            return None
        hosts.add(host)
    return path if len(hosts) == len(holders) else None


def candidate_nbytes(task: HeldTask) -> dict[str, int]:
    """Return the workers that a task may go to, with the bytes of its inputs that each has.

    These are the workers that have an input or are fetching one, and the workers with join partners
    where joining saves enough.
    """
    found: dict[str, int] = {}
    for holder, nbytes in zip(task.holders, task.sizes, strict=True):
        found[holder] = found.get(holder, 0) + nbytes
    for address in fetching_nbytes(task.sizes, task.arrivals_s, found):
        found[address] = 0
    if task.joins:
        saved: dict[str, float] = {}
        for others in task.joins:
            most = met_nbytes(others, task.output_nbytes)
            for address, n in others.items():
                saved[address] = saved.get(address, 0.0) + min(n, most)
        enough = MIN_JOINED_SHARE * sum(task.sizes)
        for address, n in saved.items():
            if n >= enough:
                found.setdefault(address, 0)
    return found


def cheapest(
    task: HeldTask,
    held: Mapping[str, int],
    workers: Sequence[WorkerSnapshot],
    places: Places,
    *,
    bandwidth: float,
    uncertainty: float,
    stock: str | None,
) -> Decision:
    """Return what `DataAware` decides for a task all of whose holders are running.

    Parameters
    ----------
    held, workers
        The result of `candidate_nbytes`, and the state of these workers.
    bandwidth
        Bytes per second that stock Dask assumes for all links.
    uncertainty, stock
        As `Snapshot.uncertainty` and `Snapshot.stock`.
    """
    found = costs_of_held(task, workers, places)
    worker = least_cost(workers, found)
    stock = stock or choose_as_stock(workers, set(task.holders), held, sum(task.sizes), bandwidth)
    if uncertainty > 1 and worker != stock:
        worker = stock_if_uncertain(worker, stock, task.as_task(), workers, places, uncertainty)
    return Decision(worker, found, stock)

"""Placement policies: which worker a task should run on, given a snapshot. Pure.

A snapshot holds all that a decision may depend on, so the same snapshot
always gives the same decision. `dask_gpurt.plugins.placement` makes snapshots of a live scheduler,
tests make their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from math import inf
from typing import NamedTuple

from dask_gpurt.placement.cost import Cost, Task, WorkerSnapshot, costs, is_surely_cheaper
from dask_gpurt.placement.joins import met_nbytes
from dask_gpurt.topology.places import Places

#: If restrictions allow at most this many workers, a policy weighs all of them.
MAX_RESTRICTED = 32
#: At most this many workers that have inputs are weighed: the ones with the most bytes.
MAX_CANDIDATES = 16
#: At most this many workers that only have inputs in flight to them are weighed.
MAX_FETCHING = 2
#: A worker with join partners is weighed if joining there saves at least this share of the inputs'
#: bytes. A saving of twice the inputs would pay for itself. With less, the worker is still a good
#: place for tasks that the holders have no time for.
MIN_JOINED_SHARE = 0.25


class Snapshot(NamedTuple):
    """All that a policy needs to place a task.

    Attributes
    ----------
    workers
        Returns the state of workers, given their addresses.
    valid
        Addresses of running workers that the task may run on; None if it may run anywhere.
    takes_tasks
        Returns whether a worker takes tasks; used where `valid` is None. None if all workers do.
    uncertainty
        Factor by which links may be faster or slower than estimated. Above 1, a policy only
        departs from stock Dask's choice for a gain that is certain.
    stock
        Stock Dask's choice, if stock Dask was asked. Otherwise it is computed from the rest of the
        snapshot, which is not exactly what stock Dask knows.
    idle
        A few workers with little to do. They are weighed even if they have no inputs.
    bandwidth_nbytes_per_s
        The one bandwidth that stock Dask assumes for all links.
    """

    task: Task
    workers: Callable[[Iterable[str]], list[WorkerSnapshot]]
    places: Places
    valid: Collection[str] | None = None
    idle: tuple[str, ...] = ()
    bandwidth_nbytes_per_s: float = 100e6
    takes_tasks: Callable[[str], bool] | None = None
    uncertainty: float = 1.0
    stock: str | None = None


class Decision(NamedTuple):
    """A policy's choice and what the choice was made from.

    Attributes
    ----------
    worker
        Address of the chosen worker; None if there was no candidate.
    costs
        Cost of each candidate, by address.
    stock
        Address of the worker that stock Dask would choose.
    """

    worker: str | None
    costs: dict[str, Cost]
    stock: str | None


def _allowed(snapshot: Snapshot, addresses: Iterable[str]) -> set[str]:
    valid = snapshot.valid
    if valid is not None:
        return {one for one in addresses if one in valid}
    if snapshot.takes_tasks is not None:
        return set(filter(snapshot.takes_tasks, addresses))
    return set(addresses)


def least_cost(workers: Iterable[WorkerSnapshot], found: Mapping[str, Cost]) -> str | None:
    """Return the address of the worker on which a task costs least; None if there is none."""
    # The cost to minimise, then tie-breakers.
    chosen: tuple[float, float, int, str] | None = None
    least_s = inf
    for worker in workers:
        total_s = sum(found[worker.address])
        if total_s <= least_s:
            bid = total_s, worker.n_tasks / worker.nthreads, worker.nbytes, worker.address
            if chosen is None or bid < chosen:
                chosen, least_s = bid, total_s
    return chosen and chosen[3]


def fetching_nbytes(
    sizes: Iterable[int], arrivals_s: Iterable[Mapping[str, float]], held: Collection[str]
) -> Mapping[str, int]:
    """Return bytes in flight, by worker, for workers that have no input but are fetching one.

    At most `MAX_FETCHING` workers are returned: those with the most bytes in flight. Between equal
    workers, the one that receives its bytes first wins.

    Parameters
    ----------
    sizes, arrivals_s
        For each input, its bytes and `Input.arriving_s`.
    held
        Workers that have an input.
    """
    nbytes: dict[str, int] = {}
    last_s: dict[str, float] = {}
    for size, arriving in zip(sizes, arrivals_s, strict=True):
        for address, seconds in arriving.items():
            if address not in held:
                nbytes[address] = nbytes.get(address, 0) + size
                last_s[address] = max(last_s.get(address, 0.0), seconds)
    if len(nbytes) <= MAX_FETCHING:
        return nbytes
    first = sorted(nbytes, key=lambda one: (-nbytes[one], last_s[one], one))[:MAX_FETCHING]
    return {one: nbytes[one] for one in first}


def choose_as_stock(
    workers: Iterable[WorkerSnapshot],
    holders: Collection[str],
    held: Mapping[str, int],
    needed_nbytes: int,
    bandwidth: float,
) -> str | None:
    """Return the worker among `holders` on which a task starts first, as stock Dask estimates it.

    That is the minimum of `Scheduler.worker_objective`. Stock Dask breaks ties by the order of a
    set, this function by address.
    """
    stock: tuple[float, int, str] | None = None
    soonest_s = inf
    for worker in workers:
        address = worker.address
        if address in holders:
            missing_nbytes = needed_nbytes - held.get(address, 0)
            start_s = worker.occupancy_s / worker.nthreads + missing_nbytes / bandwidth
            bid = start_s, worker.nbytes, address
            if start_s <= soonest_s and (stock is None or bid < stock):
                stock, soonest_s = bid, start_s
    return stock and stock[2]


def stock_if_uncertain(
    worker: str | None,
    stock: str | None,
    task: Task,
    workers: Iterable[WorkerSnapshot],
    places: Places,
    uncertainty: float,
) -> str | None:
    """Return the chosen worker, or stock Dask's if that one may cost less after all.

    Parameters
    ----------
    workers
        The workers that were weighed. Stock Dask's worker is only returned if it is one of them.
    """
    known = {one.address: one for one in workers}
    if worker is None or stock not in known:
        return worker
    is_surely = is_surely_cheaper(task, known[worker], known[stock], places, uncertainty)
    return worker if is_surely else stock


class DataAware:
    """The policy of lowest cost.

    Candidates are the workers that have, or will soon have, an input, and a few of the idlest ones.
    A worker without the kind of device that the inputs are on is only chosen if no candidate has
    one.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        task, places, uncertainty = snapshot.task, snapshot.places, snapshot.uncertainty
        held, needed_nbytes, is_arriving = _held_nbytes(task)
        holders = _allowed_holders(snapshot, held)
        candidates = self._candidates(snapshot, held, holders, is_arriving=is_arriving)
        workers = snapshot.workers(candidates)
        allowed = workers
        if task.device is not None:
            allowed = [one for one in workers if task.device in one.devices] or workers

        found_costs = costs(task, allowed, places)
        worker = least_cost(allowed, found_costs)
        stock = snapshot.stock or choose_as_stock(
            workers, holders, held, needed_nbytes, snapshot.bandwidth_nbytes_per_s
        )
        if uncertainty > 1 and worker != stock:
            worker = stock_if_uncertain(worker, stock, task, allowed, places, uncertainty)
        return Decision(worker, found_costs, stock)

    def _candidates(
        self,
        snapshot: Snapshot,
        held: Mapping[str, int],
        holders: Collection[str],
        *,
        is_arriving: bool,
    ) -> Collection[str]:
        """Return the workers to weigh: `held` itself if the holders are all of them."""
        valid, idle, joins = snapshot.valid, snapshot.idle, snapshot.task.joins
        if valid is not None and len(valid) <= MAX_RESTRICTED:
            return valid
        if joins or idle or is_arriving or holders is not held or len(held) > MAX_CANDIDATES:
            return self._near(snapshot, held) or holders
        return held

    @staticmethod
    def _near(snapshot: Snapshot, held: Mapping[str, int]) -> set[str]:
        """Return workers that have, or will have, an input or a join partner of a task."""
        nbytes: dict[str, float] = {**held}
        _add_arriving(nbytes, snapshot, held)
        _add_joined(nbytes, snapshot.task)
        near = _allowed(snapshot, nbytes)
        if len(near) > MAX_CANDIDATES:
            near = set(sorted(near, key=lambda one: (-nbytes[one], one))[:MAX_CANDIDATES])
            if snapshot.stock is not None:
                near |= _allowed(snapshot, (snapshot.stock,))
        return near | _allowed(snapshot, snapshot.idle) if snapshot.idle else near


def _held_nbytes(task: Task) -> tuple[dict[str, int], int, bool]:
    """Return bytes of inputs by holder, bytes of all inputs, and whether any is in flight."""
    held: dict[str, int] = {}
    needed_nbytes = 0
    is_arriving = False
    for _, nbytes, having, arriving, _ in task.inputs:
        needed_nbytes += nbytes
        for address in having:
            if address in held:
                held[address] += nbytes
            else:
                held[address] = nbytes
        if arriving:
            is_arriving = True
    return held, needed_nbytes, is_arriving


def _allowed_holders(snapshot: Snapshot, held: Mapping[str, int]) -> Collection[str]:
    """Return the workers that stock Dask chooses from: `held` itself if all holders are allowed."""
    valid = snapshot.valid
    if held and valid is None and snapshot.takes_tasks is None:
        return held
    return _allowed(snapshot, held) or set(snapshot.idle if valid is None else valid)


def _add_arriving(nbytes: dict[str, float], snapshot: Snapshot, held: Mapping[str, int]) -> None:
    """Add to `nbytes` the bytes of inputs in flight to workers that may run the task."""
    inputs = snapshot.task.inputs
    for one in inputs:
        for address in one.arriving_s:
            if address in held:
                nbytes[address] += one.nbytes
    arrivals_s = [one.arriving_s for one in inputs]
    if snapshot.valid is not None or snapshot.takes_tasks is not None:
        fetching = _allowed(snapshot, chain.from_iterable(arrivals_s))
        arrivals_s = [{one: s for one, s in each.items() if one in fetching} for each in arrivals_s]
    nbytes.update(fetching_nbytes([one.nbytes for one in inputs], arrivals_s, held))


def _add_joined(nbytes: dict[str, float], task: Task) -> None:
    """Add to `nbytes` the bytes of join partners.

    A worker that has only join partners counts only if joining there can save enough bytes,
    compared with the inputs. Otherwise a worker that has thin edges and a shorter queue than the
    holders would have large blocks moved to it.
    """
    joined: dict[str, float] = {}
    saved: dict[str, float] = {}
    for others in task.joins:
        most = met_nbytes(others, task.output_nbytes)
        for address, n in others.items():
            joined[address] = joined.get(address, 0) + n
            saved[address] = saved.get(address, 0) + min(n, most)
    least_nbytes = MIN_JOINED_SHARE * sum(one.nbytes for one in task.inputs)
    for address, n in joined.items():
        if address in nbytes or saved[address] >= least_nbytes:
            nbytes[address] = nbytes.get(address, 0) + n

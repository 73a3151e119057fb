"""Which worker a task should run on: one class a policy, over a snapshot. Pure.

A snapshot holds what a decision may depend on and no more; the same one always gives the same
decision. Whoever makes it asks a live scheduler (`dask_gpurt.plugins.placement.placer`) or a test.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from math import inf
from typing import NamedTuple, Protocol

from dask_gpurt.placement.cost import Cost, Task, Worker, costs, is_surely_cheaper
from dask_gpurt.topology.places import Places

#: Restrictions to so few workers, and all of those are looked at, whatever they hold.
MAX_RESTRICTED = 32
#: Of more workers that have something of a task with very many inputs, those with most of it.
MAX_CANDIDATES = 16
#: Of more workers that have nothing of a task and are fetching something, those with most of it.
MAX_COMING = 2
#: Of a task's inputs, the bytes that joining its output on a worker has to save for it to be looked
#: at. At twice the inputs it pays for itself; but with less it is still a good place for what the
#: holders have no time for.
MIN_JOINED_SHARE = 0.25


class Snapshot(NamedTuple):
    """What is known when a task is to be placed.

    Attributes
    ----------
    workers
        What is known of workers, by address.
    valid
        Addresses that the task may run at; None if it may run anywhere. Only running workers.
    takes_tasks
        Whether a worker does, asked where `valid` is None; None if all do.
    doubt
        Links may carry so many times as much as is believed, or as little. Then no other worker
        than stock's is chosen for a gain that may not be one.
    usual
        What stock would choose, where it was asked; else that is worked out from the rest, which
        it does not know as it is.
    idle
        A few workers with little to do. They are looked at whatever they hold.
    bandwidth_nbytes_per_s
        The one figure that stock Dask has for all links.
    """

    task: Task
    workers: Callable[[Iterable[str]], list[Worker]]
    places: Places
    valid: Collection[str] | None = None
    idle: tuple[str, ...] = ()
    bandwidth_nbytes_per_s: float = 100e6
    takes_tasks: Callable[[str], bool] | None = None
    doubt: float = 1.0
    usual: str | None = None


class Decision(NamedTuple):
    """What was chosen, and from what.

    Attributes
    ----------
    worker
        Address; None if there was nothing to choose from.
    costs
        Of each candidate, by address.
    stock
        What stock Dask would have chosen.
    """

    worker: str | None
    costs: dict[str, Cost]
    stock: str | None


class Policy(Protocol):
    """Chooses a worker."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """Never a worker outside of `snapshot.valid`, always the same for the same snapshot."""


def _allowed(snapshot: Snapshot, addresses: Iterable[str]) -> set[str]:
    valid = snapshot.valid
    if valid is not None:
        return {one for one in addresses if one in valid}
    if snapshot.takes_tasks is not None:
        return set(filter(snapshot.takes_tasks, addresses))
    return set(addresses)


def least_cost(workers: Iterable[Worker], found: Mapping[str, Cost]) -> str | None:
    """Address of the worker on which a task costs least; None if there is none."""
    # What is minimised, then ties.
    chosen: tuple[float, float, int, str] | None = None
    least_s = inf
    for worker in workers:
        total_s = sum(found[worker.address])
        if total_s <= least_s:
            bid = total_s, worker.n_tasks / worker.nthreads, worker.nbytes, worker.address
            if chosen is None or bid < chosen:
                chosen, least_s = bid, total_s
    return chosen and chosen[3]


def coming(
    sizes: Iterable[int], under_way: Iterable[Mapping[str, float]], held: Collection[str]
) -> Mapping[str, int]:
    """Workers that have nothing of a task but are fetching some of it, with the bytes of that.

    Of many, the few to which most is under way, and of those the ones that have it first.

    Parameters
    ----------
    sizes, under_way
        For each input bytes, and `Input.arriving_s`.
    held
        Workers that have something.
    """
    nbytes: dict[str, int] = {}
    last_s: dict[str, float] = {}
    for size, arriving in zip(sizes, under_way, strict=True):
        for address, seconds in arriving.items():
            if address not in held:
                nbytes[address] = nbytes.get(address, 0) + size
                last_s[address] = max(last_s.get(address, 0.0), seconds)
    if len(nbytes) <= MAX_COMING:
        return nbytes
    first = sorted(nbytes, key=lambda one: (-nbytes[one], last_s[one], one))[:MAX_COMING]
    return {one: nbytes[one] for one in first}


def stocks_choice(
    workers: Iterable[Worker],
    holders: Collection[str],
    held: Mapping[str, int],
    needed_nbytes: int,
    bandwidth: float,
) -> str | None:
    """`Stock.objective` of those workers that are `holders`, from the bytes that each has."""
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


def unless_in_doubt(
    worker: str | None,
    usual: str | None,
    task: Task,
    workers: Iterable[Worker],
    places: Places,
    doubt: float,
) -> str | None:
    """The worker that was chosen; or stock's, if that may cost less after all.

    Parameters
    ----------
    workers
        Those that were weighed. One that was not is not chosen here, either.
    """
    known = {one.address: one for one in workers}
    if worker is None or usual not in known:
        return worker
    is_surely = is_surely_cheaper(task, known[worker], known[usual], places, doubt)
    return worker if is_surely else usual


class Stock:
    """What distributed does itself: holders of inputs only, one bandwidth for all links.

    Where distributed breaks ties by the order of a set, this one does so by address.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        inputs = snapshot.task.inputs
        holders = _allowed(snapshot, (holder for one in inputs for holder in one.holders))
        if not holders:
            holders = set(snapshot.idle if snapshot.valid is None else snapshot.valid)
        workers = snapshot.workers(holders)
        chosen = min(
            ((*self.objective(snapshot, one), one.address) for one in workers), default=None
        )
        address = None if chosen is None else chosen[-1]
        return Decision(address, {}, address)

    @staticmethod
    def objective(snapshot: Snapshot, worker: Worker) -> tuple[float, int]:
        """What is minimised: `Scheduler.worker_objective`."""
        nbytes = 0
        for one in snapshot.task.inputs:
            if worker.address not in one.holders:
                nbytes += one.nbytes
        return worker.queue_s + nbytes / snapshot.bandwidth_nbytes_per_s, worker.nbytes


class DataAware:
    """Lowest cost of those that have, or will soon have, an input, and of the idlest few.

    A worker without the kind of device that the inputs are on is not chosen while another is
    there.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        task, places, doubt = snapshot.task, snapshot.places, snapshot.doubt
        valid, idle, takes_tasks = snapshot.valid, snapshot.idle, snapshot.takes_tasks
        held: dict[str, int] = {}
        needed = 0
        is_arriving = False
        for _, nbytes, having, arriving, _ in task.inputs:
            needed += nbytes
            for address in having:
                if address in held:
                    held[address] += nbytes
                else:
                    held[address] = nbytes
            if arriving:
                is_arriving = True

        holders: Collection[str] = held
        candidates: Collection[str] = held
        if valid is not None or takes_tasks is not None or not held:
            found = _allowed(snapshot, held)
            holders = found or set(idle if valid is None else valid)
        if valid is not None and len(valid) <= MAX_RESTRICTED:
            candidates = valid
        elif task.joins or idle or is_arriving or holders is not held or len(held) > MAX_CANDIDATES:
            candidates = self._near(snapshot, held) or holders
        workers = snapshot.workers(candidates)
        allowed = workers
        if task.device is not None:
            allowed = [one for one in workers if task.device in one.devices] or workers

        found_costs = costs(task, allowed, places)
        worker = least_cost(allowed, found_costs)
        usual = snapshot.usual or stocks_choice(
            workers, holders, held, needed, snapshot.bandwidth_nbytes_per_s
        )
        if doubt > 1 and worker != usual:
            worker = unless_in_doubt(worker, usual, task, allowed, places, doubt)
        return Decision(worker, found_costs, usual)

    @staticmethod
    def _near(snapshot: Snapshot, held: Mapping[str, int]) -> set[str]:
        """Workers that have, or will have, something of a task or what it is joined with.

        The latter only where what joining there may save is not far less than the inputs. With
        less to do than the holders, a worker that is looked at for the sake of thin edges would
        have large blocks moved to it.
        """
        task = snapshot.task
        nbytes: dict[str, float] = {**held}
        needed_nbytes = 0
        for one in task.inputs:
            needed_nbytes += one.nbytes
            for address in one.arriving_s:
                if address in held:
                    nbytes[address] += one.nbytes
        under_way = [one.arriving_s for one in task.inputs]
        if snapshot.valid is not None or snapshot.takes_tasks is not None:
            fetching = _allowed(snapshot, chain.from_iterable(under_way))
            under_way = [
                {one: s for one, s in each.items() if one in fetching} for each in under_way
            ]
        nbytes.update(coming([one.nbytes for one in task.inputs], under_way, held))
        joined: dict[str, float] = {}
        saved: dict[str, float] = {}
        for others in task.joins:
            for address, n in others.items():
                joined[address] = joined.get(address, 0) + n
                saved[address] = saved.get(address, 0) + min(n, task.output_nbytes)
        for address, n in joined.items():
            if address in nbytes or saved[address] >= MIN_JOINED_SHARE * needed_nbytes:
                nbytes[address] = nbytes.get(address, 0) + n
        near = _allowed(snapshot, nbytes)
        if len(near) > MAX_CANDIDATES:
            near = set(sorted(near, key=lambda one: (-nbytes[one], one))[:MAX_CANDIDATES])
            if snapshot.usual is not None:
                near |= _allowed(snapshot, (snapshot.usual,))
        return near | _allowed(snapshot, snapshot.idle) if snapshot.idle else near

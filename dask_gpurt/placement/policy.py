"""Which worker a task should run on: one class a policy, over a snapshot. Pure.

A snapshot holds what a decision may depend on and no more; the same one always gives the same
decision. Whoever makes it asks a live scheduler (`dask_gpurt.plugins.placement`) or a test.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from dask_gpurt.placement.cost import Cost, PathBetween, Task, Worker, cost

#: Restrictions to so few workers, and all of those are looked at, whatever they hold.
MAX_RESTRICTED = 32
#: Of more workers that have something of a task with very many inputs, those with most of it.
MAX_CANDIDATES = 16


class Snapshot(NamedTuple):
    """What is known when a task is to be placed.

    Attributes
    ----------
    worker
        What is known of one worker, by address.
    valid
        Addresses that the task may run at; None if it may run anywhere. Only running workers.
    is_running
        Whether a worker takes tasks, asked where `valid` is None.
    idle
        A few workers with little to do. They are looked at whatever they hold.
    bandwidth_nbytes_per_s
        The one figure that stock Dask has for all links.
    """

    task: Task
    worker: Callable[[str], Worker]
    path: PathBetween
    valid: Collection[str] | None = None
    idle: tuple[str, ...] = ()
    bandwidth_nbytes_per_s: float = 100e6
    is_running: Callable[[str], bool] = lambda address: True


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
    if valid is None:
        return {one for one in addresses if snapshot.is_running(one)}
    return {one for one in addresses if one in valid}


def _holders(snapshot: Snapshot) -> set[str]:
    """Workers that have an input and may run the task; all that may, if they have none."""
    found = _allowed(snapshot, (holder for one in snapshot.task.inputs for holder in one.holders))
    return found or set(snapshot.idle if snapshot.valid is None else snapshot.valid)


class Stock:
    """What distributed does itself: holders of inputs only, one bandwidth for all links.

    Where distributed breaks ties by the order of a set, this one does so by address.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        workers = map(snapshot.worker, _holders(snapshot))
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

    def candidates(self, snapshot: Snapshot) -> set[str]:
        """Workers that are looked at."""
        task, valid = snapshot.task, snapshot.valid
        if valid is not None and len(valid) <= MAX_RESTRICTED:
            return set(valid)
        nbytes: dict[str, float] = {}
        for one in task.inputs:
            for address in (*one.holders, *one.arriving_s):
                nbytes[address] = nbytes.get(address, 0) + one.nbytes
        for others in task.joins:
            for address, n in others.items():
                nbytes[address] = nbytes.get(address, 0) + n
        near = _allowed(snapshot, nbytes)
        if len(near) > MAX_CANDIDATES:
            near = set(sorted(near, key=lambda one: (-nbytes[one], one))[:MAX_CANDIDATES])
        near |= _allowed(snapshot, snapshot.idle)
        return near or _holders(snapshot)

    def decide(self, snapshot: Snapshot) -> Decision:
        task = snapshot.task
        holders = _holders(snapshot)
        workers = [snapshot.worker(one) for one in self.candidates(snapshot)]
        allowed = workers
        if task.device is not None:
            allowed = [one for one in workers if task.device in one.devices] or workers
        stock = min(
            ((*Stock.objective(snapshot, w), w.address) for w in workers if w.address in holders),
            default=None,
        )
        costs: dict[str, Cost] = {}
        chosen: tuple[float, float, int, str] | None = None
        for one in allowed:
            found = costs[one.address] = cost(task, one, snapshot.path)
            bid = sum(found), one.n_tasks / one.nthreads, one.nbytes, one.address
            if chosen is None or bid < chosen:
                chosen = bid
        return Decision(chosen and chosen[3], costs, stock and stock[2])

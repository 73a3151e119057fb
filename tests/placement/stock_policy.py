"""Stock Dask's choice of a worker, written plainly, for comparisons."""

from __future__ import annotations

from dask_gpurt.placement.cost import WorkerSnapshot
from dask_gpurt.placement.policy import Decision, Snapshot


class Stock:
    """The policy of distributed: holders of inputs only, one bandwidth for all links.

    Where distributed breaks ties by the order of a set, this class breaks them by address.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        inputs = snapshot.task.inputs
        valid, takes_tasks = snapshot.valid, snapshot.takes_tasks
        holders = {holder for one in inputs for holder in one.holders}
        if valid is not None:
            holders &= set(valid)
        elif takes_tasks is not None:
            holders = set(filter(takes_tasks, holders))
        holders = holders or set(snapshot.idle if valid is None else valid)
        workers = snapshot.workers(holders)
        chosen = min(
            ((*self.objective(snapshot, one), one.address) for one in workers), default=None
        )
        address = None if chosen is None else chosen[-1]
        return Decision(address, {}, address)

    @staticmethod
    def objective(snapshot: Snapshot, worker: WorkerSnapshot) -> tuple[float, int]:
        """Return the value to minimise, as `Scheduler.worker_objective` does."""
        nbytes = 0
        for one in snapshot.task.inputs:
            if worker.address not in one.holders:
                nbytes += one.nbytes
        return worker.queue_s + nbytes / snapshot.bandwidth_nbytes_per_s, worker.nbytes

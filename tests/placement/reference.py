"""A simple implementation of placement, with which tests compare the fast one.

It has the same rules as `dask_gpurt.placement`, but is written to be read. It computes every term
for every candidate and holder, without shortcuts.
"""

from __future__ import annotations

import dataclasses
import math

from dask_gpurt.placement.cost import SPILL_NBYTES_PER_S, Cost
from dask_gpurt.placement.joins import Partners
from dask_gpurt.placement.policy import (
    MAX_CANDIDATES,
    MAX_FETCHING,
    MAX_RESTRICTED,
    MIN_JOINED_SHARE,
)
from dask_gpurt.topology.places import Place, path_between
from tests.placement.machines import Lazy


def fetch_s(one, address, places):
    """Return the time of the best path from any holder."""
    return min(
        path_between(places, holder, address).transfer_s(one.nbytes) for holder in one.holders
    )


def join_s(address, nbytes, others, places):
    """Return the time to bring all data to the worker that is reached in the least time."""
    placed = dict(others)
    placed[address] = placed.get(address, 0.0) + nbytes

    def gathered_s(target):
        sources = set(placed) - {target}
        return math.fsum(
            path_between(places, one, target).transfer_s(placed[one]) for one in sources
        )

    return min(map(gathered_s, placed))


def met_nbytes(task, others):
    """Return the bytes that meet the join partners: the output, or a part of it."""
    if isinstance(others, Partners):
        return min(task.output_nbytes, others.met_nbytes)
    return task.output_nbytes


def cost(task, worker, places):
    missing = [one for one in task.inputs if worker.address not in one.holders]
    arriving = [one for one in missing if worker.address in one.arriving_s]
    fetched = [one for one in missing if worker.address not in one.arriving_s]
    transfer_s = math.fsum(fetch_s(one, worker.address, places) for one in fetched)
    new_nbytes = sum(one.nbytes for one in missing) + task.output_nbytes
    host = places[worker.address].host
    crossing = [one for one in fetched if all(places[a].host != host for a in one.holders)]
    waits_s = [max(worker.inlet_s, one.outlet_s) for one in crossing]
    wait_s = max([worker.receiving_s, *waits_s])
    return Cost(
        transfer_s=transfer_s + wait_s if transfer_s else 0.0,
        sending_s=transfer_s,
        arriving_s=math.fsum(
            min(one.arriving_s[worker.address], fetch_s(one, worker.address, places))
            for one in arriving
        ),
        queue_s=worker.queue_s,
        duration_s=task.duration_s * worker.slowness,
        spill_s=max(0.0, new_nbytes - worker.room_nbytes) / SPILL_NBYTES_PER_S,
        join_s=math.fsum(
            join_s(worker.address, met_nbytes(task, others), others, places)
            for others in task.joins
        ),
    )


def stock_objective(snapshot, worker):
    """Return the cost of `Scheduler.worker_objective` in Dask."""
    nbytes = sum(one.nbytes for one in snapshot.task.inputs if worker.address not in one.holders)
    return worker.queue_s + nbytes / snapshot.bandwidth_nbytes_per_s, worker.nbytes


def allowed(snapshot, address):
    if snapshot.valid is not None:
        return address in snapshot.valid
    return snapshot.takes_tasks is None or snapshot.takes_tasks(address)


def holders(snapshot):
    """Return the workers that have an input and may run the task; all allowed ones if none has."""
    found = {holder for one in snapshot.task.inputs for holder in one.holders}
    return {one for one in found if allowed(snapshot, one)} or set(
        snapshot.idle if snapshot.valid is None else snapshot.valid
    )


def candidates(snapshot):
    """Return the workers whose costs are compared."""
    task = snapshot.task
    if snapshot.valid is not None and len(snapshot.valid) <= MAX_RESTRICTED:
        return set(snapshot.valid)
    held = {address for one in task.inputs for address in one.holders}
    fetching = {address for one in task.inputs for address in one.arriving_s} - held
    fetching = {address for address in fetching if allowed(snapshot, address)}

    def most_first(address):
        due = [one for one in task.inputs if address in one.arriving_s]
        last_s = max(one.arriving_s[address] for one in due)
        return -sum(one.nbytes for one in due), last_s, address

    nbytes = {
        address: sum(
            one.nbytes for one in task.inputs if address in {*one.holders, *one.arriving_s}
        )
        for address in held | set(sorted(fetching, key=most_first)[:MAX_FETCHING])
    }
    needed_nbytes = sum(one.nbytes for one in task.inputs)
    for address in {address for others in task.joins for address in others}:
        with_it = [others for others in task.joins if address in others]
        joined = [others[address] for others in with_it]
        saved_nbytes = sum(min(others[address], met_nbytes(task, others)) for others in with_it)
        if address in nbytes or saved_nbytes >= MIN_JOINED_SHARE * needed_nbytes:
            nbytes[address] = nbytes.get(address, 0) + sum(joined)
    near = [one for one in nbytes if allowed(snapshot, one)]
    if len(near) > MAX_CANDIDATES:
        near = sorted(near, key=lambda one: (-nbytes[one], one))[:MAX_CANDIDATES]
        near += [one for one in [snapshot.stock] if one is not None and allowed(snapshot, one)]
    idle = [one for one in snapshot.idle if allowed(snapshot, one)]
    return {*near, *idle} or holders(snapshot)


def decide(snapshot):
    """Return the chosen worker, the costs of all candidates, and the choice of Dask."""
    task = snapshot.task
    workers = snapshot.workers(candidates(snapshot))
    having = holders(snapshot)
    stock = min(
        (
            (*stock_objective(snapshot, one), one.address)
            for one in workers
            if one.address in having
        ),
        default=(None,),
    )[-1]
    stock = snapshot.stock or stock
    if task.device is not None and any(task.device in one.devices for one in workers):
        workers = [one for one in workers if task.device in one.devices]
    costs = {one.address: cost(task, one, snapshot.places) for one in workers}
    bids = [
        (costs[one.address].total_s, one.n_tasks / one.nthreads, one.nbytes, one.address)
        for one in workers
    ]
    chosen = min(bids, default=(None,))[-1]
    if snapshot.uncertainty > 1 and chosen in costs and stock in costs:
        known = {one.address: one for one in workers}
        for factor in (snapshot.uncertainty, 1 / snapshot.uncertainty):
            ways = scaled(snapshot.places, factor)
            ours, theirs = (cost(task, known[one], ways).total_s for one in (chosen, stock))
            if ours >= theirs:
                return stock, costs, stock
    return chosen, costs, stock


def scaled(places, factor):
    """Return places on the same hosts with scaled bandwidths."""

    def path(source, target):
        found = path_between(places, source, target)
        rate = factor * found.bandwidth_nbytes_per_s
        return dataclasses.replace(found, bandwidth_nbytes_per_s=rate)

    def place(target):
        ways = Lazy(lambda source: path(source, target))
        # Hosts stay the same, because transfers into one host wait for each other.
        return Place(places[target].host, target, ways, ways)

    return Lazy(place)

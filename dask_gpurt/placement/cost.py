"""What it costs, in seconds, to run a task on a worker. Pure: values in, values out.

::

    cost(t, w) = transfer + sending + arriving + queue + duration + spill + join

Each term is in its own field of `Cost`, so that a decision can be explained. Workers are known by
their addresses; ways between them come as a function, which `dask_gpurt.topology` provides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from dask_gpurt.topology.model import Path

#: The way from one worker to another, by address.
PathBetween = Callable[[str, str], Path]

#: What a worker writes to disk, and reads back later, while tasks wait for memory.
SPILL_NBYTES_PER_S = 500e6


class Worker(NamedTuple):
    """A worker, as far as placing a task on it goes.

    Attributes
    ----------
    occupancy_s
        Seconds of work that were given to it and are not done.
    receiving_s
        Seconds until it has what it is fetching already; what comes next has to wait for that.
    nbytes
        Of results it holds.
    room_nbytes
        Before it begins to spill; infinite if it never does.
    devices
        Kinds of devices it computes on.
    n_tasks
        Tasks that were given to it and are not done, however long they are.
    """

    address: str
    nthreads: int
    occupancy_s: float = 0.0
    nbytes: int = 0
    room_nbytes: float = math.inf
    devices: Collection[str] = ()
    receiving_s: float = 0.0
    n_tasks: int = 0

    @property
    def queue_s(self) -> float:
        """Seconds until something given to it now would start."""
        return self.occupancy_s / self.nthreads


class Input(NamedTuple):
    """A result that the task needs.

    Attributes
    ----------
    holders
        Workers that have it.
    arriving_s
        Workers that are fetching it, with the seconds until they have it.
    """

    key: Hashable
    nbytes: int
    holders: Collection[str]
    arriving_s: Mapping[str, float] = {}


class Task(NamedTuple):
    """A task that could run now.

    Attributes
    ----------
    output_nbytes
        Expected; 0 if nothing is known.
    joins
        For each task that will need this one's output together with others': bytes of those
        others by worker.
    device
        Kind of device its inputs are on, None if they are on none.
    """

    key: Hashable
    inputs: Sequence[Input]
    duration_s: float = 0.0
    output_nbytes: float = 0
    joins: Sequence[Mapping[str, float]] = ()
    device: str | None = None


class Cost(NamedTuple):
    """Terms of a cost, in seconds.

    Attributes
    ----------
    transfer_s
        Fetching what is missing, each input over the best way from any holder, after what the
        worker is fetching already.
    sending_s
        What the holders spend on it meanwhile: serialising and sending takes one of their
        processors for about as long. Without this term everything that is not quite idle would
        look for company, and a cluster of busy workers would move all it has.
    arriving_s
        Waiting for what others already asked for.
    queue_s, duration_s
        Until a thread is free, and the task itself.
    spill_s
        Putting away what does not fit.
    join_s
        Moving the output, or what it will be joined with, when that is due.
    """

    transfer_s: float
    sending_s: float
    arriving_s: float
    queue_s: float
    duration_s: float
    spill_s: float
    join_s: float

    @property
    def total_s(self) -> float:
        return sum(self)

    @property
    def data_s(self) -> float:
        """The part that data causes for the task itself; not what it causes for senders."""
        return self.transfer_s + self.arriving_s + self.spill_s + self.join_s


def cost(task: Task, worker: Worker, path: PathBetween) -> Cost:
    """Cost of a task on a worker."""
    transfer_s = arriving_s = 0.0
    new_nbytes = task.output_nbytes
    address = worker.address
    for one in task.inputs:
        if address in one.holders:
            continue
        new_nbytes += one.nbytes
        fetch_s = math.inf
        for holder in one.holders:
            way = path(holder, address)
            # `Path.transfer_s`, without the call: this is the innermost loop of the scheduler.
            seconds = way.latency_s + one.nbytes / way.bandwidth_nbytes_per_s
            if seconds < fetch_s:
                fetch_s = seconds
        remaining_s = one.arriving_s.get(address) if one.arriving_s else None
        if remaining_s is None:
            transfer_s += fetch_s
        else:
            # It has been on its way for a while; it never takes longer than from the start.
            arriving_s += min(remaining_s, fetch_s)
    spilled_nbytes = new_nbytes - worker.room_nbytes
    return Cost(
        transfer_s + worker.receiving_s if transfer_s else 0.0,
        transfer_s,
        arriving_s,
        worker.occupancy_s / worker.nthreads,
        task.duration_s,
        spilled_nbytes / SPILL_NBYTES_PER_S if spilled_nbytes > 0 else 0.0,
        sum(join_s(address, task.output_nbytes, others, path) for others in task.joins)
        if task.joins
        else 0.0,
    )


def join_s(address: str, nbytes: float, others: Mapping[str, float], path: PathBetween) -> float:
    """Seconds of moving what a later task needs to one place, if `nbytes` of it are here.

    The place is the one to which it takes the least; so this is 0 where all of it is.
    """
    if len(others) == 1:
        ((other, other_nbytes),) = others.items()
        if other == address:
            return 0.0
        way, back = path(address, other), path(other, address)
        return min(
            way.latency_s + nbytes / way.bandwidth_nbytes_per_s,
            back.latency_s + other_nbytes / back.bandwidth_nbytes_per_s,
        )
    placed = {**others, address: others.get(address, 0.0) + nbytes}
    return min(
        sum(path(source, target).transfer_s(n) for source, n in placed.items() if source != target)
        for target in placed
    )


def steal_pays(victim: Cost, thief: Cost) -> bool:
    """Whether a task starts sooner, by more than the seconds of data it moves, on the thief."""
    return victim.queue_s - thief.queue_s > thief.data_s - victim.data_s

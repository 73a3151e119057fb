"""The cost, in seconds, of running a task on a worker. Pure: values in, values out.

::

    cost(t, w) = transfer + sending + arriving + queue + duration + spill + join

`Cost` keeps each term in a field of its own, so that a decision can be explained. Workers are known
by their addresses. `dask_gpurt.topology` has the paths between them.

This module is the innermost loop of the scheduler: it is written for few steps per input, not for
few lines. `tests/placement/reference.py` has the same rules in their plainest form.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import fsum, inf
from typing import NamedTuple

from dask_gpurt.placement.joins import Join
from dask_gpurt.topology.model import Path
from dask_gpurt.topology.places import Place, Places

_new = tuple.__new__

#: A task with at most this many inputs takes the simple path: each input is priced on each worker.
_MAX_SIMPLE_INPUTS = 4

#: Bytes per second that a worker writes to disk, and reads back later, while tasks wait for memory.
SPILL_NBYTES_PER_S = 500e6


class WorkerSnapshot(NamedTuple):
    """The state of a worker that placement needs.

    Attributes
    ----------
    occupancy_s
        Seconds of work that the worker was given and has not done.
    receiving_s
        Seconds until the worker has received its transfers in flight. New transfers wait for them.
    nbytes
        Bytes of results that the worker holds.
    room_nbytes
        Bytes that the worker can take before it begins to spill; infinite if it never spills.
    devices
        Kinds of devices that the worker computes on.
    n_tasks
        Number of tasks that the worker was given and has not done, however long they are.
    slowness
        Seconds that the worker needs for work that takes other workers one second
        (`dask_gpurt.placement.speeds`). `occupancy_s` already allows for it.
    inlet_s
        Seconds until the link into the worker's host has carried its transfers in flight, to all
        workers behind that link.
    """

    address: str
    nthreads: int
    occupancy_s: float = 0.0
    nbytes: int = 0
    room_nbytes: float = inf
    devices: Collection[str] = ()
    receiving_s: float = 0.0
    n_tasks: int = 0
    slowness: float = 1.0
    inlet_s: float = 0.0

    @property
    def queue_s(self) -> float:
        """Seconds until a task that the worker is given now would start."""
        return self.occupancy_s / self.nthreads


class Input(NamedTuple):
    """A result that the task needs.

    Attributes
    ----------
    holders
        Workers that have the result, each once.
    arriving_s
        Seconds until the result arrives, by worker that is fetching it.
    outlet_s
        Seconds until a link out of a holder's host has carried its transfers in flight to other
        hosts.
    """

    key: Hashable
    nbytes: int
    holders: Collection[str]
    arriving_s: Mapping[str, float] = {}
    outlet_s: float = 0.0


class Task(NamedTuple):
    """A task that is ready to run.

    Attributes
    ----------
    output_nbytes
        Expected bytes of the output; 0 if nothing is known.
    joins
        For each task that will need this task's output together with other results: the bytes of
        those results by worker.
    device
        Kind of device that the inputs are on; None if they are on none.
    """

    key: Hashable
    inputs: Sequence[Input]
    duration_s: float = 0.0
    output_nbytes: float = 0
    joins: Sequence[Mapping[str, float]] = ()
    device: str | None = None


class HeldTask(NamedTuple):
    """A task each of whose inputs is on exactly one worker: the shape of most tasks.

    Attributes
    ----------
    holders
        For each input, the worker that has it.
    sizes
        For each input, its bytes.
    outlets_s, arrivals_s
        For each input, `Input.outlet_s` and `Input.arriving_s`.
    duration_s, output_nbytes, joins
        As in `Task`.
    """

    holders: Sequence[str]
    sizes: Sequence[int]
    outlets_s: Sequence[float]
    arrivals_s: Sequence[Mapping[str, float]]
    duration_s: float
    output_nbytes: float
    joins: Sequence[Mapping[str, float]]

    def as_task(self) -> Task:
        """Return the same task as a `Task`, with numbers for the keys of inputs."""
        inputs = [
            Input(number, nbytes, (holder,), arriving, outlet_s)
            for number, (holder, nbytes, arriving, outlet_s) in enumerate(
                zip(self.holders, self.sizes, self.arrivals_s, self.outlets_s, strict=True)
            )
        ]
        return Task(None, inputs, self.duration_s, self.output_nbytes, self.joins)


class Cost(NamedTuple):
    """The terms of a cost, in seconds.

    Attributes
    ----------
    transfer_s
        Time to fetch missing inputs, each over the best path from any holder, after the worker's
        transfers in flight. An input that no worker of the host has also waits for the transfers in
        flight on the links at both ends.
    sending_s
        Time that the holders spend on these transfers: serialising and sending occupies one of
        their processors for about as long. Without this term, workers that are not quite idle would
        hand tasks to others. A cluster of busy workers would move all its data.
    arriving_s
        Time to wait for inputs that earlier decisions already sent to the worker.
    queue_s, duration_s
        Time until a thread is free, and time of the task itself, both at the worker's speed.
    spill_s
        Time to spill what does not fit.
    join_s
        Time to move the output, or its join partners, when a later task joins them.
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
        """Seconds that data costs the task itself, without the seconds that it costs senders."""
        return self.transfer_s + self.arriving_s + self.spill_s + self.join_s


def costs(task: Task, workers: Iterable[WorkerSnapshot], places: Places) -> dict[str, Cost]:
    """Return the cost of a task on each of some workers, by address.

    Sums do not depend on the order of inputs and joins, which come from sets. Otherwise the last
    bit of a sum could break a tie differently in another process.
    """
    inputs = task.inputs
    if len(inputs) > _MAX_SIMPLE_INPUTS:
        return _costs_of_many(task, workers, places)
    from_one, sizes, outlets_s, arrivals_s = [], [], [], []
    for _, nbytes, holders, arriving, outlet_s in inputs:
        if len(holders) != 1:
            return _costs_of_many(task, workers, places)
        (holder,) = holders
        from_one.append(holder)
        sizes.append(nbytes)
        outlets_s.append(outlet_s)
        arrivals_s.append(arriving)
    held = HeldTask(
        from_one, sizes, outlets_s, arrivals_s, task.duration_s, task.output_nbytes, task.joins
    )
    return costs_of_held(held, workers, places)


def costs_of_held(
    task: HeldTask, workers: Iterable[WorkerSnapshot], places: Places
) -> dict[str, Cost]:
    """Return the cost on each of some workers of a task each of whose inputs is on one worker."""
    needed_nbytes = sum(task.sizes)
    later = [Join(one, places) for one in task.joins]
    sources = [
        (holder, places[holder].host, nbytes, outlet_s, arriving)
        for holder, nbytes, outlet_s, arriving in zip(
            task.holders, task.sizes, task.outlets_s, task.arrivals_s, strict=True
        )
    ]
    found = {}
    for worker in workers:
        address = worker.address
        wait_s, inlet_s = worker.receiving_s, worker.inlet_s
        host, _, near, far = places[address]
        new_nbytes = needed_nbytes
        fetches = []
        waits = []
        for holder, holders_host, nbytes, outlet_s, arriving in sources:
            if holder == address:
                new_nbytes -= nbytes
                continue
            path = (near if holders_host == host else far)[holder]
            # `Path.transfer_s`, without the call.
            seconds = path.latency_s + nbytes / path.bandwidth_nbytes_per_s
            if arriving and address in arriving:
                # The transfer began earlier, so it takes at most as long as a new one.
                waits.append(min(arriving[address], seconds))
                continue
            if holders_host != host:
                wait_s = max(wait_s, inlet_s, outlet_s)
            fetches.append(seconds)
        transfer_s = fetches[0] if len(fetches) == 1 else fsum(fetches)
        arriving_s = fsum(waits) if waits else 0.0
        found[address] = _cost(task, later, worker, transfer_s, wait_s, arriving_s, new_nbytes)
    return found


class _ManyInputs:
    """The inputs of a task, indexed so that each worker's share of them is found in few steps.

    Most candidates are on hosts that have few of the inputs. All workers of one kind of place fetch
    the same from other hosts, so that part is computed once per kind.
    """

    def __init__(self, inputs: Sequence[Input], places: Places) -> None:
        self.inputs = inputs
        self._places = places
        self.needed_nbytes = sum(one.nbytes for one in inputs)
        #: Numbers of the inputs that are in flight to some worker.
        self._in_flight = [number for number, one in enumerate(inputs) if one.arriving_s]
        #: Inputs that wait for the link out of their host, the longest wait first.
        self._leaving = sorted(
            ((one.outlet_s, number) for number, one in enumerate(inputs) if one.outlet_s),
            reverse=True,
        )
        #: Numbers of the inputs that each host has, by host.
        self._on_host: dict[str, list[int]] = {}
        for number, one in enumerate(inputs):
            for host in {places[holder].host for holder in one.holders}:
                self._on_host.setdefault(host, []).append(number)
        self._far_s: dict[Hashable, list[float]] = {}

    def fetched_by(self, worker: WorkerSnapshot) -> tuple[float, float, float, int]:
        """Return what a worker has to fetch.

        Returns
        -------
        transfer_s
            Seconds of transfers.
        wait_s
            Seconds until the first of these transfers can begin.
        arriving_s
            Seconds of transfers that are already in flight to the worker.
        new_nbytes
            Bytes of inputs that the worker does not have yet.
        """
        address = worker.address
        host, kind, _, far = self._places[address]
        fetches = self._far_s.get(kind)
        if fetches is None:
            fetches = self._far_s[kind] = _far_fetches_s(self.inputs, far)
        here = self._on_host.get(host, ())
        new_nbytes = self.needed_nbytes
        arriving_s = 0.0
        #: Numbers of the inputs that come from no other host, or are in flight already.
        settled: Collection[int] = here
        if here or self._in_flight:
            fetches = fetches[:]
            for number in here:
                one = self.inputs[number]
                if address in one.holders:
                    new_nbytes -= one.nbytes
                    fetches[number] = 0.0
                else:
                    (fetches[number],) = fetches_s((one,), address, self._places)
        if self._in_flight:
            waits, coming = self._take_arriving(address, fetches)
            arriving_s = fsum(waits)
            settled = {*here, *coming}
        wait_s = worker.receiving_s
        if len(settled) < len(self.inputs):
            longest = (s for s, number in self._leaving if number not in settled)
            wait_s = max(wait_s, worker.inlet_s, next(longest, 0.0))
        return fsum(fetches), wait_s, arriving_s, new_nbytes

    def _take_arriving(self, address: str, fetches: list[float]) -> tuple[list[float], list[int]]:
        """Return seconds and numbers of the inputs in flight to a worker; zero their fetches."""
        waits, coming = [], []
        for number in self._in_flight:
            _, _, holders, arriving, _ = self.inputs[number]
            if address in arriving and address not in holders:
                # The transfer began earlier, so it takes at most as long as a new one.
                waits.append(min(arriving[address], fetches[number]))
                fetches[number] = 0.0
                coming.append(number)
        return waits, coming


def _costs_of_many(
    task: Task, workers: Iterable[WorkerSnapshot], places: Places
) -> dict[str, Cost]:
    """Return the costs of a task with many inputs, or with inputs that several workers have."""
    inputs = _ManyInputs(task.inputs, places)
    later = [Join(one, places) for one in task.joins]
    return {
        worker.address: _cost(task, later, worker, *inputs.fetched_by(worker)) for worker in workers
    }


def _cost(
    task: Task | HeldTask,
    joins: Sequence[Join],
    worker: WorkerSnapshot,
    transfer_s: float,
    wait_s: float,
    arriving_s: float,
    new_nbytes: int,
) -> Cost:
    output_nbytes = task.output_nbytes
    spilled_nbytes = new_nbytes + output_nbytes - worker.room_nbytes
    if len(joins) == 1:
        join_s = joins[0].seconds(worker.address, output_nbytes)
    else:
        join_s = fsum([one.seconds(worker.address, output_nbytes) for one in joins])
    # The same as `Cost(...)`, in half the time.
    return _new(
        Cost,
        (
            transfer_s + wait_s if transfer_s else 0.0,
            transfer_s,
            arriving_s,
            worker.occupancy_s / worker.nthreads,
            task.duration_s * worker.slowness,
            spilled_nbytes / SPILL_NBYTES_PER_S if spilled_nbytes > 0 else 0.0,
            join_s,
        ),
    )


def _far_fetches_s(inputs: Iterable[Input], far: Mapping[str, Path]) -> list[float]:
    """Return seconds to fetch each input from another host; infinite where no worker has it."""
    found = []
    for _, nbytes, holders, _, _ in inputs:
        least_s = inf
        for holder in holders:
            # `Path.transfer_s`, without the call.
            path = far[holder]
            seconds = path.latency_s + nbytes / path.bandwidth_nbytes_per_s
            if seconds < least_s:
                least_s = seconds
        found.append(least_s)
    return found


def fetches_s(inputs: Iterable[Input], address: str, places: Places) -> list[float]:
    """Return seconds in which a worker can fetch each input, each from its fastest holder."""
    host, _, near, far = places[address]
    found = []
    for _, nbytes, holders, _, _ in inputs:
        least_s = inf
        for holder in holders:
            path = (near if places[holder][0] == host else far)[holder]
            seconds = path.latency_s + nbytes / path.bandwidth_nbytes_per_s
            if seconds < least_s:
                least_s = seconds
        found.append(least_s)
    return found


def is_surely_cheaper(
    task: Task, one: WorkerSnapshot, other: WorkerSnapshot, places: Places, uncertainty: float
) -> bool:
    """Return whether a task costs less on one worker than on another, even if rates are uncertain.

    Parameters
    ----------
    uncertainty
        Factor by which links may be faster or slower than estimated.
    """
    for factor in (uncertainty, 1 / uncertainty):
        found = costs(task, (one, other), _ScaledPlaces(places, factor))
        if found[one.address].total_s >= found[other.address].total_s:
            return False
    return True


class _ScaledPlaces(dict[str, Place]):
    """Places whose paths have a multiple of their bandwidth and the same latency."""

    def __init__(self, places: Places, factor: float) -> None:
        self._places = places
        self._factor = factor

    def __missing__(self, address: str) -> Place:
        host, kind, near, far = self._places[address]
        scaled = Place(host, kind, _Scaled(near, self._factor), _Scaled(far, self._factor))
        self[address] = scaled
        return scaled


class _Scaled(dict[str, Path]):
    def __init__(self, ways: Mapping[str, Path], factor: float) -> None:
        self._ways = ways
        self._factor = factor

    def __missing__(self, source: str) -> Path:
        path = self._ways[source]
        bandwidth = path.bandwidth_nbytes_per_s * self._factor
        return replace(path, bandwidth_nbytes_per_s=bandwidth)


def steal_pays(victim: Cost, thief: Cost, uncertainty: float = 1.0) -> bool:
    """Return whether stealing makes a task end sooner by more than the data it moves costs.

    Links may be `uncertainty` times as fast as estimated. The steal gets the benefit of the doubt:
    stock Dask proposes it, and by stock Dask's own figures it pays.
    """
    # Subtract durations separately: where they are equal, their difference is exactly 0.
    sooner_s = (victim.queue_s - thief.queue_s) + (victim.duration_s - thief.duration_s)
    return sooner_s > (thief.data_s - victim.data_s) / uncertainty

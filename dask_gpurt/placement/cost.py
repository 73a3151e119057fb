"""What it costs, in seconds, to run a task on a worker. Pure: values in, values out.

::

    cost(t, w) = transfer + sending + arriving + queue + duration + spill + join

Each term is in its own field of `Cost`, so that a decision can be explained. Workers are known by
their addresses; ways between them come from `dask_gpurt.topology`.

This is the innermost loop of the scheduler: it is written for few steps an input, not for few
lines. `tests/placement/reference.py` has the same in plain words.
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

#: Of a task with no more inputs, each is weighed by itself on each worker.
_FEW = 4

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
    slowness
        Seconds it takes for what takes others one (`dask_gpurt.placement.speeds`). `occupancy_s` is
        at its own speed already.
    inlet_s
        Seconds until the link through which it gets data from other hosts has carried what workers
        behind that link are fetching already.
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
        """Seconds until something given to it now would start."""
        return self.occupancy_s / self.nthreads


class Input(NamedTuple):
    """A result that the task needs.

    Attributes
    ----------
    holders
        Workers that have it, each once.
    arriving_s
        Workers that are fetching it, with the seconds until they have it.
    outlet_s
        Seconds until the link out of the host of one that has it has carried what workers of other
        hosts are fetching already.
    """

    key: Hashable
    nbytes: int
    holders: Collection[str]
    arriving_s: Mapping[str, float] = {}
    outlet_s: float = 0.0


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


class HeldTask(NamedTuple):
    """A task each of whose inputs is on exactly one worker, which is the shape of most tasks.

    Attributes
    ----------
    holders
        For each input the worker that has it.
    sizes
        For each input its bytes.
    outlets_s, arrivals_s
        For each input `Input.outlet_s` and `Input.arriving_s`.
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
        """Return it as a `Task`, with numbers for the keys of inputs."""
        inputs = [
            Input(number, nbytes, (holder,), arriving, outlet_s)
            for number, (holder, nbytes, arriving, outlet_s) in enumerate(
                zip(self.holders, self.sizes, self.arrivals_s, self.outlets_s, strict=True)
            )
        ]
        return Task(None, inputs, self.duration_s, self.output_nbytes, self.joins)


class Cost(NamedTuple):
    """Terms of a cost, in seconds.

    Attributes
    ----------
    transfer_s
        Fetching what is missing, each input over the best way from any holder, after what the
        worker is fetching already; and, where an input is on no worker of its host, after what
        has to come through the same links, at either end.
    sending_s
        What the holders spend on it meanwhile: serialising and sending takes one of their
        processors for about as long. Without this term everything that is not quite idle would
        look for idle_candidates, and a cluster of busy workers would move all it has.
    arriving_s
        Waiting for what others already asked for.
    queue_s, duration_s
        Until a thread is free, and the task itself, both at the worker's speed.
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


def costs(task: Task, workers: Iterable[Worker], places: Places) -> dict[str, Cost]:
    """Cost of a task on each of some workers, by address.

    Sums do not depend on the order of inputs and joins, which are sets where they come from: a
    tie that the last bit of a sum broke would be broken otherwise in another process.
    """
    inputs = task.inputs
    if len(inputs) > _FEW:
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


def costs_of_held(task: HeldTask, workers: Iterable[Worker], places: Places) -> dict[str, Cost]:
    """Return the same for a task each of whose inputs is on one worker."""
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
                # It has been on its way for a while; it never takes longer than anew.
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
    """The inputs of a task, sorted such that each worker's share of them is found in few steps.

    Most candidates are on hosts that have few of the inputs. What they fetch from other hosts is
    the same for all workers of one kind of place, so it is worked out once for each kind.
    """

    def __init__(self, inputs: Sequence[Input], places: Places) -> None:
        self.inputs = inputs
        self._places = places
        self.needed_nbytes = sum(one.nbytes for one in inputs)
        #: Numbers of the inputs that workers are fetching.
        self._in_flight = [number for number, one in enumerate(inputs) if one.arriving_s]
        #: Inputs that have to wait for the link out of their host, the longest wait first.
        self._leaving = sorted(
            ((one.outlet_s, number) for number, one in enumerate(inputs) if one.outlet_s),
            reverse=True,
        )
        #: By host, the numbers of the inputs that it has.
        self._on_host: dict[str, list[int]] = {}
        for number, one in enumerate(inputs):
            for host in {places[holder].host for holder in one.holders}:
                self._on_host.setdefault(host, []).append(number)
        self._from_afar: dict[Hashable, list[float]] = {}

    def fetched_by(self, worker: Worker) -> tuple[float, float, float, int]:
        """Return what a worker has to fetch.

        Returns
        -------
        transfer_s
            Seconds of transfers.
        wait_s
            Seconds until the first of them can begin.
        arriving_s
            Seconds until it has what it is fetching already.
        new_nbytes
            Bytes that it does not have yet.
        """
        address = worker.address
        host, kind, _, far = self._places[address]
        fetches = self._from_afar.get(kind)
        if fetches is None:
            fetches = self._from_afar[kind] = _all_from_afar(self.inputs, far)
        here = self._on_host.get(host, ())
        new_nbytes = self.needed_nbytes
        arriving_s = 0.0
        #: Numbers of the inputs that come from no other host, or are on their way already.
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
        """Return seconds and numbers of the inputs under way; they are fetched no more."""
        waits, coming = [], []
        for number in self._in_flight:
            _, _, holders, arriving, _ = self.inputs[number]
            if address in arriving and address not in holders:
                # It has been on its way for a while; it never takes longer than anew.
                waits.append(min(arriving[address], fetches[number]))
                fetches[number] = 0.0
                coming.append(number)
        return waits, coming


def _costs_of_many(task: Task, workers: Iterable[Worker], places: Places) -> dict[str, Cost]:
    """Return the costs of a task of many inputs, or of inputs that several workers have."""
    inputs = _ManyInputs(task.inputs, places)
    later = [Join(one, places) for one in task.joins]
    return {
        worker.address: _cost(task, later, worker, *inputs.fetched_by(worker)) for worker in workers
    }


def _cost(
    task: Task | HeldTask,
    joins: Sequence[Join],
    worker: Worker,
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
    # As `Cost(...)` does, in half the time.
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


def _all_from_afar(inputs: Iterable[Input], far: Mapping[str, Path]) -> list[float]:
    """Seconds for each input from a worker of another host, infinite where nobody has it."""
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
    """Seconds in which a worker has each input, from the holder it takes the least from."""
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


def is_surely_cheaper(task: Task, one: Worker, other: Worker, places: Places, doubt: float) -> bool:
    """Whether a task costs less on a worker than on another whatever the links carry.

    Parameters
    ----------
    doubt
        They may carry so many times as much as is believed, or as little.
    """
    for factor in (doubt, 1 / doubt):
        found = costs(task, (one, other), _ScaledPlaces(places, factor))
        if found[one.address].total_s >= found[other.address].total_s:
            return False
    return True


class _ScaledPlaces(dict[str, Place]):
    """Places to which ways carry a multiple of what they do to others, each with its latency."""

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


def steal_pays(victim: Cost, thief: Cost, doubt: float = 1.0) -> bool:
    """Whether a task is done sooner, by more than the seconds of data it moves, on the thief.

    Where links may carry `doubt` times as much as is believed, it is given the benefit of that:
    stock, which proposes the steal, has made sure that it pays by its own figures.
    """
    # Durations apart: where they are equal, nothing is left of them.
    sooner_s = (victim.queue_s - thief.queue_s) + (victim.duration_s - thief.duration_s)
    return sooner_s > (thief.data_s - victim.data_s) / doubt

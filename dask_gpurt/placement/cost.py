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
        look for company, and a cluster of busy workers would move all it has.
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
    _, inputs, duration_s, output_nbytes, joins, _ = task
    if len(inputs) > _FEW:
        return _costs_of_many(task, workers, places)
    from_one, sizes, outlets_s, under_way = [], [], [], []
    for _, nbytes, holders, arriving, outlet_s in inputs:
        if len(holders) != 1:
            return _costs_of_many(task, workers, places)
        (holder,) = holders
        from_one.append(holder)
        sizes.append(nbytes)
        outlets_s.append(outlet_s)
        under_way.append(arriving)
    return costs_of_held(
        from_one, sizes, outlets_s, under_way, duration_s, output_nbytes, joins, workers, places
    )


def costs_of_held(
    holders: Sequence[str],
    sizes: Sequence[int],
    outlets_s: Sequence[float],
    under_way: Sequence[Mapping[str, float]],
    duration_s: float,
    output_nbytes: float,
    joins: Sequence[Mapping[str, float]],
    workers: Iterable[Worker],
    places: Places,
) -> dict[str, Cost]:
    """The same for a task of which each input is on one worker.

    Parameters
    ----------
    holders, sizes, outlets_s, under_way
        For each input the worker that has it, bytes, `Input.outlet_s`, and `Input.arriving_s`.
    duration_s, output_nbytes, joins
        As in `Task`.
    """
    needed_nbytes = sum(sizes)
    later = [Join(one, places) for one in joins]
    sources = [
        (holder, places[holder][0], nbytes, outlet_s, arriving)
        for holder, nbytes, outlet_s, arriving in zip(
            holders, sizes, outlets_s, under_way, strict=True
        )
    ]
    found = {}
    for worker in workers:
        address, _, _, _, _, _, wait_s, _, _, inlet_s = worker
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
                if inlet_s > wait_s:
                    wait_s = inlet_s
                if outlet_s > wait_s:
                    wait_s = outlet_s
            fetches.append(seconds)
        transfer_s = fetches[0] if len(fetches) == 1 else fsum(fetches)
        arriving_s = fsum(waits) if waits else 0.0
        found[address] = _cost(
            duration_s, output_nbytes, later, worker, transfer_s, wait_s, arriving_s, new_nbytes
        )
    return found


def _costs_of_many(task: Task, workers: Iterable[Worker], places: Places) -> dict[str, Cost]:
    """Cost of a task of many inputs, or of such that several have."""
    _, inputs, duration_s, output_nbytes, joins, _ = task
    needed_nbytes = 0
    later = [Join(one, places) for one in joins]
    under_way = []
    #: Inputs that have to wait for the way out, the longest wait first.
    leaving: list[tuple[float, int]] = []
    #: By host, the numbers of the inputs that it has.
    on_host: dict[str, list[int]] = {}
    for number, (_, nbytes, holders, arriving, outlet_s) in enumerate(inputs):
        needed_nbytes += nbytes
        if arriving:
            under_way.append(number)
        if outlet_s:
            leaving.append((outlet_s, number))
        for holder in holders:
            host = places[holder][0]
            if host not in on_host:
                on_host[host] = [number]
            elif on_host[host][-1] != number:
                on_host[host].append(number)
    leaving.sort(reverse=True)
    #: By kind of place: seconds for each input from other hosts. Most candidates are of one kind,
    #: and have few of the inputs on their own hosts.
    from_afar: dict[Hashable, list[float]] = {}
    found = {}
    for worker in workers:
        address = worker[0]
        host, kind, _, far = places[address]
        fetches = from_afar.get(kind)
        if fetches is None:
            fetches = from_afar[kind] = _all_from_afar(inputs, far)
        new_nbytes = needed_nbytes
        arriving_s = 0.0
        here = on_host.get(host, ())
        n_crossing = len(inputs) - len(here)
        coming: list[int] = []
        if under_way or here:
            fetches = fetches[:]
            for number in here:
                _, nbytes, holders, _, _ = inputs[number]
                if address in holders:
                    new_nbytes -= nbytes
                    fetches[number] = 0.0
                else:
                    (fetches[number],) = fetches_s((inputs[number],), address, places)
            if under_way:
                waits = []
                for number in under_way:
                    _, _, holders, arriving, _ = inputs[number]
                    if address in arriving and address not in holders:
                        # It has been on its way for a while; it never takes longer than anew.
                        waits.append(min(arriving[address], fetches[number]))
                        fetches[number] = 0.0
                        if number not in here:
                            n_crossing -= 1
                            coming.append(number)
                arriving_s = fsum(waits)
        transfer_s = fsum(fetches)
        wait_s = worker.receiving_s
        if n_crossing:
            wait_s = max(wait_s, worker.inlet_s)
            for outlet_s, number in leaving:
                if outlet_s <= wait_s:
                    break
                if number not in here and number not in coming:
                    wait_s = outlet_s
                    break
        found[address] = _cost(
            duration_s, output_nbytes, later, worker, transfer_s, wait_s, arriving_s, new_nbytes
        )
    return found


def _cost(
    duration_s: float,
    output_nbytes: float,
    joins: Sequence[Join],
    worker: Worker,
    transfer_s: float,
    wait_s: float,
    arriving_s: float,
    new_nbytes: int,
) -> Cost:
    address, nthreads, occupancy_s, _, room_nbytes, _, _, _, slowness, _ = worker
    spilled_nbytes = new_nbytes + output_nbytes - room_nbytes
    if len(joins) == 1:
        join_s = joins[0].seconds(address, output_nbytes)
    else:
        join_s = fsum([one.seconds(address, output_nbytes) for one in joins]) if joins else 0.0
    # As `Cost(...)` does, in half the time.
    return _new(
        Cost,
        (
            transfer_s + wait_s if transfer_s else 0.0,
            transfer_s,
            arriving_s,
            occupancy_s / nthreads,
            duration_s * slowness,
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

"""Helpers for placement tests: snapshots, and hypothesis strategies for them."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st

from dask_gpurt.placement.cost import Input, Task, WorkerSnapshot
from dask_gpurt.placement.joins import Partners
from dask_gpurt.placement.policy import Snapshot
from dask_gpurt.topology.model import LOCAL, Path
from dask_gpurt.topology.places import Place

#: Settings with fixed random choices, so that runs do not depend on the load of the machine.
deterministic = settings(derandomize=True)

NAMES = [f"w{i}" for i in range(6)]


class Lazy(dict):
    """A dict that computes missing entries by a function, once each."""

    def __init__(self, make):
        self._make = make

    def __missing__(self, key):
        found = self[key] = self._make(key)
        return found


def by_pair(path):
    """Make places in which a function of two workers gives the path between them."""

    def place(target):
        ways = Lazy(lambda source: path(source, target))
        return Place(target, target, ways, ways)

    return Lazy(place)


def by_host(host_of, kind_of, near, far):
    """Make places on hosts: inner paths depend on both workers, outer paths on both host kinds."""

    def arriving(kind):
        return Lazy(lambda source: far(kind_of[source], kind))

    shared = Lazy(arriving)

    def place(target):
        own = Lazy(lambda source: near(source, target))
        return Place(host_of[target], kind_of[target], own, shared[kind_of[target]])

    return Lazy(place)


def even(nbytes_per_s, latency_s=0.0):
    """Make places with equal links."""
    way = Path(latency_s, nbytes_per_s, "k")
    return by_pair(lambda source, target: LOCAL if source == target else way)


def looked_up(workers):
    """Return the data about workers that a snapshot looks up."""
    known = {one.address: one for one in workers}
    return lambda addresses: [known[one] for one in addresses]


def snapshot(task, workers, places=None, **kwargs):
    places = even(2.0**27) if places is None else places
    return Snapshot(task, looked_up(workers), places, **kwargs)


sizes = st.integers(1, 2**30)


def partners(**limits):
    """Draw join partners that meet a whole output or a part of it."""
    others = st.dictionaries(st.sampled_from(NAMES), sizes, min_size=1, **limits)
    return st.builds(Partners, others, st.just(math.inf) | sizes)


subsets = st.frozensets(st.sampled_from(NAMES))


@st.composite
def inputs(draw, *, arriving=True):
    holders = draw(subsets.filter(bool))
    coming = draw(subsets) - holders if arriving else frozenset()
    seconds = {one: draw(st.floats(0, 10)) for one in sorted(coming)}
    outlet_s = draw(st.sampled_from([0.0, 0.0, 0.5, 3.0]))
    return Input(draw(st.integers()), draw(sizes), holders, seconds, outlet_s)


@st.composite
def tasks(draw):
    return Task(
        "t",
        draw(st.lists(inputs(), max_size=4)),
        draw(st.floats(0, 10)),
        draw(sizes),
        draw(st.lists(partners(), max_size=2)),
        draw(st.sampled_from([None, "gpu"])),
    )


@st.composite
def workers(draw):
    return [
        WorkerSnapshot(
            name,
            draw(st.integers(1, 8)),
            draw(st.floats(0, 100)),
            draw(sizes),
            float(draw(st.integers(-(2**30), 2**32))),
            draw(st.sampled_from([(), ("gpu",)])),
            receiving_s=draw(st.sampled_from([0.0, 0.0, 0.5])),
            slowness=draw(st.sampled_from([1.0, 1.0, 5.0])),
            inlet_s=draw(st.sampled_from([0.0, 0.0, 0.25, 2.0])),
        )
        for name in NAMES
    ]


@st.composite
def ways(draw):
    """Strategy for links of any width and latency per direction, on few host kinds or none."""
    latency_s = draw(st.floats(0, 0.1))
    rates = st.floats(1e6, 1e12)
    within = {(a, b): Path(latency_s / 9, draw(rates), "k") for a in NAMES for b in NAMES}

    def near(source, target):
        return LOCAL if source == target else within[source, target]

    if draw(st.booleans()):
        return by_pair(near)
    host_of = {name: draw(st.sampled_from("ABC")) for name in NAMES}
    kind_of = {name: draw(st.integers(0, 1)) for name in NAMES}
    between = {(a, b): Path(latency_s, draw(rates), "k") for a in (0, 1) for b in (0, 1)}
    return by_host(host_of, kind_of, near, lambda a, b: between[a, b])


@st.composite
def two_levels(draw):
    """Strategy for equal hosts whose network is not faster than their inner links."""
    slow, quick = sorted([draw(st.floats(1e6, 1e12)), draw(st.floats(1e6, 1e12))])
    late_s, soon_s = sorted([draw(st.floats(0, 0.1)), draw(st.floats(0, 0.1))], reverse=True)
    within, between = Path(soon_s, quick, "k"), Path(late_s, slow, "k")
    host_of = {name: draw(st.sampled_from("ABC")) for name in NAMES}
    return by_host(
        host_of,
        dict.fromkeys(NAMES, 0),
        lambda a, b: LOCAL if a == b else within,
        lambda a, b: between,
    )


@st.composite
def snapshots(draw):
    return snapshot(
        draw(tasks()),
        draw(workers()),
        draw(ways()),
        valid=draw(st.none() | subsets),
        idle=tuple(sorted(draw(subsets))),
    )

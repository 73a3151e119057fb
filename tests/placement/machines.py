"""Snapshots for tests, and how hypothesis makes them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dask_gpurt.placement.cost import Input, Task, Worker
from dask_gpurt.placement.policy import Snapshot
from dask_gpurt.topology.model import LOCAL, Path

#: No deadline, for an example, or for making one: those tell of what else the machine is doing.
deterministic = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

NAMES = [f"w{i}" for i in range(6)]


class Into(dict):
    """Ways to one worker, of a function from source and target."""

    def __init__(self, target, path):
        self._target, self._path = target, path

    def __missing__(self, source):
        return self._path(source, self._target)


def by_pair(path):
    """Ways to workers, of a function from source and target."""
    return lambda target: Into(target, path)


def even(nbytes_per_s, latency_s=0.0):
    """All links alike."""
    way = Path(latency_s, nbytes_per_s, "k")
    return by_pair(lambda source, target: LOCAL if source == target else way)


def snapshot(task, workers, paths_into=None, **kwargs):
    known = {one.address: one for one in workers}
    return Snapshot(task, known.__getitem__, paths_into or even(2.0**27), **kwargs)


sizes = st.integers(1, 2**30)
subsets = st.frozensets(st.sampled_from(NAMES))


@st.composite
def inputs(draw, *, arriving=True):
    holders = draw(subsets.filter(bool))
    coming = draw(subsets) - holders if arriving else frozenset()
    seconds = {one: draw(st.floats(0, 10)) for one in sorted(coming)}
    return Input(draw(st.integers()), draw(sizes), holders, seconds)


@st.composite
def tasks(draw):
    return Task(
        "t",
        draw(st.lists(inputs(), max_size=4)),
        draw(st.floats(0, 10)),
        draw(sizes),
        draw(st.lists(st.dictionaries(st.sampled_from(NAMES), sizes, min_size=1), max_size=2)),
        draw(st.sampled_from([None, "gpu"])),
    )


@st.composite
def workers(draw):
    return [
        Worker(
            name,
            draw(st.integers(1, 8)),
            draw(st.floats(0, 100)),
            draw(sizes),
            float(draw(st.integers(-(2**30), 2**32))),
            draw(st.sampled_from([(), ("gpu",)])),
            slowness=draw(st.sampled_from([1.0, 1.0, 5.0])),
        )
        for name in NAMES
    ]


@st.composite
def ways(draw):
    """Links of any width and latency, in each direction."""
    rates = {(a, b): draw(st.floats(1e6, 1e12)) for a in NAMES for b in NAMES if a != b}
    latency_s = draw(st.floats(0, 0.1))
    found = {pair: Path(latency_s, rate, "k") for pair, rate in rates.items()}
    return by_pair(lambda source, target: LOCAL if source == target else found[source, target])


@st.composite
def snapshots(draw):
    return snapshot(
        draw(tasks()),
        draw(workers()),
        draw(ways()),
        valid=draw(st.none() | subsets),
        idle=tuple(sorted(draw(subsets))),
    )

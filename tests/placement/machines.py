"""Snapshots for tests, and how hypothesis makes them."""

from __future__ import annotations

from hypothesis import strategies as st

from dask_gpurt.placement.cost import Input, Task, Worker
from dask_gpurt.placement.policy import Snapshot
from dask_gpurt.topology.model import LOCAL, Path

NAMES = [f"w{i}" for i in range(6)]


def even(nbytes_per_s, latency_s=0.0):
    """All links alike."""
    way = Path(latency_s, nbytes_per_s, "k")
    return lambda source, target: LOCAL if source == target else way


def snapshot(task, workers, path=None, **kwargs):
    known = {one.address: one for one in workers}
    return Snapshot(task, known.__getitem__, path or even(2.0**27), **kwargs)


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
        )
        for name in NAMES
    ]


@st.composite
def ways(draw):
    """Links of any width and latency, in each direction."""
    rates = {(a, b): draw(st.floats(1e6, 1e12)) for a in NAMES for b in NAMES if a != b}
    latency_s = draw(st.floats(0, 0.1))
    found = {pair: Path(latency_s, rate, "k") for pair, rate in rates.items()}
    return lambda source, target: LOCAL if source == target else found[source, target]


@st.composite
def snapshots(draw):
    return snapshot(
        draw(tasks()),
        draw(workers()),
        draw(ways()),
        valid=draw(st.none() | subsets),
        idle=tuple(sorted(draw(subsets))),
    )

"""Traces for tests: any trace, and one with the events that a shuffle has."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from dask_gpurt.tracing.events import (
    DEVICE,
    FETCH,
    PHASE,
    RECEIVE,
    SCHEDULER,
    SEND,
    WORKER,
    Instant,
    LaneWork,
    LinkFacts,
    Sample,
    TaskTimes,
    Trace,
    TraceProcess,
)

#: Files hold whole nanoseconds.
_times = st.integers(-(10**10), 10**14).map(lambda time_ns: time_ns / 1e9)
_texts = st.text(max_size=8) | st.sampled_from(["send", "tcp://10.0.0.1:4711", 'a "quote"\n', ""])
_numbers = st.integers(0, 2**40)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | _texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_texts, inner, max_size=2),
    max_leaves=4,
)
_finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def _lengths(draw: st.DrawFn) -> tuple[float, float]:
    """Draw a start and an end. Many share times, so that slices touch and lie in each other."""
    times = st.integers(0, 12).map(float) | _times
    start_s, end_s = sorted((draw(times), draw(times)))
    return start_s, end_s


@st.composite
def _work(draw: st.DrawFn, addresses: list[str]) -> LaneWork:
    start_s, end_s = draw(_lengths())
    return LaneWork(
        process=draw(st.integers(0, len(addresses) - 1)),
        lane=draw(st.sampled_from(["communication", "compute", PHASE, FETCH]) | _texts),
        path=draw(st.sampled_from([SEND, RECEIVE, "waiting"]) | _texts),
        nbytes=draw(_numbers),
        start_s=start_s,
        end_s=end_s,
        peer=draw(st.sampled_from(addresses) | _texts),
        way=draw(_texts),
        run=draw(_numbers),
        message=draw(st.integers(0, 3) | _numbers),
        task=draw(st.integers(-1, 4)),
        thread=draw(st.integers(0, 2) | _numbers),
    )


@st.composite
def _task(draw: st.DrawFn, number: int, n_tasks: int, n_processes: int) -> TaskTimes:
    start_s, end_s = draw(_lengths())
    return TaskTimes(
        number=number,
        key=draw(_texts),
        process=draw(st.integers(0, n_processes - 1)),
        needs=tuple(draw(st.lists(st.integers(0, n_tasks + 2), max_size=4))),
        ready_s=draw(_times),
        assigned_s=draw(_times),
        here_s=draw(_times),
        start_s=start_s,
        end_s=end_s,
        known_s=draw(_times),
        nbytes=draw(_numbers),
        thread=draw(st.integers(0, 2) | _numbers),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw any trace whose times are whole nanoseconds, in the order that traces have."""
    addresses = draw(st.lists(_texts, min_size=1, max_size=3, unique=True))
    n = len(addresses)
    processes = [
        TraceProcess(
            address,
            draw(_texts),
            draw(_texts),
            draw(st.sampled_from([WORKER, SCHEDULER, DEVICE])),
            draw(st.integers(0, 64)),
            draw(st.dictionaries(_texts, _numbers, max_size=2)),
            draw(_numbers),
            draw(_texts),
            draw(_finite),
        )
        for address in addresses
    ]
    n_tasks = draw(st.integers(0, 5))
    which = st.integers(0, n - 1)
    link = st.builds(LinkFacts, _texts, _texts, _texts, _finite)
    return Trace(
        processes,
        sorted(draw(st.lists(_work(addresses), max_size=8)), key=lambda one: one.start_s),
        sorted((draw(_task(i, n_tasks, n)) for i in range(n_tasks)), key=lambda one: one.start_s),
        sorted(
            draw(st.lists(st.builds(Instant, which, _texts, _times, _texts), max_size=3)),
            key=lambda one: one.at_s,
        ),
        sorted(
            draw(st.lists(st.builds(Sample, which, _texts, _times, _finite), max_size=4)),
            key=lambda one: one.at_s,
        ),
        draw(st.lists(link, max_size=2)),
        draw(st.floats(0, 4e9)),
        draw(_finite),
        draw(st.dictionaries(_texts, _json, max_size=2)),
    )

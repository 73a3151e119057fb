"""Strategies for traces of any content."""

from __future__ import annotations

from hypothesis import strategies as st

from dask_gpurt.tracing.events import (
    DEVICE,
    SCHEDULER,
    WORKER,
    Instant,
    LaneWork,
    LinkFacts,
    Sample,
    TaskTimes,
    Trace,
    TraceProcess,
)
from dask_gpurt.tracing.formats.picture import work_order
from dask_gpurt.tracing.lane_names import FETCH, PHASE, RECEIVE, SEND

#: The coarsest times of each format, in nanoseconds.
UNITS_NS = {".json": 1000, ".json.gz": 1000, ".perfetto-trace": 1, ".pftrace": 1}


def _times(unit_ns: int) -> st.SearchStrategy[float]:
    """Return times before and after the start of a trace, as multiples of a unit."""
    units = st.integers(-(10**10) // unit_ns, 10**14 // unit_ns)
    return units.map(lambda number: number * unit_ns / 1e9)


_texts = st.text(max_size=8) | st.sampled_from(["send", "tcp://10.0.0.1:4711", 'a "quote"\n', ""])
_numbers = st.integers(0, 2**40)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | _texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_texts, inner, max_size=2),
    max_leaves=4,
)
_finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def _lengths(draw: st.DrawFn, unit_ns: int) -> tuple[float, float]:
    """Draw a start and an end. Many share times, so that slices touch and lie in each other."""
    # Ends that differ by milliseconds are those of parts of shuffles.
    close = st.integers(8_990, 9_010).map(lambda time_ms: time_ms / 1e3)
    times = st.integers(0, 12).map(float) | close | _times(unit_ns)
    start_s, end_s = sorted((draw(times), draw(times)))
    return start_s, end_s


@st.composite
def _work(draw: st.DrawFn, addresses: list[str], unit_ns: int) -> LaneWork:
    start_s, end_s = draw(_lengths(unit_ns))
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
        encoded_nbytes=draw(_numbers),
    )


@st.composite
def _task(draw: st.DrawFn, number: int, n_tasks: int, n_processes: int, unit_ns: int) -> TaskTimes:
    start_s, end_s = draw(_lengths(unit_ns))
    times = _times(unit_ns)
    return TaskTimes(
        number=number,
        key=draw(_texts),
        process=draw(st.integers(0, n_processes - 1)),
        needs=tuple(draw(st.lists(st.integers(0, n_tasks + 2), max_size=4))),
        ready_s=draw(times),
        assigned_s=draw(times),
        here_s=draw(times),
        start_s=start_s,
        end_s=end_s,
        known_s=draw(times),
        nbytes=draw(_numbers),
        thread=draw(st.integers(0, 2) | _numbers),
        away_s=draw(_finite),
        submitted_s=draw(_finite),
    )


@st.composite
def traces(draw: st.DrawFn, unit_ns: int = 1) -> Trace:
    """Draw any trace whose times are multiples of a unit, in the order that traces have."""
    times = _times(unit_ns)
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
            draw(_finite),
            draw(st.none() | _finite),
        )
        for address in addresses
    ]
    n_tasks = draw(st.integers(0, 5))
    which = st.integers(0, n - 1)
    link = st.builds(LinkFacts, _texts, _texts, _texts, _finite)
    return Trace(
        processes,
        sorted(draw(st.lists(_work(addresses, unit_ns), max_size=8)), key=work_order),
        sorted(
            (draw(_task(i, n_tasks, n, unit_ns)) for i in range(n_tasks)),
            key=lambda one: one.start_s,
        ),
        sorted(
            draw(st.lists(st.builds(Instant, which, _texts, times, _texts), max_size=3)),
            key=lambda one: one.at_s,
        ),
        sorted(
            draw(st.lists(st.builds(Sample, which, _texts, times, _finite), max_size=4)),
            key=lambda one: one.at_s,
        ),
        draw(st.lists(link, max_size=2)),
        draw(st.floats(0, 4e9)),
        draw(_finite),
        draw(st.dictionaries(_texts, _json, max_size=2)),
    )

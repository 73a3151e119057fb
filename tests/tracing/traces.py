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
from dask_gpurt.tracing.formats.picture import work_order

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


class _Clock:
    """The times of one thread, whose events follow each other."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.now_s = 0.0

    def spend(self, mean_s: float) -> tuple[float, float]:
        """Return the start and the end of the next event."""
        start_s = round(self.now_s + self._chance.expovariate(1 / mean_s) / 5, 9)
        self.now_s = round(start_s + self._chance.expovariate(1 / mean_s), 9)
        return start_s, self.now_s


def shuffle_trace(
    n_partitions: int, n_workers: int = 4, n_threads: int = 2, seed: int = 0
) -> Trace:
    """Return a trace with the mix of events that a shuffle of a dataframe has.

    The mix, the durations and the sizes are those of a ledger and a task stream, recorded at a
    shuffle of `dask.datasets.timeseries` on two workers. Each event differs from all others.
    """
    chance = random.Random(seed)
    addresses = [f"tcp://10.0.0.{one}:{40000 + one}" for one in range(n_workers)]
    trace = Trace(
        [
            TraceProcess(address, f"w{i}", f"node{i}", WORKER, n_threads)
            for i, address in enumerate(addresses)
        ],
        began_utc_s=1.8e9,
    )
    threads = [
        [140_000_000_000_000 + chance.randrange(10**12) * 64 for _ in range(n_threads)]
        for _ in addresses
    ]
    loops = [140_000_000_000_000 + chance.randrange(10**12) * 64 for _ in addresses]
    clocks = {(w, t): _Clock(chance) for w in range(n_workers) for t in range(n_threads)}
    messages = [0] * n_workers

    def run(key: str, needs: tuple[int, ...], where: tuple[int, int], mean_s: float) -> TaskTimes:
        start_s, end_s = clocks[where].spend(mean_s)
        here_s = round(start_s - chance.expovariate(1e3), 9)
        assigned_s = round(here_s - chance.expovariate(1e2), 9)
        task = TaskTimes(
            number=len(trace.tasks),
            key=key,
            process=where[0],
            needs=needs,
            ready_s=round(assigned_s - chance.expovariate(1e4), 9),
            assigned_s=assigned_s,
            here_s=here_s,
            start_s=start_s,
            end_s=end_s,
            known_s=round(end_s + chance.expovariate(2e3), 9),
            nbytes=chance.randrange(390_000, 410_000),
            thread=threads[where[0]][where[1]],
        )
        trace.tasks.append(task)
        # The ledger's clock is read a little later than the scheduler's.
        late_s = chance.random() / 1e5
        by_ledger = (
            *(task.process, "compute", key, task.nbytes),
            *(round(at_s + late_s, 9) for at_s in (start_s, end_s)),
        )
        trace.work.append(LaneWork(*by_ledger, task=task.number, thread=task.thread))
        return task

    def phase(task: TaskTimes, path: str, from_: float, to: float) -> None:
        length_s = task.end_s - task.start_s
        start_s, end_s = (round(task.start_s + length_s * share, 9) for share in (from_, to))
        trace.work.append(
            LaneWork(
                task.process,
                PHASE,
                path,
                0,
                start_s,
                end_s,
                run=1,
                task=task.number,
                thread=task.thread,
            )
        )

    def send(sender: int, target: int, at_s: float) -> None:
        messages[sender] += 1
        end_s = round(at_s + chance.expovariate(300), 9)
        about = {"way": "tcp", "run": 1, "message": messages[sender]}
        nbytes = chance.randrange(50_000, 800_000)
        trace.work.append(
            LaneWork(
                sender,
                "communication",
                SEND,
                nbytes,
                at_s,
                end_s,
                addresses[target],
                thread=loops[sender],
                **about,
            )
        )
        start_s = round(at_s + chance.random() * (end_s - at_s), 9)
        end_s = round(start_s + chance.expovariate(5000), 9)
        trace.work.append(
            LaneWork(
                target,
                "communication",
                RECEIVE,
                nbytes,
                start_s,
                end_s,
                addresses[sender],
                thread=loops[target],
                **about,
            )
        )

    transfers = []
    for number in range(n_partitions):
        where = number % n_workers, number // n_workers % n_threads
        task = run("timeseries", (), where, 0.008)
        for key in ("to_string_dtype", "operation", "shuffle-transfer"):
            task = run(key, (task.number,), where, 0.004)
        transfers.append(task.number)
        phase(task, "partition", 0.0, 0.7)
        phase(task, "held_back", 0.8, 0.81)
        if chance.random() < 0.64:
            target = (where[0] + chance.randrange(1, n_workers)) % n_workers
            send(where[0], target, round(task.end_s + chance.random() / 100, 9))
    barrier = run("shuffle-barrier", tuple(transfers), (0, 0), 0.002)
    for clock in clocks.values():
        clock.now_s = max(one.now_s for one in clocks.values())
    for number in range(n_partitions):
        where = number % n_workers, number // n_workers % n_threads
        task = run("p2pshuffle", (barrier.number,), where, 0.006)
        phase(task, "unpack", 0.0, 0.9)
        for key in ("len", "chunk"):
            other = (where[0] + (key == "len" and chance.random() < 0.1)) % n_workers, where[1]
            if other != where:
                at_s = round(task.end_s + 1e-4, 9)
                peer = addresses[where[0]]
                clocks[other].now_s = max(clocks[other].now_s, at_s + 2e-3)
                n = len(trace.tasks)
                trace.work.append(
                    LaneWork(
                        other[0],
                        FETCH,
                        "get_data",
                        400_000,
                        at_s,
                        round(at_s + 1e-3, 9),
                        peer,
                        "tcp",
                        task=n,
                    )
                )
            task = run(key, (task.number,), other, 0.0005)
            where = other
    trace.wall_s = max(one.now_s for one in clocks.values())
    for step in range(int(trace.wall_s / 0.1)):
        for process in range(n_workers):
            for name in ("bytes of outputs", "bytes of shards", "waiting bytes", "cpu"):
                value = chance.randrange(10**8) if name != "cpu" else round(chance.random() * 2, 3)
                trace.samples.append(
                    Sample(process, name, round(step / 10 + process / 1000, 9), value)
                )
    trace.instants += [Instant(0, "evicted", 0.5, "timeseries, 396 kB"), Instant(1, "restart", 0.7)]
    trace.work.sort(key=work_order)
    trace.tasks.sort(key=lambda one: one.start_s)
    trace.samples.sort(key=lambda one: one.at_s)
    return trace


def n_events(trace: Trace) -> int:
    """Return the number of events of a trace."""
    return len(trace.work) + len(trace.tasks) + len(trace.instants) + len(trace.samples)

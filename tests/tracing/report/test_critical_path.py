"""The critical path is exact on graphs whose longest chain is known, and its parts add up on all.

`Known` plays random graphs forwards: it keeps for each task the chain that made it begin, with its
parts. The report goes backwards, from times alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dask_gpurt.tracing.events import LaneWork, Sample, TaskTimes
from dask_gpurt.tracing.lane_names import CPU, FETCH
from dask_gpurt.tracing.report.critical_path import CriticalPath
from dask_gpurt.tracing.report.task_stories import (
    CLIENT,
    COMPUTING,
    DISK,
    HELD,
    NETWORK,
    PEER,
    SCHEDULER,
    THREAD,
    WORKER,
)
from dask_gpurt.tracing.report.trace_report import report_of
from tests.tracing.made_traces import MB, MadeTrace, ModelledShuffle

HOSTS = ("a", "a", "b")
MS = 1e-3


def path_of(made: MadeTrace) -> CriticalPath:
    made.trace.tasks.sort(key=lambda one: one.start_s)
    return report_of(made.trace).path


def numbers(made: MadeTrace, path: CriticalPath) -> list[int]:
    return [made.trace.tasks[i].number for i in path.tasks]


def parts(path: CriticalPath) -> dict[str, float]:
    return {part.text: part.seconds for part in path.parts}


@dataclass
class Drawn:
    """A task of a random graph: where it runs, what it needs, and milliseconds of each part."""

    process: int
    needs: frozenset[int]
    lag_ms: int
    fetch_ms: int
    held_ms: int
    compute_ms: int
    known_ms: int


@st.composite
def graphs(draw) -> list[Drawn]:
    tasks = []
    for i in range(draw(st.integers(1, 14))):
        needs = draw(st.frozensets(st.integers(0, i - 1), max_size=3)) if i else frozenset()
        tasks.append(
            Drawn(
                draw(st.integers(0, 2)),
                needs,
                draw(st.integers(0, 30)),
                draw(st.integers(1, 900)),
                draw(st.sampled_from([0, 0, 40, 300])),
                draw(st.integers(1, 2000)),
                draw(st.integers(0, 30)),
            )
        )
    return tasks


@dataclass
class Known:
    """A chain: its tasks, and its milliseconds by part."""

    known_ms: int
    chain: list[int] = field(default_factory=list)
    parts: Counter = field(default_factory=Counter)


def fetch(made: MadeTrace, task: int, ends: tuple[int, int], from_ms: int, to_ms: int) -> str:
    """Add the fetch of an input; return its part of the path."""
    peer, more = made.trace.processes[ends[0]].address, {"nbytes": 1, "task": task}
    made.work(ends[1], FETCH, "fetch", from_ms * MS, to_ms * MS, peer=peer, **more)
    ends = HOSTS[ends[0]], HOSTS[ends[1]]
    return f"{NETWORK} within {ends[0]}" if ends[0] == ends[1] else f"{NETWORK} {' to '.join(ends)}"


def play(
    drawn: list[Drawn], made: MadeTrace, before: Known, n_threads: int, is_queued: bool = False
) -> Known:
    """Run a graph that is submitted when `before` ends; return the chain that ends last.

    With threads for all tasks, a task begins when its inputs are there. With one thread, tasks of a
    worker run one after the other. They wait for it on the worker, or queued on the scheduler.
    """
    chains: list[Known] = []
    free: dict[int, Known] = {}
    offset = len(made.trace.tasks)
    for i, one in enumerate(drawn):
        last = max((chains[j] for j in one.needs), key=lambda c: c.known_ms, default=before)
        times = [chains[j].known_ms for j in one.needs]
        assume(len(set(times)) == len(times))
        parts = Counter(last.parts)
        ready_ms, chain = last.known_ms, last.chain
        busy = free.get(one.process) if n_threads == 1 else None
        assigned_ms = ready_ms + one.lag_ms
        ends = [chains[j].known_ms for j in range(i) if drawn[j].process == one.process]
        if busy is not None and is_queued and ends[-1] > ready_ms:
            # The scheduler keeps a task until it knows that the last one of the worker ended.
            assigned_ms, chain = ends[-1] + one.lag_ms, busy.chain
            parts = Counter(busy.parts)
            parts[SCHEDULER] += ends[-1] - busy.known_ms
        else:
            # Nobody could tell a slow scheduler from one that waits for a thread.
            assume(not any(ready_ms < known_ms <= assigned_ms for known_ms in ends))
        senders = [j for j in one.needs if drawn[j].process != one.process]
        fetch_ms = one.fetch_ms if senders else 0
        here_ms = assigned_ms + fetch_ms
        start_ms = here_ms + one.held_ms
        chain = [*chain, offset + i]
        parts[SCHEDULER] += one.lag_ms
        parts[HELD if one.held_ms > 250 else WORKER] += one.held_ms
        if senders:
            ends = drawn[max(senders)].process, one.process
            link = fetch(made, offset + i, ends, assigned_ms, here_ms)
            parts[link] += fetch_ms
        if busy is not None:
            assume(busy.known_ms not in (here_ms, ready_ms))
            if busy.known_ms > start_ms:
                start_ms, chain, parts = busy.known_ms, [*busy.chain, offset + i], +busy.parts
        parts[COMPUTING] += one.compute_ms
        end_ms = start_ms + one.compute_ms
        free[one.process] = Known(end_ms, chain, Counter(parts))
        parts[SCHEDULER] += one.known_ms
        chains.append(Known(end_ms + one.known_ms, chain, parts))
        thread = one.process + 1 if n_threads == 1 else None
        needs = tuple(offset + j for j in sorted(one.needs))
        made.task(
            f"step{i}", one.process, ready_ms * MS, start_ms * MS, end_ms * MS, needs,
            assigned_ms * MS, here_ms * MS, chains[-1].known_ms * MS, thread,
        )  # fmt: skip
    ends = sorted(chain.known_ms for chain in chains)
    assume(len(ends) < 2 or ends[-1] > ends[-2])
    return max(chains, key=lambda c: c.known_ms)


def check(made: MadeTrace, expected: Known) -> None:
    path = path_of(made)
    assert numbers(made, path) == expected.chain
    wanted = {name: ms * MS for name, ms in expected.parts.items() if ms}
    assert parts(path) == pytest.approx(wanted, abs=1e-9)


@given(graphs(), st.integers(1, 500))
def test_the_path_of_a_random_graph_is_exact(drawn, submitted_ms):
    made = MadeTrace(*((host, i) for i, host in enumerate(HOSTS)), threads=1000)
    before = Known(submitted_ms, [], Counter({CLIENT: submitted_ms}))
    check(made, play(drawn, made, before, 1000))


@given(graphs(), graphs(), st.integers(60, 500))
def test_the_client_is_between_two_graphs(first, second, think_ms):
    made = MadeTrace(*((host, i) for i, host in enumerate(HOSTS)), threads=1000)
    last = play(first, made, Known(100, [], Counter({CLIENT: 100})), 1000)
    last.parts[CLIENT] += think_ms
    last.known_ms += think_ms
    check(made, play(second, made, last, 1000))


@given(graphs(), st.booleans())
def test_the_path_goes_over_threads_that_were_taken(drawn, is_queued):
    for one in drawn:
        one.held_ms = 0
    made = MadeTrace(*((host, i) for i, host in enumerate(HOSTS)), threads=1)
    check(made, play(drawn, made, Known(100, [], Counter({CLIENT: 100})), 1, is_queued))


TIME = st.floats(-1, 20, allow_nan=False)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.tuples(*[TIME] * 6), st.sets(st.integers(0, 12))),
        max_size=12,
    ),
    st.lists(st.tuples(st.integers(0, 2), TIME, TIME, st.integers(-1, 12)), max_size=8),
)
def test_parts_add_up_on_any_trace(tasks, work):
    made = MadeTrace(*((host, i) for i, host in enumerate(HOSTS)))
    for number, (process, times, needs) in enumerate(tasks):
        one = TaskTimes(
            number, f"barrier{number % 2}", process, tuple(needs), *times, 1, number % 3
        )
        made.trace.tasks.append(one)
    lanes = ("phase", "held_back"), ("communication", "send"), ("fetch", "fetch"), ("read", "")
    for i, (process, start_s, end_s, task) in enumerate(work):
        peer = made.trace.processes[(process + 1) % 3].address
        made.trace.work.append(
            LaneWork(process, *lanes[i % 4], 7, start_s, end_s, peer, "tcp", 1, i, task)
        )
    made.trace.wall_s = 15.0
    report = report_of(made.trace)
    segments = report.path.segments
    assert segments[0].start_s == 0 and segments[-1].end_s == 15
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(segments))
    assert math.fsum(p.seconds for p in report.path.parts) == pytest.approx(15, abs=1e-9)
    assert all(0 <= (one.saves_s or 0) <= 15 for one in report.bottlenecks)


@pytest.mark.parametrize(
    "model",
    [
        ModelledShuffle(),
        ModelledShuffle(rates={("host1", "host2"): 100 * MB}),
        ModelledShuffle(slowdown={1: 4.0}, weights={3: 12.0}),
    ],
    ids=["even", "slow link", "slow worker and hot key"],
)
def test_parts_of_a_shuffle_add_up(model):
    trace = model.trace()
    path = report_of(trace).path
    assert math.fsum(part.seconds for part in path.parts) == pytest.approx(trace.wall_s, abs=1e-9)


def test_a_slow_link_is_on_the_path_of_its_shuffle():
    trace = ModelledShuffle(rates={("host1", "host2"): 50 * MB}).trace()
    path = report_of(trace).path
    assert path.parts[0].text == "network host1 to host2"
    assert path.parts[0].seconds > 0.7 * trace.wall_s
    keys = [trace.tasks[i].key for i in path.tasks]
    assert keys[-3:] == ["shuffle-barrier", "shuffle-p2p", "sum"] or keys[-1] == "sum"
    assert "shuffle-barrier" in keys and "shuffle-transfer" in keys


def test_a_barrier_waits_for_its_last_message():
    made = MadeTrace(("a", 0), ("b", 0))
    transfer = made.task("shuffle-transfer", 0, 0.0, 0.0, 1.0)
    made.message(0, 1, 1.0, 4.0, 3 * MB, answered_s=4.5)
    made.task("shuffle-barrier", 0, 1.0, 1.0, 5.0, (transfer,))
    assert parts(path_of(made)) == pytest.approx(
        {COMPUTING: 1.0, "network a to b": 3.0, PEER: 0.5, SCHEDULER: 0.5}
    )


def test_held_back_time_goes_to_the_link_that_carried():
    made = MadeTrace(("a", 0), ("b", 0), ("c", 0))
    made.task("shuffle-transfer", 0, 0.0, 0.0, 6.0)
    made.work(0, "phase", "held_back", 1.0, 6.0, task=0)
    made.message(0, 1, 1.0, 5.0, 4 * MB, answered_s=6.0)
    made.message(0, 2, 1.0, 1.2, 4 * MB)
    made.message(1, 2, 1.0, 6.0, 4 * MB)
    expected = {"network a to b": 4.0, "network a to c": 0.2, COMPUTING: 1.0, PEER: 0.8}
    assert parts(path_of(made)) == pytest.approx(expected)


def test_reads_in_a_task_and_before_it_are_disk_time():
    made = MadeTrace(("a", 0))
    made.task("join", 0, 0.0, 1.0, 4.0, here_s=0.0)
    made.work(0, "read", "disk > host", 0.2, 0.9, nbytes=MB, task=-1)
    made.work(0, "read", "disk > shards", 2.0, 2.5, nbytes=MB, task=0)
    assert parts(path_of(made)) == pytest.approx({COMPUTING: 2.5, DISK: 1.2, HELD: 0.3})


def test_a_thread_taken_by_unknown_work_is_waited_for():
    made = MadeTrace(("a", 0), threads=1)
    made.task("other", 0, 0.0, 0.0, 2.0, thread=1)
    made.task("mine", 0, 0.0, 2.5, 3.0, here_s=0.0, thread=2)
    found = parts(path_of(made))
    assert found == pytest.approx({THREAD: 2.0, COMPUTING: 0.5, HELD: 0.5})


def test_a_task_taken_over_had_waited_for_a_thread():
    made = MadeTrace(("a", 0), ("a", 1), threads=1)
    made.task("long", 0, 0.0, 0.0, 6.0, thread=1)
    made.task("short", 1, 0.0, 0.0, 3.5, thread=2)
    # It was assigned to the first worker at 0.5, and the second one got it from there.
    made.task("taken", 1, 0.5, 3.5, 7.0, assigned_s=0.5, here_s=3.5, thread=2)
    found = parts(path_of(made))
    assert found == pytest.approx({COMPUTING: 3.5, THREAD: 3.0, CLIENT: 0.5})


def test_an_empty_trace_has_an_empty_path():
    report = report_of(MadeTrace().trace)
    assert report.path.parts == [] and report.headline == "the trace is empty"


def test_a_trace_without_tasks_belongs_to_the_client():
    made = MadeTrace(("a", 0))
    made.trace.wall_s = 3.0
    assert report_of(made.trace).headline == "of 3.0 s: 3.0 s client"


def test_the_summary_names_the_largest_parts():
    made = MadeTrace(("host2", 0), ("host5", 0))
    made.task("read", 0, 0.0, 0.0, 18.3)
    made.work(1, FETCH, "fetch", 18.3, 30.3, nbytes=MB, peer="tcp://host2:0", task=1)
    made.task("join", 1, 18.3, 36.3, 37.3, (0,), 18.3, 30.3, 41.2)
    assert report_of(made.trace).headline == (
        "of 41.2 s: 19.3 s computing, 12.0 s network host2 to host5, 6.0 s held by its worker, "
        "3.9 s scheduler"
    )


def test_a_busy_worker_takes_messages_late():
    made = MadeTrace(("a", 0), threads=1)
    made.task("work", 0, 0.0, 3.0, 4.0, assigned_s=0.5, here_s=3.0, known_s=5.0)
    # Samples are due each quarter of a second: none came from 0.75 to 3.0, or from 4.0 to 5.0.
    at_s = [0.25, 0.5, 3.0, 3.25, 3.5, 3.75, 5.0, 5.25]
    made.trace.samples = [Sample(0, CPU, at, 1.0) for at in at_s]
    found = parts(path_of(made))
    assert found == pytest.approx({COMPUTING: 1.0, WORKER: 2.25 + 1.0, SCHEDULER: 0.75})


def test_one_late_sample_needs_others_before():
    made = MadeTrace(("a", 0), threads=1)
    made.task("work", 0, 0.0, 3.0, 4.0, assigned_s=0.0, here_s=3.0)
    made.trace.samples = [Sample(0, CPU, 0.0, 1.0), Sample(0, CPU, 3.0, 1.0)]
    assert parts(path_of(made)) == pytest.approx({COMPUTING: 1.0, SCHEDULER: 3.0})


def test_a_queued_task_waits_for_a_thread_not_for_the_scheduler():
    made = MadeTrace(("a", 0), threads=1)
    for number in range(2):
        made.task("first", 0, 0.0, number * 2.0, number * 2.0 + 2.0, assigned_s=0.0, here_s=0.0)
    made.task("queued", 0, 0.0, 4.0, 5.0, assigned_s=1.0, here_s=4.0)
    path = path_of(made)
    assert SCHEDULER not in parts(path)

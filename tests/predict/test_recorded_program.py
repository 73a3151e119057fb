"""A trace becomes a program: its tasks, its graphs in the order of the client, its shuffles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpurt.errors import PredictionError
from dask_gpurt.predict.recorded_cluster import DISK_NBYTES_PER_S
from dask_gpurt.predict.recorded_program import recorded_program
from dask_gpurt.tracing.events import MEMORY_LIMITS, LaneWork, LinkFacts
from dask_gpurt.tracing.lane_names import PHASE, SEND
from tests.predict.traces import MIB, ran, trace


def program_of(*tasks, **more):
    return recorded_program(trace(*tasks, **more), "test.json.gz")


def test_tasks_keep_durations_sizes_and_dependencies():
    recorded = program_of(
        ran(1, "load", 1.0, 1.5, nbytes=8 * MIB),
        ran(2, "load", 1.0, 2.0, worker=2, nbytes=4 * MIB),
        ran(3, "sum", 2.1, 2.4, 1, 2),
    )
    tasks = recorded.program.workload.tasks
    load, other, total = sorted(tasks, key=lambda one: (one.dependencies, one.duration_s))
    assert [one.duration_s for one in (load, other, total)] == pytest.approx([0.5, 1.0, 0.3])
    assert [one.nbytes for one in (load, other, total)] == [8 * MIB, 4 * MIB, 0]
    assert {tasks[one].key for one in total.dependencies} == {load.key, other.key}
    assert load.produces_data and not total.produces_data
    assert recorded.measured_s == pytest.approx(2.402 - 0.99)


def test_equal_prefixes_with_equal_inputs_are_one_group():
    # The sizes tell the tasks apart.
    recorded = program_of(
        ran(1, "load", 1.0, 1.1, nbytes=1),
        ran(2, "load", 1.1, 1.2, nbytes=2, ready_s=0.998),
        ran(3, "sum", 1.2, 1.3, 1, nbytes=3, ready_s=1.103),
        ran(4, "sum", 1.3, 1.4, 3, nbytes=4),
        ran(5, "sum", 1.3, 1.4, 2, nbytes=5, worker=2, ready_s=1.203),
    )
    group = {one.nbytes: str(one.key).split("'")[1] for one in recorded.program.workload.tasks}
    assert group[1] == group[2]
    assert group[3] == group[5] != group[4]


def test_a_task_that_is_submitted_later_begins_a_graph():
    recorded = program_of(
        ran(1, "load", 1.0, 1.5),
        ran(2, "sum", 1.52, 1.6, 1),
        ran(3, "again", 3.0, 3.5, 1, submitted_s=2.9),
    )
    first, second = recorded.program.submissions
    tasks = recorded.program.workload.tasks
    assert {str(tasks[one].key)[2:6] for one in first.tasks} == {"load", "sum-"}
    # The client holds what the second graph needs, and what nobody needs.
    assert len(first.wanted) == 2
    assert second.after == (0,)
    assert second.pause_s == pytest.approx(2.9 - 1.602)
    assert recorded.client_s == pytest.approx(2.9 - 1.602)


def test_graphs_of_two_clients_run_beside_each_other():
    recorded = program_of(
        ran(1, "long", 1.0, 4.0), ran(2, "short", 2.0, 2.5, submitted_s=1.9, worker=2)
    )
    first, second = recorded.program.submissions
    assert (first.after, second.after) == ((), ())
    assert second.pause_s == pytest.approx(1.9 - 0.99)
    assert recorded.client_s == 0


def shuffle(*, n: int = 4, run: int = 7, way: str = "comm", nbytes: int = MIB):
    """Return the tasks and the work of a shuffle in which each worker sends one message."""
    first = [
        ran(i, "shuffle-transfer", 1.0 + i, 1.5 + i, ready_s=0.99, worker=1 + i % 2)
        for i in range(n)
    ]
    barrier = ran(n, "shuffle-barrier", 2.0 + n, 2.5 + n, *range(n), ready_s=0.503 + n)
    # The scheduler makes one after another ready.
    last = [
        ran(
            n + 1 + i,
            "p2pshuffle",
            3.0 + n + i,
            3.4 + n + i,
            n,
            ready_s=2.503 + n + 0.04 * i,
            nbytes=2 * MIB,
        )
        for i in range(n)
    ]
    peers = "tcp://box:2", "tcp://box:1"
    work = [
        LaneWork(1 + i, "communication", SEND, nbytes, 1.0, 1.2, peers[i], way, run, 1 + i)
        for i in range(2)
    ]
    work += [LaneWork(1, PHASE, "partition", 0, 1.0, 1.1, run=run, task=i) for i in range(n)]
    return [*first, barrier, *last], work


def test_a_shuffle_has_the_bytes_of_its_messages():
    tasks, work = shuffle()
    (exchange,) = program_of(*tasks, work=work).program.exchanges
    assert (len(exchange.transfers), len(exchange.outputs)) == (4, 4)
    # Two workers send half of the data to each other.
    assert exchange.nbytes == 4 * MIB


def test_tasks_that_become_ready_late_belong_to_their_graph():
    """A busy scheduler makes a task ready long after its inputs."""
    tasks, work = shuffle(n=8)
    tasks[-1] = tasks[-1]._replace(ready_s=tasks[-1].ready_s + 60.0)
    recorded = program_of(*tasks, work=work)
    assert len(recorded.program.submissions) == 1
    assert len(recorded.program.exchanges[0].outputs) == 8


def test_a_shuffle_that_is_not_all_in_the_trace_is_left_out():
    tasks, work = shuffle()
    later = tasks[-1]._replace(submitted_s=tasks[-1].ready_s)
    recorded = program_of(*tasks[:-1], later, work=work)
    assert len(recorded.program.submissions) == 2
    assert recorded.program.exchanges == ()


def test_inputs_of_a_damaged_trace_make_no_circle():
    recorded = program_of(ran(1, "a", 1.0, 1.5, 2), ran(2, "b", 1.6, 2.0, 1, 2, 99))
    first, second = recorded.program.workload.tasks
    assert (first.dependencies, second.dependencies) == ((), (0,))


def test_each_submission_waits_for_new_results_only():
    steps = [ran(i, "step", 1.0 + i, 1.5 + i, submitted_s=0.99 + i) for i in range(5)]
    submissions = program_of(*steps).program.submissions
    assert [one.after for one in submissions] == [(), (0,), (1,), (2,), (3,)]
    assert submissions[3].pause_s == pytest.approx(3.99 - 3.502)


def test_a_worker_and_its_replacement_count_once():
    found = trace(ran(1, "load", 1.0, 9.0), hosts=("box", "box", "box", "shed"))
    processes = list(found.processes)
    processes[2] = replace(processes[2], left_s=3.0)
    processes[3] = replace(processes[3], joined_s=3.5)
    found.processes = processes
    assert recorded_program(found, "test").cluster.workers == {"box": (1, 1), "shed": (1,)}


@pytest.mark.parametrize("limits", [{"a": "x"}, {"a": [1]}, [1], {"a": -5}, {"a": True}])
def test_odd_memory_limits_count_as_unknown(limits):
    found = trace(ran(1, "load", 1.0, 1.5))
    found.about = {MEMORY_LIMITS: limits}
    assert recorded_program(found, "test").cluster.memory_nbytes == 0


def test_compressed_messages_count_with_their_bytes_on_the_link():
    tasks, work = shuffle()
    work = [one._replace(encoded_nbytes=MIB // 4) if one.path == SEND else one for one in work]
    (exchange,) = program_of(*tasks, work=work).program.exchanges
    assert exchange.nbytes == MIB


def test_a_shuffle_of_stock_has_the_bytes_of_its_outputs():
    tasks, _ = shuffle()
    (exchange,) = program_of(*tasks).program.exchanges
    assert exchange.nbytes == 8 * MIB


def test_the_time_at_a_barrier_is_no_work():
    tasks, work = shuffle()
    recorded = program_of(*tasks, work=work)
    (exchange,) = recorded.program.exchanges
    barrier = recorded.program.workload.tasks[exchange.barrier]
    assert barrier.duration_s == recorded.cluster.turnaround_s


def test_the_cluster_has_hosts_memory_and_rates():
    tasks, work = shuffle(nbytes=10 * MIB)
    recorded = program_of(*tasks, work=work, hosts=("box", "shed"))
    cluster = recorded.cluster
    assert cluster.workers == {"box": (1,), "shed": (1,)}
    assert cluster.memory_nbytes == 8 * 2**30
    assert cluster.network_nbytes_per_s == pytest.approx(10 * MIB / 0.2)
    assert cluster.control_s == pytest.approx(0.002)


def test_measured_links_say_more_than_messages():
    tasks, work = shuffle(nbytes=10 * MIB)
    links = [LinkFacts("box", "shed", "", 2e9)]
    recorded = program_of(*tasks, work=work, hosts=("box", "shed"), links=links)
    assert recorded.cluster.network_nbytes_per_s == 2e9


def test_the_time_between_two_tasks_of_a_thread_is_measured():
    recorded = program_of(
        ran(1, "load", 1.0, 1.5, ready_s=0.9),
        ran(2, "load", 1.504, 2.0, ready_s=0.9),
        ran(3, "load", 2.002, 2.5, ready_s=0.9),
        ran(4, "late", 9.0, 9.5, ready_s=8.9),
    )
    # The last task was not there when the one before it ended.
    assert recorded.cluster.turnaround_s == pytest.approx(0.003)


def test_the_start_of_workers_is_measured():
    # Workers see their first tasks 1.0 and 1.4 s late. Waits for inputs of others do not count, and
    # waits beside another task neither.
    late = [
        ran(1, "load", 2.0, 2.5, ready_s=1.0)._replace(here_s=1.999),
        ran(2, "load", 2.4, 2.9, ready_s=1.0, worker=2)._replace(here_s=2.399),
        ran(3, "sum", 3.9, 4.0, 1, 2, ready_s=2.91)._replace(here_s=3.899),
        ran(4, "sum", 2.91, 4.0, 2, ready_s=2.902, worker=2),
        ran(5, "last", 4.01, 4.1, 4, ready_s=3.0, worker=2)._replace(here_s=3.9),
    ]
    cluster = program_of(*late).cluster
    assert cluster.startup_s == pytest.approx((0.999 + 1.399) / 2)


@pytest.mark.parametrize(
    ("about", "policy"),
    [
        ({"runtime": "on", "gpurt": {"placement": {"enabled": True, "policy": "auto"}}}, "auto"),
        (
            {"runtime": "on", "gpurt": {"placement": {"enabled": True, "policy": "data-aware"}}},
            "data-aware",
        ),
        ({"runtime": "on", "gpurt": {"placement": {"enabled": False, "policy": "auto"}}}, "stock"),
        ({"runtime": "off", "gpurt": {"placement": {"enabled": True, "policy": "auto"}}}, "stock"),
        ({"runtime": "on", "gpurt": {"placement": {"enabled": True, "policy": "odd"}}}, "stock"),
        ({"runtime": "on", "gpurt": [1]}, "stock"),
        ({}, "stock"),
    ],
)
def test_placement_is_that_of_the_trace(about, policy):
    found = trace(ran(1, "load", 1.0, 1.5))
    found.about = about
    assert recorded_program(found, "test").policy == policy


def test_a_disk_is_measured_while_it_is_busy():
    write, read = (
        LaneWork(1, lane, path, 80_000_000, start_s, start_s + 0.5)
        for lane, path, start_s in (
            ("write", "memory > disk", 1.0),
            ("read", "disk > memory", 1.25),
        )
    )
    few = program_of(ran(1, "load", 1.0, 1.5), work=[write]).cluster
    assert few.disk_nbytes_per_s == DISK_NBYTES_PER_S
    enough = program_of(ran(1, "load", 1.0, 1.5), work=[write, read]).cluster
    assert enough.disk_nbytes_per_s == pytest.approx(160e6 / 0.75)


def test_a_trace_without_tasks_is_an_error():
    with pytest.raises(PredictionError, match="has no task"):
        program_of()

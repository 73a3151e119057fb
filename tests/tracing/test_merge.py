"""Files of workers become one trace: one clock, sends with receives, tasks with their needs."""

from __future__ import annotations

import random

import pytest

from dask_gpurt.tracing.clocks import ClockExchange
from dask_gpurt.tracing.events import SCHEDULER
from dask_gpurt.tracing.lane_names import FETCH, RECEIVE, SEND
from dask_gpurt.tracing.merge import RecordedProcess, merged
from dask_gpurt.tracing.records import RecordEncoder, key_hash
from tests.tracing.clock_model import DelayedLink, SkewedClock

A, B = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"
SECONDS = 60.0


#: Of a worker with the clock of the scheduler.
EXACT = [ClockExchange(0.0, 0.0, 0.0, 0.0)]


def scheduler(encoder=None):
    data = encoder.block() if encoder is not None else b""
    return RecordedProcess("tcp://10.0.0.9:1", "scheduler", "s", data)


def messages(n, clocks, links, seed=0):
    """Return two workers that sent each other `n` messages; and the true start of each send."""
    rng = random.Random(seed)
    encoders = {A: RecordEncoder(), B: RecordEncoder()}
    true_s = {}
    for number in range(1, n + 1):
        sender, receiver = (A, B) if rng.random() < 0.5 else (B, A)
        start_s = rng.uniform(0.1, SECONDS - 1.0)
        # One way takes 1 ms, the other 3 ms: many arrows are shorter than the error of a clock.
        there_s = 1e-3 if sender == A else 3e-3
        arrived_s = start_s + there_s
        taken_s = arrived_s + rng.expovariate(1 / 1e-4)
        end_s = taken_s + 4e-3 - there_s
        true_s[sender, number] = start_s, arrived_s
        send, receive = clocks[sender].read, clocks[receiver].read
        encoders[sender].work(
            *("communication", SEND, 100, send(start_s), send(end_s), receiver, "tcp", 1, number)
        )
        encoders[receiver].work(
            *("communication", RECEIVE, 100, receive(arrived_s), receive(taken_s)),
            *(sender, "", 1, number),
        )
    workers = [
        RecordedProcess(
            *(address, address, address, encoder.block(), 1),
            exchanges=links[address].rounds(clocks[address], 0.0, SECONDS, rng),
        )
        for address, encoder in encoders.items()
    ]
    return workers, true_s


def test_no_arrow_of_a_hundred_thousand_points_backwards():
    clocks = {A: SkewedClock(), B: SkewedClock(5.0, 50e-6)}
    # The two workers' clocks are wrong in opposite directions.
    links = {A: DelayedLink(3e-3, 1e-3, 1e-4), B: DelayedLink(1e-3, 3e-3, 1e-4)}
    workers, true_s = messages(100_000, clocks, links)
    trace = merged(scheduler(), workers, 0.0, SECONDS)
    address = [one.address for one in trace.processes]
    sends = {(address[it.process], it.message): it for it in trace.work if it.path == SEND}
    receives = {(it.peer, it.message): it for it in trace.work if it.path == RECEIVE}
    assert sends.keys() == receives.keys() == true_s.keys()
    assert all(receives[one].start_s >= sends[one].start_s for one in sends)
    assert all(it.way == "tcp" for it in receives.values())
    worst_s = max(
        max(abs(sends[one].start_s - sent_s), abs(receives[one].start_s - arrived_s))
        for one, (sent_s, arrived_s) in true_s.items()
    )
    assert worst_s <= 2e-3


def test_messages_across_an_end_are_left_out_on_both_sides():
    clocks = {A: SkewedClock(), B: SkewedClock(-3.0)}
    links = dict.fromkeys((A, B), DelayedLink(1e-5, 1e-5))
    workers, true_s = messages(500, clocks, links)
    trace = merged(scheduler(), workers, 20.0, 40.0)
    address = [one.address for one in trace.processes]
    sends = {(address[it.process], it.message) for it in trace.work if it.path == SEND}
    receives = {(it.peer, it.message) for it in trace.work if it.path == RECEIVE}
    assert sends == receives
    assert 0 < len(sends) < len(true_s)
    assert min(it.start_s for it in trace.work) >= 0
    assert trace.wall_s == 20.0


def a_task(encoder, number, key, worker, times, needs=()):
    """Record a task on the scheduler: ready, assigned, start, end and known."""
    ready_s, assigned_s, start_s, end_s, known_s = times
    encoder.assigned(number, key, worker, ready_s, assigned_s, known_s, nbytes=10)
    encoder.times(number, key_hash(key), assigned_s, start_s, end_s, thread=77)
    encoder.needs(number, list(needs))


def test_tasks_have_the_times_of_their_worker():
    on_scheduler, on_worker = RecordEncoder(), RecordEncoder()
    a_task(on_scheduler, 1, "a", A, (0.0, 0.5, 1.1, 2.1, 3.0))
    a_task(on_scheduler, 2, "b", A, (3.0, 3.5, 4.1, 5.1, 6.0), needs=[1])
    clock = SkewedClock(100.0)
    on_worker.key(1, key_hash("a"), "a")
    on_worker.key(2, key_hash("b"), "b")
    on_worker.task_run(1, clock.read(0.75), clock.read(1.0), clock.read(2.0))
    on_worker.task_run(2, clock.read(3.75), clock.read(4.0), clock.read(5.0))
    on_worker.work(FETCH, "fetch", 5, clock.read(3.6), clock.read(3.7), peer=B, key=2)
    exchanges = [DelayedLink(1e-5, 1e-5).exchange(clock, 0.0, random.Random(0))]
    worker = RecordedProcess(A, "w", "h", on_worker.block(), 2, exchanges=exchanges)
    trace = merged(scheduler(on_scheduler), [worker], 0.0, 10.0)
    first, second = trace.tasks
    assert second.needs == (first.number,)
    assert (first.process, first.key, first.nbytes, first.thread) == (1, "a", 10, 77)
    assert first.here_s == pytest.approx(0.75, abs=1e-4)
    assert (second.start_s, second.end_s) == pytest.approx((4.0, 5.0), abs=1e-4)
    (fetch,) = trace.work
    assert fetch.task == second.number
    assert [one.kind for one in trace.processes] == [SCHEDULER, "worker"]


def test_tasks_have_the_time_at_which_their_graph_came():
    on_scheduler = RecordEncoder()
    for number, submitted_s in enumerate([None, 0.5, 2.5, 2.5, -9e6]):
        times = (4.0 + number, 4.0 + number, 9.5)
        encoder = on_scheduler
        encoder.assigned(number + 1, "a", A, *times, nbytes=1, submitted_s=submitted_s)
        encoder.times(number + 1, key_hash("a"), 9.0, 9.0, 9.1, thread=77)
    trace = merged(scheduler(on_scheduler), [RecordedProcess(A, "w", "h")], 1.0, 20.0)
    # The first, the second and the last came before the trace.
    assert [one.submitted_s for one in trace.tasks] == pytest.approx([0, 0, 1.5, 1.5, 0], abs=1e-3)


def test_a_task_that_ran_before_it_was_assigned_moves_no_clock():
    """It was assigned to its worker a second time, after another worker left."""
    on_scheduler, on_worker = RecordEncoder(), RecordEncoder()
    a_task(on_scheduler, 1, "a", A, (0.0, 5.0, 5.0, 6.0, 6.1))
    on_worker.key(1, key_hash("a"), "a")
    on_worker.task_run(1, 3.9, 4.0, 6.0)
    on_worker.work(FETCH, "fetch", 5, 2.0, 2.5, peer=B)
    worker = RecordedProcess(A, "w", "h", on_worker.block(), 2, exchanges=EXACT)
    (fetch,) = merged(scheduler(on_scheduler), [worker], 0.0, 10.0).work
    assert (fetch.start_s, fetch.end_s) == (2.0, 2.5)


def test_tasks_outside_of_the_trace_are_in_no_needs():
    on_scheduler = RecordEncoder()
    a_task(on_scheduler, 1, "a", A, (0.0, 0.5, 1.1, 2.1, 3.0))
    a_task(on_scheduler, 2, "b", A, (3.0, 3.5, 4.1, 5.1, 6.0), needs=[1])
    a_task(on_scheduler, 3, "c", A, (6.0, 6.5, 7.1, 8.1, 9.0), needs=[1, 2])
    trace = merged(scheduler(on_scheduler), [RecordedProcess(A, "w", "h")], 3.5, 20.0)
    assert [(task.number, task.needs) for task in trace.tasks] == [(2, ()), (3, (2,))]
    # The trace cuts off the time before it.
    assert trace.tasks[0].ready_s == 0.0


def test_a_worker_without_events_keeps_dasks_times():
    on_scheduler = RecordEncoder()
    a_task(on_scheduler, 1, "a", A, (0.0, 0.5, 1.1, 2.1, 3.0))
    lost = RecordedProcess(A, "w", "h", n_threads=2, ended="lost: it was killed")
    trace = merged(scheduler(on_scheduler), [lost], 0.0, 10.0)
    (task,) = trace.tasks
    assert (task.start_s, task.end_s) == pytest.approx((1.1, 2.1))
    assert trace.processes[1].ended == "lost: it was killed"


def test_runs_of_one_key_find_each_their_own_times():
    on_scheduler, on_worker = RecordEncoder(), RecordEncoder()
    for number in range(3):
        times = [10.0 * number + one for one in (0.0, 0.5, 1.1, 2.1, 3.0)]
        a_task(on_scheduler, number + 1, "a", A, times)
    on_worker.key(1, key_hash("a"), "a")
    # The scheduler has not seen the result of the second run on this worker.
    for start_s in (1.0, 6.0, 11.0, 21.0):
        on_worker.task_run(1, start_s, start_s, start_s + 1.0)
    worker = RecordedProcess(A, "w", "h", on_worker.block(), exchanges=EXACT)
    trace = merged(scheduler(on_scheduler), [worker], 0.0, 40.0)
    assert [task.start_s for task in trace.tasks] == pytest.approx([1.0, 11.0, 21.0])


def test_a_damaged_file_gives_what_precedes_the_damage():
    encoder = RecordEncoder()
    encoder.work("codec", "encode", 1, 1.0, 2.0)
    first = encoder.block()
    encoder.work("codec", "encode", 1, 3.0, 4.0)
    data = bytearray(first + encoder.block())
    data[-1] ^= 1
    trace = merged(scheduler(), [RecordedProcess(A, "w", "h", data, exchanges=EXACT)], 0.0, 10.0)
    assert [it.start_s for it in trace.work] == [1.0]
    assert "damaged" in trace.processes[1].ended


def test_evictions_are_instants_as_well():
    encoder = RecordEncoder()
    encoder.work("write", "memory > disk", 100, 1.0, 2.0)
    encoder.work("write", "drop", 0, 3.0, 4.0)
    encoder.instant("task failed", 5.0, "x")
    encoder.sample("cpu", 6.0, 0.5)
    trace = merged(
        scheduler(), [RecordedProcess(A, "w", "h", encoder.block(), exchanges=EXACT)], 0.0, 10.0
    )
    assert [(it.name, it.detail) for it in trace.instants] == [
        ("eviction", "memory > disk"),
        ("task failed", "x"),
    ]
    (sample,) = trace.samples
    assert (sample.name, sample.at_s, sample.value) == ("cpu", 6.0, 0.5)


def test_without_a_comparison_of_clocks_there_are_no_events():
    encoder = RecordEncoder()
    encoder.instant("task failed", 5.0, "x")
    trace = merged(scheduler(), [RecordedProcess(A, "w", "h", encoder.block())], 0.0, 10.0)
    assert not trace.instants
    assert trace.processes[1].ended == "no events: its clock could not be compared"

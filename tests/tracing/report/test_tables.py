"""Tables of a report: transfers, workers, tasks and idle gaps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpurt.devices.ledger import LedgerEntry, overlap
from dask_gpurt.tracing.events import DEVICE, Instant, LinkFacts, TraceProcess
from dask_gpurt.tracing.lane_names import FETCH
from dask_gpurt.tracing.report.event_columns import prefix_of
from dask_gpurt.tracing.report.idle_gaps import NOTHING_LEFT
from dask_gpurt.tracing.report.trace_report import report_of
from tests.tracing.made_traces import MB, MadeTrace, ModelledShuffle

FOUR_HOSTS = ("host1", "host2", "host3", "host4")


def two_hosts(threads: int = 1) -> MadeTrace:
    return MadeTrace(("a", 0), ("b", 0), threads=threads)


def test_a_shaped_link_is_first_with_its_rate():
    rates = {("host2", "host4"): 200 * MB}
    trace = ModelledShuffle(FOUR_HOSTS, workers_of_host=1, rates=rates, facts=False).trace()
    first, *others = report_of(trace).transfers
    assert first.link == "host2 to host4"
    assert first.rate == pytest.approx(200 * MB, rel=0.05)
    rates = [one.rate for one in others if one.kind == "message"]
    assert len(rates) == 11 and min(rates) == pytest.approx(1000 * MB, rel=0.05)


def test_bytes_of_messages_are_those_that_were_sent():
    trace = ModelledShuffle().trace()
    sent = sum(one.nbytes for one in trace.work if one.path == "send")
    rows = report_of(trace).transfers
    assert sum(row.nbytes for row in rows if row.kind == "message") == sent
    n = sum(one.path == "send" for one in trace.work)
    assert sum(row.n_transfers for row in rows if row.kind == "message") == n


def test_an_answer_that_comes_late_does_not_slow_the_link():
    made = two_hosts()
    made.message(0, 1, 0.0, 1.0, 100 * MB, answered_s=5.0)
    (row,) = report_of(made.trace).transfers
    assert row.busy_s == 1.0 and row.rate == 100 * MB


def test_a_link_carries_encoded_bytes():
    made = two_hosts()
    made.message(0, 1, 0.0, 1.0, 100 * MB)
    made.trace.work[0] = made.trace.work[0]._replace(encoded_nbytes=30 * MB)
    (row,) = report_of(made.trace).transfers
    assert row.nbytes == 30 * MB and row.rate == 30 * MB


def test_bytes_in_shared_memory_move_while_they_are_received():
    made = MadeTrace(("a", 0), ("a", 1))
    made.message(0, 1, 0.0, 1.0, 100 * MB, answered_s=3.0, way="shared memory")
    (row,) = report_of(made.trace).transfers
    assert (row.link, row.way, row.busy_s) == ("within a", "shared memory", 3.0)


def test_messages_that_overlap_count_their_time_once():
    made = two_hosts()
    made.message(0, 1, 0.0, 2.0, 100 * MB)
    made.message(0, 1, 1.0, 3.0, 200 * MB)
    made.trace.links = [LinkFacts("a", "b", "", 400 * MB)]
    (row,) = report_of(made.trace).transfers
    assert (row.busy_s, row.rate, row.share) == (3.0, 100 * MB, 0.25)
    assert row.mean_nbytes == 150 * MB


def test_kinds_on_one_link_at_once_add_up_to_its_rate():
    made = two_hosts()
    made.message(0, 1, 0.0, 2.0, 100 * MB)
    made.work(1, FETCH, "fetch", 1.0, 3.0, nbytes=200 * MB, peer="tcp://a:0")
    made.trace.links = [LinkFacts("a", "b", "tcp", 400 * MB)]
    report = report_of(made.trace)
    assert sorted((row.kind, row.rate) for row in report.transfers) == [
        (FETCH, 100 * MB),
        ("message", 50 * MB),
    ]
    (link,) = report.findings.links.values()
    assert (link.kind, link.nbytes, link.n_transfers) == (FETCH, 300 * MB, 2)
    assert (link.busy_s, link.rate, link.share) == (3.0, 100 * MB, 0.25)


def test_messages_without_a_receive_are_noted():
    made = two_hosts()
    made.message(0, 1, 0.0, 2.0, MB)
    made.trace.work = [one for one in made.trace.work if one.path == "send"]
    report = report_of(made.trace)
    assert report.transfers[0].busy_s == 2.0
    assert any("1 message left a worker" in note for note in report.notes)


def test_a_fetch_counts_at_its_receiver_with_a_foreign_sender():
    made = two_hosts()
    made.work(0, FETCH, "fetch", 0.0, 1.0, nbytes=5 * MB, peer="tcp://10.0.0.9:4000", way="tcp")
    made.work(0, FETCH, "GatherDepBusyEvent", 1.0, 2.0, peer="tcp://b:0")
    (row,) = report_of(made.trace).transfers
    assert (row.kind, row.link, row.n_transfers) == (FETCH, "10.0.0.9 to a", 1)


def test_copies_and_disks_are_rows_by_path_and_way():
    made = two_hosts()
    for process in (0, 1):
        made.work(process, "write", "host > disk", 0.0, 2.0, nbytes=100 * MB)
        made.work(process, "write", "host > disk", 1.0, 3.0, nbytes=200 * MB)
    made.work(0, "copies", "host > device", 0.0, 1.0, nbytes=10 * MB, way="pageable")
    made.work(0, "write", "drop", 0.0, 9.0)
    made.work(0, "compute", "work", 0.0, 9.0, nbytes=MB)
    disk, copies = report_of(made.trace).transfers
    assert (disk.kind, disk.link, disk.busy_s, disk.rate) == ("write", "host to disk", 6, 100 * MB)
    assert (disk.n_processes, disk.longest_busy_s, disk.n_transfers) == (2, 3.0, 4)
    assert (copies.link, copies.way) == ("host to device", "pageable")


def test_streams_of_a_device_copy_over_one_link():
    made = two_hosts()
    made.trace.processes.append(TraceProcess("gpu", "H100", "a", DEVICE))
    for stream in (7, 13):
        work = {"nbytes": 100 * MB, "way": "pageable"}
        made.work(2, f"stream {stream}", "host to device", stream, stream + 2, **work)
    made.work(2, "stream 7", "a kernel", 0.0, 9.0)
    (row,) = report_of(made.trace).transfers
    assert (row.kind, row.link, row.way) == ("copy", "host to device", "pageable")
    assert (row.n_transfers, row.busy_s, row.rate) == (2, 4.0, 50 * MB)


def test_kernels_and_happenings_are_summed_up():
    made = two_hosts()
    made.trace.about = {
        "kernels": [["gpu", "sum", 3, 0.5], ["gpu", "join", 1, 2], "damaged", ["gpu", 7, 1, 1.0]],
        "program": "x",
    }
    names = ["evicted", "restart", "evicted"]
    made.trace.instants = [Instant(0, name, float(i), "why") for i, name in enumerate(names)]
    report = report_of(made.trace)
    assert [(row.name, row.busy_s) for row in report.kernels] == [("join", 2.0), ("sum", 0.5)]
    assert report.about == {"program": "x"}
    restart, evicted = report.happenings
    assert restart == ("restart", 1, 1.0, 1.0, "why")
    assert (evicted.n_times, evicted.first_s, evicted.last_s) == (2, 0.0, 2.0)


def test_relayed_messages_are_counted_apart():
    made = MadeTrace(("a", 0), ("b", 0), ("b", 1))
    made.message(0, 1, 0.0, 1.0, 10 * MB)
    made.message(1, 2, 1.0, 2.0, 4 * MB, way="shared memory")
    made.trace.work = [
        one._replace(path="relay") if one.process == 1 and one.path == "send" else one
        for one in made.trace.work
    ]
    rows = {row.kind: row.nbytes for row in report_of(made.trace).transfers}
    assert rows == {"message": 10 * MB, "relayed": 4 * MB}


def test_the_overlap_is_that_of_the_ledger():
    made = MadeTrace(("a", 0))
    entries = [
        LedgerEntry("compute", "work", 0, 0.0, 4.0),
        LedgerEntry("communication", "send", 1, 2.0, 6.0),
        LedgerEntry("communication", "waiting", 0, 3.0, 4.0),
        LedgerEntry("codec", "encode", 1, 3.0, 4.0),
    ]
    made.task("work", 0, 0.0, 0.0, 4.0)
    for one in entries:
        made.work(0, one.lane, one.path, one.start_s, one.end_s, nbytes=one.nbytes)
    (row,) = report_of(made.trace).workers
    expected = overlap(entries)
    assert row.lanes_s == expected.parts_s
    assert row.overlap == expected.efficiency


def test_workers_are_compared_with_the_mean_and_with_others():
    made = two_hosts()
    for i in range(18):
        made.task("work", 0, 0.0, float(i), i + 1.0, thread=1)
    for i in range(3):
        made.task("work", 1, 0.0, 3.0 * i, 3.0 * i + 3, thread=1)
    made.task("alone", 1, 9.0, 9.0, 9.0, thread=1)
    first, second = report_of(made.trace).workers
    assert (first.name, first.busy_share, first.skew) == ("a-0", 1.0, pytest.approx(4 / 3))
    assert (second.busy_share, second.slowness, first.slowness) == (0.5, 3.0, pytest.approx(1 / 3))


def test_few_tasks_do_not_make_a_worker_slow():
    made = two_hosts()
    for i in range(8):
        made.task("work", 0, 0.0, float(i), i + 1.0, thread=1)
    made.task("work", 1, 0.0, 0.0, 30.0, thread=1)
    assert [row.slowness for row in report_of(made.trace).workers] == [1.0, 1.0]


def test_time_held_back_is_not_work():
    made = two_hosts()
    made.task("shuffle-transfer", 0, 0.0, 0.0, 4.0, thread=1)
    made.work(0, "phase", "held_back", 1.0, 4.0, task=0)
    report = report_of(made.trace)
    (row,) = report.tasks
    assert (row.task_s, row.held_back_s, row.longest_s) == (4.0, 3.0, 1.0)
    assert report.workers[0].task_s == 1.0


def test_prefixes_have_their_sums_and_waits():
    made = two_hosts()
    for i in range(3):
        made.task("read", 0, 0.0, float(i), i + 1.0 + i, thread=i, nbytes=10)
    made.task("join", 1, 4.0, 6.0, 7.0, (0, 1), assigned_s=4.0, here_s=5.5)
    made.task("join", 1, 4.0, 7.0, 8.0, (0, 1), assigned_s=4.0, here_s=4.5)
    report = report_of(made.trace)
    read, join = report.tasks
    assert (read.prefix, read.n_tasks, read.task_s, read.nbytes) == ("read", 3, 6.0, 30)
    assert (read.median_s, read.longest_s, read.mean_s) == (2.0, 3.0, 2.0)
    assert (join.data_wait_s, join.start_wait_s) == (2.0, 3.0)
    assert [row.prefix for row in report.waiting] == ["join"]


def test_gaps_name_who_was_waited_for():
    made = two_hosts()
    read = made.task("read", 0, 0.0, 0.0, 3.0, thread=1)
    made.task("early", 1, 0.0, 0.0, 0.5, thread=1)
    made.task("join", 1, 3.0, 3.0, 4.0, (read,), thread=1)
    made.work(0, "write", "host > disk", 4.0, 5.0, nbytes=1)
    rows = {(row.worker, row.waited_for): row for row in report_of(made.trace).gaps.rows}
    assert rows["b-0", "read on a-0"].seconds == 2.5
    assert rows["b-0", NOTHING_LEFT].seconds == 1.0
    assert rows["a-0", NOTHING_LEFT].seconds == 2.0


def test_a_gap_behind_a_barrier_names_the_link():
    trace = ModelledShuffle(rates={("host1", "host2"): 50 * MB}).trace()
    gaps = report_of(trace).gaps
    assert gaps.by_cause()[0][0] == "network host1 to host2"
    assert gaps.total_s == pytest.approx(sum(row.seconds for row in gaps.rows))


def test_a_thread_without_tasks_is_idle_all_the_time():
    made = two_hosts(threads=2)
    made.task("work", 0, 0.0, 0.0, 2.0, thread=1)
    rows = {row.worker: row for row in report_of(made.trace).gaps.rows}
    assert (rows["a-0"].n_gaps, rows["a-0"].seconds) == (1, 2.0)
    assert (rows["b-0"].n_gaps, rows["b-0"].seconds) == (2, 4.0)


def test_what_the_trace_lacks_is_noted():
    made = two_hosts()
    made.task("work", 0, 0.0, 0.0, 2.0)
    made.trace.processes[1] = TraceProcess(
        "tcp://b:0", "b-0", "b", n_dropped=1200, ended="limit of 1.0 GiB", clock_error_s=0.02
    )
    assert report_of(made.trace).notes == [
        "The recording of b-0 ended early: limit of 1.0 GiB.",
        "b-0 dropped 1,200 events.",
        "Times of b-0 may be wrong by 20.0 ms.",
    ]


@pytest.mark.parametrize(
    "key, prefix",
    [
        ("read-csv", "read-csv"),
        ("('shuffle-transfer-4a5b6c7d8e9f0a1b2c3d4e5f60718293', 12)", "shuffle-transfer"),
        ("sum-aggregate-4a5b6c7d8e9f0a1b2c3d4e5f60718293", "sum-aggregate"),
        ("inc-3", "inc"),
        ("('x', 0, 1)", "x"),
        ("('mean_agg-12-abcdef', 3)", "mean_agg"),
        ("load-12f", "load-12f"),
        ("", ""),
        # It took years.
        ("tile" + "-123456" * 100 + "_x", "tile" + "-123456" * 100 + "_x"),
    ],
)
def test_prefixes_of_whole_keys(key, prefix):
    assert prefix_of(key).startswith(prefix[:50])
    assert len(prefix) > 50 or prefix_of(key) == prefix


def test_workers_that_come_and_go_had_only_their_own_time():
    made = two_hosts()
    made.trace.processes[1] = replace(made.trace.processes[1], joined_s=4.0, left_s=8.0)
    made.task("work", 0, 0.0, 0.0, 10.0, thread=1)
    made.task("work", 1, 0.0, 5.0, 8.0, thread=1)
    report = report_of(made.trace)
    assert [row.busy_share for row in report.workers] == [1.0, 0.75]
    assert report.findings.busy_share == 13 / 14
    (gap,) = report.gaps.rows
    assert (gap.worker, gap.seconds) == ("b-0", 1.0)


def test_a_worker_without_tasks_is_idle_while_it_is_there():
    made = two_hosts()
    made.trace.processes[1] = replace(made.trace.processes[1], joined_s=4.0, left_s=8.0)
    made.task("work", 0, 0.0, 0.0, 10.0, thread=1)
    (gap,) = report_of(made.trace).gaps.rows
    assert (gap.worker, gap.seconds) == ("b-0", 4.0)


def test_a_task_that_has_left_its_thread_is_not_busy():
    """Its worker starts another thread for the next tasks."""
    made = MadeTrace(("a", 0), threads=1)
    made.task("parent", 0, 0.0, 0.0, 10.0, thread=1, away_s=9.0)
    made.task("child", 0, 1.0, 1.0, 5.0, thread=2)
    made.task("child", 0, 1.0, 6.0, 9.0, thread=2)
    report = report_of(made.trace)
    (worker,) = report.workers
    assert worker.busy_share == 0.8
    assert sum(row.seconds for row in report.gaps.rows) == 2.0
    by_prefix = {row.prefix: (row.task_s, row.held_back_s) for row in report.tasks}
    assert by_prefix == {"parent": (1.0, 0.0), "child": (7.0, 0.0)}

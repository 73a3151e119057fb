"""Rows hold slices that viewers can show, and arrows connect what belongs together."""

from __future__ import annotations

import dataclasses

from hypothesis import given

from dask_gpurt.tracing.events import LaneWork, Sample, TaskTimes, Trace, TraceProcess
from dask_gpurt.tracing.formats.arrows import MAX_ARROWS, ArrowFinder
from dask_gpurt.tracing.formats.picture import LANE, THREAD, PointEvent, SliceBegin, SliceEnd, draw
from dask_gpurt.tracing.lane_names import FETCH, PHASE, RECEIVE, SEND
from tests.tracing.shuffle_trace import shuffle_trace
from tests.tracing.traces import traces

A, B = TraceProcess("tcp://a", "a", "h1"), TraceProcess("tcp://b", "b", "h2")


def work(lane, path, start_s, end_s, **others):
    return LaneWork(others.pop("process", 0), lane, path, 0, start_s, end_s, **others)


def task(number, start_s, end_s, process=0, needs=(), **others):
    return TaskTimes(number, "k", process, needs, 0, 0, 0, start_s, end_s, end_s, **others)


def rows_of(trace):
    """Return the slices of each row, as path and depth, by the name and number of the row."""
    rows = {}
    depths = {}
    for drawn in draw(trace):
        if isinstance(drawn, SliceBegin):
            key = drawn.row.name, drawn.row.number
            depths[key] = depths.get(key, 0) + 1
            name = getattr(drawn.event, "path", "task")
            rows.setdefault(key, []).append((name, depths[key]))
        elif isinstance(drawn, SliceEnd):
            depths[drawn.row.name, drawn.row.number] -= 1
    assert not any(depths.values())
    return list(rows.values())


@given(trace=traces())
def test_slices_of_a_row_lie_in_each_other(trace):
    open_ends = {}
    last_ns = None
    n = 0
    for drawn in draw(trace):
        assert last_ns is None or drawn.at_ns >= last_ns
        last_ns = drawn.at_ns
        ends = open_ends.setdefault(drawn.row.number, [])
        assert (drawn.row.kind in (THREAD, LANE)) == isinstance(drawn, SliceBegin | SliceEnd)
        if isinstance(drawn, SliceBegin):
            assert not ends or drawn.end_ns <= ends[-1]
            assert drawn.row.process == drawn.event.process
            ends.append(drawn.end_ns)
            n += 1
        elif isinstance(drawn, SliceEnd):
            assert ends.pop() == drawn.at_ns
        else:
            n += 1
    assert not any(open_ends.values())
    assert n == sum(map(len, (trace.work, trace.tasks, trace.instants, trace.samples)))


def test_overlapping_work_of_a_lane_gets_rows_of_its_own():
    sends = [work("communication", SEND, start, start + 3) for start in range(5)]
    # A row is used again when its slice has ended.
    assert rows_of(Trace([A], sends)) == [
        [(SEND, 1), (SEND, 1)],
        [(SEND, 1), (SEND, 1)],
        [(SEND, 1)],
    ]


def test_work_inside_of_other_work_is_beside_it():
    inner = [work("communication", SEND, 0, 9), work("communication", SEND, 1, 2)]
    assert rows_of(Trace([A], inner)) == [[(SEND, 1)], [(SEND, 1)]]


def test_a_wait_lies_in_the_work_that_waits():
    events = [work("compute", "join", 0, 9, thread=1), work("compute", "waiting", 1, 2, thread=1)]
    assert rows_of(Trace([A], events)) == [[("join", 1), ("waiting", 2)]]


def test_a_part_of_a_shuffle_lies_in_its_task():
    parts = [work(PHASE, "partition", 1, 3, thread=7), work(PHASE, "sort", 2, 3, thread=7)]
    late = work(PHASE, "late", 3, 9.1, thread=7)
    trace = Trace([A], [*parts, late], [task(0, 0, 9, thread=7)])
    assert rows_of(trace) == [[("task", 1), ("partition", 2), ("sort", 3)], [("late", 1)]]


def test_a_part_that_seems_to_end_after_its_task_is_cut():
    part = work(PHASE, "partition", 1, 9.01, thread=7)
    trace = Trace([A], [part], [task(0, 0, 9, thread=7)])
    assert rows_of(trace) == [[("task", 1), ("partition", 2)]]
    (drawn,) = (one for one in draw(trace) if isinstance(one, SliceBegin) and one.event == part)
    assert (drawn.end_ns, drawn.cut_ns) == (9 * 10**9, 10**7)


def test_each_thread_has_its_row_and_a_number():
    tasks = [task(i, i, i + 0.5, thread=thread) for i, thread in enumerate((8, 9, 8))]
    named = [
        drawn.row.name for drawn in draw(Trace([A], tasks=tasks)) if isinstance(drawn, SliceBegin)
    ]
    assert named == ["thread 1", "thread 2", "thread 1"]


def test_a_quantity_of_a_process_has_one_row():
    samples = [Sample(i % 2, name, i, 1.0) for i in range(4) for name in ("cpu", "bytes")]
    rows = {drawn.row.number for drawn in draw(Trace([A, B], samples=samples))}
    assert len(rows) == 4


def test_samples_that_are_no_numbers_are_left_out():
    samples = [Sample(0, "rate", 0, value) for value in (1.0, float("nan"), float("inf"))]
    assert [drawn.event.value for drawn in draw(Trace([A], samples=samples))] == [1.0]


# ------------------------------------------------------------------ arrows


def test_a_message_goes_from_send_to_receive():
    sends = [work("communication", SEND, i, i + 1, peer=B.address, message=i + 1) for i in range(2)]
    receives = [
        work("communication", RECEIVE, 3, 4, process=1, peer=A.address, message=i) for i in (1, 2)
    ]
    stray = work("communication", RECEIVE, 3, 4, process=1, peer="tcp://gone", message=1)
    finder = ArrowFinder(Trace([A, B], [*sends, *receives, stray]))
    out = [finder.of_work(one).chain for one in sends]
    assert out == [finder.of_work(one).chain for one in receives]
    assert len(set(out)) == 2 and all(out)
    assert finder.of_work(stray).chain == 0
    # The numbers of messages count for each sender.
    assert finder.of_work(receives[0]._replace(peer=B.address)).chain not in out


def test_a_send_is_drawn_before_a_receive_of_the_same_time():
    receive = work("communication", RECEIVE, 1, 2, process=1, peer=A.address, message=1)
    send = work("communication", SEND, 1, 2, peer=B.address, message=1)
    drawn = [
        one.event for one in draw(Trace([A, B], [receive, send])) if isinstance(one, SliceBegin)
    ]
    assert drawn == [send, receive]


def test_outputs_go_along_a_chain():
    tasks = [task(0, 0, 1), task(1, 1, 2, needs=(0,)), task(2, 2, 3, needs=(1,))]
    arrows = list(map(ArrowFinder(Trace([A], tasks=tasks)).of_task, tasks))
    assert len({one.chain for one in arrows}) == 1
    assert [(one.comes, one.goes) for one in arrows] == [(False, True), (True, True), (True, False)]


def test_each_consumer_of_an_output_has_an_arrow():
    tasks = [task(0, 0, 1), task(1, 1, 2, needs=(0,)), task(2, 2, 3, needs=(0, 1))]
    first, second, third = map(ArrowFinder(Trace([A], tasks=tasks)).of_task, tasks)
    assert first.chain == second.chain == third.chain
    assert first.out == third.into and len(first.out) == 1


def test_an_output_passes_the_fetch_that_brought_it():
    for of_task in (0, 1):
        tasks = [task(0, 0, 1), task(1, 3, 4, process=1, needs=(0,))]
        fetch = work(FETCH, "get_data", 1, 2, process=1, peer=A.address, task=of_task)
        other = fetch._replace(peer="tcp://c")
        finder = ArrowFinder(Trace([A, B], [fetch, other], tasks))
        assert finder.of_work(other).chain == 0
        late = ArrowFinder(Trace([A, B], [fetch._replace(start_s=3.5)], tasks))
        assert late.of_work(fetch).chain == 0 != late.of_task(tasks[0]).chain
        on_way = finder.of_work(fetch)
        assert on_way.chain == finder.of_task(tasks[0]).chain == finder.of_task(tasks[1]).chain
        assert on_way.comes and on_way.goes


def test_a_shared_fetch_passes_on_several_arrows():
    tasks = [task(0, 0, 1), *(task(i, 3, 4, process=1, needs=(0,)) for i in (1, 2))]
    fetch = work(FETCH, "get_data", 1, 2, process=1, peer=A.address, task=0)
    finder = ArrowFinder(Trace([A, B], [fetch], tasks))
    on_way, source = finder.of_work(fetch), finder.of_task(tasks[0])
    assert on_way.chain == source.chain and on_way.through == source.out
    assert finder.of_task(tasks[2]).into == source.out


def test_a_task_with_many_inputs_has_arrows_from_the_last():
    n = MAX_ARROWS + 5
    tasks = [task(i, 0, 100 - i) for i in range(n)]
    tasks.append(task(n, 200, 201, needs=tuple(range(n))))
    finder = ArrowFinder(Trace([A], tasks=tasks))
    with_arrow = [
        one.number for one in tasks[:-1] if finder.of_task(one).chain or finder.of_task(one).out
    ]
    assert with_arrow == list(range(MAX_ARROWS))


def test_no_arrow_goes_back_in_time_or_nowhere():
    tasks = [task(0, 5, 6), task(1, 1, 2, needs=(0, 1, 99))]
    finder = ArrowFinder(Trace([A], tasks=tasks))
    assert not any(dataclasses.asdict(finder.of_task(tasks[1])).values())


def test_a_shuffle_is_drawn_with_arrows_in_order():
    trace = shuffle_trace(50)
    ends: dict[int, int] = {}
    n_into = 0
    for drawn in draw(trace):
        if not isinstance(drawn, SliceBegin):
            assert isinstance(drawn, SliceEnd | PointEvent)
            continue
        arrows = drawn.arrows
        for number in (*arrows.into, *arrows.through, *[arrows.chain] * arrows.comes):
            assert ends[number] <= drawn.at_ns
            n_into += 1
        for number in (*arrows.out, *arrows.through, *[arrows.chain] * arrows.goes):
            ends[number] = drawn.at_ns
    assert n_into > len(trace.tasks) / 2

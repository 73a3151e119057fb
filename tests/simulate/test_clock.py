"""The event queue of a simulation runs events in order of time."""

from __future__ import annotations

from dask_gpurt.simulate.clock import VirtualClock


def test_calls_run_by_due_time_then_in_order_of_scheduling():
    clock, done = VirtualClock(), []
    for when_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        clock.call_at(when_s, lambda name=name: done.append((clock.now_s, name)))
    while clock.step():
        pass
    assert done == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]


def test_call_due_now_runs_after_earlier_ones():
    clock, done = VirtualClock(), []

    def first():
        done.append("first")
        clock.call_later(0.0, lambda: done.append("third"))

    clock.call_at(1.0, first)
    clock.call_at(1.0, lambda: done.append("second"))
    while clock.step():
        pass
    assert done == ["first", "second", "third"]


def test_cancelled_call_takes_no_time():
    clock = VirtualClock()
    event = clock.call_at(5.0, lambda: 1 / 0)
    clock.call_at(1.0, event.cancel)
    assert clock.step()
    assert not clock.step()
    assert clock.now_s == 1.0


def test_virtual_time_never_goes_back():
    clock, seen = VirtualClock(), []
    clock.call_at(2.0, lambda: clock.call_at(1.0, lambda: seen.append(clock.now_s)))
    while clock.step():
        pass
    assert seen == [2.0]

"""Lanes run urgent work first, on their own threads, and complete every future at the end."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, wait

import pytest

from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.lanes import Lane
from dask_gpurt.devices.ledger import Ledger, LedgerEntry
from tests.failure.gates import until

PATIENCE_S = 20.0


class Gate:
    """Work that waits until the test opens the gate."""

    def __init__(self):
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        return "through"


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


def closed_in(gate):
    """A lane whose only thread waits in the gate."""
    lane = Lane("lane")
    future = lane.submit(gate)
    assert gate.entered.wait(PATIENCE_S)
    return lane, future


def test_lane_returns_results_and_errors():
    with Lane("lane", 2) as lane:
        assert lane.submit(divmod, 7, 2).result(PATIENCE_S) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            lane.submit(divmod, 7, 0).result(PATIENCE_S)
        with pytest.raises(SystemExit):
            lane.submit(sys.exit).result(PATIENCE_S)
        assert lane.submit(divmod, 7, 2).result(PATIENCE_S) == (3, 1), "threads survive errors"


def out_of_threads(monkeypatch):
    """From now on, the process cannot start more threads."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_submit_fails_without_a_thread_and_works_once_one_starts(monkeypatch):
    with Lane("lane") as lane:
        with monkeypatch.context() as without:
            out_of_threads(without)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                lane.submit(pytest.fail, "refused work ran")
        assert lane.n_waiting == 0
        assert lane.submit(divmod, 7, 2).result(PATIENCE_S) == (3, 1)


def test_a_started_lane_needs_no_more_threads(monkeypatch):
    with Lane("lane", 2) as lane:
        lane.start()
        lane.start()
        out_of_threads(monkeypatch)
        assert lane.submit(divmod, 7, 2).result(PATIENCE_S) == (3, 1)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Lane("lane").start()


def test_a_lane_works_with_the_threads_it_could_start(gate, monkeypatch):
    with Lane("lane", 2) as lane:
        held = lane.submit(gate)
        assert gate.entered.wait(PATIENCE_S)
        with monkeypatch.context() as without:
            out_of_threads(without)
            waiting = lane.submit(divmod, 7, 2)
        gate.open.set()
        assert held.result(PATIENCE_S) == "through"
        assert waiting.result(PATIENCE_S) == (3, 1)


def test_one_thread_keeps_the_order(gate):
    lane, _ = closed_in(gate)
    ran = []
    futures = [lane.submit(ran.append, n) for n in range(50)]
    gate.open.set()
    wait(futures, PATIENCE_S)
    assert ran == list(range(50))
    lane.close()


def test_urgent_work_overtakes_queued_work(gate):
    """Only running work delays its start."""
    lane, _ = closed_in(gate)
    ran = []
    order = [Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.LOW, Priority.HIGH]
    futures = [
        lane.submit(ran.append, (priority.name, n), priority=priority)
        for n, priority in enumerate(order)
    ]
    assert lane.n_waiting == 5
    gate.open.set()
    wait(futures, PATIENCE_S)
    assert ran == [("HIGH", 2), ("HIGH", 4), ("NORMAL", 1), ("LOW", 0), ("LOW", 3)]
    assert lane.n_waiting == 0
    lane.close()


def test_a_lane_is_pending_from_submission_to_the_end(gate):
    lane = Lane("lane")
    assert not lane.is_pending()
    lane.submit(gate)
    assert gate.entered.wait(PATIENCE_S)
    assert lane.n_waiting == 0
    assert lane.is_pending(), "nothing waits, but something is being done"
    last = lane.submit(divmod, 7, 2)
    assert lane.is_pending()
    gate.open.set()
    last.result(PATIENCE_S)
    until(lambda: not lane.is_pending(), "the lane's thread did not become idle")
    lane.close()
    assert not lane.is_pending(), "a lane whose threads have ended does nothing"


def test_a_lane_without_threads_is_not_pending(monkeypatch):
    with Lane("lane") as lane:
        out_of_threads(monkeypatch)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            lane.submit(pytest.fail, "refused work ran")
        assert not lane.is_pending()


def test_threads_of_a_lane_work_at_once():
    together = threading.Barrier(3)
    with Lane("lane", 3) as lane:
        futures = [lane.submit(together.wait, PATIENCE_S) for _ in range(3)]
        assert sorted(future.result(PATIENCE_S) for future in futures) == [0, 1, 2]


def test_lanes_work_at_once():
    together = threading.Barrier(2)
    with Lane("one") as one, Lane("other") as other:
        futures = [lane.submit(together.wait, PATIENCE_S) for lane in (one, other)]
        assert sorted(future.result(PATIENCE_S) for future in futures) == [0, 1]


def n_threads():
    """Return the number of threads of one lane: threads of earlier tests may be ending."""
    return sum(thread.name.startswith("gpurt counted") for thread in threading.enumerate())


def test_lane_starts_no_more_threads_than_needed(gate):
    lane = Lane("counted", 8)
    assert n_threads() == 0
    second = Gate()
    for number, one in enumerate((gate, second), 1):
        lane.submit(one)
        assert one.entered.wait(PATIENCE_S)
        assert n_threads() == number
    second.open.set()
    gate.open.set()
    lane.close()
    assert n_threads() == 0


def test_an_idle_thread_is_used_before_another_is_started():
    with Lane("lane", 8) as lane:
        for _ in range(5):
            lane.submit(int).result(PATIENCE_S)
            deadline_s = time.monotonic() + PATIENCE_S
            # The thread becomes idle just after it sets the result.
            while lane._n_idle == 0:
                assert time.monotonic() < deadline_s
        assert len(lane._threads) == 1


def test_cancelled_work_does_not_run(gate):
    lane, _ = closed_in(gate)
    ran = []
    first, second = lane.submit(ran.append, 1), lane.submit(ran.append, 2)
    assert first.cancel()
    gate.open.set()
    second.result(PATIENCE_S)
    assert ran == [2]
    lane.close()


def test_closing_cancels_queued_work_and_waits_for_running_work(gate):
    lane, running = closed_in(gate)
    ran, told = [], []
    waiting = [lane.submit(ran.append, n) for n in range(3)]
    for future in waiting:
        future.add_done_callback(lambda future: told.append(future.cancelled()))
    closing = threading.Thread(target=lane.close, daemon=True)
    closing.start()
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(PATIENCE_S)
    assert closing.is_alive()
    with pytest.raises(RuntimeError, match="lane 'lane' is closed"):
        lane.submit(ran.append, 4)
    gate.open.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert running.result(0) == "through"
    assert (ran, told) == ([], [True] * 3)
    lane.close()


def test_work_may_close_its_own_lane():
    lane = Lane("lane")
    lane.submit(lane.close).result(PATIENCE_S)
    with pytest.raises(RuntimeError):
        lane.submit(int)
    lane.close()


def test_a_cancellation_callback_may_use_the_lane(gate):
    """Callbacks of cancellation run without the lane's lock."""
    lane, _ = closed_in(gate)
    refused, told = [], threading.Event()

    def try_again(future):
        try:
            lane.submit(int)
        except RuntimeError as error:
            refused.append(str(error))
        told.set()

    lane.submit(int).add_done_callback(try_again)
    threading.Thread(target=lane.close, daemon=True).start()
    assert told.wait(PATIENCE_S)
    assert refused == ["lane 'lane' is closed"]


class Value:
    """An object whose deletion the test can observe."""


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_lane_keeps_nothing_alive(fails):
    def work(value):
        if fails:
            raise LookupError

    gc.disable()
    try:
        with Lane("lane") as lane:
            value = Value()
            gone = threading.Event()
            weakref.finalize(value, gone.set)
            future = lane.submit(work, value)
            wait([future], PATIENCE_S)
            del value, future
            # The thread drops its references just after it sets the result.
            assert gone.wait(PATIENCE_S)
    finally:
        gc.enable()


def test_coroutines_await_lanes():
    async def main():
        with Lane("lane") as lane:
            return await asyncio.wrap_future(lane.submit(divmod, 7, 2))

    assert asyncio.run(main()) == (3, 1)


def test_the_ledger_entry_precedes_the_result():
    times = iter(range(10))
    ledger = Ledger(clock=lambda: next(times))
    with Lane("disk", ledger=ledger) as lane:
        lane.submit(int, path="write", nbytes=100).result(PATIENCE_S)
        assert ledger.entries() == [LedgerEntry("disk", "write", 100, 0, 1)]
        lane.submit(divmod, 7, 2).result(PATIENCE_S)
        assert ledger.entries()[1:] == [LedgerEntry("disk", "divmod", 0, 2, 3)]


def test_failed_work_is_in_the_ledger_and_cancelled_work_is_not(gate):
    ledger = Ledger()
    lane = Lane("disk", ledger=ledger)
    lane.submit(gate)
    assert gate.entered.wait(PATIENCE_S)
    lane.submit(int, path="never").cancel()
    failed = lane.submit(divmod, 1, 0, nbytes=7)
    gate.open.set()
    wait([failed], PATIENCE_S)
    lane.close()
    assert [(entry.path, entry.nbytes) for entry in ledger.entries()] == [("", 0), ("divmod", 7)]


def test_threads_submit_at_once():
    done = []
    with Lane("lane", 3) as lane:

        def submit_many(number):
            futures = [lane.submit(done.append, (number, n)) for n in range(200)]
            wait(futures, PATIENCE_S)

        threads = [threading.Thread(target=submit_many, args=(n,), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert sorted(done) == [(number, n) for number in range(4) for n in range(200)]

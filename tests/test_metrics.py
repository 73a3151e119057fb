"""Counters contain the additions of all threads, and snapshots are consistent."""

from __future__ import annotations

import sys
import threading

import pytest

from dask_gpurt.metrics import MEANING, Counters, total


def test_counters_begin_at_zero():
    assert Counters().snapshot() == dict.fromkeys(MEANING, 0)


def test_several_counters_are_added_at_once():
    counters = Counters()
    counters.add(sent_nbytes=10, messages=1)
    counters.add(sent_nbytes=5)
    expected = dict.fromkeys(MEANING, 0) | {"sent_nbytes": 15, "messages": 1}
    assert counters.snapshot() == expected


def test_snapshot_does_not_change():
    counters = Counters()
    before = counters.snapshot()
    counters.add(messages=1)
    before["messages"] += 100
    assert counters.snapshot()["messages"] == 1


def test_two_counters_do_not_share_values():
    first, second = Counters(), Counters()
    first.add(messages=1)
    assert second.snapshot()["messages"] == 0


def test_unknown_counter_name_is_refused():
    counters = Counters()
    with pytest.raises(KeyError, match="sent_bytes"):
        counters.add(sent_bytes=1)
    assert counters.snapshot() == dict.fromkeys(MEANING, 0)


@pytest.fixture
def restless():
    """Make the interpreter switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_additions_of_many_threads_are_kept():
    counters = Counters()
    n_threads, n_rounds = 8, 500
    barrier = threading.Barrier(n_threads)

    def work():
        barrier.wait()
        for _ in range(n_rounds):
            counters.add(messages=1, sent_nbytes=3)

    threads = [threading.Thread(target=work) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = counters.snapshot()
    assert snapshot["messages"] == n_threads * n_rounds
    assert snapshot["sent_nbytes"] == 3 * n_threads * n_rounds


@pytest.mark.usefixtures("restless")
def test_snapshot_never_shows_a_partial_addition():
    """A snapshot shows amounts that were added together either all or not at all."""
    counters = Counters()
    stop = threading.Event()

    def work():
        while not stop.is_set():
            counters.add(messages=1, sent_nbytes=7)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(2000):
            snapshot = counters.snapshot()
            assert snapshot["sent_nbytes"] == 7 * snapshot["messages"]
    finally:
        stop.set()
        thread.join()


def test_total_sums_several_workers():
    snapshots = [{"messages": 1, "sent_nbytes": 10}, {"messages": 2}, {}]
    expected = dict.fromkeys(MEANING, 0) | {"messages": 3, "sent_nbytes": 10}
    assert total(iter(snapshots)) == expected


def test_total_of_no_workers_is_zero():
    assert total([]) == dict.fromkeys(MEANING, 0)


def test_total_keeps_unknown_names():
    """A worker of a newer version may count more."""
    assert total([{"later": 2}, {"later": 3}])["later"] == 5


def test_total_does_not_change_the_snapshots():
    snapshot = {"messages": 1}
    total([snapshot, snapshot])
    assert snapshot == {"messages": 1}


def test_every_counter_has_a_description():
    assert all(meaning.strip() for meaning in MEANING.values())
    assert len(set(MEANING.values())) == len(MEANING)

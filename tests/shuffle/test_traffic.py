"""Bytes are summed by link and path for half a minute, in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.shuffle import traffic
from dask_gpurt.shuffle.traffic import OTHERS, WINDOW_S, LinkPath, Moved, Traffic

AB = LinkPath("a", "b", "shared")
AC = LinkPath("a", "c", "comm")


def test_links_are_summed_busiest_first():
    moved = Traffic()
    for link, nbytes, now_s in [(AB, 10, 1.0), (AC, 30, 1.5), (AB, 5, 3.0)]:
        moved.add(link, nbytes, now_s)
    assert [*moved.lately(3.0).items()] == [(AC, Moved(30, 1)), (AB, Moved(15, 2))]


def test_bytes_of_half_a_minute_ago_are_forgotten():
    moved = Traffic()
    moved.add(AB, 10, 0.5)
    moved.add(AC, 20, 5.0)
    assert moved.lately(WINDOW_S - 1) == {AC: Moved(20, 1), AB: Moved(10, 1)}
    assert moved.lately(WINDOW_S) == {AC: Moved(20, 1)}
    assert moved.lately(10 * WINDOW_S) == {}


def test_a_clock_that_is_set_back_begins_anew():
    moved = Traffic()
    for second in range(1_000, 1_030):
        moved.add(AB, 10, second)
    for second in range(100, 200):
        moved.add(AB, 1, second)
    assert moved.lately(200.0) == {AB: Moved(29, 29)}


def test_links_beyond_the_limit_are_summed(monkeypatch):
    monkeypatch.setattr(traffic, "MAX_LINKS", 2)
    moved = Traffic()
    for number in range(5):
        moved.add(LinkPath("a", str(number), "comm"), 1, 0.0)
    found = moved.lately(0.0)
    assert len(found) == 3
    assert found[LinkPath(OTHERS, OTHERS, "comm")] == Moved(3, 3)


@given(st.lists(st.tuples(st.sampled_from([AB, AC]), st.integers(0, 99), st.floats(0, 200))))
def test_any_order_of_messages_gives_the_sum_of_the_window(messages):
    moved = Traffic()
    ordered = sorted(messages, key=lambda one: one[2])
    for link, nbytes, now_s in ordered:
        moved.add(link, nbytes, now_s)
    end_s = 200.0
    wanted = {}
    for link, nbytes, now_s in ordered:
        if int(now_s) > end_s - WINDOW_S:
            wanted[link] = wanted.get(link, 0) + nbytes
    assert {link: one.nbytes for link, one in moved.lately(end_s).items()} == wanted

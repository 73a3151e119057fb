"""Where a root task joins the others that a later task needs together with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement.siblings import Seat, seat

MB20 = 0.02


def test_a_free_place_next_to_a_sibling_is_taken_even_before_sizes_are_known():
    assert seat([Seat("a", 1, 1, 1.0, None)], ahead=1.0, duration_s=0.5, n_queued=0) == "a"


def test_nobody_waits_longer_than_a_transfer_takes():
    seats = [Seat("a", 1, 1, 1.0, MB20)]
    assert seat(seats, ahead=0.0, duration_s=0.5, n_queued=0) is None
    assert seat(seats, ahead=0.0, duration_s=0.01, n_queued=0) == "a"


def test_while_others_wait_for_a_place_waiting_costs_nothing():
    seats = [Seat("a", 1, 1, 1.0, MB20)]
    assert seat(seats, ahead=0.0, duration_s=0.5, n_queued=9) == "a"


def test_a_full_worker_takes_one_more_for_each_thread_and_only_for_known_bytes():
    def chosen(n_free, saved_s, nthreads=1):
        seats = [Seat("a", nthreads, n_free, 2.0, saved_s)]
        return seat(seats, ahead=1.0, duration_s=0.5, n_queued=9)

    assert chosen(0, MB20) == "a"
    assert chosen(-1, MB20) is None
    assert chosen(-1, MB20, nthreads=2) == "a"
    assert chosen(0, None) is None


def test_of_two_seats_the_one_that_saves_more_is_taken():
    seats = [Seat("a", 1, 1, 1.0, 0.1), Seat("b", 1, 1, 1.0, 0.2)]
    assert seat(seats, ahead=1.0, duration_s=0.5, n_queued=0) == "b"
    assert seat(reversed(seats), ahead=1.0, duration_s=0.5, n_queued=0) == "b"
    assert seat([], ahead=1.0, duration_s=0.5, n_queued=0) is None


seats = st.builds(
    Seat,
    st.sampled_from("abcd"),
    st.integers(1, 8),
    st.integers(-10, 10),
    st.floats(0, 10),
    st.none() | st.floats(0, 1e3),
)


@given(st.lists(seats), st.floats(0, 10), st.floats(0, 10), st.integers(0, 5))
def test_no_worker_is_ever_overfilled(found, ahead, duration_s, n_queued):
    chosen = seat(found, ahead=ahead, duration_s=duration_s, n_queued=n_queued)
    if chosen is not None:
        mine = [one for one in found if one.worker == chosen]
        assert any(one.n_free > -one.nthreads for one in mine)
    assert chosen == seat(found[::-1], ahead=ahead, duration_s=duration_s, n_queued=n_queued)

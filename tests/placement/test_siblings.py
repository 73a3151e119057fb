"""Root tasks are placed next to the siblings that a later task needs with them."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from dask_gpurt.placement.siblings import Seat, seat
from tests.placement.machines import deterministic

MB20 = 0.02


def test_free_slot_next_to_a_sibling_is_used_for_unknown_sizes():
    assert (
        seat([Seat("a", 1, 1, 1.0, MB20, is_certain=False)], ahead=1.0, duration_s=0.5, to_come=0)
        == "a"
    )


def test_root_does_not_wait_for_uncertain_gains():
    seats = [Seat("a", 1, 1, 1.0, 9.9, is_certain=False)]
    assert seat(seats, ahead=0.0, duration_s=0.01, to_come=0) is None
    assert seat(seats, ahead=0.0, duration_s=0.01, to_come=1) == "a"


def test_root_does_not_wait_longer_than_a_transfer():
    seats = [Seat("a", 1, 1, 1.0, MB20)]
    assert seat(seats, ahead=0.0, duration_s=0.5, to_come=0) is None
    assert seat(seats, ahead=0.0, duration_s=0.01, to_come=0) == "a"


def test_waiting_is_free_while_other_roots_fill_the_slot():
    seats = [Seat("a", 1, 1, 1.0, MB20)]
    assert seat(seats, ahead=0.0, duration_s=0.5, to_come=9) == "a"


def test_full_worker_takes_one_extra_root_per_thread():
    def chosen(n_free, nthreads=1, *, is_certain=True):
        seats = [Seat("a", nthreads, n_free, 2.0, MB20, is_certain)]
        return seat(seats, ahead=1.0, duration_s=0.5, to_come=9)

    assert chosen(0) == "a"
    assert chosen(-1) is None
    assert chosen(-1, nthreads=2) == "a"
    assert chosen(0, is_certain=False) is None


def test_seat_that_saves_more_is_chosen():
    seats = [Seat("a", 1, 1, 1.0, 0.1), Seat("b", 1, 1, 1.0, 0.2)]
    assert seat(seats, ahead=1.0, duration_s=0.5, to_come=0) == "b"
    assert seat(reversed(seats), ahead=1.0, duration_s=0.5, to_come=0) == "b"
    assert seat([], ahead=1.0, duration_s=0.5, to_come=0) is None


seats = st.builds(
    Seat,
    st.sampled_from("abcd"),
    st.integers(1, 8),
    st.integers(-10, 10),
    st.floats(0, 10),
    st.floats(0, 1e3),
    st.booleans(),
)


@deterministic
@given(st.lists(seats, min_size=1), st.floats(0, 10), st.floats(0, 10), st.floats(0, 5))
def test_no_worker_is_ever_overfilled(found, ahead, duration_s, to_come):
    chosen = seat(found, ahead=ahead, duration_s=duration_s, to_come=to_come)
    assume(chosen is not None)
    mine = [one for one in found if one.worker == chosen]
    assert any(one.n_free > (-one.nthreads if one.is_certain else 0) for one in mine)


@deterministic
@given(st.lists(seats), st.floats(0, 10), st.floats(0, 10), st.floats(0, 5))
def test_choice_of_a_seat_does_not_depend_on_the_order(found, ahead, duration_s, to_come):
    chosen = seat(found, ahead=ahead, duration_s=duration_s, to_come=to_come)
    assert chosen == seat(found[::-1], ahead=ahead, duration_s=duration_s, to_come=to_come)

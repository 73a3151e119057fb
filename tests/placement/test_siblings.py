"""Where a root task joins the others that a later task needs together with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement.siblings import Candidate, best_candidate
from tests.placement.machines import deterministic

MB20 = 0.02


def test_a_free_place_next_to_a_sibling_is_taken_even_before_sizes_are_known():
    assert (
        best_candidate(
            [Candidate("a", 1, 1, 1.0, MB20, is_certain=False)],
            ahead=1.0,
            duration_s=0.5,
            to_come=0,
        )
        == "a"
    )


def test_nobody_waits_for_what_is_not_known():
    candidates = [Candidate("a", 1, 1, 1.0, 9.9, is_certain=False)]
    assert best_candidate(candidates, ahead=0.0, duration_s=0.01, to_come=0) is None
    assert best_candidate(candidates, ahead=0.0, duration_s=0.01, to_come=1) == "a"


def test_nobody_waits_longer_than_a_transfer_takes():
    candidates = [Candidate("a", 1, 1, 1.0, MB20)]
    assert best_candidate(candidates, ahead=0.0, duration_s=0.5, to_come=0) is None
    assert best_candidate(candidates, ahead=0.0, duration_s=0.01, to_come=0) == "a"


def test_while_there_are_others_to_take_the_place_waiting_costs_nothing():
    candidates = [Candidate("a", 1, 1, 1.0, MB20)]
    assert best_candidate(candidates, ahead=0.0, duration_s=0.5, to_come=9) == "a"


def test_a_full_worker_takes_one_more_for_each_thread_and_only_for_known_bytes():
    def chosen(n_free, nthreads=1, *, is_certain=True):
        candidates = [Candidate("a", nthreads, n_free, 2.0, MB20, is_certain)]
        return best_candidate(candidates, ahead=1.0, duration_s=0.5, to_come=9)

    assert chosen(0) == "a"
    assert chosen(-1) is None
    assert chosen(-1, nthreads=2) == "a"
    assert chosen(0, is_certain=False) is None


def test_of_two_seats_the_one_that_saves_more_is_taken():
    candidates = [Candidate("a", 1, 1, 1.0, 0.1), Candidate("b", 1, 1, 1.0, 0.2)]
    assert best_candidate(candidates, ahead=1.0, duration_s=0.5, to_come=0) == "b"
    assert best_candidate(reversed(candidates), ahead=1.0, duration_s=0.5, to_come=0) == "b"
    assert best_candidate([], ahead=1.0, duration_s=0.5, to_come=0) is None


candidates = st.builds(
    Candidate,
    st.sampled_from("abcd"),
    st.integers(1, 8),
    st.integers(-10, 10),
    st.floats(0, 10),
    st.floats(0, 1e3),
    st.booleans(),
)


@deterministic
@given(st.lists(candidates), st.floats(0, 10), st.floats(0, 10), st.floats(0, 5))
def test_no_worker_is_ever_overfilled(found, ahead, duration_s, to_come):
    chosen = best_candidate(found, ahead=ahead, duration_s=duration_s, to_come=to_come)
    if chosen is not None:
        mine = [one for one in found if one.worker == chosen]
        assert any(one.n_free > (-one.nthreads if one.is_certain else 0) for one in mine)
    assert chosen == best_candidate(
        found[::-1], ahead=ahead, duration_s=duration_s, to_come=to_come
    )

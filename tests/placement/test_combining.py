"""A combining task goes where the fewest bytes move, as long as each worker gets its share."""

from __future__ import annotations

from dask_gpurt.placement.combining import Combiner, best_combiner

IDLE = Combiner("a", 1, 300, 0.3, 0, 0.0, 0)


def chosen(*workers, n_combining=2, total_nthreads=2, most_before_s=1.0):
    return best_combiner(workers, n_combining, total_nthreads, most_before_s)


def test_fewest_bytes_count_before_a_free_link():
    slow = IDLE._replace(address="b", missing_nbytes=200, fetch_s=0.9)
    assert chosen(IDLE, slow) == "b"


def test_of_equal_bytes_the_soonest_fetched_wins():
    assert chosen(IDLE, IDLE._replace(address="b", fetch_s=0.2)) == "b"


def test_a_worker_with_its_share_is_left_out():
    full = IDLE._replace(address="b", missing_nbytes=100, n_alike=1)
    assert chosen(IDLE, full) == "a"
    assert chosen(IDLE, full, n_combining=4) == "b"


def test_if_all_have_their_share_bytes_decide():
    one, other = (IDLE._replace(address=name, n_alike=1) for name in "bc")
    assert chosen(one, other._replace(missing_nbytes=100)) == "c"


def test_no_worker_is_chosen_where_others_wait_long():
    busy = IDLE._replace(before_s=3.0)
    assert chosen(busy) is None
    assert chosen(busy._replace(nthreads=4)) == "a"
    assert chosen() is None

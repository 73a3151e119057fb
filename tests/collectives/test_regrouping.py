"""Regrouped trees combine the values of each worker first, and every value once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.collectives.regrouping import regrouped


def combined(holders, levels):
    """Return the numbers of the values that each value of the last level is made of."""
    values = [[number] for number in range(len(holders))]
    for level in levels:
        values = [[one for number in group for one in values[number]] for group in level]
    return values


@given(
    holders=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    most_inputs=st.integers(2, 8),
    n_local=st.integers(0, 3),
    n_across=st.integers(0, 3),
)
def test_each_value_is_combined_once(holders, most_inputs, n_local, n_across):
    found = regrouped(holders, most_inputs, n_local, n_across)
    if len(set(holders)) == len(holders):
        assert found is None
        return
    local, across = found
    assert len(local) >= n_local and len(across) >= n_across
    assert max(len(group) for level in local + across for group in level) <= most_inputs
    of_worker = combined(holders, local)
    assert sorted({holders[one] for one in made} for made in of_worker) == sorted(
        {holder} for holder in dict.fromkeys(holders)
    )
    (whole,) = combined(holders, local + across) if across or len(of_worker) > 1 else of_worker
    assert sorted(whole) == [*range(len(holders))]


def test_blocks_in_turns_on_four_workers():
    local, across = regrouped([0, 1, 2, 3] * 3, 4)
    assert local == [[[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]]
    assert across == [[[0, 1, 2, 3]]]


def test_many_values_of_one_worker_take_two_levels():
    local, across = regrouped(["a"] * 7, 4)
    assert local == [[[0, 1, 2], [3, 4, 5, 6]], [[0, 1]]]
    assert across == []

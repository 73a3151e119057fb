"""Levels of a tree combine slices where that takes less time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.collectives.sliced_trees import LEAST_SLICE_NBYTES, choose

MB = 1_000_000


def chosen(n_values, n_workers, *, n_trees=1, nbytes=100 * MB, width=10**7, rate=200 * MB):
    found = choose(n_values, n_trees, nbytes, width, n_workers, rate)
    return found.level, found.n_slices


def test_all_levels_are_sliced_where_each_worker_has_a_value():
    assert chosen([4, 1], 4) == (0, 4)
    # With eight slices, the root would receive as much more as a level less.
    assert chosen([8, 2, 1], 8) == (0, 4)


def test_levels_with_a_task_for_each_worker_stay_whole():
    assert chosen([32, 8, 2, 1], 8) == (1, 4)
    assert chosen([64, 16, 4, 1], 4) == (2, 4)


def test_times_are_those_of_the_busiest_worker():
    found = choose([4, 1], 1, 100 * MB, 10**7, 4, 200 * MB)
    assert found.whole_s == pytest.approx(3 * 0.5)
    # Three quarters of a value in slices, three quarters of the result, and 21 tasks.
    assert found.seconds == pytest.approx(1.5 * 0.5, abs=0.011)


@pytest.mark.parametrize(
    "case",
    [
        {"n_values": [4, 1], "n_workers": 1},
        {"n_values": [4, 1], "n_workers": 0},
        {"n_values": [2, 1], "n_workers": 8},
        {"n_values": [32, 8, 2, 1], "n_workers": 2},
        {"n_values": [4, 1], "n_workers": 8, "n_trees": 8},
        {"n_values": [4, 1], "n_workers": 8, "width": 100},
        {"n_values": [1], "n_workers": 8},
    ],
    ids=str,
)
def test_a_tree_stays_whole(case):
    assert chosen(**case)[1] == 1


def test_several_trees_share_the_workers():
    assert chosen([4, 1], 8, n_trees=4) == (0, 2)


def test_many_workers_do_not_mean_many_tasks():
    """64 slices would be 5,500 tasks: 3 s for the scheduler. The bytes take 1 s."""
    level, n_slices = chosen([64, 16, 4, 1], 64, nbytes=400 * MB, rate=1250 * MB)
    assert level == 0 and 4 <= n_slices <= 16


@given(
    n_leaves=st.integers(1, 500),
    split=st.integers(2, 16),
    n_trees=st.integers(1, 20),
    n_workers=st.integers(0, 300),
    nbytes=st.integers(1 << 20, 1 << 34),
    rate=st.floats(1e6, 1e11),
)
def test_slices_are_worthwhile_and_not_too_small(n_leaves, split, n_trees, n_workers, nbytes, rate):
    n_values = [n_leaves]
    while n_values[-1] > 1:
        n_values.append(-(-n_values[-1] // split))
    found = choose(n_values, n_trees, nbytes, 10**6, n_workers, rate)
    assert found.seconds <= found.whole_s
    assert found.n_slices == 1 or found.n_slices * n_trees <= n_workers
    assert found.n_slices == 1 or nbytes // found.n_slices >= LEAST_SLICE_NBYTES
    if found.n_slices > 1:
        assert n_values[found.level] > 2
        assert n_values[found.level + 1] * n_trees < n_workers

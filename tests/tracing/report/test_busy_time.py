"""Unions of intervals, times at a limit, and amounts over time agree with a count on a grid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.tracing.report.busy_time import (
    Coverage,
    amount_over_time,
    busy_by_group,
    crowded,
)

#: Whole seconds, so that a grid of one second is exact.
INTERVALS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), min_size=1, max_size=12
)


def columns(intervals) -> tuple[np.ndarray, np.ndarray]:
    found = np.array(intervals, dtype=float)
    return found[:, 0], found[:, 1]


def open_at(intervals, second: int) -> int:
    return sum(start <= second < end for start, end in intervals)


@given(INTERVALS, st.integers(0, 20), st.integers(0, 20))
def test_coverage_is_the_union(intervals, a, b):
    covered = Coverage(*columns(intervals))
    a, b = sorted((a, b))
    assert covered.between(a, b) == sum(open_at(intervals, s) > 0 for s in range(a, b))
    assert covered.total_s == sum(open_at(intervals, s) > 0 for s in range(20))


@given(INTERVALS, st.integers(1, 4))
def test_crowded_time_has_enough_open_intervals(intervals, least):
    found = crowded(*columns(intervals), least)
    assert found.total_s == sum(open_at(intervals, s) >= least for s in range(20))


@given(st.lists(INTERVALS, min_size=1, max_size=4))
def test_busy_time_is_counted_for_each_group(groups):
    group = np.repeat(np.arange(len(groups)), [len(one) for one in groups])
    busy_s = busy_by_group(group, *columns([i for one in groups for i in one]), len(groups))
    assert busy_s.tolist() == [Coverage(*columns(one)).total_s for one in groups]


def test_a_wait_suspends_the_work_around_it():
    start_s, end_s = np.array([0.0, 1.0]), np.array([4.0, 2.0])
    busy_s = busy_by_group(np.zeros(2, int), start_s, end_s, 1, np.array([1, -1]))
    assert busy_s.tolist() == [3.0]


@given(INTERVALS)
def test_amounts_over_time_keep_their_sum(intervals):
    start_s, end_s = columns(intervals)
    amount = np.arange(1.0, len(start_s) + 1)
    found = amount_over_time(start_s, end_s, amount, np.linspace(0, 21, 22))
    assert found.sum() == pytest.approx(amount.sum())


def test_nothing_covers_nothing():
    empty = np.zeros(0)
    assert Coverage(empty, empty).between(0, 1) == 0
    assert crowded(empty, empty, 1).total_s == 0
    assert busy_by_group(np.zeros(0, int), empty, empty, 2).tolist() == [0, 0]

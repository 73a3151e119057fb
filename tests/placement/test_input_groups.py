"""Inputs of a shuffle that one task hands over."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement.input_groups import (
    MOST_INPUTS,
    MOST_NBYTES,
    TASKS_PER_THREAD,
    ShuffleInput,
    grouped,
)

HOLDERS = st.sampled_from(["", "a", "b", "gone"])
INPUTS = st.lists(
    st.builds(ShuffleInput, HOLDERS, st.integers(0, MOST_NBYTES * 2), st.booleans()), max_size=700
)
THREADS = st.integers(0, 8)


@given(INPUTS, THREADS)
def test_each_input_is_handed_over_once(inputs, n_threads):
    groups = grouped(inputs, n_threads)
    assert sorted(itertools.chain.from_iterable(groups)) == [*range(len(inputs))]
    assert all(group == sorted(group) for group in groups)
    assert groups == sorted(groups)


@given(INPUTS, THREADS)
def test_a_group_is_bounded(inputs, n_threads):
    for group in grouped(inputs, n_threads):
        chosen = [inputs[number] for number in group]
        assert len(group) <= MOST_INPUTS
        if len(group) > 1:
            assert len({one.holder for one in chosen}) == 1
            assert not any(one.is_alone for one in chosen)
            assert sum(one.nbytes for one in chosen) <= MOST_NBYTES


@pytest.mark.parametrize("n_threads", [1, 2, 7])
@pytest.mark.parametrize("n", [1, 31, 64, 500, 2000])
def test_each_thread_keeps_enough_tasks(n, n_threads):
    groups = grouped([ShuffleInput("a", 1)] * n, n_threads)
    assert len(groups) >= min(n, n_threads * TASKS_PER_THREAD)


def test_many_small_inputs_need_few_tasks():
    groups = grouped([ShuffleInput()] * 512, 2)
    assert [len(group) for group in groups] == [8] * 64
    assert groups[1] == [*range(8, 16)]


def test_inputs_of_a_worker_go_together():
    inputs = [ShuffleInput("ab"[number % 2], 10) for number in range(128)]
    groups = grouped(inputs, 2)
    assert groups[:2] == [[0, 2], [1, 3]]


def test_a_cluster_without_workers_may_grow():
    assert len(grouped([ShuffleInput()] * 40, 0)) == 40

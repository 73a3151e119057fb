"""Each eviction policy evicts values in its documented order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.memory.decisions.eviction_policy import POLICIES, EvictionCandidate


def candidate(
    next_use=None, *, nbytes=100, last_used=0, is_clean=False, made=0
) -> EvictionCandidate:
    return EvictionCandidate(nbytes, next_use, last_used, is_clean, made)


def eviction_order(policy: str, **candidates: EvictionCandidate) -> str:
    rank = POLICIES[policy].rank
    return " ".join(sorted(candidates, key=lambda name: rank(candidates[name]), reverse=True))


def test_values_without_a_known_use_leave_before_far_uses():
    order = eviction_order(
        "next-use",
        soon=candidate((0, 1, 3)),
        later=candidate((0, 1, 9)),
        next_graph=candidate((0, 2, 0)),
        urgent=candidate((-1, 5, 0)),
        unknown=candidate(),
    )
    assert order == "unknown next_graph later soon urgent"


def test_priorities_of_different_lengths_compare():
    order = eviction_order(
        "next-use",
        from_scheduler=candidate((0, 1, 3)),
        from_queue=candidate((0, 1, 3, -7)),
        later=candidate((0, 1, 4)),
    )
    assert order == "later from_queue from_scheduler"


def test_newest_clean_and_oldest_dirty_unused_values_leave_first():
    order = eviction_order(
        "next-use",
        old=candidate(made=1, last_used=2),
        recent=candidate(made=2, last_used=1),
        clean_old=candidate(last_used=3, is_clean=True),
        clean_recent=candidate(last_used=4, is_clean=True),
    )
    assert order == "clean_recent clean_old old recent"


def test_clean_value_leaves_before_a_dirty_one_of_the_same_use():
    order = eviction_order(
        "next-use", dirty=candidate((1,)), clean=candidate((1,), is_clean=True, last_used=9)
    )
    assert order == "clean dirty"


def test_lru_ranks_by_the_last_use_only():
    order = eviction_order(
        "lru",
        first=candidate(last_used=1, next_use=(0,)),
        second=candidate(last_used=2, is_clean=True),
        third=candidate(last_used=3, nbytes=10**9),
    )
    assert order == "first second third"


def test_largest_ranks_by_size_then_by_age():
    order = eviction_order(
        "largest",
        small=candidate(nbytes=1),
        old=candidate(nbytes=7, last_used=1),
        recent=candidate(nbytes=7, last_used=2),
    )
    assert order == "old recent small"


def test_policies_have_the_names_of_the_setting():
    assert {name: policy.name for name, policy in POLICIES.items()} == {
        "next-use": "next-use",
        "lru": "lru",
        "largest": "largest",
    }


candidates = st.builds(
    EvictionCandidate,
    st.integers(0, 2**40),
    st.none() | st.lists(st.integers(-3, 3), max_size=4).map(tuple),
    st.integers(0, 5),
    st.booleans(),
    st.integers(0, 5),
)


@pytest.mark.parametrize("policy", POLICIES)
@given(found=st.lists(candidates, max_size=6))
def test_any_two_ranks_compare(policy, found):
    for one, other in itertools.product(map(POLICIES[policy].rank, found), repeat=2):
        assert (one < other) + (one == other) + (one > other) == 1

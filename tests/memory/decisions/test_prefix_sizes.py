"""Output sizes of tasks are predicted from earlier outputs of their prefix."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.memory.decisions.prefix_sizes import PrefixSizes


def learnt(*sizes: int) -> int | None:
    known = PrefixSizes()
    for nbytes in sizes:
        known.learn("random_sample", nbytes)
    return known.expected("random_sample")


def test_unseen_group_has_no_expected_size():
    known = PrefixSizes()
    known.learn("sum", 8)
    assert known.expected("random_sample") is None


def test_outputs_of_one_size_are_expected_at_that_size():
    assert learnt(*[8_000_000] * 100) == 8_000_000


def test_sizes_that_vary_are_expected_high():
    random_ = random.Random(4)
    sizes = [max(0, int(random_.gauss(1_000_000, 100_000))) for _ in range(500)]
    known = PrefixSizes()
    covered = 0
    for nbytes in sizes:
        expected = known.expected("read_parquet")
        covered += expected is not None and nbytes <= expected
        known.learn("read_parquet", nbytes)
    assert covered >= 0.9 * len(sizes)
    assert known.expected("read_parquet") <= 1_400_000


def test_larger_of_two_output_sizes_is_expected():
    assert learnt(*[1_000, 9_000] * 50) == 9_000


def test_a_single_outlier_is_forgotten():
    assert learnt(10**9, *[1_000] * 150) < 2_000


def test_a_group_that_changes_its_size_is_followed():
    assert learnt(*[1_000] * 100, *[50_000] * 20) >= 50_000
    assert learnt(*[50_000] * 100, *[1_000] * 100) < 2_000


def test_prefixes_do_not_mix():
    known = PrefixSizes()
    known.learn("one", 1)
    known.learn("two", 2)
    assert (known.expected("one"), known.expected("two")) == (1, 2)


def test_level_of_outputs_is_learnt_and_replaces_the_previous():
    known = PrefixSizes()
    assert known.top_level("map") == 0
    known.learn("map", 100)
    known.learn("map", 7, top_level=1)
    assert (known.top_level("map"), known.expected("map")) == (1, 7)
    known.learn("map", 9)
    assert (known.top_level("map"), known.expected("map")) == (0, 9)


def test_least_recently_used_group_is_forgotten():
    known = PrefixSizes(max_prefixes=3)
    for prefix in "abc":
        known.learn(prefix, 1)
    known.expected("a")
    known.learn("b", 1)
    known.learn("d", 1)
    assert [known.expected(prefix) for prefix in "abcd"] == [1, 1, None, 1]
    assert len(known) == 3


def test_invalid_sizes_are_refused():
    with pytest.raises(ValueError, match="-1 bytes"):
        PrefixSizes().learn("sum", -1)
    with pytest.raises(ValueError, match="at least 1"):
        PrefixSizes(max_prefixes=0)


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=50))
def test_expected_size_lies_within_the_seen_sizes(sizes):
    # A mean of sizes beyond 2**53 would be rounded, but no real value is that large.
    assert min(sizes) <= learnt(*sizes) <= max(sizes)

"""The order in which values leave: whole where they are few, by samples where there are many."""

from __future__ import annotations

import random

import pytest

from dask_gpurt.memory.order import RANKED_AT_ONCE, Order


class Ranks:
    """Numbers are their own ranks; counts how often that is asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, value):
        self.asked += 1
        return value


def begun(*groups):
    order, ranks = Order(), Ranks()
    order.renew(groups, ranks)
    return order, ranks


def left(order):
    """Everything, as it would leave."""
    found = []
    while order.go_on():
        found.append(order.left.pop())
    return found


def shuffled(n):
    return random.Random(n).sample(range(n), n)


@pytest.mark.parametrize("n", [0, 1, 100, RANKED_AT_ONCE])
def test_few_leave_exactly_as_they_are_ranked(n):
    order, _ = begun(shuffled(n))
    assert left(order) == sorted(range(n), reverse=True)


def test_of_many_so_many_are_ranked_at_a_time_and_none_is_left_out():
    n = 3 * RANKED_AT_ONCE + 5
    order, ranks = begun(shuffled(n))
    asked = [ranks.asked]
    found = []
    while order.go_on():
        if ranks.asked != asked[-1]:
            asked.append(ranks.asked)
        found.append(order.left.pop())
    assert sorted(found) == list(range(n))
    batches = [end - first for first, end in zip([0, *asked[:-1]], asked, strict=True)]
    assert len(batches) == 4
    assert max(batches) <= RANKED_AT_ONCE
    assert sum(batches) == n


def test_those_that_leave_first_would_be_among_the_first_of_all():
    n = 10 * RANKED_AT_ONCE
    order, _ = begun(shuffled(n))
    first = [order.left.pop() for _ in range(RANKED_AT_ONCE // 16)]
    assert min(first) > n * 7 // 8


def test_a_group_leaves_before_the_next_whatever_its_ranks():
    few, many = shuffled(10), [value + 1000 for value in shuffled(2 * RANKED_AT_ONCE)]
    order, ranks = begun(few, many)
    assert ranks.asked == len(few)
    found = left(order)
    assert found[: len(few)] == sorted(few, reverse=True)
    assert sorted(found[len(few) :]) == sorted(many)


def test_an_empty_group_is_passed_over():
    order, _ = begun([], [1, 2])
    assert left(order) == [2, 1]


def test_another_sample_is_ranked_each_time():
    values = shuffled(3 * RANKED_AT_ONCE)
    order, ranks = Order(), Ranks()
    seen = set()
    for _ in range(3):
        order.renew([values], ranks)
        assert seen.isdisjoint(order.left)
        seen.update(order.left)
    assert seen == set(values)


@pytest.mark.parametrize("n", [160, 50 * RANKED_AT_ONCE])
def test_an_order_is_stale_once_a_share_of_what_was_ranked_has_changed(n):
    order, _ = begun(range(n))
    for _ in range(min(n, RANKED_AT_ONCE) // 16):
        order.changed()
    assert not order.is_stale(n)
    order.changed()
    assert order.is_stale(n)

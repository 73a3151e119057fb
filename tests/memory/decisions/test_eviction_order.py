"""The order of eviction is exact for few values, and approximated by samples for many."""

from __future__ import annotations

import random
from weakref import WeakSet

import pytest

from dask_gpurt.memory.decisions.eviction_order import RANKED_AT_ONCE, EvictionOrder


class Ranks:
    """A rank function that returns its argument and counts its calls."""

    def __init__(self):
        self.asked = 0

    def __call__(self, value):
        self.asked += 1
        return value


def begun(values):
    ranks = Ranks()
    order = EvictionOrder(ranks)
    for value in values:
        order.add(value)
    order.refresh()
    return order, ranks


def left(order):
    """Return all values in the order of eviction."""
    found = []
    while order.rank_more():
        found.append(order.ranked.pop())
    return found


def shuffled(n):
    return random.Random(n).sample(range(n), n)


@pytest.mark.parametrize("n", [0, 1, 100, RANKED_AT_ONCE])
def test_few_values_leave_exactly_in_their_ranked_order(n):
    order, _ = begun(shuffled(n))
    assert left(order) == sorted(range(n), reverse=True)


def test_many_values_are_ranked_in_batches_without_a_gap():
    n = 3 * RANKED_AT_ONCE + 5
    order, ranks = begun(shuffled(n))
    asked = [ranks.asked]
    found = []
    while order.rank_more():
        if ranks.asked != asked[-1]:
            asked.append(ranks.asked)
        found.append(order.ranked.pop())
    assert sorted(found) == list(range(n))
    batches = [end - first for first, end in zip([0, *asked[:-1]], asked, strict=True)]
    assert len(batches) == 4
    assert max(batches) <= RANKED_AT_ONCE
    assert sum(batches) == n


def test_first_victims_rank_among_the_first_of_all():
    n = 10 * RANKED_AT_ONCE
    order, _ = begun(shuffled(n))
    first = [order.ranked.pop() for _ in range(RANKED_AT_ONCE // 16)]
    assert min(first) > n * 7 // 8


def test_values_added_later_leave_last():
    order, ranks = begun(shuffled(100))
    for late in (200, 300, 250):
        order.add(late)
    order.refresh()
    assert ranks.asked == 100
    assert left(order) == [*reversed(range(100)), 300, 250, 200]
    order.add(400)
    assert left(order) == [400]


@pytest.mark.parametrize("n_before", [0, 50, 3 * RANKED_AT_ONCE])
def test_removed_values_are_not_kept_by_the_order(n_before):
    order, _ = begun(range(n_before))
    gone = WeakSet()
    for _ in range(5_000):
        value = Value()
        order.add(value)
        order.remove(value)
        gone.add(value)
    del value
    assert len(gone) <= RANKED_AT_ONCE // 16
    order.ranked = []
    order.refresh()
    assert not gone


class Value:
    pass


def test_another_sample_is_ranked_each_time():
    order, _ = begun(shuffled(3 * RANKED_AT_ONCE))
    seen = set(order.ranked)
    for _ in range(2):
        order.ranked = []
        order.refresh()
        assert seen.isdisjoint(order.ranked)
        seen.update(order.ranked)
    assert seen == set(range(3 * RANKED_AT_ONCE))


@pytest.mark.parametrize("n", [160, 50 * RANKED_AT_ONCE])
@pytest.mark.parametrize("change", ["changed", "add"])
def test_order_is_renewed_after_a_share_of_it_has_changed(n, change):
    order, ranks = begun(range(n))
    values = iter(range(n, 2 * n))
    asked = ranks.asked
    for _ in range(min(n, RANKED_AT_ONCE) // 16):
        getattr(order, change)(*() if change == "changed" else (next(values),))
    order.refresh()
    assert ranks.asked == asked
    getattr(order, change)(*() if change == "changed" else (next(values),))
    order.refresh()
    assert ranks.asked > asked

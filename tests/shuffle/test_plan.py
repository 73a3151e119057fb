"""The plan sends every row to exactly one slot of exactly one owner, and cuts slots into shards."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.shuffle.plan import SHARD_TARGET_NBYTES, ExchangePlan, cut_shards

WORKERS = ["tcp://a:1", "tcp://b:2", "tcp://c:3", "tcp://d:4"]

deterministic = settings(derandomize=True, max_examples=200)
owner_maps = st.dictionaries(st.integers(0, 60), st.sampled_from(WORKERS), max_size=30)


# ------------------------------------------------------------------ slots


@deterministic
@given(owner_maps)
def test_slots_enumerate_the_wanted_partitions(worker_for):
    plan = ExchangePlan(worker_for)
    assert plan.n_slots == len(worker_for)
    assert sorted(plan.partitions) == sorted(worker_for)
    assert plan.slot_of == {p: slot for slot, p in enumerate(plan.partitions)}


@deterministic
@given(owner_maps)
def test_partitions_of_a_worker_are_adjacent_and_ascending(worker_for):
    plan = ExchangePlan(worker_for)
    for worker in plan.workers:
        first, end = plan.slots_of_worker[worker]
        mine = sorted(p for p, owner in worker_for.items() if owner == worker)
        assert list(plan.partitions[first:end]) == mine


@deterministic
@given(owner_maps)
def test_worker_ranges_cover_all_slots_in_order(worker_for):
    plan = ExchangePlan(worker_for)
    assert set(plan.workers) == set(worker_for.values())
    assert list(plan.slots_of_worker) == list(plan.workers)
    ranges = [plan.slots_of_worker[worker] for worker in plan.workers]
    bounds = [0, *(end for _, end in ranges)]
    assert ranges == list(pairwise(bounds))
    assert bounds[-1] == plan.n_slots


@deterministic
@given(st.permutations(range(12)))
def test_the_plan_does_not_depend_on_the_order_of_the_owner_map(order):
    owners = {p: WORKERS[p * 7 % 3] for p in range(12)}
    plan = ExchangePlan({p: owners[p] for p in order})
    expected = ExchangePlan(owners)
    assert plan.partitions == expected.partitions
    assert plan.workers == expected.workers


def test_slots_of_a_small_plan():
    plan = ExchangePlan({0: "a", 1: "b", 2: "a", 5: "b"})
    assert plan.partitions == (0, 2, 1, 5)
    assert plan.workers == ("a", "b")
    assert plan.slots_of_worker == {"a": (0, 2), "b": (2, 4)}


def test_plan_without_partitions_has_no_slots():
    plan = ExchangePlan({})
    assert plan.n_slots == 0
    assert plan.workers == ()
    assert plan.slots_of_worker == {}
    assert plan.slots(np.array([0, 1, -1])).tolist() == [-1, -1, -1]


# ------------------------------------------------------------------ the slot of each row


def _expected(plan, numbers):
    return [plan.slot_of.get(number, -1) for number in numbers]


@deterministic
@given(owner_maps, st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 65), max_size=40))
def test_each_row_gets_its_slot(worker_for, numbers):
    plan = ExchangePlan(worker_for)
    slots = plan.slots(np.array(numbers, dtype=np.int64))
    assert slots.dtype == np.intp
    assert slots.tolist() == _expected(plan, numbers)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_slots_do_not_depend_on_the_number_type(dtype):
    plan = ExchangePlan({0: "b", 1: "a", 3: "b", 100: "a"})
    numbers = [0, 1, 2, 3, 100, 101, 127]
    assert plan.slots(np.array(numbers, dtype=dtype)).tolist() == _expected(plan, numbers)


# There is a fast path if slots equal partitions; the tests below cover both paths.
PLANS = [
    pytest.param(ExchangePlan(dict.fromkeys(range(4), "a")), id="slots-are-partitions"),
    pytest.param(ExchangePlan({0: "a", 1: "b", 2: "a", 3: "b"}), id="slots-are-permuted"),
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", ["i1", "i4", "i8", "f8"])
def test_negative_and_out_of_range_numbers_have_no_slot(plan, dtype):
    slots = plan.slots(np.array([-1, 2, -4, -128, 4, 5, 127], dtype=dtype))
    assert slots.tolist() == [-1, plan.slot_of[2], -1, -1, -1, -1, -1]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("stranger", "side"), [(-2, "below"), (4, "above")])
def test_numbers_next_to_the_range_have_no_slot(plan, stranger, side):
    slots = plan.slots(np.array([0, 3, stranger, 1]))
    assert slots.tolist() == [plan.slot_of[0], plan.slot_of[3], -1, plan.slot_of[1]], side


@pytest.mark.parametrize("plan", PLANS)
def test_extreme_signed_numbers_have_no_slot(plan):
    limits = np.iinfo(np.int64)
    slots = plan.slots(np.array([limits.min, limits.max, 1], dtype=np.int64))
    assert slots.tolist() == [-1, -1, plan.slot_of[1]]


@pytest.mark.parametrize("plan", PLANS)
def test_large_unsigned_numbers_do_not_wrap_around(plan):
    # As int64 these are -1, -(2**63) and, plus four, a partition that exists.
    huge = [2**64 - 1, 2**63, 2**64 - 4, 2**63 + 1]
    slots = plan.slots(np.array([*huge, 3], dtype=np.uint64))
    assert slots.tolist() == [-1, -1, -1, -1, plan.slot_of[3]]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.filterwarnings("error")
def test_special_floats_have_no_slot(plan):
    values = [np.nan, np.inf, -np.inf, 0.5, 2.0000001, -0.5, 1e300, -1e300, 2.0**63, 4.0, 2.0, -0.0]
    expected = [-1] * 10 + [plan.slot_of[2], plan.slot_of[0]]
    assert plan.slots(np.array(values)).tolist() == expected


@pytest.mark.parametrize("plan", PLANS)
def test_objects_with_missing_values_get_slots(plan):
    slots = plan.slots(np.array([1, None, 3.0, np.nan, True], dtype=object))
    assert slots.tolist() == [plan.slot_of[1], -1, plan.slot_of[3], -1, plan.slot_of[1]]


@pytest.mark.parametrize("plan", PLANS)
def test_booleans_are_zero_and_one(plan):
    slots = plan.slots(np.array([True, False]))
    assert slots.tolist() == [plan.slot_of[1], plan.slot_of[0]]


@pytest.mark.parametrize("plan", [*PLANS, pytest.param(ExchangePlan({}), id="empty-plan")])
@pytest.mark.parametrize("dtype", ["i8", "u8", "f8", "?", "O"])
def test_no_rows_give_no_slots(plan, dtype):
    slots = plan.slots(np.array([], dtype=dtype))
    assert slots.dtype == np.intp
    assert slots.shape == (0,)


def test_rows_of_culled_partitions_are_dropped():
    plan = ExchangePlan({1: "a", 4: "b"})
    assert plan.slots(np.array([0, 1, 2, 3, 4, 5])).tolist() == [-1, 0, -1, -1, 1, -1]


def test_the_partition_numbers_are_not_changed():
    numbers = np.array([0, 1, 7, -2])
    ExchangePlan({0: "a", 1: "b"}).slots(numbers)
    assert numbers.tolist() == [0, 1, 7, -2]


# ------------------------------------------------------------------ cuts

row_counts = st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 17, 100]), max_size=40)
row_sizes = st.sampled_from([0.0, 0.25, 1.0, 8.0, 33.3, 1000.0])
targets = st.sampled_from([1, 10, 100, 1000])


def _cut(counts, row_nbytes, target_nbytes):
    return cut_shards([0, *accumulate(counts)], row_nbytes, target_nbytes)


@deterministic
@given(row_counts, row_sizes, targets)
def test_every_slot_with_rows_is_in_exactly_one_shard(counts, row_nbytes, target):
    cuts = _cut(counts, row_nbytes, target)
    covered = [slot for first, end in cuts for slot in range(first, end)]
    assert covered == sorted(set(covered))
    missed = set(range(len(counts))) - set(covered)
    assert all(counts[slot] == 0 for slot in missed)


@deterministic
@given(row_counts, row_sizes, targets)
def test_shard_boundaries_are_non_empty_slots(counts, row_nbytes, target):
    for first, end in _cut(counts, row_nbytes, target):
        assert first < end
        assert counts[first] and counts[end - 1]


@deterministic
@given(row_counts, row_sizes, targets)
def test_shard_is_at_least_half_full_and_ends_at_the_target(counts, row_nbytes, target):
    cuts = _cut(counts, row_nbytes, target)
    nbytes = max(row_nbytes, 1.0)
    limit = max(target, nbytes)
    for number, (first, end) in enumerate(cuts):
        before_last = sum(counts[first : end - 1]) * nbytes
        assert before_last < limit, "went on although it was full"
        whole = before_last + counts[end - 1] * nbytes
        if number + 1 < len(cuts) and whole < limit * (1 - 1e-9):
            assert whole >= limit / 2 * (1 - 1e-9), "closed although it was not half full"
            next_slot = cuts[number + 1][0]
            assert whole + counts[next_slot] * nbytes > limit * (1 - 1e-9), "the next one fits"
        if end - first > 1 and whole > limit * (1 + 1e-9):
            assert before_last < limit / 2 * (1 + 1e-9), "went on although it was half full"


def test_cuts_of_a_small_example():
    cuts = _cut([0, 3, 0, 3, 4, 0, 50, 0, 1, 0], row_nbytes=2.0, target_nbytes=12)
    assert cuts == [(1, 4), (4, 5), (6, 7), (8, 9)]


def test_running_totals_may_begin_above_zero():
    """A worker's part of the running total does not begin at zero."""
    assert cut_shards([70, 80, 80, 90], 1.0, 10) == [(0, 1), (2, 3)]


def test_slot_larger_than_the_target_is_not_divided():
    assert _cut([1_000_000], 1000.0, 10) == [(0, 1)]


def test_rows_larger_than_the_target_get_one_shard_per_slot():
    assert _cut([1, 1, 2], row_nbytes=1e9, target_nbytes=1000) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]])
def test_no_rows_give_no_shards(counts):
    assert _cut(counts, 8.0, 100) == []


def test_default_shard_target():
    rows = SHARD_TARGET_NBYTES // 8
    before = [0, rows - 1, rows, rows + 1]
    assert cut_shards(before, 8.0) == [(0, 2), (2, 3)]


def test_neighbouring_slots_are_read_in_sequence():
    plan = ExchangePlan({0: "a", 1: "a", 2: "b", 3: "a", 4: "b"}, read_order=[3, 4, 0, 2])
    # Unread partitions come last; the partitions of each worker stay together.
    assert plan.partitions == (3, 0, 1, 4, 2)
    assert plan.slots_of_worker == {"a": (0, 3), "b": (3, 5)}
    assert plan.slots(np.array([4, 0, 3, 9])).tolist() == [3, 1, 0, -1]

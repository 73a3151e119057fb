"""Residency decides on eviction, prefetch and admission by its documented rules."""

from __future__ import annotations

import pytest

from dask_gpurt.memory.decisions.admission import Admission
from dask_gpurt.memory.decisions.eviction_order import RANKED_AT_ONCE
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.levels import Level
from dask_gpurt.memory.decisions.moves import Drop, Load, Put
from dask_gpurt.memory.decisions.residency import (
    AHEAD_SHARE,
    MAX_MOVES,
    MAX_PASSED,
    SMALL_NBYTES,
    Residency,
)

MEMORY, PINNED, DISK = 0, 1, 2


def two_levels(capacity, policy="lru", uses=None):
    uses = uses if uses is not None else {}
    return Residency(
        [Level("memory", capacity), Level("disk")], {0: (1,)}, POLICIES[policy], uses.get
    )


def settle(residency, fail=()):
    """Carry out all due moves at once; return them."""
    done = []
    moves = residency.due()
    while moves:
        for move in moves:
            done.append(move)
            if isinstance(move, Put):
                if move.key in fail:
                    residency.put_failed(move)
                else:
                    residency.put_done(move, residency.values[move.key].nbytes)
            elif isinstance(move, Load):
                residency.load_done(move)
        moves = residency.take_moves() + residency.due()
    return done


def where(residency):
    return {key: sorted(value.copies) for key, value in residency.values.items()}


def test_nothing_moves_while_there_is_room():
    residency = two_levels(100)
    for key in "abc":
        residency.insert(key, 30)
    assert residency.due() == []


def test_above_the_mark_the_least_recently_used_leaves():
    residency = two_levels(100)
    for key in "abcd":
        residency.insert(key, 30)
    residency.touch("a")
    moves = settle(residency)
    assert [(type(move), move.key) for move in moves] == [(Put, "b"), (Drop, "b")]
    assert where(residency) == {"a": [0], "b": [1], "c": [0], "d": [0]}


def test_a_clean_value_leaves_without_a_write():
    residency = two_levels(100)
    for key in "abcd":
        residency.insert(key, 30)
    settle(residency)
    residency.remove("d")
    residency.take_moves()
    assert residency.load(residency.values["a"])
    settle(residency)
    assert where(residency)["a"] == [0, 1]
    residency.touch("b")
    residency.touch("c")
    residency.insert("e", 30)
    assert settle(residency) == [Drop("a", 1, MEMORY)]
    assert where(residency)["a"] == [1]


def test_room_is_made_in_advance_only_where_it_needs_a_write():
    residency = two_levels(100)
    for key in "abcdefghij":
        residency.insert(key, 10)
    residency.insert("x", 7)
    # The level holds 107 bytes, and evicts until 95 are left.
    assert {move.key for move in settle(residency)} == {"a", "b"}
    residency.remove("x")
    for key in "ab":
        assert residency.load(residency.values[key])
    settle(residency)
    for key in "cdefghij":
        residency.touch(key)
    residency.insert("y", 6)
    # The other copy can be dropped at once when its room is needed.
    assert settle(residency) == [Drop("a", 1, MEMORY)]
    assert residency.levels[MEMORY].used_nbytes == 96


@pytest.mark.parametrize("still_runs", [True, False])
def test_a_copy_made_while_a_task_had_the_value_is_useless(still_runs):
    """The task may have changed it: a part of the copy would be old, and another part new."""
    residency = two_levels(50)
    value = residency.insert("a", 30)
    residency.insert("b", 30)
    (move,) = residency.due()
    assert move.key == "a"
    residency.pin(value)
    if not still_runs:
        residency.unpin(value)
    assert not residency.put_done(move, 30)
    assert where(residency)["a"] == [0]
    assert (residency.levels[0].leaving_nbytes, residency.levels[1].used_nbytes) == (0, 0)
    if still_runs:
        # Meanwhile, the other value is evicted.
        assert [move.key for move in settle(residency)] == ["b", "b"]
        residency.unpin(value)
    # Now it is written again.
    assert residency.evict_first(0, 2) >= 30
    assert Put("a", value.serial, 0, 1) in residency.take_moves()


def test_unused_value_leaves_first_then_the_furthest_use():
    uses = {"a": (0, 5), "b": (0, 9), "c": (0, 7)}
    residency = two_levels(100, "next-use", uses)
    for key in "abcd":
        residency.insert(key, 25)
    residency.insert("e", 25)
    assert settle(residency)[0].key in "de"
    del uses["c"]
    residency.insert("f", 25)
    assert "b" not in [key for key, levels in where(residency).items() if levels == [1]]


def test_copy_of_a_removed_value_is_discarded():
    residency = two_levels(50)
    residency.insert("a", 30)
    residency.insert("b", 30)
    (move,) = residency.due()
    residency.remove("a")
    residency.insert("a", 10)
    assert not residency.put_done(move, 30)
    assert where(residency)["a"] == [0]
    assert residency.levels[0].leaving_nbytes == 0


def test_a_blocked_tier_is_left_alone_until_retried():
    residency = two_levels(50)
    residency.insert("a", 30)
    residency.insert("b", 30)
    settle(residency, fail={"a", "b"})
    assert where(residency) == {"a": [0], "b": [0]}
    assert residency.due() == []
    residency.retry()
    settle(residency)
    assert where(residency)["a"] == [1]


def full(residency):
    """Let all due puts find a full tier; return their number."""
    moves = [move for move in residency.due() if isinstance(move, Put)]
    for move in moves:
        residency.put_failed(move, is_full=True)
    return len(moves)


def test_a_full_tier_is_tried_less_and_less_often():
    residency = two_levels(50)
    residency.insert("a", 80)
    tried_s = []
    for tenth in range(200):
        residency.retry(tenth / 10)
        if full(residency):
            tried_s.append(tenth / 10)
    # Each failure is noticed at the next retry.
    assert tried_s == [0.0, 1.1, 3.2, 7.3, 15.4]


def test_a_full_tier_is_tried_at_once_when_it_has_room():
    residency = two_levels(50)
    residency.insert("b", 30)
    residency.insert("a", 30)
    (settled,) = settle(residency)[:1]
    residency.insert("c", 80)
    # After the third failure, the tier would not be tried for four seconds.
    for now_s in (0.0, 0.1, 1.2, 1.3, 3.4, 3.5):
        residency.retry(now_s)
        assert bool(full(residency)) == (now_s in (0.0, 1.2, 3.4))
    residency.remove(settled.key)
    assert full(residency)
    # After the removal and one failure, it is not tried for one second.
    residency.retry(3.6)
    assert not full(residency)
    residency.retry(4.7)
    assert full(residency)


def test_writes_in_flight_are_bounded():
    residency = two_levels(10)
    for number in range(100):
        residency.insert(number, 10)
    assert len(residency.due()) == MAX_MOVES


def test_number_of_queried_uses_is_bounded():
    asked = []
    n = 4 * RANKED_AT_ONCE
    residency = Residency(
        [Level("memory", (n - 1) * SMALL_NBYTES), Level("disk")],
        {0: (1,)},
        POLICIES["next-use"],
        lambda key: asked.append(key) or (key,),
    )
    for key in range(n):
        residency.insert(key, SMALL_NBYTES)
    moves = residency.due()
    assert len(moves) == MAX_MOVES
    assert len(asked) <= RANKED_AT_ONCE
    # The first values of a random sample are nearly the first of all values.
    assert min(move.key for move in moves) > n * 0.99


def test_of_very_many_values_small_ones_leave_last():
    n = 2 * RANKED_AT_ONCE
    residency = two_levels(n + 10 * SMALL_NBYTES)
    for key in range(n):
        residency.insert(key, 1)
    for key in range(n, n + 11):
        residency.insert(key, SMALL_NBYTES)
    moves = settle(residency)
    assert moves
    assert all(move.key >= n for move in moves)


def test_clean_value_is_dropped_while_all_writes_are_busy():
    uses = {}
    residency = two_levels(None, "next-use", uses)
    n = MAX_MOVES + MAX_PASSED + 10
    # Writes of the first values will begin. Two of the values after them have copies below.
    near, far = MAX_MOVES + 2, n - 1
    for key in range(n):
        uses[key] = (n - key,)
        if key in (near, far):
            residency.load(residency.insert(key, SMALL_NBYTES, level=1))
            residency.load_done(*residency.take_moves())
        else:
            residency.insert(key, SMALL_NBYTES)
    residency.levels[MEMORY].capacity_nbytes = 0
    moves = residency.due()
    puts, drops = moves[:MAX_MOVES], moves[MAX_MOVES:]
    assert [type(move) for move in puts] == [Put] * MAX_MOVES
    assert [move.key for move in drops] == [near]
    # The other value with a copy leaves together with values before it.
    while puts:
        for move in puts:
            residency.put_done(move, SMALL_NBYTES)
        puts = [move for move in residency.due() if isinstance(move, Put)]
    assert all(not value.in_memory for value in residency.values.values())


def test_values_sink_through_the_tiers():
    levels = [Level("memory", 60), Level("pinned", 60), Level("disk")]
    residency = Residency(levels, {0: (1, 2)}, POLICIES["lru"])
    for number in range(6):
        residency.insert(number, 25)
        settle(residency)
    # Each of the upper levels has room for two values, and the oldest are on disk.
    assert where(residency) == {
        0: [DISK],
        1: [DISK],
        2: [PINNED],
        3: [PINNED],
        4: [MEMORY],
        5: [MEMORY],
    }


def test_a_copy_that_a_read_has_dropped_is_not_the_last_one():
    """A load fails for the same copy, which was damaged. The disk has the value."""
    levels = [Level("memory", 60), Level("pinned", 60), Level("disk")]
    residency = Residency(levels, {0: (1, 2)}, POLICIES["lru"])
    value = residency.insert("a", 10, level=1)
    residency.load(value)
    (move, *_) = residency.take_moves()
    value.copies[2] = 10
    assert residency.drop_copy(value, 1)
    assert residency.load_failed(move)
    assert value.copies == {2: 10}


def test_prefetch_takes_free_room_or_room_of_later_values():
    uses = {key: (0, number) for number, key in enumerate("abcdefgh")}
    residency = two_levels(190, "next-use", uses)
    for key in "hgfedcba":
        residency.insert(key, 40)
    settle(residency)
    cold = {key for key, levels in where(residency).items() if 0 not in levels}
    assert cold == set("efgh")
    # All values in memory are needed sooner than the spilled ones.
    residency.load_ahead("efgh")
    assert not [move for move in residency.take_moves() if isinstance(move, Load)]
    for key in "ab":
        residency.remove(key)
    residency.take_moves()
    residency.load_ahead("efgh")
    assert [move.key for move in residency.take_moves()] == ["e"]
    # A second value would exceed the share. The first may exceed it, or no large one could move.
    assert residency.levels[0].reserved_nbytes == 40 > AHEAD_SHARE * 190


def test_claim_waits_for_room_but_the_first_not_for_ever():
    residency = two_levels(100)
    admission = Admission(residency)
    for key in "abc":
        residency.insert(key, 30)
    first = admission.request("x", ["a"], 60, (0, 1))
    second = admission.request("y", ["b"], 60, (0, 2))
    assert admission.due() == []
    settle(residency)  # other values are written, which makes room
    assert admission.due() == [first]
    assert not second.is_admitted
    residency.insert("out", 60)
    admission.end(first)
    residency.remove("a")
    while not admission.due():
        assert settle(residency)
    assert second.is_ready
    third = admission.request("z", [], 1000, (0, 3))
    assert not admission.due()
    admission.end(second)
    settle(residency)
    while not admission.due():
        settle(residency)
    assert third.is_ready
    assert admission.overcommitted == 1


def test_nested_tasks_start_one_by_one_after_the_patience_time():
    admission = Admission(two_levels(100))
    outer = admission.request("outer", [], 90, (0, 0))
    inner = [admission.request(number, [], 40, (1, number)) for number in range(3)]
    assert outer.is_ready
    assert admission.due() == []
    assert admission.force_progress()
    for claim in inner:
        assert admission.due() == [claim]
        # A running task will free its room when it ends.
        assert admission.due() == []
        admission.end(claim)
    assert not admission.force_progress()
    admission.end(outer)
    # Ended claims leave nothing behind.
    first = admission.request("first", [], 90, (2, 0))
    admission.request("second", [], 90, (2, 1))
    assert admission.running == {first}
    assert admission.due() == []


def test_subtasks_start_beside_a_task_that_waits_for_them():
    admission = Admission(two_levels(100))
    outer = admission.request("outer", [], 90, (0, 0))
    inner = [admission.request(number, [], 40, (1, number)) for number in range(2)]
    admission.may_wait(outer)
    assert admission.due() == [inner[0]]
    assert admission.due() == []
    admission.end(outer)
    # A call for an ended claim has the effect of one for a running claim.
    admission.may_wait(outer)
    assert admission.due() == [inner[1]]
    third = admission.request("third", [], 90, (2, 0))
    assert admission.due() == []
    for claim in inner:
        admission.end(claim)
    assert admission.due() == [third]


def test_forcibly_started_task_may_itself_wait():
    admission = Admission(two_levels(100))
    claims = [admission.request(number, [], 90, (0, number)) for number in range(4)]
    for nested in claims[1:]:
        assert admission.due() == []
        assert admission.force_progress()
        assert admission.due() == [nested]
    for claim in claims[::-1]:
        admission.end(claim)
    assert not admission.running


def test_at_most_two_tasks_of_four_tenths_run_at_once():
    residency = two_levels(100)
    admission = Admission(residency)
    claims = [admission.request(n, [], 40, (n,)) for n in range(6)]
    most = 0
    while any(not claim.is_ready for claim in claims):
        admission.due()
        most = max(most, len(admission.running))
        for claim in [*admission.running][:1]:
            admission.end(claim)
    assert most == 2


def test_a_lost_input_does_not_hold_its_task():
    residency = two_levels(100)
    admission = Admission(residency)
    residency.insert("a", 10, level=1)
    claim = admission.request("x", ["a"], 0, ())
    assert admission.due() == []
    (move,) = residency.take_moves()
    assert not residency.load_failed(move)
    admission.mark_lost("a")
    residency.remove("a")
    assert admission.due() == [claim]
    assert claim.lost == {"a"}


@pytest.mark.parametrize("n_small", [0, 500, 2 * RANKED_AT_ONCE])
@pytest.mark.parametrize("may_leave", [True, False], ids=["may leave", "may not leave"])
def test_many_small_values_do_not_delay_large_evictions(n_small, may_leave):
    room = 10 * SMALL_NBYTES
    residency = two_levels(n_small + room)
    for number in range(n_small):
        value = residency.insert(("small", number), 1)
        if not may_leave:
            value.refused.add(1)
    for number in range(100):
        residency.insert(number, SMALL_NBYTES)
        while moves := residency.due():
            for move in moves:
                if isinstance(move, Put):
                    assert not isinstance(move.key, tuple)
                    residency.put_done(move, SMALL_NBYTES)
                    residency.take_moves()
        assert residency.levels[0].used_nbytes <= n_small + room


@pytest.mark.parametrize("how", ["the disk is full", "the disk refuses all values"])
def test_decisions_are_quick_if_nothing_can_be_evicted(how, monkeypatch):
    looked_at, evict = [], Residency._evict

    def counted(residency, value, *args, **kwargs):
        looked_at.append(value)
        return evict(residency, value, *args, **kwargs)

    monkeypatch.setattr(Residency, "_evict", counted)
    residency = two_levels(1_000)
    for number in range(100):
        residency.insert(number, 30)
    refused = {1} if how == "the disk refuses all values" else ()
    while moves := residency.due():
        for move in moves:
            residency.put_failed(move, refused, is_full=not refused)
    looked_at.clear()
    for number in range(100, 110):
        residency.insert(number, 30)
        for move in residency.due():
            residency.put_failed(move, refused)
        assert not residency.evict_now(0, 30)
    assert len(looked_at) <= 2 * 10


def test_evicting_many_looks_at_each_value_once(monkeypatch):
    looked_at, may_leave = [], Residency._may_leave

    def counted(residency, value, number):
        looked_at.append(value.key)
        return may_leave(residency, value, number)

    monkeypatch.setattr(Residency, "_may_leave", counted)
    residency = two_levels(None)
    for number in range(1_000):
        residency.insert(number, 30)
    residency.pin(residency.values[0])
    assert residency.evict_first(0, 400) == 400 * 30
    assert len(residency.take_moves()) == 400
    assert len(looked_at) <= 401
    # No value is left but the pinned one.
    assert residency.evict_first(0, 1_000) == 599 * 30


def test_a_clean_value_leaves_although_the_disk_is_full():
    residency = two_levels(100)
    for key in "abcdef":
        residency.insert(key, 30)
    while moves := residency.due():
        for move in moves:
            if isinstance(move, Put) and move.key == "b":
                assert residency.put_done(move, 30)
            elif isinstance(move, Put):
                residency.put_failed(move, is_full=True)
    assert where(residency)["b"] == [1]
    assert residency.load(residency.values["b"])
    (move,) = residency.take_moves()
    assert residency.load_done(move)
    residency.levels[1].is_blocked = True
    assert settle(residency) == [Drop("b", move.serial, MEMORY)]

"""Decisions on residency: invariants under random histories, and what each rule says."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from dask_gpurt.memory.decisions.admission import Admission
from dask_gpurt.memory.decisions.eviction_order import RANKED_AT_ONCE
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.moves import Drop, Load, Put
from dask_gpurt.memory.decisions.residency import (
    AHEAD_SHARE,
    MAX_MOVES,
    MAX_PASSED,
    SMALL_NBYTES,
    Level,
    Residency,
)

MEMORY, PINNED, DISK = 0, 1, 2


def two_levels(capacity, policy="lru", uses=None):
    uses = uses if uses is not None else {}
    return Residency(
        [Level("memory", capacity), Level("disk")], {0: (1,)}, POLICIES[policy], uses.get
    )


def settle(residency, fail=()):
    """Carry out everything that is due, at once; returns the moves."""
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


def test_room_is_made_ahead_of_need_only_where_that_takes_a_write():
    residency = two_levels(100)
    for key in "abcdefghij":
        residency.insert(key, 10)
    residency.insert("x", 7)
    # 107 bytes, and 95 are aimed at.
    assert {move.key for move in settle(residency)} == {"a", "b"}
    residency.remove("x")
    for key in "ab":
        assert residency.load(residency.values[key])
    settle(residency)
    for key in "cdefghij":
        residency.touch(key)
    residency.insert("y", 6)
    # The other one can go at once when its room is needed.
    assert settle(residency) == [Drop("a", 1, MEMORY)]
    assert residency.levels[MEMORY].used_nbytes == 96


def test_a_pinned_value_stays_and_its_copy_serves_later():
    residency = two_levels(50)
    value = residency.insert("a", 30)
    residency.insert("b", 30)
    (move,) = residency.due()
    assert move.key == "a"
    residency.pin(value)
    assert residency.put_done(move, 30)
    assert where(residency)["a"] == [0, 1]
    # The other one goes instead.
    assert [move.key for move in settle(residency)] == ["b", "b"]
    residency.unpin(value)
    residency.insert("c", 30)
    assert settle(residency) == [Drop("a", 1, MEMORY)]


def test_furthest_use_leaves_first_and_no_use_before_it():
    uses = {"a": (0, 5), "b": (0, 9), "c": (0, 7)}
    residency = two_levels(100, "next-use", uses)
    for key in "abcd":
        residency.insert(key, 25)
    residency.insert("e", 25)
    assert settle(residency)[0].key in "de"
    del uses["c"]
    residency.insert("f", 25)
    assert "b" not in [key for key, levels in where(residency).items() if levels == [1]]


def test_a_copy_of_a_value_that_is_gone_is_of_no_use():
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
    """Everything that is due finds no room; returns how many tried."""
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
    # Each failure is seen at the look after it.
    assert tried_s == [0.0, 1.1, 3.2, 7.3, 15.4]


def test_a_full_tier_is_tried_at_once_when_it_has_room():
    residency = two_levels(50)
    residency.insert("b", 30)
    residency.insert("a", 30)
    (settled,) = settle(residency)[:1]
    residency.insert("c", 80)
    # The third time: it would be left alone for four seconds.
    for now_s in (0.0, 0.1, 1.2, 1.3, 3.4, 3.5):
        residency.retry(now_s)
        assert bool(full(residency)) == (now_s in (0.0, 1.2, 3.4))
    residency.remove(settled.key)
    assert full(residency)
    # And then for one.
    residency.retry(3.6)
    assert not full(residency)
    residency.retry(4.7)
    assert full(residency)


def test_few_writes_are_under_way_at_once():
    residency = two_levels(10)
    for number in range(100):
        residency.insert(number, 10)
    assert len(residency.due()) == MAX_MOVES


def test_of_very_many_values_only_so_many_are_asked_for_their_use():
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
    # The first of a fair sample are the first of all, more or less.
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


def test_while_writes_are_as_many_as_may_be_a_copy_is_looked_for_among_the_first_to_leave():
    uses = {}
    residency = two_levels(None, "next-use", uses)
    n = MAX_MOVES + MAX_PASSED + 10
    # Writes of the first to leave will begin; of those after them two have copies.
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
    # The other one has its turn with those before it.
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
    # Two fit into each of the upper levels, and the oldest are at the bottom.
    assert where(residency) == {
        0: [DISK],
        1: [DISK],
        2: [PINNED],
        3: [PINNED],
        4: [MEMORY],
        5: [MEMORY],
    }


def test_reads_ahead_take_free_room_or_that_of_later_values():
    uses = {key: (0, number) for number, key in enumerate("abcdefgh")}
    residency = two_levels(190, "next-use", uses)
    for key in "hgfedcba":
        residency.insert(key, 40)
    settle(residency)
    cold = {key for key, levels in where(residency).items() if 0 not in levels}
    assert cold == set("efgh")
    # Everything at home is needed sooner than what is cold.
    residency.load_ahead("efgh")
    assert not [move for move in residency.take_moves() if isinstance(move, Load)]
    for key in "ab":
        residency.remove(key)
    residency.take_moves()
    residency.load_ahead("efgh")
    assert [move.key for move in residency.take_moves()] == ["e"]
    # The next one would be more than the share; the first may be, or nothing large ever moved.
    assert residency.levels[0].reserved_nbytes == 40 > AHEAD_SHARE * 190


def test_a_claim_waits_for_room_and_the_first_never_for_ever():
    residency = two_levels(100)
    admission = Admission(residency)
    for key in "abc":
        residency.insert(key, 30)
    first = admission.request("x", ["a"], 60, (0, 1))
    second = admission.request("y", ["b"], 60, (0, 2))
    assert admission.due() == []
    settle(residency)  # the others are written, which makes room
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


def test_what_a_task_waits_for_begins_one_after_the_other_once_patience_ran_out():
    admission = Admission(two_levels(100))
    outer = admission.request("outer", [], 90, (0, 0))
    inner = [admission.request(number, [], 40, (1, number)) for number in range(3)]
    assert outer.is_ready
    assert admission.due() == []
    assert admission.force_progress()
    for claim in inner:
        assert admission.due() == [claim]
        # One that is at work leaves room when it ends.
        assert admission.due() == []
        admission.end(claim)
    assert not admission.force_progress()
    admission.end(outer)
    # Nothing is remembered of those that are gone.
    first = admission.request("first", [], 90, (2, 0))
    admission.request("second", [], 90, (2, 1))
    assert admission.running == {first}
    assert admission.due() == []


def test_what_a_task_may_wait_for_begins_beside_it():
    admission = Admission(two_levels(100))
    outer = admission.request("outer", [], 90, (0, 0))
    inner = [admission.request(number, [], 40, (1, number)) for number in range(2)]
    admission.may_wait(outer)
    assert admission.due() == [inner[0]]
    assert admission.due() == []
    admission.end(outer)
    # One that is over is not told apart from those that run.
    admission.may_wait(outer)
    assert admission.due() == [inner[1]]
    third = admission.request("third", [], 90, (2, 0))
    assert admission.due() == []
    for claim in inner:
        admission.end(claim)
    assert admission.due() == [third]


def test_what_was_let_in_may_itself_wait_for_others():
    admission = Admission(two_levels(100))
    claims = [admission.request(number, [], 90, (0, number)) for number in range(4)]
    for nested in claims[1:]:
        assert admission.due() == []
        assert admission.force_progress()
        assert admission.due() == [nested]
    for claim in claims[::-1]:
        admission.end(claim)
    assert not admission.running


def test_n_tasks_of_four_tenths_never_run_more_than_two_at_a_time():
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


class Histories(RuleBasedStateMachine):
    """Any order of events, on three levels: the books stay right."""

    claims = Bundle("claims")

    def __init__(self):
        super().__init__()
        self.uses = {}
        self.levels = [Level("memory", 100), Level("pinned", 60), Level("disk")]
        self.residency = Residency(self.levels, {0: (1, 2)}, POLICIES["next-use"], self.uses.get)
        self.admission = Admission(self.residency)
        self.under_way = []
        self.pins = []

    def took(self):
        for move in self.residency.take_moves():
            if not isinstance(move, Drop):
                self.under_way.append(move)

    @rule(key=st.integers(0, 12), nbytes=st.integers(0, 60), use=st.none() | st.integers(0, 9))
    def insert(self, key, nbytes, use):
        if key in self.residency.values:
            self.residency.remove(key)
        self.residency.insert(key, nbytes)
        self.uses[key] = None if use is None else (use,)
        self.took()

    @rule(key=st.integers(0, 12))
    def remove(self, key):
        if key in self.residency.values:
            self.residency.remove(key)
        self.took()

    @rule()
    def due(self):
        self.under_way += [m for m in self.residency.due() if not isinstance(m, Drop)]

    @rule(keys=st.lists(st.integers(0, 12)))
    def ahead(self, keys):
        self.residency.load_ahead(keys)
        self.took()

    @rule(
        target=claims,
        keys=st.lists(st.integers(0, 12), unique=True, max_size=4),
        nbytes=st.integers(0, 120),
        priority=st.integers(0, 9),
    )
    def ask(self, keys, nbytes, priority):
        return self.admission.request(object(), keys, nbytes, (priority,))

    @rule()
    def admit(self):
        for claim in self.admission.due():
            for value in claim.values:
                if self.residency.values.get(value.key) is value:
                    assert value.in_memory
        self.took()

    @rule(claim=consumes(claims))
    def end(self, claim):
        self.admission.end(claim)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "failed", "for good"]))
    def finish(self, data, outcome):
        number = data.draw(st.integers(0, len(self.under_way) - 1))
        move = self.under_way.pop(number)
        value = self.residency.values.get(move.key)
        if isinstance(move, Put):
            if outcome == "done":
                self.residency.put_done(move, value.nbytes if value else 1)
            else:
                self.residency.put_failed(move, [move.target] if outcome == "for good" else [])
        elif outcome == "done":
            self.residency.load_done(move)
        elif outcome == "failed":
            self.residency.load_deferred(move)
        elif not self.residency.load_failed(move):
            self.admission.mark_lost(move.key)
            self.residency.remove(move.key)
        self.took()

    @rule()
    def retry(self):
        self.residency.retry()

    @invariant()
    def books_are_right(self):
        values = self.residency.values.values()
        for number, level in enumerate(self.levels):
            here = {value.key: value for value in values if number in value.copies}
            assert level.members == here
            assert level.used_nbytes == sum(value.copies[number] for value in here.values())
            assert level.reserved_nbytes >= 0
            assert level.leaving_nbytes >= 0
        loading = sum(value.nbytes for value in values if isinstance(value.moving, Load))
        promised = sum(claim.output_nbytes for claim in self.admission.running)
        assert self.levels[0].reserved_nbytes == loading + promised
        for number, level in enumerate(self.levels):
            assert level.leaving_nbytes == sum(
                value.copies[number]
                for value in values
                if isinstance(value.moving, Put) and value.moving.source == number
            )

    @invariant()
    def every_value_is_somewhere(self):
        for value in self.residency.values.values():
            assert value.copies
            assert value.pins >= 0
            if value.pins and value.in_memory and value.moving is None:
                continue
        for claim in self.admission.running:
            if claim.is_ready:
                for value in claim.values:
                    if self.residency.values.get(value.key) is value:
                        assert value.in_memory or value.key in claim.lost

    @invariant()
    def moves_are_few_and_of_this_world(self):
        assert sum(isinstance(move, Put) for move in self.under_way) <= MAX_MOVES
        for move in self.under_way:
            value = self.residency.values.get(move.key)
            if value is not None and value.serial == move.serial:
                assert value.moving == move
                assert move.source in value.copies


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=300, stateful_step_count=60)


@pytest.mark.parametrize("n_small", [0, 500, 2 * RANKED_AT_ONCE])
@pytest.mark.parametrize("may_leave", [True, False], ids=["may leave", "may not leave"])
def test_many_small_values_are_not_in_the_way_of_large_ones(n_small, may_leave):
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

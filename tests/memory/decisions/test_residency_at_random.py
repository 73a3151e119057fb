"""The invariants of residency hold after any random history of events."""

from __future__ import annotations

import hypothesis.strategies as st
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
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.levels import Level
from dask_gpurt.memory.decisions.moves import Drop, Load, Put
from dask_gpurt.memory.decisions.residency import MAX_MOVES, Residency


class Histories(RuleBasedStateMachine):
    """Random events on three levels; the counts of bytes must stay right."""

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
        self.begin(self.residency.take_moves())

    def begin(self, moves):
        for move in moves:
            if isinstance(move, Drop):
                continue
            value = self.residency.values[move.key]
            if isinstance(move, Put) and move.source == value.top_level:
                assert not value.pins, "a running task needs it"
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
        self.begin(self.residency.due())

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

"""A state machine that compares a store with a dict, whatever the type of the values."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from dask_gpurt.errors import TierFullError

KEYS = st.integers(0, 8)


class AgainstADict(RuleBasedStateMachine):
    """Rules for deletions, tasks, messages, lanes and failing tiers.

    A subclass adds rules that insert, read and compare values. It sets `setup`, which has the
    `store` under test, before any rule runs.
    """

    def __init__(self):
        super().__init__()
        self.soon = ()
        self.model = {}
        self.claims = []
        self.borrowed = []

    @rule(key=KEYS)
    def delete(self, key):
        if key in self.model:
            del self.model[key]
            del self.setup.store[key]
        else:
            with pytest.raises(KeyError):
                del self.setup.store[key]

    def ask(self, keys, nbytes, top_level):
        """Let a task claim inputs and room."""
        told = []
        claim, ready = self.setup.store.claim("task", keys, nbytes, (), told.append, top_level)
        self.claims.append((claim, told, ready))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def end(self, data):
        claim, told, ready = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        if ready or told:
            for value in claim.values:
                if self.setup.residency.values.get(value.key) is value:
                    assert value.key in self.setup.store.memory
        self.setup.store.end(claim)

    def borrow(self, key):
        """Read a value for a message."""
        found = self.setup.store.read_for_send(key)
        assert (found is not None) == (key in self.model)
        if found is not None:
            self.borrowed.append(found)

    @precondition(lambda self: self.borrowed)
    @rule()
    def end_send(self):
        self.setup.store.end_send(self.borrowed.pop())

    @rule(keys=st.lists(KEYS, max_size=4))
    def look_ahead(self, keys):
        self.soon = tuple(keys)
        self.setup.store.decide()

    @precondition(lambda self: self.setup.lanes)
    @rule(data=st.data())
    def step(self, data):
        lane = data.draw(st.sampled_from(self.setup.lanes))
        # Several threads read, so reads happen in any order.
        last = len(lane.calls) - 1 if lane is self.setup.read else 0
        lane.step(data.draw(st.integers(0, last)))

    @rule(tier=st.sampled_from([0, 1]), n=st.integers(0, 3), full=st.booleans())
    def break_a_write(self, tier, n, full):
        self.setup.tiers[tier].fail("put", TierFullError("full") if full else OSError("no"), n)

    @rule()
    def retry(self):
        self.setup.store.retry()

    def settle(self):
        """Repair the tiers, end all tasks and messages, and run all lanes to their end."""
        store = self.setup.store
        for tier in self.setup.tiers:
            tier.mend()
        store.retry()
        for claim, *_ in self.claims:
            store.end(claim)
        for loan in self.borrowed:
            store.end_send(loan)
        store.decide()
        self.setup.settle()

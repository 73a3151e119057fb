"""A store with an emulated device has the same values as a dict after random operations."""

from __future__ import annotations

import contextlib
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule

from dask_gpurt.memory.device_values import is_on_device
from dask_gpurt.memory.store import HOST
from tests.memory.against_a_dict import KEYS, AgainstADict
from tests.memory.device_setup import DEVICE, Setup, noise

# ------------------------------------------------------------------ against a dict


class Arrays(AgainstADict):
    """Random operations in random orders of lanes and streams; values equal those of a dict."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed):
        self.setup = Setup(random.Random(seed).randrange, upcoming=lambda: self.soon)

    @rule(key=KEYS, nbytes=st.integers(0, 500), on_device=st.booleans(), seed=st.integers(0, 99))
    def put(self, key, nbytes, on_device, seed):
        array = noise(nbytes, seed)
        try:
            self.setup.store[key] = self.setup.made(array) if on_device else array
        except MemoryError:
            # Inputs of running tasks take the room, or a rule made a copy fail.
            return
        self.model[key] = (array, on_device)

    def same(self, value, expected):
        array, on_device = expected
        assert is_on_device(value) == on_device
        np.testing.assert_array_equal(self.setup.host_copy(value), array)

    @rule(key=KEYS)
    def get(self, key):
        if key not in self.model:
            with pytest.raises(KeyError):
                self.setup.store[key]
            return
        try:
            value = self.setup.store[key]
        except MemoryError:
            assert self.model[key][1]
            return
        self.same(value, self.model[key])

    @rule(key=KEYS)
    def use_and_forget(self, key):
        """A kernel is queued on a value that may be deleted or evicted before it runs."""
        value = self.setup.store.memory.get(key)
        if is_on_device(value):
            self.setup.compute.wait(value.ready)
            self.setup.compute.launch(lambda source: None, reads=[value.buffer])
            value.used(self.setup.compute.record())

    @rule(keys=st.lists(KEYS, unique=True, max_size=3), nbytes=st.integers(0, 300))
    def claim(self, keys, nbytes):
        self.ask(keys, nbytes, nbytes % 2)

    @rule(key=KEYS)
    def read_for_send(self, key):
        with contextlib.suppress(MemoryError):
            self.borrow(key)

    @rule(n=st.integers(0, 10))
    def pump(self, n):
        self.setup.device.pump(n)

    @rule(n=st.integers(0, 3))
    def break_an_allocation(self, n):
        self.setup.device.left["allocate"] = n

    @invariant()
    def same_keys(self):
        if hasattr(self, "setup"):
            assert set(self.setup.store) == set(self.model)
            assert not self.setup.hazards

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "setup"):
            return
        levels, store = self.setup.residency.levels, self.setup.store
        for key in self.model:
            assert (key in store.memory) == self.setup.residency.values[key].in_memory
        for top_level in (HOST, DEVICE):
            there = [self.model[key] for key in store.memory if self.model[key][1] == top_level]
            assert levels[top_level].used_nbytes == sum(array.nbytes for array, _ in there)
        assert all(level.reserved_nbytes >= 0 for level in levels)
        assert self.setup.device.used_nbytes <= self.setup.device.capacity_nbytes
        assert self.setup.pool.used_nbytes <= self.setup.pool.capacity_nbytes

    def teardown(self):
        if not hasattr(self, "setup"):
            return
        setup = self.setup
        setup.device.left.clear()
        self.settle()
        for key, expected in self.model.items():
            self.same(setup.store[key], expected)
        setup.settle()
        setup.device.pump()
        assert not setup.hazards
        assert setup.device.used_nbytes == setup.residency.levels[DEVICE].used_nbytes
        for number, tier in enumerate(setup.tiers, 2):
            assert tier.used_nbytes == setup.residency.levels[number].used_nbytes
        for level in setup.residency.levels:
            assert (level.reserved_nbytes, level.leaving_nbytes) == (0, 0)
        for key in list(self.model):
            del setup.store[key]
        setup.settle()
        setup.device.pump()
        assert setup.device.used_nbytes == 0
        assert all(tier.used_nbytes == 0 for tier in setup.tiers)


TestAgainstADict = Arrays.TestCase
TestAgainstADict.settings = settings(max_examples=150, stateful_step_count=50)

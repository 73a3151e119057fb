"""Random use of a store of shards agrees with a plain dict."""

from __future__ import annotations

import os
from itertools import accumulate
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dask_gpurt.errors import (
    PartitionReleasedError,
)
from dask_gpurt.shuffle import merging
from dask_gpurt.shuffle.plan import cut_shards
from dask_gpurt.shuffle.shards import LOW_WATER
from tests.shuffle.shard_rig import (
    ROW_NBYTES,
    MergingFrames,
    Rig,
    TripleFrames,
    make_joined_shard,
    make_rows,
    read_slot,
)
from tests.thoroughness import RUNS_ALL

# ------------------------------------------------------------------ against a plain dict


N_SLOTS = 6
row_counts = st.lists(st.integers(0, 3), min_size=N_SLOTS, max_size=N_SLOTS)


class StoreMachine(RuleBasedStateMachine):
    """Random operations on a store, compared with a dict."""

    adapter = TripleFrames

    @initialize(limit_rows=st.sampled_from([0, 3, 8, 1000]))
    def open(self, limit_rows):
        self.root = TemporaryDirectory()
        limit_nbytes = limit_rows * ROW_NBYTES
        self.rig = Rig(self.root.name, limit_nbytes, slots=(0, N_SLOTS), adapter=self.adapter())
        self.shards = []
        self.counts = {}
        self.sent = []
        self.released = set()
        self.sealed = False

    def _cut(self, counts_of, shard_rows, attempt, packed):
        counts = [sum(several) for several in zip(*counts_of.values(), strict=True)]
        cuts = cut_shards([0, *accumulate(counts)], ROW_NBYTES, shard_rows * ROW_NBYTES)
        return [
            make_joined_shard(
                {source: one[first:end] for source, one in counts_of.items()},
                first,
                number,
                len(cuts),
                attempt,
                packed,
            )
            for number, (first, end) in enumerate(cuts)
        ]

    @precondition(lambda self: not self.sealed)
    @rule(
        counts_of=st.dictionaries(st.integers(0, 7), row_counts, min_size=1, max_size=3),
        shard_rows=st.integers(1, 6),
        packed=st.booleans(),
        data=st.data(),
    )
    def add(self, counts_of, shard_rows, packed, data):
        if not self.counts.keys().isdisjoint(counts_of):
            return
        shards = self._cut(counts_of, shard_rows, 1, packed)
        self.rig.store.add(data.draw(st.permutations(shards)))
        self.shards += shards
        self.counts.update(counts_of)
        self.sent.append((counts_of, shard_rows))

    @precondition(lambda self: self.counts)
    @rule(data=st.data(), attempt=st.integers(1, 2), packed=st.booleans())
    def add_again(self, data, attempt, packed):
        counts_of, shard_rows = data.draw(st.sampled_from(self.sent))
        if attempt == 2:
            shard_rows = data.draw(st.integers(1, 6))
        self.rig.store.add(self._cut(counts_of, shard_rows, attempt, packed))

    @rule()
    def seal(self):
        self.rig.store.seal()
        self.sealed = True

    def _expected(self, slot):
        return [r for s in sorted(self.counts) for r in make_rows(s, slot, self.counts[s][slot])]

    @precondition(lambda self: self.sealed)
    @rule(slot=st.integers(0, N_SLOTS - 1))
    def pieces(self, slot):
        if slot in self.released:
            with pytest.raises(PartitionReleasedError):
                self.rig.store.pieces(slot)
        else:
            assert read_slot(self.rig.store, slot) == self._expected(slot)

    @rule(slot=st.integers(0, N_SLOTS - 1))
    def release(self, slot):
        self.rig.store.release(slot)
        if self.sealed:
            self.released.add(slot)

    @rule()
    def make_room(self):
        was_over = self.rig.store.is_over_limit
        self.rig.store.make_room()
        if was_over:
            assert self.rig.budget.used_nbytes <= LOW_WATER * self.rig.budget.limit_nbytes

    @invariant()
    def the_budget_is_what_the_shards_in_memory_take(self):
        resident = sum(shard.nbytes for shard in self.shards if shard.is_resident)
        assert self.rig.budget.used_nbytes == self.rig.store.resident_nbytes == resident
        assert self.rig.budget.least_nbytes == 0

    @invariant()
    def shards_are_there_until_their_last_partition_is_let_go(self):
        for shard in self.shards:
            with_rows = {s for s, n in enumerate(shard.rows_per_slot, shard.first_slot) if n}
            is_wanted = bool(with_rows - self.released)
            assert (shard.is_resident or shard.on_disk is not None) == is_wanted

    @invariant()
    def no_file_outlives_its_shards(self):
        wanted = {shard.on_disk[0].path for shard in self.shards if shard.on_disk}
        assert {os.readlink(path).removesuffix(" (deleted)") for path in self.rig.files} == wanted

    def teardown(self):
        store = self.rig.store
        store.seal()
        for slot in range(N_SLOTS):
            if slot not in self.released:
                assert read_slot(store, slot) == self._expected(slot)
        store.close()
        assert self.rig.budget.used_nbytes == 0
        assert not self.rig.directory.exists()
        self.root.cleanup()


def test_random_use_agrees_with_a_dict():
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            derandomize=True, max_examples=300 if RUNS_ALL else 60, stateful_step_count=30
        ),
    )


# ------------------------------------------------------------------ with merging


class MergingMachine(StoreMachine):
    """The same while small shards are merged, before they are spilled and before they are read."""

    adapter = MergingFrames

    @invariant()
    def the_budget_is_what_the_shards_in_memory_take(self):
        assert self.rig.budget.used_nbytes == self.rig.store.resident_nbytes
        assert self.rig.budget.least_nbytes == 0

    @invariant()
    def shards_are_there_until_their_last_partition_is_let_go(self):
        if self.sealed and len(self.released) == N_SLOTS:
            assert self.rig.store.resident_nbytes == 0

    @invariant()
    def no_file_outlives_its_shards(self):
        if self.sealed and len(self.released) == N_SLOTS:
            assert not self.rig.files


@pytest.mark.parametrize("merged_rows", [4, 1000])
def test_random_use_with_merging_agrees_with_a_dict(monkeypatch, merged_rows):
    monkeypatch.setattr(merging, "LEAST_PIECES", 0)
    monkeypatch.setattr(merging, "MERGED_NBYTES", merged_rows * ROW_NBYTES)
    run_state_machine_as_test(
        MergingMachine,
        settings=settings(
            derandomize=True, max_examples=300 if RUNS_ALL else 60, stateful_step_count=30
        ),
    )

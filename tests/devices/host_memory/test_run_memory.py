"""Shards share pages with shards that are freed together, and idle lanes hold little memory."""

from __future__ import annotations

import numpy as np
import pytest

from dask_gpurt.devices.host_memory.pages import PAGE_NBYTES
from dask_gpurt.devices.host_memory.pool import HostPool
from dask_gpurt.devices.host_memory.run_memory import RunMemory
from dask_gpurt.frames.adapter import Packed
from dask_gpurt.metrics import Counters
from dask_gpurt.shuffle.budget import Budget
from dask_gpurt.shuffle.shard import Shard
from dask_gpurt.shuffle.shards import ShardStore
from tests.shuffle.shard_rig import LAYOUT_KEY, ROW_NBYTES, TripleFrames

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
N_ROWS = (64 * KIB) // ROW_NBYTES


class _Worker:
    """The pool, the budget and the store of a run with these slots."""

    def __init__(self, root, n_slots, limit_nbytes):
        self.pool, self.budget = HostPool(GIB), Budget(limit_nbytes)
        self._n_sources = 0
        self.slots = (1000, 1000 + n_slots)
        self.memory = RunMemory(self.pool, HostPool(0), self.slots, limit_nbytes)
        self.store = ShardStore(
            TripleFrames(),
            self.slots,
            str(root / "run"),
            self.budget,
            Counters(),
            empty_at=self.memory.stored,
            slots_per_lane=self.memory.slots_per_lane,
        )

    def receive(self, n_sources):
        """Take in 64 KiB of each source for each slot."""
        for source in range(self._n_sources, self._n_sources + n_sources):
            for number, slot in enumerate(range(*self.slots)):
                buffer = self.memory.stored(N_ROWS * ROW_NBYTES, slot)
                packed = Packed(buffer, N_ROWS, N_ROWS, 2 * N_ROWS)
                shard = Shard(
                    source=source,
                    attempt=1,
                    number=number,
                    count=self.slots[1] - self.slots[0],
                    first_slot=slot,
                    rows_per_slot=np.array([N_ROWS], np.uint32),
                    layout_key=LAYOUT_KEY,
                    packed=packed,
                )
                self.store.add([shard])
        self._n_sources += n_sources


@pytest.mark.parametrize("limit_nbytes", [256 * MIB, 4 * GIB, 400 * GIB])
def test_few_shards_of_many_slots_take_few_pages(tmp_path, limit_nbytes):
    worker = _Worker(tmp_path, 500, limit_nbytes)
    worker.receive(n_sources=1)
    wasted = worker.pool.used_nbytes - worker.budget.used_nbytes
    assert wasted <= min(limit_nbytes // 8, 64 * worker.pool.lane_nbytes)


@pytest.mark.parametrize("limit_nbytes", [0, 1, 100 * MIB, 100 * GIB])
@pytest.mark.parametrize("n_slots", [0, 1, 3])
def test_a_run_of_any_size_has_a_lane(limit_nbytes, n_slots):
    pool = HostPool(GIB)
    memory = RunMemory(pool, HostPool(0), (7, 7 + n_slots), limit_nbytes)
    buffers = [memory.stored(64 * KIB, 7 + slot) for slot in range(n_slots)]
    is_large = limit_nbytes > GIB
    assert pool.used_nbytes <= (n_slots if is_large else 2) * PAGE_NBYTES
    memory.close()
    del buffers
    assert pool.used_nbytes == 0


def test_each_of_few_slots_has_pages_of_its_own(tmp_path):
    worker = _Worker(tmp_path, 4, 4 * GIB)
    worker.receive(n_sources=64)
    worker.store.seal()
    before = worker.pool.used_nbytes
    worker.store.release(worker.slots[0])
    assert before - worker.pool.used_nbytes >= 64 * N_ROWS * ROW_NBYTES


def test_shards_that_leave_memory_free_their_pages(tmp_path):
    worker = _Worker(tmp_path, 60, 256 * MIB)
    worker.receive(n_sources=32)
    worker.budget.most_nbytes = worker.budget.used_nbytes // 2
    worker.store.make_room()
    assert 0 < worker.budget.used_nbytes <= worker.budget.most_nbytes
    wasted = worker.pool.used_nbytes - worker.budget.used_nbytes
    assert wasted <= 5 * worker.pool.lane_nbytes
    worker.store.seal()
    for slot in range(*worker.slots):
        worker.store.release(slot)
    assert worker.pool.used_nbytes == 0


def test_spilling_again_and_again_leaves_no_full_pages(tmp_path):
    worker = _Worker(tmp_path, 60, 64 * MIB)
    assert worker.memory.slots_per_lane == 60
    for _ in range(4):
        worker.budget.most_nbytes = 1 << 40
        worker.receive(n_sources=16)
        worker.budget.most_nbytes = 16 * MIB
        worker.store.make_room()
    wasted = worker.pool.used_nbytes - worker.budget.used_nbytes
    assert wasted <= 2 * worker.pool.lane_nbytes
    worker.store.close()


def test_outputs_get_the_pages_that_no_shard_has_filled(tmp_path):
    worker = _Worker(tmp_path, n_slots=8, limit_nbytes=4 * GIB)
    worker.receive(40)
    before = worker.pool.used_nbytes
    worker.memory.all_stored()
    used, live = worker.pool.used_nbytes, 40 * 8 * 64 * KIB
    assert before >= live + 8 * 3 * PAGE_NBYTES
    assert used <= live + 8 * PAGE_NBYTES + live // 8
    assert worker.pool.idle_nbytes == before - used

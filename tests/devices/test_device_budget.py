"""The device budget counts shards while they live, and refuses those beyond the limit."""

from __future__ import annotations

import threading

import pytest

from dask_gpurt.devices.device_budget import DeviceBudget


class Memory:
    def __init__(self, nbytes):
        self.nbytes = nbytes


def test_no_memory_beyond_the_limit():
    budget = DeviceBudget(100)
    held = budget.take(Memory, 60)
    assert held.nbytes == 60
    assert budget.take(Memory, 41) is None
    assert budget.take(Memory, 40) is not None
    assert budget.used_nbytes == 60


def test_dead_memory_returns_to_the_budget():
    budget = DeviceBudget(100)
    held = budget.take(Memory, 100)
    assert budget.take(Memory, 1) is None
    del held
    assert budget.take(Memory, 100) is not None
    assert budget.used_nbytes == 0


def test_a_failed_allocation_does_not_count():
    def full(nbytes):
        raise MemoryError

    budget = DeviceBudget(100)
    assert budget.take(full, 60) is None
    assert budget.used_nbytes == 0


def test_other_errors_propagate():
    def broken(nbytes):
        raise ValueError("no such device")

    budget = DeviceBudget(100)
    with pytest.raises(ValueError, match="no such device"):
        budget.take(broken, 60)
    assert budget.used_nbytes == 0


def test_threads_together_stay_within_the_limit():
    budget = DeviceBudget(1000)
    kept, start = [], threading.Barrier(8)

    def take():
        start.wait()
        for _ in range(100):
            memory = budget.take(Memory, 7)
            if memory is not None:
                kept.append(memory)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept) == 1000 // 7
    assert budget.used_nbytes == 7 * len(kept)

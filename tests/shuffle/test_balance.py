"""Full partitions go to different workers, and balanced ranges of partitions stay unchanged."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from distributed.shuffle._shuffle import _get_worker_for_range_sharding
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.shuffle import balance
from dask_gpurt.shuffle.balance import by_range, load, owners

WORKERS = tuple("abcdefgh")


@pytest.mark.parametrize("n_partitions", [1, 2, 7, 8, 9, 100])
def test_ranges_equal_those_of_dask(n_partitions):
    stock = {
        p: _get_worker_for_range_sharding(n_partitions, p, WORKERS) for p in range(n_partitions)
    }
    assert by_range(n_partitions, WORKERS) == stock


def test_even_partitions_stay_in_ranges():
    rows = (100, 110, 95, 100, 105, 98, 100, 100)
    assert owners(rows, WORKERS[:4]) == by_range(8, WORKERS[:4])


def test_partitions_without_rows_stay_in_ranges():
    assert owners((0,) * 10, WORKERS[:3]) == by_range(10, WORKERS[:3])


@pytest.mark.parametrize("n_workers", [2, 3, 4])
@pytest.mark.parametrize("n_partitions", [16, 32, 200])
def test_zipf_keys_are_balanced(n_workers, n_partitions):
    rng = np.random.default_rng(0)
    keys = rng.zipf(1.2, 1_000_000)
    partitions = keys * 2654435761 % 2**32 % n_partitions
    sample = np.bincount(partitions[:50_000], minlength=n_partitions)
    everything = np.bincount(partitions, minlength=n_partitions)
    found = owners(tuple(sample.tolist()), WORKERS[:n_workers])
    loads = load(everything.tolist(), found)
    # The fullest partition is on one worker in any assignment.
    best = max(everything.sum() / n_workers, everything.max())
    assert max(loads.values()) <= 1.25 * best


def test_unsampled_partitions_are_spread():
    rows = (1000,) + (0,) * 30
    counted = Counter(owners(rows, WORKERS[:4]).values())
    assert sorted(counted.values())[1:] == [10, 10, 10]


@settings(derandomize=True)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60), st.integers(1, 8))
def test_owners_cover_all_partitions_within_the_graham_bound(rows, n_workers):
    workers = WORKERS[:n_workers]
    found = owners(tuple(rows), workers)
    assert set(found) == set(range(len(rows)))
    assert set(found.values()) <= set(workers)
    assert found == owners(tuple(rows), workers)
    least = max(sum(rows) / n_workers, max(rows))
    most = max(load(rows, found).values())
    tolerated = 1.2 * sum(rows) / n_workers
    assert most <= max(4 / 3 * least * 1.01 + max(rows) / 3, tolerated)


def test_owners_of_a_run_are_calculated_once(monkeypatch):
    """Dask asks for each of its partitions, of which there may be ten thousands."""
    calls = []

    def counted(rows, workers):
        calls.append((rows, workers))
        return owners(rows, workers)

    monkeypatch.setattr(balance, "owners", counted)
    latest, rows = balance.LatestOwners(), (5, 0, 9, 1)
    for workers in (WORKERS[:2], WORKERS[:3]):
        found = {partition: latest.of(rows, workers)[partition] for partition in range(4)}
        assert found == owners(rows, workers)
    assert calls == [(rows, WORKERS[:2]), (rows, WORKERS[:3])]

"""Samples of a process tell whether to release idle memory, and how many values have to leave."""

from __future__ import annotations

import pytest

from dask_gpurt.memory.decisions.process_samples import (
    CROWDED_SHARE,
    MOST_LEAVING,
    SAMPLES,
    ProcessSamples,
)

LIMIT = 1_000


def samples_every(interval_s: float, n: int, nbytes: int) -> tuple[ProcessSamples, list[bool]]:
    """Take samples of a process of a size, whose releases end at once; return what to release."""
    samples = ProcessSamples(LIMIT, 0.0)
    times = [interval_s * number for number in range(1, n + 1)]
    return samples, [samples.take(now, nbytes, 200, is_releasing=False) for now in times]


@pytest.mark.parametrize(
    ("interval_s", "n", "released"), [(0.125, 15, [5, 10, 15]), (1.0, 6, [1, 2, 3, 4, 5, 6])]
)
def test_memory_is_released_at_intervals(interval_s, n, released):
    samples, releases = samples_every(interval_s, n, LIMIT + 1)
    assert [number for number, due in enumerate(releases, 1) if due] == released
    assert samples.is_over_for_long, "with any interval of the monitor"
    assert samples.unmanaged_nbytes == LIMIT + 1 - 200


def test_a_sample_with_idle_memory_does_not_count():
    samples, _ = samples_every(0.125, 4, LIMIT)
    assert samples.take(0.625, LIMIT + 500, 0, is_releasing=False)
    assert (samples.n_over, samples.unmanaged_nbytes) == (0, LIMIT - 200)
    assert not samples.take(0.75, LIMIT + 500, 0, is_releasing=True)
    assert samples.n_over == 1


def test_nothing_is_released_below_the_limit_or_twice_at_once():
    samples, releases = samples_every(1.0, SAMPLES, LIMIT)
    assert not any(releases)
    assert not samples.is_over_for_long
    assert not samples.take(9.0, LIMIT + 1, 0, is_releasing=True)
    assert samples.take(9.1, LIMIT + 1, 0, is_releasing=False)


def test_one_sample_below_the_limit_ends_the_excess():
    samples, _ = samples_every(0.125, 2 * SAMPLES, LIMIT + 1)
    assert samples.is_over_for_long
    samples.take(2.0, LIMIT, 0, is_releasing=False)
    assert not samples.is_over_for_long


def test_values_get_what_is_left_in_a_crowded_process():
    samples, _ = samples_every(0.125, SAMPLES - 1, LIMIT + 1)
    assert samples.capacity_nbytes(30, 100) == 100
    samples.take(9.0, LIMIT + 1, 0, is_releasing=True)
    assert samples.is_over_for_long
    assert samples.capacity_nbytes(30, 100) == 30
    # Tasks need some room, one at a time.
    assert samples.capacity_nbytes(-50, 100) == 100 * CROWDED_SHARE
    samples.take(9.1, LIMIT - 70, 0, is_releasing=True)
    assert not samples.is_over_for_long
    # With more values, the process would be over its limit again.
    assert samples.capacity_nbytes(30, 100) == 30
    assert samples.capacity_nbytes(100, 100) == 100
    assert samples.capacity_nbytes(30, 100) == 100


@pytest.mark.parametrize(
    ("nbytes", "n_values", "n"),
    [
        (1_250, 100, 20),
        (1_001, 100, 1),
        (1_250, 3, 1),
        (1_250, 0, 0),
        (1_250, 10**6, MOST_LEAVING),
    ],
)
def test_values_leave_in_proportion_to_the_excess(nbytes, n_values, n):
    samples, _ = samples_every(0.125, 1, nbytes)
    assert samples.n_leaving(n_values) == n


def test_more_owned_than_used_leaves_no_negative_rest():
    """Pages of a value that nobody has touched yet are not in memory."""
    samples = ProcessSamples(LIMIT, 0.0)
    assert samples.unmanaged_nbytes == 0
    samples.take(0.1, 100, 200, is_releasing=False)
    assert samples.unmanaged_nbytes == 0

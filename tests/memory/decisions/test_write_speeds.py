"""The faster way of writing is taken, once both are known."""

from __future__ import annotations

import pytest

from dask_gpurt.memory.decisions.write_speeds import WriteSpeeds

MIB = 1 << 20
PAST, THROUGH = True, False


def test_each_way_is_tried_once():
    speeds = WriteSpeeds()
    assert not speeds.prefers_cache
    speeds.record(PAST, MIB, 1.0)
    assert speeds.prefers_cache


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, True), (1.0, False), (2.0, False)])
def test_faster_way_is_taken(seconds, expected):
    speeds = WriteSpeeds()
    speeds.record(PAST, 4 * MIB, 4.0)
    speeds.record(THROUGH, MIB, seconds)
    assert speeds.prefers_cache is expected


def test_disk_that_becomes_slow_is_noticed():
    speeds = WriteSpeeds()
    speeds.record(PAST, MIB, 0.1)
    speeds.record(THROUGH, MIB, 0.5)
    speeds.record(PAST, MIB, 0.4)
    assert not speeds.prefers_cache
    speeds.record(PAST, MIB, 2.0)
    assert speeds.prefers_cache


def test_single_slow_write_among_large_ones_does_not_count():
    speeds = WriteSpeeds()
    speeds.record(THROUGH, 100 * MIB, 1.0)
    speeds.record(PAST, 100 * MIB, 0.5)
    speeds.record(PAST, MIB, 0.1)
    assert not speeds.prefers_cache

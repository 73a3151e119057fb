"""The bandwidth of a link, from messages that share it."""

from __future__ import annotations

import pytest

from dask_gpurt.transport.rate import LinkRate

MIB = 1 << 20


def test_nothing_is_known_at_first():
    rate = LinkRate()
    assert rate.bandwidth is None
    rate.begin(0.0)
    assert rate.bandwidth is None
    rate.end(1.0, MIB - 1)
    assert rate.bandwidth is None


def test_one_message():
    rate = LinkRate()
    rate.begin(10.0)
    rate.end(10.5, 4 * MIB)
    assert rate.bandwidth == 8 * MIB


def test_messages_that_overlap_share_the_link():
    """Both take a second, but the link moved the two of them in it."""
    rate = LinkRate()
    rate.begin(0.0)
    rate.begin(0.0)
    rate.end(1.0, 4 * MIB)
    rate.end(1.0, 4 * MIB)
    assert rate.bandwidth == 8 * MIB


def test_time_without_messages_does_not_count():
    rate = LinkRate()
    for start in (0.0, 100.0, 1000.0):
        rate.begin(start)
        rate.end(start + 1, 2 * MIB)
    assert rate.bandwidth == 2 * MIB


def test_a_message_that_fails_costs_time():
    rate = LinkRate()
    rate.begin(0.0)
    rate.end(1.0, 0)
    rate.begin(1.0)
    rate.end(2.0, 2 * MIB)
    assert rate.bandwidth == MIB


def test_a_link_that_changes_is_learnt_anew():
    rate = LinkRate()
    now = 0.0
    for seconds in [1.0] * 50 + [0.1] * 50:
        rate.begin(now)
        now += seconds
        rate.end(now, 8 * MIB)
    assert rate.bandwidth == pytest.approx(80 * MIB, rel=0.05)

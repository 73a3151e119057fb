"""Estimated link rates have a default, and follow reports of transfers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.topology import learned
from dask_gpurt.topology.learned import End, LearnedLinks
from dask_gpurt.topology.model import LOCAL

A0, A1, B0, B1, C0 = (End(f"tcp://{h}:{p}", h) for h, p in ("a0", "a1", "b0", "b1", "c0"))


def rate(links, source, target):
    return links.path(source, target).bandwidth_nbytes_per_s


def test_without_reports_the_prior_depends_on_hosts():
    links = LearnedLinks()
    assert rate(links, A0, A1) == pytest.approx(learned.SAME_HOST_NBYTES_PER_S)
    assert rate(links, A0, B0) == pytest.approx(learned.OTHER_HOST_NBYTES_PER_S)
    assert links.path(A0, A0) is LOCAL


def test_reports_replace_the_prior_of_their_direction():
    links = LearnedLinks()
    for _ in range(5):
        links.observe(A0, B0, 1e9)
        links.observe(A0, C0, 1e7)
    assert rate(links, A0, B0) == pytest.approx(1e9, rel=0.35)
    assert rate(links, A0, C0) == pytest.approx(1e7, rel=0.35)
    assert rate(links, A0, B0) > 3 * rate(links, B0, A0)


def test_unseen_pairs_follow_their_hosts_then_the_cluster():
    links = LearnedLinks()
    for _ in range(5):
        links.observe(A0, B0, 1e9)
    assert rate(links, A1, B1) == pytest.approx(1e9, rel=0.4)
    assert rate(links, B0, C0) == pytest.approx(1e9, rel=0.4)
    assert rate(links, A0, A1) == pytest.approx(learned.SAME_HOST_NBYTES_PER_S)


def test_one_outlier_does_not_undo_many_reports():
    links = LearnedLinks()
    for _ in range(20):
        links.observe(A0, B0, 1e9)
    before = rate(links, A0, B0)
    links.observe(A0, B0, 1e4)
    assert rate(links, A0, B0) > before / 2


def test_a_link_that_became_slow_is_noticed():
    links = LearnedLinks()
    for _ in range(100):
        links.observe(A0, B0, 1e9)
    for _ in range(100):
        links.observe(A0, B0, 1e7)
    assert rate(links, A0, B0) == pytest.approx(1e7, rel=0.2)


@pytest.mark.parametrize(
    ("nbytes_per_s", "count"),
    [
        (math.nan, 1),
        (math.inf, 1),
        (0, 1),
        (-1e9, 1),
        (1e99, 1),
        (1e9, 0),
        (1e9, math.nan),
        ("fast", 1),
        (None, 1),
    ],
)
def test_impossible_reports_are_ignored(nbytes_per_s, count):
    links = LearnedLinks()
    assert not links.observe(A0, B0, nbytes_per_s, count)
    assert rate(links, A0, B0) == pytest.approx(learned.OTHER_HOST_NBYTES_PER_S)


@given(st.lists(st.tuples(st.floats(1e3, 1e13), st.integers(1, 10**6)), min_size=1))
def test_rate_stays_between_reports_and_the_prior(reports):
    links = LearnedLinks()
    for nbytes_per_s, count in reports:
        assert links.observe(A0, B0, nbytes_per_s, count)
    known = [nbytes_per_s for nbytes_per_s, _ in reports] + [learned.OTHER_HOST_NBYTES_PER_S]
    assert min(known) * 0.999 <= rate(links, A0, B0) <= max(known) * 1.001


def test_remembered_pairs_are_bounded(monkeypatch):
    monkeypatch.setattr(learned, "MAX_PAIRS", 10)
    links = LearnedLinks()
    for i in range(50):
        links.observe(End(f"tcp://x:{i}", f"h{i}"), A0, 1e9)
    assert len(links._pairs) == len(links._hosts) == 10


def test_a_worker_that_left_is_forgotten():
    links = LearnedLinks()
    links.observe(A0, B0, 1e9)
    links.observe(A0, C0, 1e9)
    links.forget(B0.address)
    assert list(links._pairs) == [(A0.address, C0.address)]


def test_doubt_shrinks_but_never_vanishes():
    links = LearnedLinks()
    found = [links.uncertainty()]
    for _ in range(100):
        links.observe(A0, B0, 1e9)
        found.append(links.uncertainty())
    assert found == sorted(found, reverse=True)
    assert found[0] > 100 > found[1] > 3 > found[-1] > 1.2

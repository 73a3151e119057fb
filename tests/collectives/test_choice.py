"""The cheapest algorithm depends on the bytes, on the latency, and on who shares a host."""

from __future__ import annotations

import pytest

from dask_gpurt.collectives import choice
from dask_gpurt.collectives.choice import LinkCosts, RankGroup

#: Three microseconds for a step and 370 GB/s: NVLink, as in the research on systems, 5.3.
NVLINK = LinkCosts(hop_s=3e-6, message_s=0.0, rate=370e9, inside_rate=370e9)
#: Messages of Dask between hosts on Ethernet.
ETHERNET = LinkCosts(hop_s=2e-3, message_s=5e-4, rate=1.25e9, inside_rate=10e9)


def names(candidates):
    return [one.algorithm for one in candidates]


@pytest.mark.parametrize(("n", "nbytes"), [(3, 1_665_000), (4, 740_000), (8, 211_000)])
def test_one_shot_gives_way_to_two_shot_where_the_formula_says(n, nbytes):
    """The size is `hop_s * rate * N / ((N - 1) (N - 2))` (research: systems, 5.3)."""
    group = RankGroup(range(n))
    assert names(group.all_reduce(int(0.99 * nbytes), NVLINK))[0] == "one-shot"
    assert names(group.all_reduce(int(1.01 * nbytes), NVLINK))[0] == "two-shot"


def test_two_ranks_need_one_step():
    assert names(RankGroup(range(2)).all_reduce(1 << 30, NVLINK))[0] == "one-shot"


def test_the_ring_takes_as_many_bytes_and_more_steps():
    costs = {one.algorithm: one for one in RankGroup(range(8)).all_reduce(64 << 10, ETHERNET)}
    assert costs["ring"].work.across == pytest.approx(costs["two-shot"].work.across)
    hops = [costs[name].work.n_hops for name in ("ring", "two-shot")]
    assert hops == [14, 2]


def test_ranks_of_a_host_add_up_before_they_send():
    hosts = [rank // 4 for rank in range(16)]
    best, *others = RankGroup(hosts).all_reduce(1 << 28, ETHERNET)
    assert best.algorithm == "two-level"
    assert {one.algorithm for one in others} == {"one-shot", "two-shot", "ring", "tree"}
    assert "two-level" not in names(RankGroup(range(4)).all_reduce(1 << 28, ETHERNET))
    assert "two-level" not in names(RankGroup([0] * 4).all_reduce(1 << 28, ETHERNET))


def test_large_values_take_a_chain_and_tiny_ones_few_hops():
    group = RankGroup(range(8))
    large, *_ = group.broadcast(200 << 20, ETHERNET)
    assert large.algorithm == "chain" and 1 < large.work.n_slices <= 200
    # Hardly longer than one copy to one host.
    assert large.seconds < 1.5 * (200 << 20) / ETHERNET.rate
    tiny, *_ = group.broadcast(1000, ETHERNET)
    assert tiny.work.n_hops < 4


@pytest.mark.parametrize("n", [4, 8, 32])
def test_no_other_number_of_slices_is_much_better(n):
    nbytes = 200 << 20
    chosen = choice.chain_slices(n, nbytes, ETHERNET)

    def seconds(n_slices):
        rounds = n + n_slices - 2
        return rounds * ETHERNET.message_s + rounds / n_slices * nbytes / ETHERNET.rate

    assert seconds(chosen) <= 1.02 * min(seconds(other) for other in range(1, 200))


def test_a_very_large_group_is_counted_soon():
    hosts = [rank // 8 for rank in range(1000)]
    group = RankGroup(hosts)
    assert "two-shot" not in names(group.all_reduce(1 << 20, ETHERNET))
    assert names(group.all_reduce(1 << 30, ETHERNET))[0] == "two-level"
    assert len(hosts) > choice.MOST_FLAT


def test_a_candidate_explains_its_cost():
    (one, *_) = RankGroup([0, 0, 1, 1]).all_reduce(100_000_000, ETHERNET)
    text = "two-level: 0.1000 s, 4 hops, 100.0 MB between hosts, 100.0 MB inside"
    assert str(one) == text

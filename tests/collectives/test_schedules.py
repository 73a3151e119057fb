"""Each algorithm ends with the right slices everywhere, in as many steps and bytes as promised."""

from __future__ import annotations

import math
from functools import partial

import pytest

from dask_gpurt.collectives import schedules, two_level
from dask_gpurt.collectives.choice import counted
from tests.collectives.interpreter import assert_all_have_the_sum, own_value, run

N_RANKS = range(1, 65)


def of(schedule, n_ranks):
    return lambda rank: schedule(rank, n_ranks)


def log2_up(n):
    return math.ceil(math.log2(n))


@pytest.mark.parametrize("n", N_RANKS)
@pytest.mark.parametrize("name", ["one_shot", "two_shot", "ring", "tree"])
def test_after_an_all_reduce_every_rank_has_the_sum_of_all(name, n):
    schedule = of(getattr(schedules, name), n)
    n_slices = 1 if name in ("one_shot", "tree") else n
    assert_all_have_the_sum(run(schedule, n, n_slices))


@pytest.mark.parametrize("n", N_RANKS)
@pytest.mark.parametrize("name", ["direct", "ring"])
def test_after_a_reduce_scatter_rank_i_has_the_sum_of_slice_i(name, n):
    values = run(of(getattr(schedules, f"{name}_reduce_scatter"), n), n, n)
    for rank in range(n):
        assert values[rank][rank].ranks == (1 << n) - 1


@pytest.mark.parametrize("n", N_RANKS)
@pytest.mark.parametrize("name", ["direct", "ring"])
def test_after_an_all_gather_slice_i_is_that_of_rank_i(name, n):
    values = run(of(getattr(schedules, f"{name}_all_gather"), n), n, n)
    assert values == [[own_value(rank) for rank in range(n)]] * n


@pytest.mark.parametrize("n", N_RANKS)
def test_after_a_broadcast_every_rank_has_rank_0s_value(n):
    value = own_value(0)
    assert run(of(schedules.tree_broadcast, n), n, 1) == [[value]] * n
    assert run(of(schedules.two_shot_broadcast, n), n, n) == [[value] * n] * n
    for n_slices in (1, 2, 7):
        chain = partial(two_level.broadcast, hosts=range(n), n_slices=n_slices)
        assert run(chain, n, n_slices) == [[value] * n_slices] * n


#: Number of ranks on each host.
GROUPS = [[1], [4], [1, 1, 1], [2, 2], [4, 4, 4], [3, 1], [1, 3], [2, 5, 3], [8] * 4, [1, 2, 3, 4]]


def hosts_of(sizes, is_mixed):
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    return sorted(hosts, key=lambda host: (host * 7919) % 5) if is_mixed else hosts


def rotated(sizes):
    """Return hosts whose ranks take turns."""
    left = [[host] * size for host, size in enumerate(sizes)]
    return [ranks.pop() for _ in range(max(sizes)) for ranks in left if ranks]


@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("order", [partial(hosts_of, is_mixed=False), rotated])
def test_in_two_levels_every_rank_has_the_sum_and_the_value(sizes, order):
    hosts = order(sizes)
    n_slices = two_level.n_slices(hosts)
    assert_all_have_the_sum(run(partial(two_level.all_reduce, hosts=hosts), len(hosts), n_slices))
    for n_slices in (1, 2, 7):
        steps = partial(two_level.broadcast, hosts=hosts, n_slices=n_slices)
        assert run(steps, len(hosts), n_slices) == [[own_value(0)] * n_slices] * len(hosts)


@pytest.mark.parametrize("n", range(2, 65))
def test_steps_and_bytes_are_those_of_the_formulas(n):
    """With one rank on each host; bytes are in parts of the value."""
    hosts = range(n)
    share = 2 * (n - 1) / n

    def work(schedule, n_slices):
        found = counted(of(schedule, n), hosts, n_slices)
        assert found.inside == 0
        return found.n_steps, pytest.approx(found.across)

    assert work(schedules.one_shot, 1) == (1, n - 1)
    assert work(schedules.two_shot, n) == (2, share)
    assert work(schedules.ring, n) == (2 * (n - 1), share)
    assert work(schedules.tree, 1) == (2 * log2_up(n), 2 * log2_up(n))
    assert work(schedules.direct_reduce_scatter, n) == (1, share / 2)
    assert work(schedules.ring_all_gather, n) == (n - 1, share / 2)
    assert work(schedules.two_shot_broadcast, n) == (2, share)
    for pieces in (1, 5):
        chain = partial(two_level.broadcast, hosts=hosts, n_slices=pieces)
        steps = n + pieces - 2
        found = counted(chain, hosts, pieces)
        assert (found.n_steps, found.across) == (steps, pytest.approx(steps / pieces))


@pytest.mark.parametrize(("n_hosts", "on_host"), [(2, 4), (4, 2), (3, 3), (8, 8)])
def test_in_two_levels_few_bytes_pass_a_card(n_hosts, on_host):
    hosts = [number // on_host for number in range(n_hosts * on_host)]
    n = len(hosts)
    two = counted(partial(two_level.all_reduce, hosts=hosts), hosts, two_level.n_slices(hosts))
    assert (two.n_steps, two.across) == (4, pytest.approx(2 * (n_hosts - 1) / n_hosts))
    flat = counted(of(schedules.two_shot, n), hosts, n)
    assert flat.across == pytest.approx(on_host * two.across)
    for pieces in (1, 8):
        spread = partial(two_level.broadcast, hosts=hosts, n_slices=pieces)
        work = counted(spread, hosts, pieces)
        assert work.n_steps == n_hosts + pieces - 1
        assert work.across == pytest.approx((n_hosts + pieces - 2) / pieces)

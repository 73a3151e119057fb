"""Shards in two steps reach every worker, over few links between hosts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.shuffle.routing import LEAST_ON_HOST, MOST_DIRECT, Routing, host_of

deterministic = settings(derandomize=True, max_examples=200)

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def workers_of(sizes):
    return [
        f"tcp://10.0.0.{host}:{port}"
        for host, n in enumerate(sizes)
        for port in range(4000, 4000 + n)
    ]


def routes(sizes, routing="two-level"):
    workers = workers_of(sizes)
    return {me: Routing(me, workers, routing) for me in workers}


@deterministic
@given(sizes)
def test_every_worker_is_reached_in_two_steps(sizes):
    found = routes(sizes)
    for me, mine in found.items():
        for target in found:
            relay = mine.hop(target)
            assert host_of(relay) == host_of(target)
            # Inside a host, nothing is handed on again: no wait leads back to a relay.
            assert found[relay].hop(target) == target
            if host_of(me) == host_of(target):
                assert relay == target


@deterministic
@given(sizes)
def test_a_worker_has_one_link_to_each_other_host(sizes):
    found = routes(sizes)
    for me, mine in found.items():
        links = {mine.hop(target) for target in found if host_of(target) != host_of(me)}
        assert len(links) == len(sizes) - 1


def test_workers_of_equal_hosts_share_the_links():
    found = routes([4, 4])
    hosts = {host_of(me) for me in found}
    pairs = {
        frozenset((me, mine.hop(target)))
        for me, mine in found.items()
        for target in found
        if host_of(target) != host_of(me)
    }
    assert len(hosts) == 2
    assert len(pairs) == 4


def test_a_worker_that_sends_only_has_a_route_too():
    assert Routing("tcp://10.0.0.9:1", workers_of([2, 2]), "two-level").hop(
        "tcp://10.0.0.1:4001"
    ) in {"tcp://10.0.0.1:4000", "tcp://10.0.0.1:4001"}


def test_small_clusters_and_small_hosts_send_directly():
    def is_two_level(sizes, routing):
        return next(iter(routes(sizes, routing).values())).is_two_level

    n_hosts = MOST_DIRECT // LEAST_ON_HOST
    assert not is_two_level([LEAST_ON_HOST] * n_hosts, "auto")
    assert is_two_level([LEAST_ON_HOST] * (n_hosts + 1), "auto")
    assert not is_two_level([LEAST_ON_HOST - 1] * 2 * n_hosts, "auto")
    assert not is_two_level([LEAST_ON_HOST] * 2 * n_hosts, "direct")
    assert is_two_level([1, 1], "two-level")

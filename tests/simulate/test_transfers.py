"""Transfers over shared links get fair rates, and end at the right times."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.simulate import transfers
from dask_gpurt.simulate.clock import VirtualClock
from dask_gpurt.simulate.transfers import Transfers, fair_rates


def test_one_flow_gets_its_narrowest_link():
    assert fair_rates({0: ["a", "b"]}, {"a": 8.0, "b": 2.0}) == {0: 2.0}


def test_unused_share_goes_to_other_flows():
    # Flow 0 is held back by `slow`, so flow 1 gets more than half of `shared`.
    rates = fair_rates({0: ["shared", "slow"], 1: ["shared"]}, {"shared": 8.0, "slow": 1.0})
    assert rates == {0: 1.0, 1: 7.0}


LINKS = {f"link{number}": float(2**number) for number in range(5)}
WAYS = st.lists(st.sampled_from(sorted(LINKS)), min_size=1, max_size=3, unique=True)


@given(st.lists(WAYS, min_size=1, max_size=12))
def test_rates_are_max_min_fair(ways):
    flows = dict(enumerate(ways))
    rates = fair_rates(flows, LINKS)
    load = {
        link: sum(rate for flow, rate in rates.items() if link in flows[flow]) for link in LINKS
    }
    assert all(load[link] <= LINKS[link] * (1 + 1e-9) for link in LINKS)
    for flow, rate in rates.items():
        # On some full link of its path, no other flow is faster than this one.
        assert any(
            load[link] >= LINKS[link] * (1 - 1e-9)
            and rate >= max(rates[o] for o in flows if link in flows[o]) * (1 - 1e-9)
            for link in flows[flow]
        )


class Run:
    """Transfers on a virtual clock, with the time at which each ended."""

    def __init__(self, capacities):
        self.clock = VirtualClock()
        self.transfers = Transfers(self.clock, capacities)
        self.through = {}

    def start(self, name, links, nbytes, at_s=0.0):
        def begin():
            self.number = self.transfers.start(links, nbytes, note)

        def note():
            self.through[name] = self.clock.now_s

        self.clock.call_at(at_s, begin)

    def finish(self):
        while self.clock.step():
            pass
        return self.through


def test_a_transfer_alone_takes_its_bytes_over_the_bandwidth():
    run = Run({"a": 2.0**30, "b": 2.0**20})
    run.start("x", ["a", "b"], 2**21)
    assert run.finish() == {"x": 2.0}


def test_two_transfers_share_a_link_until_one_ends():
    run = Run({"a": 2.0**20})
    run.start("short", ["a"], 2**20)
    run.start("long", ["a"], 2**21)
    # Each has half of the link for two seconds. Then one MiB is left, and has the whole link.
    assert run.finish() == {"short": 2.0, "long": 3.0}


def test_later_transfer_slows_the_first_from_then_on():
    run = Run({"a": 2.0**20})
    run.start("first", ["a"], 2**21)
    run.start("second", ["a"], 2**19, at_s=1.0)
    assert run.finish() == {"second": 2.0, "first": 2.5}


def test_directions_of_a_link_do_not_share_bandwidth():
    run = Run({"a to b": 2.0**20, "b to a": 2.0**20})
    run.start("there", ["a to b"], 2**20)
    run.start("back", ["b to a"], 2**20)
    assert run.finish() == {"there": 1.0, "back": 1.0}


def test_unsaturated_link_does_not_couple_flows():
    run = Run({"wide": 8.0, "a": 2.0, "b": 2.0})
    run.start("x", ["a", "wide"], 4)
    run.start("y", ["b", "wide"], 8, at_s=1.0)
    assert run.finish() == {"x": 2.0, "y": 5.0}


def test_weighted_flow_equals_several_flows():
    ways = {0: ["a", "b"], 1: ["a"]}
    capacities = {"a": 12.0, "b": 4.0}
    each = fair_rates({0: ["a", "b"], 1: ["a"], 2: ["a"], 3: ["a", "b"]}, capacities)
    assert fair_rates(ways, capacities, {0: 2, 1: 2}) == {0: each[0], 1: each[1]}


def test_transfer_of_nothing_takes_no_time():
    run = Run({"a": 1.0})
    run.start("empty", ["a"], 0)
    run.start("here", [], 100)
    assert run.finish() == {"empty": 0.0, "here": 0.0}


def test_aborted_transfer_ends_silently_and_frees_the_link():
    run = Run({"a": 2.0**20})
    run.start("stays", ["a"], 2**20)
    run.start("goes", ["a"], 2**20)
    run.clock.call_at(1.0, lambda: run.transfers.abort(run.number))
    assert run.finish() == {"stays": 1.5}
    assert run.transfers.rates() == {}
    run.transfers.abort(run.number)


@given(
    st.lists(
        st.tuples(WAYS, st.integers(1, 100), st.integers(0, 20)),
        min_size=1,
        max_size=10,
    )
)
def test_incremental_rates_equal_full_computation(starts):
    run = Run(LINKS)
    under_way = {}

    def begin(links, nbytes):
        number = run.transfers.start(links, nbytes, lambda: under_way.pop(number))
        under_way[number] = links

    for links, nbytes, at_s in starts:
        run.clock.call_at(float(at_s), lambda links=links, nbytes=nbytes: begin(links, nbytes))
    while run.clock.step():
        if not run.transfers.settling:
            assert run.transfers.rates() == pytest.approx(fair_rates(under_way, LINKS))
    assert not under_way


def all_to_all(n_hosts, n_rounds):
    """Run transfers between all pairs of hosts, each pair's one after the other."""
    capacities = {
        f"{number} {way}": 100.0 + number for number in range(n_hosts) for way in ("out", "in")
    }
    run = Run(capacities)

    def begin(source, target, turn):
        links = [f"{source} out", f"{target} in"]

        def done():
            run.through[source, target, turn] = run.clock.now_s
            if turn < n_rounds:
                begin(source, target, turn + 1)

        run.transfers.start(links, 50 + (7 * source + 13 * target + 29 * turn) % 101, done)

    for source, target in itertools.permutations(range(n_hosts), 2):
        begin(source, target, 1)
    return run.finish()


def test_waits_among_many_transfers_hardly_change_their_ends(monkeypatch):
    ends = all_to_all(12, 5)
    monkeypatch.setattr(transfers, "MANY", 10**9)
    exact = all_to_all(12, 5)
    assert ends.keys() == exact.keys()
    assert max(ends.values()) == pytest.approx(max(exact.values()), rel=transfers.WAIT_SHARE)


def test_a_recomputation_serves_many_changes(monkeypatch):
    computed = []

    def counted(*arguments):
        computed.append(1)
        return fair_rates(*arguments)

    monkeypatch.setattr(transfers, "fair_rates", counted)
    changes = 2 * len(all_to_all(24, 3))
    assert len(computed) < changes / 5

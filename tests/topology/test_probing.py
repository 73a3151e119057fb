"""A probe makes few transfers, the most informative first, and evaluates them correctly."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.errors import ProtocolError
from dask_gpurt.topology import probing
from dask_gpurt.topology.learned import End
from dask_gpurt.topology.probing import ProbeTransfer


def ends(n_hosts, per_host=1):
    return [
        End(f"tcp://10.0.0.{host}:{i}", f"10.0.0.{host}")
        for host in range(n_hosts)
        for i in range(per_host)
    ]


@given(st.integers(0, 40), st.integers(1, 3))
def test_pairs_are_bounded_different_and_of_two_workers(n_hosts, per_host):
    found = probing.pairs(ends(n_hosts, per_host))
    assert len(found) <= probing.MAX_PAIRS
    assert len(set(found)) == len(found)
    assert all(one != other for one, other in found)
    between = [(one.host, other.host) for one, other in found if one.host != other.host]
    assert len(set(between)) == len(between), "one worker stands for its host"


@pytest.mark.parametrize("n_hosts", [2, 3, 4, 7, 8])
def test_few_hosts_are_probed_both_ways(n_hosts):
    found = {(one.host, other.host) for one, other in probing.pairs(ends(n_hosts, 2))}
    assert len(found) == n_hosts * n_hosts


def test_every_one_of_many_hosts_is_probed():
    found = probing.pairs(ends(probing.MAX_PAIRS))
    assert {source for source, _ in found} == set(ends(probing.MAX_PAIRS))
    assert {target for _, target in found} == set(ends(probing.MAX_PAIRS))


def test_workers_of_one_host_are_a_pair():
    ((one, other),) = probing.pairs(ends(1, 3))
    assert one.host == other.host
    assert probing.pairs(ends(1)) == probing.pairs([]) == []


def test_finished_pairs_count_and_are_not_repeated():
    first = probing.pairs(ends(2, 2))
    done = {(one.host, other.host) for one, other in first}
    assert probing.pairs(ends(2, 2), done) == []
    later = probing.pairs(ends(3, 2), done)
    assert {end.host for pair in later for end in pair} == {f"10.0.0.{i}" for i in range(3)}
    assert not done & {(one.host, other.host) for one, other in later}
    assert probing.pairs(ends(40), {(str(i), "x") for i in range(probing.MAX_PAIRS)}) == []


@given(st.floats(1e3, 1e11), st.floats(0, 0.1))
def test_probe_messages_grow_within_bounds(rate, latency_s):
    transfers = []
    while nbytes := probing.next_nbytes(transfers):
        transfers.append(ProbeTransfer(nbytes, latency_s + nbytes / rate))
    assert transfers[0].nbytes == probing.SMALLEST_NBYTES
    assert len(transfers) <= 8
    assert sum(one.nbytes for one in transfers) <= probing.MAX_PAIR_NBYTES
    # The last message may exceed the limit, because its time is not known in advance.
    assert sum(one.seconds for one in transfers[:-1]) <= probing.MAX_PAIR_S
    assert all(one.nbytes <= other.nbytes for one, other in pairwise(transfers))


@pytest.mark.parametrize("held_up", range(6))
def test_brief_pause_of_a_process_makes_no_link_slow(held_up):
    transfers = []
    while nbytes := probing.next_nbytes(transfers):
        pause_s = 0.1 if len(transfers) == held_up else 0.0
        transfers.append(ProbeTransfer(nbytes, 0.001 + nbytes / 100e6 + pause_s))
    found = probing.conclude({"latency_s": 0.001, "transfers": transfers})
    assert found.nbytes_per_s == pytest.approx(100e6, rel=0.1)


@pytest.mark.parametrize("rate", [2e6, 100e6, 1.25e9, 12.5e9])
@pytest.mark.parametrize("latency_s", [0.0001, 0.003])
def test_rates_are_found_within_a_tenth(rate, latency_s):
    transfers = []
    while nbytes := probing.next_nbytes(transfers):
        transfers.append(ProbeTransfer(nbytes, latency_s + nbytes / rate))
    found = probing.conclude({"latency_s": latency_s, "transfers": transfers})
    assert found.nbytes_per_s == pytest.approx(rate, rel=0.1)
    assert found.latency_s == latency_s


def test_impossible_latency_makes_no_link_infinitely_fast():
    found = probing.conclude({"latency_s": 1.0, "transfers": [(1e6, 0.5)]})
    assert found.nbytes_per_s == 1e6 / 0.05


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"latency_s": 0.1},
        {"latency_s": 0.1, "transfers": []},
        {"latency_s": 0.1, "transfers": "none"},
        {"latency_s": 0.1, "transfers": [1]},
        {"latency_s": 0.1, "transfers": [(1, 2, 3)]},
        {"latency_s": "soon", "transfers": [(1, 2)]},
        {"transfers": [(1, 2)]},
        {"latency_s": -1, "transfers": [(1, 2)]},
        {"latency_s": float("nan"), "transfers": [(1, 2)]},
        {"latency_s": 0, "transfers": [(1, 0)]},
        {"latency_s": 0, "transfers": [(float("inf"), 1)]},
        {"latency_s": 0, "transfers": [(-5, 1)]},
    ],
)
def test_empty_probe_answers_are_refused(answer):
    with pytest.raises(ProtocolError):
        probing.conclude(answer)


@pytest.mark.parametrize(
    ("mode", "n_hosts", "said", "why"),
    [
        ("auto", 2, "used", None),
        ("auto", probing.AUTOMATIC_HOSTS, "used", None),
        ("auto", probing.AUTOMATIC_HOSTS + 1, "used", "more than"),
        ("auto", probing.AUTOMATIC_HOSTS + 1, "used needed", None),
        ("auto", 2, "", "does not use"),
        ("auto", 2, "used described", "are described"),
        ("auto", 2, "used busy", "running"),
        ("on", 1000, "described", None),
        ("on", 2, "used busy", "running"),
        ("off", 2, "used", "is off"),
    ],
)
def test_cluster_is_probed_when_the_setting_says_so(mode, n_hosts, said, why):
    about = {f"is_{one}": one in said for one in ("described", "needed", "used", "busy")}
    found = probing.why_not(mode, n_hosts=n_hosts, **about)
    assert (found is None) == (why is None)
    assert why is None or why in found

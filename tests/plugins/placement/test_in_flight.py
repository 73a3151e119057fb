"""Transfers that decisions cause count as load of the links between hosts until they end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dask_gpurt.placement.cost import Input, Task
from dask_gpurt.plugins.placement.cluster_links import ClusterLinks
from dask_gpurt.plugins.placement.in_flight import TransfersInFlight
from dask_gpurt.simulate.example_clusters import gpu_hosts

#: Three hosts with two GPUs on NVLink each, and network cards of 1, 1 and 0.1 GB/s.
TOPOLOGY = gpu_hosts(3, 2, nic_bandwidth=1e9, nvlink=True, slow_nics={2: 1e8})
GB = 10**9


def worker(host, number):
    address = f"tcp://10.0.0.{host}:{number}"
    ends = {"host": f"10.0.0.{host}", "name": f"host{host}-gpu{number}"}
    return SimpleNamespace(address=address, needs_what={"something"}, **ends)


WORKERS = [[worker(host, number) for number in range(2)] for host in range(3)]


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def in_flight(clock):
    links = ClusterLinks(TOPOLOGY)
    everybody = [one for of_host in WORKERS for one in of_host]
    for one in everybody:
        links.add(one)
    scheduler = SimpleNamespace(workers={one.address: one for one in everybody})
    return TransfersInFlight(scheduler, links, clock)


def fetches(in_flight, target, *sources, plain):
    """Record a decision by which a worker fetches a gigabyte from each of the others."""
    holders = [one.address for one in sources]
    keys = [f"x-{number}-{target.address}" for number in range(len(sources))]
    if plain:
        needed = [SimpleNamespace(key=key) for key in keys]
        ts = SimpleNamespace(dependencies=needed)
        in_flight.expect_from(holders, ts, [GB] * len(sources), target.address)
    else:
        inputs = [Input(key, GB, (one,)) for key, one in zip(keys, holders, strict=True)]
        in_flight.expect(target.address, Task("t", inputs))


@pytest.mark.parametrize("plain", [True, False])
def test_workers_of_a_host_wait_for_transfers_on_its_card(in_flight, clock, plain):
    (here, neighbour), (there, _), _ = WORKERS
    fetches(in_flight, here, there, plain=plain)
    for one in (here, neighbour):
        assert in_flight.inlet_s(one.address) == pytest.approx(1)
    assert in_flight.inlet_s(there.address) == 0
    # Cards send and receive at the same time.
    for one in WORKERS[1]:
        assert in_flight.outlet_s(one.address) == pytest.approx(1)
    assert in_flight.outlet_s(here.address) == 0
    # No worker sends data to the neighbour yet.
    assert in_flight.receiving_s(neighbour) == 0
    fetches(in_flight, neighbour, there, plain=plain)
    assert in_flight.inlet_s(here.address) == pytest.approx(2)
    assert in_flight.receiving_s(here) == pytest.approx(1, rel=1e-3)
    clock.now_s += 1.5
    assert in_flight.inlet_s(here.address) == pytest.approx(0.5)
    clock.now_s += 1
    assert in_flight.inlet_s(here.address) == 0


@pytest.mark.parametrize("plain", [True, False])
def test_transfers_within_a_host_do_not_use_its_card(in_flight, plain):
    (here, neighbour), *_ = WORKERS
    fetches(in_flight, here, neighbour, plain=plain)
    assert in_flight.receiving_s(here) > 0
    assert in_flight.inlet_s(here.address) == in_flight.outlet_s(neighbour.address) == 0


@pytest.mark.parametrize("plain", [True, False])
def test_slow_sender_leaves_card_bandwidth_for_others(in_flight, plain):
    (here, _), _, (slow, _) = WORKERS
    fetches(in_flight, here, slow, plain=plain)
    assert in_flight.receiving_s(here) == pytest.approx(10, rel=1e-3)
    assert in_flight.inlet_s(here.address) == pytest.approx(1)
    assert in_flight.outlet_s(slow.address) == pytest.approx(10, rel=1e-3)


def test_each_of_several_holders_sends_a_share(in_flight):
    (here, _), others, (slow, _) = WORKERS
    holders = [one.address for one in (*others, slow)]
    in_flight.expect(here.address, Task("t", [Input("x", 3 * GB, holders)]))
    assert in_flight.inlet_s(here.address) == pytest.approx(3)
    assert in_flight.outlet_s(others[0].address) == pytest.approx(2)
    assert in_flight.outlet_s(slow.address) == pytest.approx(10)


def test_finished_transfers_are_forgotten_when_a_worker_leaves(in_flight, clock):
    (here, _), (there, _), _ = WORKERS
    fetches(in_flight, here, there, plain=True)
    in_flight.remove_worker(there.address)
    assert in_flight.by_inlet and in_flight.by_outlet
    clock.now_s += 2
    in_flight.remove_worker(there.address)
    assert not in_flight.by_inlet and not in_flight.by_outlet


@pytest.mark.parametrize("plain", [True, False])
def test_transfers_that_nobody_needs_any_more_are_no_load(in_flight, monkeypatch, plain):
    """The client may have cancelled them. Other workers of the host may have got them."""
    (here, neighbour), (there, _), _ = WORKERS
    for one in (here, neighbour):
        fetches(in_flight, one, there, plain=plain)
    monkeypatch.setattr(here, "needs_what", {})
    assert in_flight.inlet_s(here.address) == pytest.approx(2)
    assert in_flight.outlet_s(there.address) == pytest.approx(2)
    monkeypatch.setattr(neighbour, "needs_what", {})
    assert in_flight.inlet_s(here.address) == in_flight.outlet_s(there.address) == 0
    assert not in_flight.by_inlet and not in_flight.by_outlet

"""Transfers that decisions caused, and the load of the links into their hosts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dask_gpurt.placement.cost import Input, Task
from dask_gpurt.plugins.placement.cluster_links import WorkerPaths
from dask_gpurt.plugins.placement.in_flight import Arrivals
from dask_gpurt.simulate.example_clusters import gpu_hosts

#: Two GPUs each on NVLink, and a card of 1 GB/s; that of the third host carries a tenth.
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
def arrivals(clock):
    paths = WorkerPaths(TOPOLOGY)
    everybody = [one for of_host in WORKERS for one in of_host]
    for one in everybody:
        paths.add(one)
    scheduler = SimpleNamespace(workers={one.address: one for one in everybody})
    return Arrivals(scheduler, paths, clock)


def fetches(arrivals, target, *sources, plain):
    """Record a decision by which a worker fetches a gigabyte from each of the others."""
    holders = [one.address for one in sources]
    keys = [f"x-{number}-{target.address}" for number in range(len(sources))]
    if plain:
        needed = [SimpleNamespace(key=key) for key in keys]
        ts = SimpleNamespace(dependencies=needed)
        arrivals.expect_from(holders, ts, [GB] * len(sources), target.address)
    else:
        inputs = [Input(key, GB, (one,)) for key, one in zip(keys, holders, strict=True)]
        arrivals.expect(target.address, Task("t", inputs))


@pytest.mark.parametrize("plain", [True, False])
def test_workers_of_a_host_wait_for_transfers_on_its_card(arrivals, clock, plain):
    (here, neighbour), (there, _), _ = WORKERS
    fetches(arrivals, here, there, plain=plain)
    for one in (here, neighbour):
        assert arrivals.inlet_s(one.address) == pytest.approx(1)
    assert arrivals.inlet_s(there.address) == 0
    # Both ways are carried at once.
    for one in WORKERS[1]:
        assert arrivals.outlet_s(one.address) == pytest.approx(1)
    assert arrivals.outlet_s(here.address) == 0
    # Nobody sends the neighbour anything yet.
    assert arrivals.receiving_s(neighbour) == 0
    fetches(arrivals, neighbour, there, plain=plain)
    assert arrivals.inlet_s(here.address) == pytest.approx(2)
    assert arrivals.receiving_s(here) == pytest.approx(1, rel=1e-3)
    clock.now_s += 1.5
    assert arrivals.inlet_s(here.address) == pytest.approx(0.5)
    clock.now_s += 1
    assert arrivals.inlet_s(here.address) == 0


@pytest.mark.parametrize("plain", [True, False])
def test_transfers_within_a_host_do_not_use_its_card(arrivals, plain):
    (here, neighbour), *_ = WORKERS
    fetches(arrivals, here, neighbour, plain=plain)
    assert arrivals.receiving_s(here) > 0
    assert arrivals.inlet_s(here.address) == arrivals.outlet_s(neighbour.address) == 0


@pytest.mark.parametrize("plain", [True, False])
def test_slow_sender_leaves_card_bandwidth_for_others(arrivals, plain):
    (here, _), _, (slow, _) = WORKERS
    fetches(arrivals, here, slow, plain=plain)
    assert arrivals.receiving_s(here) == pytest.approx(10, rel=1e-3)
    assert arrivals.inlet_s(here.address) == pytest.approx(1)
    assert arrivals.outlet_s(slow.address) == pytest.approx(10, rel=1e-3)


def test_each_of_several_holders_sends_a_share(arrivals):
    (here, _), others, (slow, _) = WORKERS
    holders = [one.address for one in (*others, slow)]
    arrivals.expect(here.address, Task("t", [Input("x", 3 * GB, holders)]))
    assert arrivals.inlet_s(here.address) == pytest.approx(3)
    assert arrivals.outlet_s(others[0].address) == pytest.approx(2)
    assert arrivals.outlet_s(slow.address) == pytest.approx(10)


def test_finished_transfers_are_forgotten_when_a_worker_leaves(arrivals, clock):
    (here, _), (there, _), _ = WORKERS
    fetches(arrivals, here, there, plain=True)
    arrivals.remove_worker(there.address)
    assert arrivals.by_inlet and arrivals.by_outlet
    clock.now_s += 2
    arrivals.remove_worker(there.address)
    assert not arrivals.by_inlet and not arrivals.by_outlet

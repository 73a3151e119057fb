"""Ways between workers of a cluster: as described where they are, else as learnt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dask_gpurt.plugins import worker_paths
from dask_gpurt.plugins.worker_paths import WorkerPaths
from dask_gpurt.topology import learned
from dask_gpurt.topology.description import parse
from dask_gpurt.topology.model import LOCAL
from tests.topology.test_model import load


def worker(host, port, name=None):
    return SimpleNamespace(address=f"tcp://{host}:{port}", host=host, name=name or port)


LEFT0, LEFT1 = worker("10.0.0.1", 1, "left-0"), worker("10.0.0.1", 2, "left-1")
RIGHT0 = worker("10.0.0.2", 1, "right-0")
NO_GPU, NO_GPU_EITHER = worker("10.0.0.1", 3), worker("10.0.0.1", 4)
STRANGER = worker("10.0.0.9", 1)
EVERYBODY = [LEFT0, LEFT1, RIGHT0, NO_GPU, NO_GPU_EITHER, STRANGER]


@pytest.fixture
def described():
    paths = WorkerPaths(load("two-hosts"))
    for one in EVERYBODY:
        paths.add(one)
    return paths


def test_described_machines_are_believed(described):
    assert described(LEFT0.address, LEFT1.address).kind == "nvlink"
    assert described(LEFT0.address, RIGHT0.address).bandwidth_nbytes_per_s == 12.5e9
    assert described(LEFT0.address, LEFT0.address) is LOCAL
    for _ in range(100):
        described.observe(RIGHT0.address, {LEFT0.address: (1e6, 1)})
    assert described(LEFT0.address, RIGHT0.address).bandwidth_nbytes_per_s == 12.5e9


def test_machines_that_are_not_described_are_learnt(described):
    there = STRANGER.address, LEFT0.address
    assert described(*there).bandwidth_nbytes_per_s == pytest.approx(
        learned.OTHER_HOST_NBYTES_PER_S
    )
    for _ in range(50):
        described.observe(LEFT0.address, {STRANGER.address: (2e9, 2)})
    assert described(*there).bandwidth_nbytes_per_s == pytest.approx(1e9, rel=0.1)


def test_two_workers_in_one_place_still_have_to_send(described):
    path = described(NO_GPU.address, NO_GPU_EITHER.address)
    assert path.kind == "same host"
    assert path.bandwidth_nbytes_per_s < float("inf")


def test_devices_are_as_described(described):
    assert described.device_kind(LEFT0.address) == "gpu"
    assert described.device_kind(NO_GPU.address) is None
    assert WorkerPaths(None).device_kind(LEFT0.address) is None


def test_a_worker_that_left_is_forgotten(described):
    described.remove(LEFT0.address)
    assert described.device_kind(LEFT0.address) is None
    described.observe(LEFT0.address, {RIGHT0.address: (1e9, 1)})
    # Asked for all the same, as a decision may that began before.
    assert described(RIGHT0.address, LEFT0.address).kind == "network"


def test_there_is_no_doubt_only_where_the_ways_between_hosts_are_described():
    paths = WorkerPaths(load("two-hosts"))
    for one in (LEFT0, LEFT1, RIGHT0):
        paths.add(one)
    assert paths.doubt() == 1
    paths.add(STRANGER)
    assert paths.doubt() > 1
    apart = WorkerPaths(parse("hosts: [" + ", ".join(map(_alone, "12")) + "]"))
    apart.add(LEFT0)
    assert apart.doubt() == 1
    apart.add(RIGHT0)
    assert apart.doubt() > 1


def _alone(number):
    return f"{{name: h{number}, addresses: [10.0.0.{number}], numa: [{{name: numa0}}]}}"


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(worker_paths, "_MAX_PATHS", 3)
    paths = WorkerPaths(None)
    for i in range(20):
        paths(f"tcp://a:{i}", "tcp://b:1")
    assert len(paths._known) <= 3

"""The catalogue finds machines by name, and says what is wrong with those of a user's file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpurt.errors import PredictionError
from dask_gpurt.predict.catalogue import DISK_NBYTES_PER_S, Catalogue
from dask_gpurt.predict.machine_network import (
    LOCAL_LATENCY_S,
    NETWORK_LATENCY_S,
    cluster_of,
    traced_cluster,
)
from dask_gpurt.predict.recorded_cluster import RecordedCluster

GIB = 2**30
TRACED = RecordedCluster({"box": (2, 2), "shed": (2, 2)}, 4 * GIB, 1e9, 5e8, 0.001, 0.002)


def catalogue(text: str = "") -> Catalogue:
    return Catalogue(TRACED, text, "mine.yaml" if text else "")


def test_all_machines_of_the_package_can_be_used():
    known = catalogue()
    assert len(known.names) > 15
    for name in known.names:
        machine = known.group(name).machine
        assert machine.threads >= 2
        assert machine.memory_nbytes >= GIB
        assert machine.name == "recorded" or (machine.usd_per_hour > 0 and machine.priced)


@pytest.mark.parametrize(
    ("text", "count"),
    [("m7i.4xlarge", 1), ("4*m7i.4xlarge", 4), ("4xm7i.4xlarge", 4), (" 12 x m7i.4xlarge ", 12)],
)
def test_a_number_of_machines_can_be_asked_for(text, count):
    group = catalogue().group(text)
    assert (group.count, group.machine.name) == (count, "m7i.4xlarge")
    assert group.machine.memory_nbytes == 64 * GIB
    assert group.machine.network_nbytes_per_s == 6.25e9 / 8
    assert group.name == f"{count}xm7i.4xlarge"


def test_the_machines_of_the_trace_are_known():
    machine = catalogue().group("recorded").machine
    assert (machine.threads, machine.memory_nbytes) == (4, 8 * GIB)
    assert machine.network_nbytes_per_s == 5e8
    assert machine.usd_per_hour is None


def test_a_users_file_adds_and_replaces_machines():
    text = (
        "shed: {threads: 8, memory: 30 GB, network: 1 Gb/s, usd_per_hour: 0.5}\n"
        "m7i.4xlarge: {threads: 2, memory: 1 GB, network: 1 GB/s, disk: 2 GB/s}\n"
    )
    known = catalogue(text)
    shed, replaced = (known.group(name).machine for name in ("shed", "m7i.4xlarge"))
    assert (shed.threads, shed.memory_nbytes, shed.usd_per_hour) == (8, 30 * 10**9, 0.5)
    assert shed.disk_nbytes_per_s == DISK_NBYTES_PER_S
    assert (replaced.disk_nbytes_per_s, replaced.usd_per_hour) == (2e9, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"write such as '4xm7i"),
        ("0*m7i.4xlarge", "from 1 to 10,000"),
        ("99999*m7i.4xlarge", "from 1 to 10,000"),
        ("m7i.5xlarge", "did you mean m7i.*There are c6in"),
        ("nothing-like-it", "Describe others with --machines"),
    ],
)
def test_unknown_machines_are_an_error(text, said):
    with pytest.raises(PredictionError, match=said):
        catalogue().group(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "has no machines"),
        ("a: [", "is not YAML"),
        ("a: 5", "may be a section"),
        ("a: {threads: 1, memory: 1 GB}", "lacks network"),
        ("a: {threads: 1, memory: 1 GB, network: 1 GB/s, gpus: 2}", "has no key 'gpus'"),
        ("a: {threads: 0, memory: 1 GB, network: 1 GB/s}", "from 1 to 4096"),
        ("a: {threads: true, memory: 1 GB, network: 1 GB/s}", "from 1 to 4096"),
        ("a: {threads: 1, memory: 1, network: 1 GB/s}", "memory is 1; write such as '64 GiB'"),
        ("a: {threads: 1, memory: 0 GB, network: 1 GB/s}", "memory is '0 GB'"),
        ("a: {threads: 1, memory: 1 GB, network: 1 GB}", "network is '1 GB'"),
        ("a: {threads: 1, memory: 1 GB, network: 1 GB/s, usd_per_hour: -1}", "usd_per_hour may be"),
        (
            "a: {threads: 1, memory: 1 GB, network: 1 GB/s, usd_per_hour: .nan}",
            "usd_per_hour may be",
        ),
        ("a: {threads: 1, memory: 1 GB, network: 1 GB/s, priced: 2026}", "priced may be a day"),
        ("recorded: {threads: 1, memory: 1 GB, network: 1 GB/s}", "use another"),
    ],
)
def test_mistakes_in_a_users_file_are_named(text, said):
    with pytest.raises(PredictionError, match=f"mine.yaml.*{said}"):
        catalogue(text)


def test_workers_are_as_large_as_the_recorded_ones():
    model = cluster_of(catalogue().group("2*m7i.4xlarge"), TRACED)
    assert len(model.workers) == 16
    assert {(one.nthreads, one.memory_nbytes) for one in model.workers} == {(2, 8 * GIB)}
    assert len({one.host for one in model.workers}) == 2


def test_a_machine_smaller_than_a_recorded_worker_has_one_worker():
    model = cluster_of(
        catalogue("small: {threads: 1, memory: 2 GiB, network: 1 GB/s}").group("3*small"), TRACED
    )
    assert [(one.nthreads, one.memory_nbytes) for one in model.workers] == [(1, 2 * GIB)] * 3


def test_the_cluster_of_the_trace_has_its_hosts_and_workers():
    uneven = replace(TRACED, workers={"box": (2, 1), "shed": (4,)})
    model = traced_cluster(uneven)
    found = [(one.host, one.nthreads, one.memory_nbytes) for one in model.workers]
    assert found == [
        ("10.0.0.0", 2, 4 * GIB),
        ("10.0.0.0", 1, 4 * GIB),
        ("10.0.0.1", 4, 4 * GIB),
    ]


def test_workers_of_a_machine_share_its_network_alone():
    model = cluster_of(catalogue().group("2*recorded"), TRACED, network=2.0)
    first, second, far = (model.workers[i].address for i in (0, 1, 2))
    route = model.network.route
    assert not set(route(first, far).links) - set(model.capacities)
    shared = set(route(first, far).links) & set(route(second, model.workers[3].address).links)
    assert min(model.capacities[link] for link in shared) == pytest.approx(0.95 * 2 * 5e8)
    inside = route(first, second)
    assert not set(inside.links) & shared
    assert min(model.capacities[link] for link in inside.links) == 1e9
    assert route(first, first).links == ()
    assert inside.latency_s == LOCAL_LATENCY_S
    assert route(first, far).latency_s == pytest.approx(NETWORK_LATENCY_S)


def test_little_memory_is_not_unlimited():
    model = cluster_of(
        catalogue("tiny: {threads: 16, memory: 4 B, network: 1 GB/s}").group("tiny"), TRACED
    )
    assert {one.memory_nbytes for one in model.workers} == {1}


def test_too_many_workers_are_refused():
    with pytest.raises(PredictionError, match=r"10000xm7i\.8xlarge would be 160,000 workers"):
        cluster_of(catalogue().group("10000xm7i.8xlarge"), TRACED)


def test_a_worker_can_use_all_of_a_fast_network():
    known = catalogue("quick: {threads: 2, memory: 8 GiB, network: 200 Gb/s}")
    model = cluster_of(known.group("2xquick"), TRACED)
    links = model.network.route(*(one.address for one in model.workers)).links
    assert min(model.capacities[link] for link in links) == pytest.approx(0.95 * 25e9)
